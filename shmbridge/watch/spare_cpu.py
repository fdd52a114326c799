"""CPU time that nobody else wants: for observers that copy records, so that they do not slow the run."""

import contextlib
import os
from pathlib import Path

_NICEST = 19
_GROUP = Path("/proc/self/autogroup")


def use_only_spare_cpu() -> None:
    """Gives this thread, and those that it starts, only CPU time that no other process wants. Never blocks.

    For good: it cannot always be taken back. What the kernel does not allow is left as it is. Between
    containers with CPU limits or shares of their own, those decide.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    with contextlib.suppress(OSError):  # processes of another terminal are a group of their own
        _GROUP.write_text(str(_NICEST))
