"""The pusher's end of `resume_watchdog.py`: a child that outlives whoever pauses a server, and makes the
calls that were left to be made.

Knows the child's command line and its lines. One thread.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from shmbridge.consumers.engines.engine import EngineFailed

Call = tuple[str, object]  # path and query; body, None for none

_PROGRAM = str(Path(__file__).with_name("resume_watchdog.py"))


class PauseGuard:
    """Starts the child before the first pause, and again should somebody end it.

    Args:
        url: of the server.
    """

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-I", "-S", _PROGRAM, url]
        self._child: subprocess.Popen[bytes] | None = None
        self._left: list[list[Call]] = []

    @contextmanager
    def pausing(self, resume: Call) -> Iterator[None]:
        """Pauses the server in the block: from its beginning on `resume` is called if this process dies.

        Takes milliseconds the first time. That stays so after the block, unless it finds that nobody is there
        to be paused.
        """
        self.left([resume])
        try:
            yield
        except EngineFailed as error:
            if not error.reached:
                self.left()
            raise

    def left(self, *calls: list[Call]) -> None:
        """Says what is left to be done from here on: lists of calls, each up to the first that fails;
        nothing: the server goes on.

        The very last call lets the server go on, and is made until it is taken.
        """
        self._left = list(calls)
        if self._say() or not calls:
            return
        self.close()
        self._left = list(calls)
        # A session of its own: what ends the pusher's group at a terminal is not for it.
        self._child = subprocess.Popen(
            [*self._command, str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
        )
        self._say()

    def _say(self) -> bool:
        if self._child is None or self._child.stdin is None:
            return False
        line = json.dumps(self._left).encode() + b"\n"
        try:
            return os.write(self._child.stdin.fileno(), line) == len(line)
        except OSError:  # somebody ended it
            return False

    def close(self) -> None:
        """Lets the child end; where something is left, it does that first, in its own time. Idempotent."""
        child, self._child = self._child, None
        if child is not None and child.stdin is not None:
            child.stdin.close()
            if not self._left:
                child.wait()
