"""Which complete groups go into the next batch: the oldest first, whole groups only.

Knows groups; knows nothing of lanes, leases or layouts. Not thread-safe.
"""

from collections import Counter, deque
from collections.abc import Iterator

from shmbridge.groups import Group
from shmbridge.staleness import is_stale


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

    def take(self, count: int) -> list[Group] | None:
        """The `count` oldest groups, or None while there are fewer."""
        if len(self._queue) < count:
            return None
        groups = [self._queue.popleft() for _ in range(count)]
        for group in groups:
            self._by_producer[group.producer_id] -= 1
        return groups
