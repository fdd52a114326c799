"""Calls at process exit for objects that were not closed, held by weak references only."""

import atexit
import os
import weakref
from collections.abc import Callable

_Weak = weakref.WeakMethod[Callable[[], None]]


def at_exit(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a bound method at the end of this process if its object still lives, not in children; returns a
    function that cancels that.
    """
    weak: _Weak = weakref.WeakMethod(method)
    pid = os.getpid()

    def call() -> None:
        if os.getpid() == pid and (alive := weak()) is not None:
            alive()

    atexit.register(call)
    return lambda: atexit.unregister(call)
