"""A program of its own that ends what a pusher began with a server, if the pusher dies before it could: no
server stays paused.

    python -I -S resume_watchdog.py URL PID

Standard input has a JSON line whenever the pusher PID comes further: the calls that are then left to be made,
[[[path, body], ...], ...]. When the pusher is gone, by the kernel's word for it, those of the last line are
made by POST: the lists one after the other, each up to the first call that fails; the very last call, which
lets the server go on, until it is taken. Sits there for as long as a learner runs, and does nothing. Knows
nothing of weights.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
from typing import Any

Calls = list[list[list[Any]]]

_LOOK_MS = 1000  # where the kernel does not say when the pusher is gone
_RETRY_S = 0.5
_LONGEST_S = 600.0
_REFUSED_S = 10.0  # of a server at whose address nobody listens


def main(url: str, pusher: int) -> None:
    """Waits for the end of the pusher; blocks until then."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)  # its pusher's to act on
    left = _left(_said_by(pusher))
    for calls in left[:-1]:
        all(_post(url, *call) for call in calls)
    for call in left[-1] if left else ():
        _insist(url, *call)


def _left(said: bytes) -> Calls:
    lines = said.split(b"\n")[:-1]  # behind the last end of a line stands what the pusher could not finish
    left: Calls = json.loads(lines[-1]) if lines else []
    return left


def _said_by(pusher: int) -> bytes:
    """What the pusher said, from its last two lines on, once it can say no more."""
    os.set_blocking(0, False)
    waiting = select.poll()
    waiting.register(0, select.POLLIN)
    gone = _death_of(pusher)  # children that the pusher forks hold the pipe, too: its end alone is not enough
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
    """A descriptor that is readable once the pusher is gone; None on kernels, and in sandboxes, that have
    none.
    """
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
            if error.code < 500:  # not its route: another server has the address now
                return None
        except OSError as error:
            # it is gone, or being started again
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


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
