"""Groups that are committed and in no batch yet, counted by producer. Any thread."""

import time
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.batch import Batch
from shmbridge.batching.former import BatchFormer, Held
from shmbridge.errors import BadArgument
from shmbridge.hub.lanes import LaneSet
from shmbridge.record.groups import Group, GroupAssembler
from shmbridge.record.record import Record
from shmbridge.shown import kind_of


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

    def __init__(self, former: BatchFormer, lanes: LaneSet, outside: OutsideQueue) -> None:
        self._former, self._lanes, self._outside = former, lanes, outside.waiting

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
        late = list(fragments.late(time.monotonic(), self._lanes.busy_producers()))
        return [*late, *fragments.orphans(self._lanes.finished_producers())]
