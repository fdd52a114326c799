"""What the kernel says of a process: running, stopped, dead, or in another pid namespace."""

from enum import StrEnum
from pathlib import Path

from shmbridge.segments import is_own_namespace


class State(StrEnum):
    """The state of a process, as far as it can be seen from here."""

    RUNNING = "running"  # also asleep
    STOPPED = "stopped"  # by a signal or a debugger
    DEAD = "dead"
    UNKNOWN = "unknown"  # its pid means nothing here


def state_of(pid: int, namespace: int, *, alive: bool) -> State:
    """Returns the state of a process. Never blocks.

    Args:
        pid: in its own pid namespace.
        namespace: that namespace, as `locks.pid_namespace`.
        alive: whether the kernel lock of its lane or hub is held; this alone proves life.
    """
    if not alive:
        return State.DEAD
    if not is_own_namespace(namespace):
        return State.UNKNOWN
    try:
        letter = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return State.UNKNOWN  # the lock is held by another process than the one that took it
    return State.STOPPED if letter in "Tt" else State.RUNNING
