"""Makes SIGTERM an orderly stop, like Ctrl-C; a second signal ends the process at once. `leave` ends it
although a call of an environment never returns. Used by the command lines of producers.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 128 + signal.SIGTERM

_GRACE_S = 3.0


class Stopped:
    """Whether SIGTERM was received."""

    def __init__(self) -> None:
        self.by_sigterm = False

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        """Does what SIGINT would do: asyncio cancels the main task, which flushes and sends a goodbye;
        without asyncio, raises KeyboardInterrupt.
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


def leave(code: int) -> NoReturn:
    """Ends the process. Python would wait for its threads, and so for a call of an environment that never
    returns: here they have three seconds.
    """
    give_up = time.monotonic() + _GRACE_S
    while (running := _threads()) and time.monotonic() < give_up:
        running[0].join(give_up - time.monotonic())
    if not running:
        sys.exit(code)
    print(f"{len(running)} calls of environments did not return within {_GRACE_S:g} s", file=sys.stderr)
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _threads() -> list[threading.Thread]:
    """The threads that Python would wait for."""
    others = (each for each in threading.enumerate() if each is not threading.main_thread())
    return [each for each in others if not each.daemon]
