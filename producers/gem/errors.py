"""The errors of this room."""

from shmbridge import ShmBridgeError


class NotSuspendable(ShmBridgeError, RuntimeError):
    """An Atropos environment cannot be played turn by turn, because of how it asks for completions."""

    code = "SB515"


class EnvFailed(ShmBridgeError, RuntimeError):
    """An environment failed, or gave no trajectory; its own exception is the cause. There is no reward."""

    code = "SB516"


class GroupNotAlike(ShmBridgeError, ValueError):
    """The episodes of a group would begin differently, so that their scores could not be compared."""

    code = "SB517"
