"""The control server as the other parts of a hub reach it: they are made before it, and outlive it.

Knows when there is one. Used by what forms batches, serves ranks, or makes room for groups.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.control.environments import HubView, QueueView
from shmbridge.segments.closing import Closing

if TYPE_CHECKING:
    from shmbridge.control.server import ControlServer


class ControlPlane:
    """At most one control server. Any thread."""

    def __init__(self, closing: Closing) -> None:
        self._bell = closing.lock()
        self._server: ControlServer | None = None  # its thread answers requests before this is set

    def serve(self, bridge: str, hub: HubView, queue: QueueView | None, first_env_id: int) -> None:
        """Answers participants from now on."""
        from shmbridge.control.server import ControlServer

        self._server = ControlServer(bridge, hub, queue, first_env_id=first_env_id, bell=self._bell)

    def look_again(self) -> None:
        """There may be an answer for a request that waits for one. Never blocks."""
        if self._server is not None:
            self._server.look_again()

    def env_shares(self) -> Mapping[str, EnvWeight]:
        """What the registered environments ask for, by producer id; an immutable snapshot."""
        return self._server.shares if self._server is not None else {}

    def close(self) -> None:
        """Stops answering; blocks until the answer being written is out."""
        if self._server is not None:
            self._server.close()
