"""What can go wrong with SkyRL-Gym: a data set, an environment."""

from __future__ import annotations

from shmbridge import ShmBridgeError


class BadTask(ShmBridgeError, ValueError):
    """A data set cannot be read, or a row of it is no task in SkyRL's format."""

    code = "SB512"


class EnvironmentFailed(ShmBridgeError, RuntimeError):
    """A SkyRL-Gym environment raised, or returned what no environment returns; its episode is no row."""

    code = "SB513"
