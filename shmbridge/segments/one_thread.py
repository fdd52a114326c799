"""Under SHMBRIDGE_DEBUG=1, raises when two threads use a single-threaded object at once. Off, it costs
nothing.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Any

from shmbridge.errors import UsedByTwoThreads


def wanted() -> bool:
    """Returns whether SHMBRIDGE_DEBUG=1 asks for the check."""
    return os.environ.get("SHMBRIDGE_DEBUG", "") == "1"


def watch(owner: object, what: str, methods: tuple[str, ...]) -> None:
    """With SHMBRIDGE_DEBUG=1, a second thread in any of these methods of `owner` at once gets
    UsedByTwoThreads.

    The methods become attributes of the object. A signal handler that calls one during another, in the same
    thread, does not count as a second thread.
    """
    if not wanted():
        return
    inside = _Inside(what)
    for name in methods:
        setattr(owner, name, inside.of(name, getattr(owner, name)))


class _Inside:
    """The thread that is in the object, and in which of its methods."""

    def __init__(self, what: str) -> None:
        # re-entrant: a signal handler may come while it is held
        self._what, self._lock = what, threading.RLock()
        self._thread, self._method, self._depth = 0, "", 0

    def of(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def watched(*args: Any, **options: Any) -> Any:
            self._enter(name)
            try:
                return method(*args, **options)
            finally:
                self._depth -= 1

        return watched

    def _enter(self, name: str) -> None:
        with self._lock:
            me = threading.get_ident()
            if self._depth and self._thread != me:
                names = {thread.ident: thread.name for thread in threading.enumerate()}
                raise UsedByTwoThreads(
                    f"{self._what}: thread {names.get(self._thread, self._thread)!r} is in "
                    f"{self._method}(), and thread {names.get(me, me)!r} calls {name}()",
                    hint="give each thread its own, or take turns with a lock",
                )
            if not self._depth:
                self._thread, self._method = me, name
            self._depth += 1
