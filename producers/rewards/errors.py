"""The error of this room."""

from shmbridge.errors import ShmBridgeError


class RewardsFailed(ShmBridgeError, RuntimeError):
    """A group could not be given its rewards; nothing of it was put."""

    code = "SB420"
