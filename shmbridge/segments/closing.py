"""close() in a signal handler, which may interrupt the main thread anywhere.

A handler that interrupts a section locked by its own thread must not wait. In that case close() only records
that it is owed, and the interrupted call closes at its end. So close() must know every lock that it, or a
thread that it joins, may wait for: `Closing.lock` makes them all, and they are re-entrant. Used by the
consumer's parts.
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
    """The closing state of an object, shared by all its parts. Once `ending`, it never opens again.

    Attributes:
        owed: a signal handler called close() where it had to wait; the interrupted call closes at its end.
        ending: nothing more is taken, formed or handed out.
        closed: `ending`, and its counters are final.
        over: `closed`, and everything is given back.
        whole: a lock for work on all parts: close() comes before or after it, never in between.
    """

    def __init__(self, give_up: Callable[[], None], stop_taking: Callable[[], None]) -> None:
        self._give_up, self._stop_taking = give_up, stop_taking
        self._pid = os.getpid()
        self._locks: list[threading.RLock] = []
        # held during close(); a re-entrant signal handler sees that and returns
        self._closer = threading.RLock()
        self.owed = self.ending = self.closed = self.over = False
        self.whole = self.lock()

    def lock(self) -> "threading.RLock":
        """Returns a lock that close(), or a thread that it joins, may wait for."""
        lock = threading.RLock()
        self._locks.append(lock)
        return lock

    @property
    def lock_is_mine(self) -> bool:
        """Whether this thread holds one of the locks: tells a handler whether it interrupted a locked
        section.
        """
        return any(map(is_mine, self._locks))

    def close(self) -> None:
        """Gives everything up, or records that the close is owed.

        Idempotent; a repeated call finishes an interrupted one. No-op in a child of fork.
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
        """Does an owed close(). Called at the end of every call that takes a lock."""
        if self.owed and not is_own_thread():
            self.close()


class _HasClosing(Protocol):
    _closing: Closing


Owner = TypeVar("Owner", bound=_HasClosing)


def then_close(
    call: Callable[Concatenate[Owner, Rest], Result],
) -> Callable[Concatenate[Owner, Rest], Result]:
    """Wraps a call that takes a lock: an owed close() is done at its end, also after an exception."""

    @functools.wraps(call)
    def called(owner: Owner, /, *args: Rest.args, **options: Rest.kwargs) -> Result:
        try:
            return call(owner, *args, **options)
        finally:
            owner._closing.close_if_owed()

    return called


def is_mine(lock: "threading.RLock") -> bool:
    """Returns whether this thread holds the lock."""
    return lock._is_owned()  # type: ignore[attr-defined, no-any-return]


def begin_own_thread() -> None:
    """Marks this thread as one whose end close() waits for."""
    _this_thread.is_own = True


def is_own_thread() -> bool:
    """Returns whether close() waits for the end of this thread, so that it must not close."""
    return hasattr(_this_thread, "is_own")
