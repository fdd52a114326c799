"""close() in a signal handler, which may interrupt the main thread anywhere.

A handler that interrupts a section locked by its own thread must wait for nothing. There close() only notes
that it is owed, and the interrupted call closes at its end. So close() has to know every lock that it, or a
thread that it joins, may wait for: `Closing.lock` makes them all, and they are reentrant. Knows locks and
threads; knows nothing of what is closed. Used by the consumer's parts.
"""

import functools
import os
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_this_thread = threading.local()

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class Closing:
    """How far an object is closed, for all its parts. Once `ending`, it never opens again.

    Attributes:
        owed: a signal handler called close() where it had to wait; the interrupted call closes at its end.
        ending: nothing more is taken, formed or handed out.
        closed: `ending`, and its counters are final.
        over: `closed`, and everything is given back.
        whole: a lock for what needs all parts: close() comes before or after it, never between.
    """

    def __init__(self, give_up: Callable[[], None], stop_taking: Callable[[], None]) -> None:
        self._give_up, self._stop_taking = give_up, stop_taking
        self._pid = os.getpid()
        self._locks: list[threading.RLock] = []
        self._closer = threading.RLock()  # held during close(); a handler in between sees that and returns
        self.owed = self.ending = self.closed = self.over = False
        self.whole = self.lock()

    def lock(self) -> "threading.RLock":
        """A lock that close(), or a thread that it joins, may wait for."""
        lock = threading.RLock()
        self._locks.append(lock)
        return lock

    @property
    def lock_is_mine(self) -> bool:
        """Whether this thread holds such a lock: a handler asks whether it interrupted a locked section."""
        return any(map(is_mine, self._locks))

    def close(self) -> None:
        """Gives everything up, or notes that it is owed.

        Idempotent; a repeat finishes what an interrupt ended. No-op in a child of fork.
        """
        if self.over or os.getpid() != self._pid or is_mine(self._closer):
            return
        if self.lock_is_mine:
            self.owed = self.ending = True
            self._stop_taking()
            return
        with self._closer:
            if not self.over:
                self._give_up()
                self.over, self.owed = True, False

    def close_if_owed(self) -> None:
        """Does what close() has put off: at the end of every call that takes a lock."""
        if self.owed and not is_own_thread():
            self.close()


class _HasClosing(Protocol):
    _closing: Closing


Owner = TypeVar("Owner", bound=_HasClosing)


def then_close(
    call: Callable[Concatenate[Owner, Rest], Result],
) -> Callable[Concatenate[Owner, Rest], Result]:
    """A call that takes a lock: an owed close() is done at its end, also when it ends by an exception."""

    @functools.wraps(call)
    def called(owner: Owner, /, *args: Rest.args, **options: Rest.kwargs) -> Result:
        try:
            return call(owner, *args, **options)
        finally:
            owner._closing.close_if_owed()

    return called


def is_mine(lock: "threading.RLock") -> bool:
    """Whether this thread holds the lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def begin_own_thread() -> None:
    """Says that close() waits for the end of this thread."""
    _this_thread.is_own = True


def is_own_thread() -> bool:
    """Whether close() waits for the end of this thread, so that it cannot close."""
    return hasattr(_this_thread, "is_own")
