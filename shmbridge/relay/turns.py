"""Whose turn it is: nodes share what may be on its way at a time, in proportion to their weights."""

from collections.abc import Iterable


class Turns:
    """Stride scheduling over nodes: the node whose bytes, divided by its weight, are fewest comes next.

    A node that comes late or was idle begins where the others stand, and does not catch up. One thread.

    Args:
        most_bytes: on their way at a time, over all nodes; at least one pull always is.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._weights: dict[str, float] = {}
        self._passed: dict[str, float] = {}
        self._reserved: dict[str, int] = {}
        self._now = 0.0  # where the node stood that had the last turn

    def add(self, node: str, weight: float = 1.0) -> None:
        """Gives a node turns from now on, or another weight."""
        if not weight > 0:
            raise ValueError(f"weight {weight!r} of node {node} is not above 0")
        self._weights[node] = weight
        self._passed.setdefault(node, self._now)
        self._reserved.setdefault(node, 0)

    def remove(self, node: str) -> None:
        """Takes a node out, with all that is on its way from it."""
        for table in (self._weights, self._passed, self._reserved):
            table.pop(node, None)

    @property
    def reserved(self) -> int:
        """Bytes that may be on their way."""
        return sum(self._reserved.values())

    def next(self, ready: Iterable[str], size: int) -> str | None:
        """Returns the node that may send up to `size` bytes now, and reserves them; None if none may."""
        reserved = self.reserved
        if reserved and reserved + size > self.most_bytes:
            return None
        known = [node for node in ready if node in self._passed]
        if not known:
            return None
        node = min(known, key=lambda each: (max(self._passed[each], self._now), each))
        self._now = max(self._passed[node], self._now)
        self._passed[node] = self._now + size / self._weights[node]
        self._reserved[node] += size
        return node

    def came(self, node: str, size: int, brought: int) -> None:
        """Ends a turn for `size` bytes that brought `brought`: only those count."""
        if node in self._reserved:
            self._reserved[node] = max(self._reserved[node] - size, 0)
            self._passed[node] += (brought - size) / self._weights[node]
