"""What still happens when a process ends, or drops an object, without close(). Knows weak references; knows nothing of what is called."""

import atexit
import weakref
from collections.abc import Callable

_Weak = weakref.WeakMethod[Callable[[], None]]


def at_exit(method: Callable[[], None]) -> Callable[[], None]:
    """Calls a bound method at the end of the interpreter if its object still lives; returns what undoes that."""
    weak: _Weak = weakref.WeakMethod(method)

    def call() -> None:
        if (alive := weak()) is not None:
            alive()

    atexit.register(call)
    return lambda: atexit.unregister(call)
