"""A group's number for trainers that name groups by integers: `group_number`."""

from __future__ import annotations

import hashlib

from shmbridge.consumers.trajectories import Trajectory


def group_number(row: Trajectory) -> int:
    """Returns the number of a row's group, 0 to 2**63 - 1; the same for its rows, in every process.

    Made from the producer and the group's id, so a group that a producer puts twice under one id has one
    number. Never blocks.
    """
    name = f"{row.meta.producer_id}\n{row.meta.group_id}".encode()
    return int.from_bytes(hashlib.sha256(name).digest()[:8], "big") >> 1
