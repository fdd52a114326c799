"""The actor that writes the policy's weights into the segment of a source's node."""

from typing import Any

import numpy as np

from shmbridge.relay.outward import Inward, decode_head
from shmbridge.relay.ray.actors import get_or_make
from shmbridge.relay.ray.directory import Placed


def inward_name(placed: Placed) -> str:
    """Returns the name of the actor on a source's node."""
    return f"shmbridge-inward-{placed.bridge}-{placed.node_id[:16]}"


def make_inward(placed: Placed) -> Any:
    """Returns the actor on a source's node, made if there is none."""
    return get_or_make(InwardActor, inward_name(placed), placed.node_id, placed.bridge)


class InwardActor:
    """Writes weights into the segment of a source's node; opened by the first version, and kept."""

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._inward: Inward | None = None

    def begin(self, head: bytes) -> int:
        """Begins a version, unless it is there; returns the newest that is."""
        about = decode_head(head)
        if self._inward is None:
            self._inward = Inward(self._bridge)
        self._inward.begin(about)
        return self._inward.version

    def write(self, transfer: str, number: int, part: np.ndarray[Any, Any]) -> None:
        """Writes a part, out of the object store here."""
        self._opened().write(transfer, number, part)

    def commit(self, transfer: str) -> int:
        """Makes the version the newest, and returns it."""
        return self._opened().commit(transfer)

    def stop(self) -> None:
        """Leaves the bridge; whole versions stay."""
        inward, self._inward = self._inward, None
        if inward is not None:
            inward.close()

    def _opened(self) -> Inward:
        if self._inward is None:  # begun again in the middle of a transfer
            self._inward = Inward(self._bridge)
        return self._inward
