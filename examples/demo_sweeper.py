"""Removes the shared memory of a demo that was killed; waits, unseen, for as long as the demo lives.

    python examples/demo_sweeper.py BRIDGE     (started by demo.py, which holds the other end of its stdin)

A killed demo cannot clean up, and its children die with it. Its pipe closes: that is how the sweeper knows.
"""

from __future__ import annotations

import signal
import sys
import time

import shmbridge

PATIENCE_S = 30.0  # for processes that the kernel is still taking down


def sweep(bridge: str, patience_s: float = PATIENCE_S) -> list[str]:
    """Remove all segments of a bridge, waiting for living users to end; return what is left."""
    deadline = time.monotonic() + patience_s
    while kept := list(shmbridge.clean(bridge, dry_run=False).kept):
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return kept


def main() -> None:
    """Wait for the end of stdin, then sweep."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_IGN)
    sys.stdin.buffer.read()
    sweep(sys.argv[1])


if __name__ == "__main__":
    main()
