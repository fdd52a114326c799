"""Keeps a paused server from staying paused when its pusher dies: a child process resumes it then.

    python -I -S pause_guard.py URL PID

The pusher PID writes a JSON line to the child's standard input at each stage: the calls still to make,
[[[path, body], ...], ...]. When the kernel reports the pusher's death, the child POSTs those of the last
line: list by list, each up to the first failing call. It repeats the very last call, which resumes the
server, until it succeeds. It is idle for as long as the learner runs, and imports the standard library alone.
"""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

Call = tuple[str, object]  # path and query; body, None for none
Calls = list[list[list[Any]]]

_LOOK_MS = 1000  # poll interval where the kernel cannot report the pusher's death
_RETRY_S = 0.5
_LONGEST_S = 600.0
_REFUSED_S = 10.0  # how long to retry while no server listens


def main(url: str, pusher: int) -> None:
    """Waits for the pusher's death, then makes the calls. Blocks."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # the pusher handles signals
    left = _left(_said_by(pusher))
    for calls in left[:-1]:
        all(_post(url, *call) for call in calls)
    for call in left[-1] if left else ():
        _insist(url, *call)


def _left(said: bytes) -> Calls:
    lines = said.split(b"\n")[:-1]  # text after the last newline is an unfinished line
    left: Calls = json.loads(lines[-1]) if lines else []
    return left


def _said_by(pusher: int) -> bytes:
    """Reads the pusher's lines until its end; returns from the last two lines on."""
    os.set_blocking(0, False)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    gone = _death_of(pusher)  # forked children of the pusher hold the pipe, too, so end-of-file is not enough
    if gone is not None:
        waiting.register(gone, select.POLLIN)
    said = b""
    while True:
        over = os.getppid() != pusher
        ready = waiting.poll(0 if over else None if gone is not None else _LOOK_MS)
        over = over or any(descriptor == gone for descriptor, _ in ready)
        try:
            more = os.read(0, 1 << 16)
        except BlockingIOError:
            if over:
                return said
            continue
        if not more:
            return said
        said = b"\n".join((said + more).split(b"\n")[-2:])


def _death_of(pusher: int) -> int | None:
    """Returns a descriptor that is readable once the pusher is dead; None without pidfd."""
    try:
        return os.pidfd_open(pusher)
    except OSError:
        return None


def _post(url: str, path: str, body: object) -> bool:
    try:
        _ask(url + path, body)
    except OSError:
        return False
    return True


def _insist(url: str, path: str, body: object) -> None:
    import urllib.error

    until = time.monotonic() + _LONGEST_S
    while time.monotonic() < until:
        try:
            return _ask(url + path, body)
        except urllib.error.HTTPError as error:
            if error.code < 500:  # unknown route: another server has the address now
                return None
        except OSError as error:
            # the server is gone or restarting
            if isinstance(getattr(error, "reason", error), ConnectionRefusedError):
                until = min(until, time.monotonic() + _REFUSED_S)
        time.sleep(_RETRY_S)
    return None


def _ask(url: str, body: object) -> None:
    import urllib.request

    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    data, headers = (
        (b"", {}) if body is None else (json.dumps(body).encode(), {"Content-Type": "application/json"})
    )
    with direct.open(urllib.request.Request(url, data, headers, method="POST"), timeout=_LONGEST_S):
        pass


class PauseGuard:
    """Starts the child before the first pause of the server at a URL, and again if it was killed."""

    def __init__(self, url: str) -> None:
        self._command = [sys.executable, "-I", "-S", __file__, url]
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
        except Exception as error:
            if not getattr(error, "reached", True):
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
