"""Which records a folder holds: per producer the sequences seen, as a few ranges."""

from bisect import bisect_right
from collections.abc import Iterator


class SeenKeys:
    """A set of (producer_id, sequence). Small while each producer's sequences have few gaps."""

    def __init__(self) -> None:
        # Per producer the starts and the ends of its ranges; ends are exclusive.
        self._ranges: dict[str, tuple[list[int], list[int]]] = {}

    def has(self, producer_id: str, sequence: int) -> bool:
        """Returns whether a key was added."""
        starts, ends = self._ranges.get(producer_id, ([], []))
        at = bisect_right(starts, sequence) - 1
        return at >= 0 and sequence < ends[at]

    def add(self, producer_id: str, sequence: int) -> bool:
        """Adds a key; returns whether it is new."""
        if self.has(producer_id, sequence):
            return False
        starts, ends = self._ranges.setdefault(producer_id, ([], []))
        at = bisect_right(starts, sequence)
        joins_left = at > 0 and ends[at - 1] == sequence
        joins_right = at < len(starts) and starts[at] == sequence + 1
        if joins_left and joins_right:
            ends[at - 1] = ends.pop(at)
            starts.pop(at)
        elif joins_left:
            ends[at - 1] = sequence + 1
        elif joins_right:
            starts[at] = sequence
        else:
            starts.insert(at, sequence)
            ends.insert(at, sequence + 1)
        return True

    def reached(self) -> dict[str, int]:
        """Returns the last sequence of each producer."""
        return {producer_id: ends[-1] - 1 for producer_id, (_, ends) in sorted(self._ranges.items())}

    def counts(self) -> dict[str, int]:
        """Returns how many records there are of each producer."""
        return {
            producer_id: sum(ends) - sum(starts)
            for producer_id, (starts, ends) in sorted(self._ranges.items())
        }

    def __iter__(self) -> Iterator[str]:
        return iter(self._ranges)
