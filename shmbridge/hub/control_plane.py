"""A holder of the hub's control server. The other parts are made before the server and outlive it.

Used by the batch former, the rank server and the consumer.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.control.environments import HubView, QueueView
from shmbridge.segments.closing import Closing

if TYPE_CHECKING:
    from shmbridge.control.messages import Evaluated
    from shmbridge.control.server import ControlServer


class ControlPlane:
    """Holds at most one control server. Any thread."""

    def __init__(self, closing: Closing) -> None:
        self._bell = closing.lock()
        self._server: ControlServer | None = None  # set last: its thread answers requests before

    def serve(self, bridge: str, hub: HubView, queue: QueueView | None, first_env_id: int) -> None:
        """Starts answering participants."""
        from shmbridge.control.server import ControlServer

        self._server = ControlServer(bridge, hub, queue, first_env_id=first_env_id, bell=self._bell)

    def look_again(self) -> None:
        """Has the server retry its waiting requests. Never blocks."""
        if self._server is not None:
            self._server.look_again()

    def env_shares(self) -> Mapping[str, EnvWeight]:
        """Returns the shares that environments requested, by producer id; an immutable snapshot."""
        return self._server.shares if self._server is not None else {}

    def take_evaluations(self) -> "list[Evaluated]":
        """See Consumer.take_evaluations."""
        return self._server.evaluations.take() if self._server is not None else []

    def stats(self) -> dict[str, float]:
        """Returns the counters of evaluations, flat."""
        return self._server.evaluations.stats() if self._server is not None else {}

    def close(self) -> None:
        """Stops answering; blocks until the answer being written is sent."""
        if self._server is not None:
            self._server.close()
