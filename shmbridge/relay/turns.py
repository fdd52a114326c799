"""Whose turn it is: nodes share what may be on its way at a time, in proportion to their weights."""

from collections import deque
from collections.abc import Iterable


class Turns:
    """Stride scheduling over nodes: the node whose bytes, divided by its weight, are fewest comes next.

    A node that comes late or was idle begins where the others stand, and does not catch up. A node whose last
    turn brought nothing has one turn at a time beside the others', which reserves nothing: nodes that have
    nothing wait for no one, and nobody for them. One thread.

    Args:
        most_bytes: on their way at a time, over all nodes; at least one pull always is.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._weights: dict[str, float] = {}
        self._passed: dict[str, float] = {}
        self._reserved: dict[str, deque[int]] = {}  # bytes of each turn under way, the oldest first
        self._idle: set[str] = set()
        self._now = 0.0  # where the node stood that had the last turn

    def add(self, node: str, weight: float = 1.0) -> None:
        """Gives a node turns from now on, or another weight."""
        if not weight > 0:
            raise ValueError(f"weight {weight!r} of node {node} is not above 0")
        self._weights[node] = weight
        if node not in self._passed:
            self._passed[node] = self._now
            self._reserved[node] = deque()
            self._idle.add(node)

    def remove(self, node: str) -> None:
        """Takes a node out, with all that is on its way from it."""
        for table in (self._weights, self._passed, self._reserved):
            table.pop(node, None)
        self._idle.discard(node)

    @property
    def reserved(self) -> int:
        """Bytes that may be on their way."""
        return sum(map(sum, self._reserved.values()))

    def next(self, ready: Iterable[str], size: int) -> str | None:
        """Returns the node that may send up to `size` bytes now, and reserves them; None if none may."""
        known = [node for node in ready if node in self._passed]
        for node in known:
            if node in self._idle and not self._reserved[node]:
                self._reserved[node].append(0)
                return node
        busy = [node for node in known if node not in self._idle]
        reserved = self.reserved
        if not busy or (reserved and reserved + size > self.most_bytes):
            return None
        node = min(busy, key=lambda each: (max(self._passed[each], self._now), each))
        self._now = max(self._passed[node], self._now)
        self._passed[node] = self._now + size / self._weights[node]
        self._reserved[node].append(size)
        return node

    def came(self, node: str, brought: int) -> None:
        """Ends the oldest turn of a node, which brought so many bytes: only those count."""
        if not self._reserved.get(node):
            return
        reserved = self._reserved[node].popleft()
        self._passed[node] += (brought - reserved) / self._weights[node]
        (self._idle.discard if brought else self._idle.add)(node)
