"""close() in a signal handler, which may interrupt the main thread anywhere.

The rule: a handler that interrupts a section locked by its own thread waits for nothing that this section may
keep from ending. There close() only notes that it is owed, and the interrupted call pays at its end. So every
lock that close(), or a thread that it joins, may wait for is an RLock that close() asks for its owner; a test
walks a consumer's parts for them. Knows locks and threads; knows nothing of what is closed.
"""

import functools
import threading
from collections.abc import Callable
from typing import Concatenate, ParamSpec, Protocol, TypeVar

_this_thread = threading.local()

Rest = ParamSpec("Rest")
Result = TypeVar("Result")


class _Owes(Protocol):
    def close_if_owed(self) -> None: ...


Owner = TypeVar("Owner", bound=_Owes)


def then_close(
    call: Callable[Concatenate[Owner, Rest], Result],
) -> Callable[Concatenate[Owner, Rest], Result]:
    """A call that takes a lock: a close() that is owed is done at its end, also when it ends by an
    exception.
    """

    @functools.wraps(call)
    def called(owner: Owner, /, *args: Rest.args, **options: Rest.kwargs) -> Result:
        try:
            return call(owner, *args, **options)
        finally:
            owner.close_if_owed()

    return called


def is_mine(lock: "threading.RLock | threading.Condition") -> bool:
    """Whether this thread holds the lock; asked in a handler: whether it interrupted a locked section."""
    return lock._is_owned()  # type: ignore[union-attr, no-any-return]


def begin_own_thread() -> None:
    """Says that close() waits for the end of this thread."""
    _this_thread.is_own = True


def is_own_thread() -> bool:
    """Whether close() waits for the end of this thread, so that it cannot close."""
    return hasattr(_this_thread, "is_own")
