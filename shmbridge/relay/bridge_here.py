"""What a destination reads of the bridge here: lanes of earlier relays, a living relay, the learner's run."""

import contextlib
import time
from collections.abc import Collection

from shmbridge._ext import header
from shmbridge.config import Run
from shmbridge.control import messages
from shmbridge.control.client import ControlClient
from shmbridge.errors import RelayTaken, ShmBridgeError, ShmPermission
from shmbridge.segments import inventory, locks, segment
from shmbridge.segments.locks import LockByte

_ANSWER_S = 0.2
_REMOVING_S = 1.0  # longest that the removal of a dead lane takes
_LOOK_AGAIN_S = 0.01


def refuse_a_second(bridge: str) -> None:
    """Raises RelayTaken if a process lives that puts records of other nodes. Blocks for a second then.

    Whoever removes a dead lane holds its lock meanwhile, as its producer did.
    """
    until = time.monotonic() + _REMOVING_S
    for name in segment.lane_names(bridge):
        while (lane := inventory.lane_info(name)) is not None and lane.alive and lane.origin_node:
            if time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise RelayTaken(
                f"process {lane.pid} puts records of other nodes into bridge {bridge!r}",
                hint=f"one relay for a bridge: shmbridge relay --bridge {bridge} --stop",
            )


def untaken(bridge: str, own: Collection[str]) -> set[str]:
    """Returns the sources with records that no hub has taken yet in lanes which are not among `own`."""
    found: set[str] = set()
    for name in segment.lane_names(bridge):
        if name in own:
            continue
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = segment.open_mapping(name, readonly=True)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is not None and said is not None and said["origin_producer_id"]:
                words = header.lane_counters(mapping)
                if words["tail"] > words["head"] and not words["quarantined"]:
                    found.add(said["origin_producer_id"])
    return found


def announced_run(bridge: str, control: header.Control) -> tuple[Run | None, int] | None:
    """Returns the run that the learner has announced, and its step; None if no hub answers soon."""
    if not locks.is_locked(control.mapping.fd, LockByte.HUB):
        return None
    try:
        with ControlClient(bridge, role="relay", name="relay") as client:
            answer = client.request(messages.RunInfoRequest(), _ANSWER_S)
    except ShmBridgeError:
        return None
    return (answer.run, answer.current_step) if isinstance(answer, messages.RunInfo) else None
