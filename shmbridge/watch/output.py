"""Standard output of a command whose reader may end early, or whose terminal lacks some characters."""

import contextlib
import io
import os
import select
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def to_reader() -> Iterator[None]:
    """Runs the block, which prints. Characters that the output cannot encode are escaped.

    If the reader has gone (`| head`), the block ends there, without an error.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # what the interpreter flushes at its end must not fail again
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def has_reader() -> bool:
    """Returns whether standard output can still be written to: False once the reader of a pipe has gone.

    Never blocks.
    """
    try:
        asked = select.poll()
        asked.register(sys.stdout.fileno(), 0)
        return not asked.poll(0)
    except (AttributeError, OSError, ValueError):  # closed, or no file: printing tells
        return True
