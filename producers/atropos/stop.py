"""Makes SIGTERM an orderly stop, like Ctrl-C; a second signal ends the process at once.

Used by the command line of `shmbridge.producers.atropos`.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

EXIT_CODE = 128 + signal.SIGTERM


class Stopped:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.by_sigterm = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Does what SIGINT would do now: asyncio cancels the main task, which flushes and says goodbye;
        elsewhere KeyboardInterrupt.
        """
        self.by_sigterm = True
        as_if_interrupted = signal.getsignal(signal.SIGINT)
        for each in (signal.SIGTERM, signal.SIGINT):
            signal.signal(each, signal.SIG_DFL)
        if callable(as_if_interrupted):
            as_if_interrupted(signal.SIGINT, frame)
        else:  # SIGINT is ignored, as in a background job of a shell
            raise KeyboardInterrupt


@contextlib.contextmanager
def orderly_sigterm() -> Iterator[Stopped]:
    """Within the block SIGTERM interrupts as Ctrl-C does; a script's own handler takes its place.

    In other threads it does nothing.
    """
    stopped = Stopped()
    if threading.current_thread() is not threading.main_thread():
        yield stopped
        return
    before = signal.signal(signal.SIGTERM, stopped)
    try:
        yield stopped
    finally:
        if signal.getsignal(signal.SIGTERM) is stopped:
            signal.signal(signal.SIGTERM, before)
