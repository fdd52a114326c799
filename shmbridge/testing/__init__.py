"""For tests of code that uses shmbridge: the lane's specification in plain Python, and waiting for a condition with a deadline.

Knows only public words. Imported by tests, never by the package itself.
"""

import time
from collections.abc import Callable

from shmbridge.testing.model import RingModel, Taken

__all__ = ["RingModel", "Taken", "wait_until"]


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0, *, every_s: float = 0.002) -> None:
    """Polls until `condition()` is true; AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {getattr(condition, '__name__', condition)}")
        time.sleep(every_s)
