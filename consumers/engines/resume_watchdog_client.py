"""The pusher's side of `resume_watchdog.py`: starts the watchdog and tells it the remaining calls. One
thread.
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
    """Starts the child before the first pause of the server at a URL, and again if it was killed."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-I", "-S", _PROGRAM, url]
        self._child: subprocess.Popen[bytes] | None = None
        self._left: list[list[Call]] = []

    @contextmanager
    def pausing(self, resume: Call) -> Iterator[None]:
        """Arms the watchdog for the block: `resume` is called if this process dies.

        Takes milliseconds the first time. It stays armed after the block, unless the block finds that no
        server listens.
        """
        self.left([resume])
        try:
            yield
        except EngineFailed as error:
            if not error.reached:
                self.left()
            raise

    def left(self, *calls: list[Call]) -> None:
        """Stores the calls to replay if this process dies. Each list stops at its first failure; no lists:
        nothing to replay.

        The very last call resumes the server, and is repeated until it succeeds.
        """
        self._left = list(calls)
        if self._say() or not calls:
            return
        self.close()
        self._left = list(calls)
        # Its own session, so that terminal signals to the pusher's process group do not reach it.
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
        except OSError:  # the child was killed
            return False

    def close(self) -> None:
        """Lets the child end, after the stored calls if there are any; does not wait for it. Idempotent."""
        child, self._child = self._child, None
        if child is not None and child.stdin is not None:
            child.stdin.close()
            if not self._left:
                child.wait()
