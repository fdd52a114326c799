"""Creates the lane of a new producer."""

import os

from shmbridge import sizing
from shmbridge._ext import header
from shmbridge._ext.header import Mapping
from shmbridge.schema import Columns
from shmbridge.segments import locks, segment


def create_lane(
    bridge: str,
    lane_bytes: int,
    columns: Columns,
    given_id: str,
    env_name: str,
    origin: tuple[bytes, bytes, int] | None = None,
) -> tuple[str, Mapping, str]:
    """Returns a new lane's segment, its name and mapping, and the producer id that its records carry.

    `origin`: LaneOrigin.words() of a lane that a relay writes. Blocks to reserve memory. A text that
    cannot be encoded leaves no lane behind.
    """
    given, env = given_id.encode()[:63], env_name.encode()[:127]
    slots = sizing.slots_of(lane_bytes)
    *_, size = header.lane_geometry(lane_bytes, slots)
    name, lane = segment.create_lane(bridge, size)
    producer_id = f"{given.decode(errors='ignore')}-{name.rpartition('.')[2]}"
    header.format_lane(
        lane,
        lane_bytes,
        slots,
        columns.encode(),
        len(columns),
        os.getpid(),
        locks.pid_namespace(),
        producer_id.encode(),
        env,
        *(origin or ()),
    )
    return name, lane, producer_id
