"""Removes the shared memory of a demo that was killed; waits, unseen, for as long as the demo lives.

    python -m shmbridge.demo.sweeper BRIDGE    (started by demo.py, which holds the other end of its stdin)

A killed demo cannot clean up, and its children die with it. The sweeper notices that by its closed pipe.
"""

from __future__ import annotations

import signal
import sys
import time
from dataclasses import dataclass

from shmbridge import clean

PATIENCE_S = 30.0  # for processes that the kernel is still taking down


@dataclass(frozen=True)
class Swept:
    """The segments that a sweep left, and the number of committed groups that it removed."""

    left: list[str]
    undelivered: int


def sweep(bridge: str, patience_s: float = PATIENCE_S) -> Swept:
    """Removes all segments of a bridge, waiting for living users to end."""
    deadline = time.monotonic() + patience_s
    undelivered = 0
    while True:
        report = clean(bridge, dry_run=False)
        undelivered += sum(held for name, held in report.undelivered.items() if name in report.removed)
        if not report.kept or time.monotonic() > deadline:
            return Swept(list(report.kept), undelivered)
        time.sleep(0.05)


def main() -> None:
    """Waits for the end of stdin, then sweeps."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
