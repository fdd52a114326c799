"""What a destination reads of the bridge here: lanes of earlier relays, a living relay, the learner's run."""

import contextlib
import time
from collections.abc import Collection

from shmbridge._ext import header
from shmbridge.control import messages
from shmbridge.control.server import ControlClient
from shmbridge.errors import RelayTaken, ShmBridgeError, ShmPermission
from shmbridge.segments import LockByte, is_locked, lane_info, lane_names, lock_after, open_mapping

_ANSWER_S = 0.2
_REMOVING_S = 1.0  # longest that the removal of a dead lane takes
_LOOK_AGAIN_S = 0.01


def be_the_only_relay(bridge: str, control: header.Control) -> None:
    """Takes the lock of the bridge's relay, for as long as the control segment is open. Blocks for at most
    a second while a lane of a relay is locked: a process that removes a dead lane holds its lock meanwhile.

    Raises RelayTaken if a process lives that puts records of other nodes.
    """
    if not lock_after(lambda: 0, control.mapping.fd, LockByte.RELAY):
        raise RelayTaken(
            f"another process puts records of other nodes into bridge {bridge!r}",
            hint=f"one relay for a bridge: shmbridge relay --bridge {bridge} --stop",
        )
    until = time.monotonic() + _REMOVING_S
    for name in lane_names(bridge):
        while (lane := lane_info(name)) is not None and lane.alive and lane.origin_node:
            if time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise RelayTaken(
                f"process {lane.pid} puts records of other nodes into bridge {bridge!r}",
                hint=f"one relay for a bridge: shmbridge relay --bridge {bridge} --stop",
            )


def untaken(bridge: str, own: Collection[str]) -> dict[str, list[str]]:
    """Returns the sources with records that no hub has taken yet in lanes which are not among `own`: a
    producer id -> those lanes.
    """
    found: dict[str, list[str]] = {}
    for name in lane_names(bridge):
        if name in own:
            continue
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = open_mapping(name, readonly=True)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is not None and said is not None and said["origin_producer_id"]:
                words = header.lane_counters(mapping)
                if words["tail"] > words["head"] and not words["quarantined"]:
                    found.setdefault(said["origin_producer_id"], []).append(name)
    return found


class HubSays:
    """What the learner's hub says when it is asked, over one socket. One thread.

    Args:
        bridge: name of the bridge here.
        control: its control segment.
    """

    def __init__(self, bridge: str, control: header.Control) -> None:
        self._bridge, self._control = bridge, control
        self._client: ControlClient | None = None

    @property
    def is_there(self) -> bool:
        """Whether a hub lives."""
        return is_locked(self._control.mapping.fd, LockByte.HUB)

    def ask(self) -> messages.RunInfo | None:
        """Returns the run that the learner has announced, its step, and the lanes that its hub will not read.

        None if no hub answers soon. Blocks for a fifth of a second then.
        """
        if not self.is_there:
            return None
        try:
            if self._client is None:
                self._client = ControlClient(self._bridge, role="relay", name="relay")
            answer = self._client.request(messages.RunInfoRequest(), _ANSWER_S)
        except ShmBridgeError:
            self.close()
            return None
        return answer if isinstance(answer, messages.RunInfo) else None

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()
