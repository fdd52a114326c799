"""Policy "oldest": the group that began under the oldest policy version goes first, from any producer.

Its purpose: docs/explanation/staleness.md. Not thread-safe, except for the calls that scheduler.py names.
"""

import heapq
from collections import Counter
from collections.abc import Callable, Iterator

from shmbridge.batching.batch_size import Want
from shmbridge.record.groups import Group

_Entry = tuple[int, int, Group]


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
