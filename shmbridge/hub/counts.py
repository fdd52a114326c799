"""What is queued and what was counted, flat: produced = released + held + discarded."""

import time
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from shmbridge.batch import Batch
from shmbridge.control.environments import EnvWeight
from shmbridge.errors import BadArgument, kind_of
from shmbridge.hub.former import Held
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.waiting import Waiting
from shmbridge.metrics import LATENCY_BOUNDS_S
from shmbridge.record import Group, GroupAssembler, Record, log_contradictions
from shmbridge.segments import MemoryUse

if TYPE_CHECKING:
    from shmbridge.hub.hub import Hub

_WINDOW_S = 30.0  # at least; at most as long again, or as long as nobody asked
_PERCENTILES = (50, 99)


@dataclass(frozen=True, slots=True)
class OutsideQueue:
    """The queue of a program that takes all records at once and queues groups itself: Consumer(outside=).

    Attributes:
        waiting: groups queued in the program, by producer id; environments of the control plane see them as
            queued.
        first_env_id: the control plane numbers environments from here on; lower numbers belong to the
            program.
    """

    waiting: Counter[str] = field(default_factory=Counter)
    first_env_id: int = 0


def check_outside(outside: OutsideQueue | None) -> OutsideQueue:
    """Returns the queue, an empty one for None; or raises BadArgument."""
    if outside is None:
        return OutsideQueue()
    if not isinstance(outside, OutsideQueue):
        raise BadArgument(f"outside= is {kind_of(outside)}, not an OutsideQueue", hint="leave it out")
    return outside


class GroupQueue:
    """`Consumer.queue`, for programs that serve batches to others."""

    def __init__(self, hub: "Hub", outside: OutsideQueue) -> None:
        self._former, self._lanes, self._outside = hub.former, hub.lanes, outside.waiting

    def __repr__(self) -> str:
        return f"<GroupQueue: {self.groups()} groups>"

    def groups(self, producer_id: str | None = None) -> int:
        """Returns the groups committed and not yet in a batch, of one producer or all. Never blocks.

        A fragment not yet read counts as one.
        """
        waiting = sum(lane.waiting for lane in self._lanes if producer_id in (None, lane.producer_id))
        return waiting + self._taken(producer_id)

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Returns, per producer id, whether its process lives, and its groups. One pass over the lanes."""
        waiting, live = Counter[str](), set()
        for lane in self._lanes:
            waiting[lane.producer_id] += lane.waiting
            if not lane.dead:
                live.add(lane.producer_id)
        return {each: (each in live, waiting[each] + self._taken(each)) for each in producer_ids}

    def _taken(self, producer_id: str | None) -> int:
        """Returns the groups that were taken from lanes and are in no batch."""
        outside = self._outside.total() if producer_id is None else self._outside[producer_id]
        return self._former.queued(producer_id) + outside

    def stats(self, shares: Mapping[str, EnvWeight]) -> dict[str, float]:
        """Returns the groups in all, and by name of the environments that requested shares."""
        by_env = {
            f"queue_groups{{{shares[each].name}}}": groups
            for each, (_, groups) in self.look_at_producers(shares).items()
        }
        return {"queue_groups": self.groups(), **by_env}

    def count_batch(self, batches: int = 1) -> None:
        """Counts batches handed out other than by `take_groups`; a negative number: batches undone unread."""
        self._former.count_batch(batches)

    def require_room(self, groups: int) -> None:
        """Raises BatchTooBig if only the caller's own release makes room for so many groups. Never blocks."""
        self._former.require_room(groups)

    def keep(self, records: list[Record], batch: Batch | None = None) -> Held:
        """Takes over the leases of groups that a caller holds, or of their batch, to be kept without it."""
        held = Held(records)
        if batch is not None:
            batch._is_lent = True
        self._former.held_by_caller(held)
        return held

    def take_incomplete(self, fragments: GroupAssembler) -> list[Group]:
        """Removes and returns groups that will never be whole: too late, or their producer has left.

        `fragments` must hold all records there are.
        """
        log_contradictions(fragments)
        late = fragments.late(time.monotonic(), self._lanes.busy_producers())
        return [*late, *fragments.orphans(self._lanes.finished_producers())]


class RecentLatency:
    """From the hub's counts, which only rise. Never blocks; one thread at a time."""

    def __init__(self) -> None:
        self._since: Sequence[int] = [0] * (len(LATENCY_BOUNDS_S) + 1)
        self._next_since: Sequence[int] = self._since
        self._next_at = time.monotonic()

    def stats(self, counts: Sequence[int], now_s: float | None = None) -> dict[str, float]:
        """Returns `latency_us_p50` and `latency_us_p99` of the last half minute or so; none without records.

        Args:
            counts: records by bucket, since the hub began.
            now_s: time.monotonic(); None for now.
        """
        now_s = time.monotonic() if now_s is None else now_s
        if now_s - self._next_at >= _WINDOW_S:
            self._since, self._next_since, self._next_at = self._next_since, counts, now_s
        lately = [count - before for count, before in zip(counts, self._since, strict=True)]
        if not sum(lately):
            return {}
        return {f"latency_us_p{p}": percentile_s(lately, p) * 1e6 for p in _PERCENTILES}


def percentile_s(counts: Sequence[int], percent: float) -> float:
    """Returns a percentile of the records in these buckets, in seconds; evenly spread within each bucket.

    One beyond the largest bound is that bound.
    """
    rank, below = percent / 100 * sum(counts), 0
    for count, low, high in zip(counts, (0.0, *LATENCY_BOUNDS_S), LATENCY_BOUNDS_S, strict=False):
        if count and below + count >= rank:
            return low + (high - low) * (rank - below) / count
        below += count
    return LATENCY_BOUNDS_S[-1]


def lane_counters(lanes: LaneSet, waiting: Waiting, memory: MemoryUse) -> dict[str, float]:
    """Returns the counters of all lanes, present and removed. Never blocks; any thread."""
    total = lanes.counters()
    reasons = {key: value for key, value in sorted(total.items()) if "{" in key}
    return {
        **{key: total[key] for key in ("records_total", "released_total", "held", "put_off")},
        **{
            key: total[key]
            for key in ("tokens_total", "logprobs_unrecorded_total", "bytes_total", "lane_bytes")
        },
        **memory.of(lane.reader.lane for lane in lanes),
        **{key: total[key] for key in ("leases_dropped_total", "leases_returned_total")},
        **reasons,
        "dropped_total": sum(value for key, value in reasons.items() if key.startswith("dropped")),
        "discarded_total": sum(value for key, value in reasons.items() if key.startswith("discarded")),
        "episodes_lost_total": sum(
            value for key, value in reasons.items() if key.startswith("episodes_lost")
        ),
        "producer_wait_s": total["producer_wait_ns"] / 1e9,
        "wait_s": waiting.wait_s,
        "late_wakes_total": total["late_wakes_total"] + waiting.late_wakes,
        "lanes_live": lanes.live,
        "lanes_dead": len(lanes) - lanes.live,
        "lanes_quarantined": sum(lane.corrupt for lane in lanes),
        "lanes_refused": len(lanes.refused),
        "lanes_waiting": int(lanes.some_wait),
    }
