"""What happens at process exit to objects that were not closed; they are held by weak references only."""

import atexit
import contextlib
import os
import weakref
from collections.abc import Callable, Generator
from typing import Any, TypeVar

_Generator = TypeVar("_Generator", bound=Generator[Any, Any, Any])
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


_generators: "weakref.WeakSet[Generator[Any, Any, Any]]" = weakref.WeakSet()


def closed_at_exit(generator: _Generator) -> _Generator:
    """Returns the generator, which is closed when the interpreter exits.

    Its `except` and `finally` need their modules, which Python clears before it collects what is left.

    Never blocks. One that another thread is in stays as it is.
    """
    _generators.add(generator)
    return generator


@atexit.register
def _close_generators() -> None:
    for generator in list(_generators):
        with contextlib.suppress(ValueError):
            generator.close()
