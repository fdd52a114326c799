"""An exception between two lines, as from a signal handler, for tests that raise it at each line."""

import linecache
import sys
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager


class Stop(Exception):
    """Raised by the handler."""


@contextmanager
def raising_at(
    number: int, modules: Collection[str], events: Collection[str] = ("line",)
) -> Iterator[Callable[[], bool]]:
    """Raises Stop at the `number`-th of these trace events in these modules; yields whether that came.

    Not at the line of a `with`: the interpreter traces it again on leaving the block, where no handler can
    run.
    """
    left = number

    def trace(frame, event, _):
        nonlocal left
        if frame.f_globals.get("__name__") not in modules:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno).lstrip()
        if event in events and not line.startswith("with "):
            left -= 1
            if left == 0:
                raise Stop
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lambda: left <= 0
    finally:
        sys.settrace(before)
