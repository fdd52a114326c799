"""What is asked of a batch, and the policies that choose its whole groups: "oldest" and "atropos".

"fair" has a file of its own. The policies and their reasons: docs/explanation/scheduling.md,
docs/explanation/staleness.md.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, Self

from shmbridge.atropos.env_status import EnvWeight, Queued
from shmbridge.atropos.queue import AtroposQueue
from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.config import check_choice, check_count, check_seconds, check_timeout
from shmbridge.errors import BadArgument
from shmbridge.record.groups import Group
from shmbridge.schema import Split
from shmbridge.shown import shown

Screen = Callable[[Group], bool]
MOST_LAG = 7  # staleness values counted one by one; anything staler shares one bar
LAGS = (*map(str, range(MOST_LAG + 1)), f"over_{MOST_LAG}", "unknown")
_MOST_PREFETCHED = 1024
Policy = Literal["fair", "atropos", "oldest"]
# Returns the shares requested by the registered environments, by producer id; an immutable snapshot.
Shares = Callable[[], Mapping[str, EnvWeight]]
_Entry = tuple[int, int, Group]


@dataclass(frozen=True, slots=True)
class Want:
    """The size of a batch: a number of groups, or a number of rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        given = [
            (name, size) for name, size in (("groups", self.groups), ("rows", self.rows)) if size is not None
        ]
        if len(given) != 1:
            said = "groups and rows are both given" if given else "neither groups nor rows is given"
            raise BadArgument(f"the size of a batch: {said}", hint="groups=8, or rows=64")
        name, size = given[0]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            number = str(size).strip() if isinstance(size, str) else ""
            hint = f"{name}={number}, without quotes" if number.isdigit() else f"{name}=8"
            raise BadArgument(f"{name}={shown(size)} is no number of {name} from 1", hint=hint)

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    @property
    def size(self) -> int:
        """The number of groups or rows."""
        return self.groups if self.groups is not None else self.rows or 0

    @property
    def by_rows(self) -> bool:
        """Whether the size counts rows (trajectories)."""
        return self.groups is None

    def as_groups(self, like: Sequence[Group]) -> int:
        """Returns how many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))


def check_screen(keep: Screen | None) -> Screen | None:
    """Returns what Consumer.screen was given, or raises BadArgument."""
    if keep is not None and not callable(keep):
        raise BadArgument(f"keep={shown(keep)} cannot be called", hint="a function of a group, or None")
    return keep


def staleness(stamped: int, current: int) -> int:
    """Returns the versions between the stamped and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Returns whether a record exceeds the limit; None is no limit, and an unstamped record never does."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness


def staleness_of(stamped: int, current: int) -> str:
    """Returns the histogram bar of a staleness: one of LAGS."""
    if stamped < 0 or current < 0:
        return "unknown"
    lag = staleness(stamped, current)
    return str(lag) if lag <= MOST_LAG else f"over_{MOST_LAG}"


class StalenessHistogram:
    """A histogram of groups' staleness at the hand-out of their batch. One thread counts; any may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LAGS, 0)
        self._largest = 0
        self._ahead = 0

    def count(self, stamped: Iterable[int], current: int) -> None:
        """Counts groups by the version under which each began."""
        for version in stamped:
            self._counts[staleness_of(version, current)] += 1
            self._ahead += version > current
            self._largest = max(self._largest, staleness(version, current))

    def stats(self) -> dict[str, float]:
        """Returns `staleness_groups_total{lag}`, the largest staleness, and groups of future versions."""
        lags = {f"staleness_groups_total{{{lag}}}": count for lag, count in self._counts.items()}
        return {**lags, "staleness_max": self._largest, "policy_version_ahead_total": self._ahead}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of Consumer.batches; `max_staleness` includes the off-policy limit.

    Raises BadArgument for an unknown split.
    """

    size: Want
    layout: Layout = "packed"
    make: MakeBatch | None = None
    max_staleness: int | None = None
    split: Split | None = "train"
    hold: Hold = "step"
    prefetch: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            check_choice("split", self.split, ("train", "eval"))

    def checked(self) -> Self:
        """Returns the request for an iteration, with plain numbers. Raises BadArgument."""
        prefetch = check_count("prefetch", self.prefetch, 0, _MOST_PREFETCHED)
        timeout_s = check_timeout(self.timeout_s)
        if timeout_s is not None and timeout_s < 0:
            check_seconds("timeout_s", timeout_s)
        if self.make is not None and not callable(self.make):
            raise BadArgument(
                f"make={shown(self.make)} cannot be called",
                hint="make=a function of (groups, layout), or a Batch class",
            )
        check_choice("layout", self.layout, ("padded", "packed"))
        check_choice("hold", self.hold, ("step", "gather", "caller"))
        return replace(self, prefetch=prefetch, timeout_s=timeout_s)

    def batch_of(self, groups: list[Group]) -> Batch:
        """Returns the groups as a batch. Raises TypeError if `make` returns no batch."""
        return as_batch((self.make or Batch)(groups, self.layout))


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How groups are chosen for batches; see Consumer."""

    policy: Policy
    group_timeout_s: float
    allocation_wait_s: float


class Scheduler(Protocol):
    """Holds complete groups and chooses. Not thread-safe, except `queued`, `len`, `formed` and `stats`.

    An exception, for example of a signal handler, may end a call anywhere; `recount` is then called before
    the next call. Until then a group is in one place or in none, never in two.
    """

    @property
    def waits_until_s(self) -> float:
        """time.monotonic() until which a batch waits for certain groups; infinite if it waits for none."""

    @property
    def formed(self) -> int | None:
        """Batches formed, if those are the steps of a run; None if the batches handed out are."""

    def look_ahead(self, lanes: int) -> bool:
        """Returns whether choosing well needs every record in `lanes` lanes to be added before `take`."""

    def add(self, group: Group) -> None:
        """Queues a complete group behind the others."""

    def put_back(self, groups: list[Group]) -> None:
        """Returns groups of a batch that was not handed out to the queue, before all others, in their order.

        O(1) per group.
        """

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """Returns the groups of the next batch; None while there is none. `last`: no more groups can come."""

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """Removes and returns the unfit groups. Checks every group."""

    def recount(self) -> None:
        """Recomputes its counts from the groups it holds, after an exception ended a call half-way.

        A group in transit then is not here.
        """

    def queued(self, producer_id: str) -> int:
        """Returns the queued groups of one producer."""

    def stats(self) -> dict[str, float]:
        """Returns its counters."""

    def __len__(self) -> int:
        """Returns the number of queued groups."""

    def __iter__(self) -> Iterator[Group]:
        """Iterates over all groups it holds, in no promised order."""


class OldestScheduler:
    """A heap by version, then by arrival. Unstamped groups count as the oldest."""

    waits_until_s = float("inf")
    formed: int | None = None

    def __init__(self) -> None:
        self._heap: list[_Entry] = []
        self._next = 0
        self._by_producer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Group]:
        return (group for _, _, group in self._heap)

    def recount(self) -> None:
        """See Scheduler."""
        heapq.heapify(self._heap)
        self._by_producer = Counter(group.producer_id for group in self)

    def queued(self, producer_id: str) -> int:
        """See Scheduler."""
        return self._by_producer[producer_id]

    def stats(self) -> dict[str, float]:
        """See Scheduler."""
        return {}

    def look_ahead(self, lanes: int) -> bool:
        """Returns True: the oldest group is known only after all lanes are read."""
        return True

    def add(self, group: Group) -> None:
        """See Scheduler; O(log n)."""
        group.number = self._next
        self._next += 1
        self._push(group)

    def put_back(self, groups: list[Group]) -> None:
        """See Scheduler: ahead of all others of their version, since they came first."""
        for group in groups:
            self._push(group)

    def _push(self, group: Group) -> None:
        heapq.heappush(self._heap, (group.oldest_version, group.number, group))
        self._by_producer[group.producer_id] += 1

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """See Scheduler.

        For a size in rows, takes whole groups in order until the next does not fit; the first always does.
        """
        if not (want.by_rows and last and self._heap) and self._size(want) < want.size:
            return None
        chosen: list[Group] = []
        left = want.size
        while self._heap and left > 0:
            size = self._heap[0][2].rows if want.by_rows else 1
            if chosen and size > left:
                break
            chosen.append(heapq.heappop(self._heap)[2])
            left -= size
        self._by_producer.subtract(group.producer_id for group in chosen)
        return chosen

    def _size(self, want: Want) -> int:
        return sum(group.rows for group in self) if want.by_rows else len(self)

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """See Scheduler."""
        removed = [group for group in self if unfit(group)]
        if removed:
            gone = set(map(id, removed))
            self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
            heapq.heapify(self._heap)
            self._by_producer.subtract(group.producer_id for group in removed)
        return removed


class AtroposScheduler:
    """The scheduler of policy "atropos". A wanted size counts rows: the run's batch size."""

    waits_until_s = float("inf")

    def __init__(self, shares: Callable[[], Mapping[str, EnvWeight]]) -> None:
        self._shares = shares
        self._applied: dict[int, EnvWeight] = {}
        self._seen: Mapping[str, EnvWeight] | None = None
        self._queue: AtroposQueue[Group] = AtroposQueue(0)
        self._by_producer: Counter[str] = Counter()  # groups neither in a formed batch nor buffered
        self._by_env: dict[int | None, Queued] = {}

    @property
    def formed(self) -> int | None:
        """See Scheduler."""
        return self._queue.step

    def __len__(self) -> int:
        return self._queue.queue_size

    def __iter__(self) -> Iterator[Group]:
        return iter(self._queue)

    def recount(self) -> None:
        """See Scheduler."""
        self._queue.recount()
        self._seen = None  # so that the shares are applied again
        self._recount()
        self._by_env = self._queue.by_env()

    def queued(self, producer_id: str) -> int:
        """See Scheduler."""
        return self._by_producer[producer_id]

    def by_env(self) -> Mapping[int | None, Queued]:
        """Returns the queue of each environment, as of the last change. Any thread."""
        return self._by_env

    def stats(self) -> dict[str, float]:
        """See Scheduler."""
        return {"groups_buffered": self._queue.buffered}

    def look_ahead(self, lanes: int) -> bool:
        """Returns True: upstream queues every group that was sent."""
        return True

    def add(self, group: Group) -> None:
        """See Scheduler."""
        self._apply_shares()
        for queued in self._queue.add(group, group.rows, group.env_id).queued:
            self._by_producer[queued.producer_id] += 1

    def put_back(self, groups: list[Group]) -> None:
        """See Scheduler: a whole batch comes next; groups of a partial batch go before all others."""
        known = self._queue.queue_size
        self._queue.put_back([(group, group.rows, group.env_id) for group in groups])
        if self._queue.queue_size > known:
            self._by_producer.update(group.producer_id for group in groups)
            self._by_env = self._queue.by_env()

    def take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        """See Scheduler; upstream has no shorter last batch."""
        self._apply_shares()
        self._queue.batch_size = want.size
        self._by_producer.subtract(group.producer_id for group in self._queue.form())
        self._by_env = self._queue.by_env()
        return self._queue.next_batch()

    def remove(self, unfit: Callable[[Group], bool]) -> list[Group]:
        """See Scheduler."""
        removed = self._queue.remove(unfit)
        if removed:
            self._recount()
        return removed

    def _recount(self) -> None:
        self._by_producer = Counter(group.producer_id for group in self._queue.queued())

    def _apply_shares(self) -> None:
        shares = self._shares()
        if shares is self._seen:
            return
        self._seen = shares
        asked = {share.env_id: share for share in shares.values()}
        for env_id, share in asked.items():
            if self._applied.get(env_id) != share:
                self._queue.register(share)
        for env_id in self._applied.keys() - asked.keys():
            self._queue.disconnect(env_id)
        self._applied = asked
