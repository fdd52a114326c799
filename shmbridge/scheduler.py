"""Which complete groups go into the next batch: the oldest first, whole groups only.

Knows groups; knows nothing of lanes, leases or layouts. Not thread-safe.
"""

from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shmbridge.groups import Group
from shmbridge.staleness import is_stale

Policy = Literal["fair", "atropos"]


@dataclass(frozen=True, slots=True)
class Want:
    """How large a batch is to be: so many groups, or so many rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        if (self.groups is None) == (self.rows is None) or min(size for size in (self.groups, self.rows) if size is not None) < 1:
            raise ValueError(f"groups={self.groups}, rows={self.rows}: one of them, at least 1")

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    def as_groups(self, like: Sequence[Group]) -> int:
        """How many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))


class Scheduler:
    """A queue of complete groups."""

    def __init__(self) -> None:
        self._queue: deque[Group] = deque()
        self._by_producer: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._queue)

    def queued(self, producer_id: str) -> int:
        """Groups of one producer that wait here."""
        return self._by_producer[producer_id]

    def __iter__(self) -> Iterator[Group]:
        return iter(self._queue)

    def stale(self, current: int, max_staleness: int) -> Iterator[Group]:
        """Takes out and yields the groups beyond the limit."""
        late = [group for group in self._queue if is_stale(group.oldest_version, current, max_staleness)]
        for group in late:
            self._queue.remove(group)
            self._by_producer[group.producer_id] -= 1
            yield group

    def add(self, group: Group) -> None:
        """Queues a complete group behind the others."""
        self._queue.append(group)
        self._by_producer[group.producer_id] += 1

    def put_back(self, groups: list[Group]) -> None:
        """Returns groups of a batch that was not formed to the front, in their order."""
        self._queue.extendleft(reversed(groups))
        self._by_producer.update(group.producer_id for group in groups)

    def take(self, want: Want) -> list[Group] | None:
        """The oldest groups, or None while there are fewer."""
        count = want.groups or self._groups_of(want.rows or 1)
        if count == 0 or len(self._queue) < count:
            return None
        groups = [self._queue.popleft() for _ in range(count)]
        for group in groups:
            self._by_producer[group.producer_id] -= 1
        return groups

    def _groups_of(self, rows: int) -> int:
        """How many of the oldest groups fit into so many rows; 0 while there may be more to come."""
        fit = 0
        for count, group in enumerate(self._queue):
            fit += group.rows
            if fit >= rows:
                return count + (fit == rows or count == 0)
        return 0
