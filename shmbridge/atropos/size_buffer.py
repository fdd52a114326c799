"""Groups of an unusual size, kept until some of them add up to the group size that their environment
registered, as upstream's server does.

Pure. Used by queue.py, one buffer per environment.
"""

from typing import Generic, TypeVar

T = TypeVar("T")


class SizeBuffer(Generic[T]):
    """Finds the very groups that upstream's find_groups_summing_to_target finds, without checking all of them
    for each new one.

    Upstream takes the groups that fit in order of arrival; if those do not add up, it solves the subset sum
    and walks back from its end. Both grow by one group at a time: a running sum, and a set of reachable sums
    kept as the bits of one integer.
    """

    def __init__(self) -> None:
        self._items: list[tuple[T, int]] = []
        self.sequences = 0
        self._begin_again(0)

    def __len__(self) -> int:
        return len(self._items)

    @property
    def items(self) -> list[T]:
        """The buffered items, in order of arrival."""
        return [item for item, _ in self._items]

    def add(self, item: T, size: int, target: int) -> list[tuple[T, int]]:
        """Keeps an item; removes and returns the items that now add up to `target`, in order of arrival, with
        their sizes.
        """
        if target != self._target:
            self._begin_again(target)
        self._items.append((item, size))
        self.sequences += size
        places = self._first_fit() or self._any_fit()
        if not places:
            return []
        found = [self._items[place] for place in places]
        self.sequences -= target
        for place in reversed(places):
            del self._items[place]
        self._begin_again(target)
        return found

    def keep(self, items: list[tuple[T, int]]) -> None:
        """Replaces the buffered items."""
        self._items = items
        self.sequences = sum(size for _, size in items)
        self._begin_again(self._target)

    def sized(self) -> list[tuple[T, int]]:
        """Returns the buffered items, with sizes."""
        return list(self._items)

    def _begin_again(self, target: int) -> None:
        self._target = target
        self._looked_at = 0
        self._sum = 0  # of the items that fit in order of arrival
        self._fits: list[int] = []
        self._reach = [1]  # bit j of entry i: the first i items can add up to j

    def _first_fit(self) -> list[int]:
        for place in range(self._looked_at, len(self._items)):
            size = self._items[place][1]
            self._looked_at += 1
            if self._sum + size <= self._target:
                self._fits.append(place)
                self._sum += size
                if self._sum == self._target:
                    return self._fits
            self._reach.append(self._reach[-1] | self._moved(size))
        return []

    def _moved(self, size: int) -> int:
        """Returns the sums reachable by also taking one item of `size`, none of them beyond the target."""
        if size > self._target:
            return 0
        moved = self._reach[-1] << size
        return moved & ((2 << self._target) - 1) if moved.bit_length() > self._target + 1 else moved

    def _any_fit(self) -> list[int]:
        left, places = self._target, []
        if not self._reach[-1] >> left & 1:
            return []
        for place in range(len(self._items) - 1, -1, -1):
            size = self._items[place][1]
            if left >= size and self._reach[place] >> (left - size) & 1:
                places.append(place)
                left -= size
        return places[::-1]
