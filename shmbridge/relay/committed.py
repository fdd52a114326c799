"""What of other nodes' records is committed here: one number for each source of a node that is there."""

import time

from shmbridge.segments import newest_relayed, read_receipts, remove_receipts

_TIDY_S = 5.0


class Committed:
    """The newest committed record of each source, and whose lanes are those of an earlier relay. One thread.

    In memory are the sources of nodes that are there. Those of other nodes are in lanes and receipts alone,
    and are read again when their node, or a record of theirs, comes.

    Raises ProcessLimit.
    """

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._newest: dict[str, tuple[str, int]] = {}  # producer id -> its node, and a sequence there
        self._earlier: set[str] = set()
        self._read: dict[str, tuple[str, int]] | None = newest_relayed(bridge)
        self._tidied_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._newest.keys() | self._earlier)

    def newest(self, producer_id: str) -> int | None:
        """Returns the sequence of a source's last record that is committed here; None if none is."""
        if producer_id not in self._newest and (found := self._lanes_and_receipts().get(producer_id)):
            self._recall(producer_id, found)
        known = self._newest.get(producer_id)
        return None if known is None else known[1]

    def of_node(self, node: str) -> dict[str, int]:
        """Returns the newest sequence of each source of a node."""
        return {producer_id: newest for producer_id, (at, newest) in self._newest.items() if at == node}

    def is_earlier(self, producer_id: str) -> bool:
        """Whether lanes of a source are those of an earlier relay, or were let go."""
        return producer_id in self._earlier

    def node_comes(self, node: str) -> None:
        """Reads what lanes and receipts say of the sources of a node."""
        for producer_id, found in self._lanes_and_receipts().items():
            if found[0] == node and producer_id not in self._newest:
                self._recall(producer_id, found)

    def note(self, producer_id: str, node: str, sequence: int) -> None:
        """Notes a commit; or that the source's node has this name by now."""
        self._newest[producer_id] = node, sequence

    def let_go(self, producer_id: str) -> None:
        """Notes that a lane of the source was let go: its end must be said there, too."""
        self._earlier.add(producer_id)

    def node_leaves(self, node: str) -> None:
        """Forgets the sources of a node: all that is known of them stands in lanes and receipts."""
        for producer_id in self.of_node(node):
            self.forget(producer_id)
        self._read = None

    def forget(self, producer_id: str) -> None:
        """Forgets a source that is finished, or away."""
        self._newest.pop(producer_id, None)
        self._earlier.discard(producer_id)

    def finish(self, producer_id: str) -> None:
        """Forgets a source that will send nothing again, and removes its receipts."""
        self.forget(producer_id)
        if self._read is not None:
            self._read.pop(producer_id, None)
        self.remove_receipts(producer_id, None)

    def remove_receipts(self, producer_id: str, newest: int | None) -> None:
        """Removes receipts of a source, up to a sequence, or all."""
        remove_receipts(
            self._bridge,
            lambda each: each.producer_id == producer_id and (newest is None or each.sequence <= newest),
        )

    def tidy(self, is_there: set[str]) -> None:
        """Notes, now and then, the receipts of earlier relays' lanes that were removed late."""
        if time.monotonic() - self._tidied_s < _TIDY_S:
            return
        self._tidied_s, self._read = time.monotonic(), None
        for receipt in read_receipts(self._bridge):
            if receipt.node in is_there:
                self._newest.setdefault(receipt.producer_id, (receipt.node, receipt.sequence))

    def _recall(self, producer_id: str, found: tuple[str, int]) -> None:
        self._newest[producer_id] = found
        self._earlier.add(producer_id)

    def _lanes_and_receipts(self) -> dict[str, tuple[str, int]]:
        """What was read last; again, if a node has left since. What was put here since then is in memory."""
        if self._read is None:
            self._read = newest_relayed(self._bridge)
        return self._read
