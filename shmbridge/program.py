"""What all programs of ours share: their log, how they tell something, and how they refuse."""

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from shmbridge import log_format
from shmbridge.errors import ShmBridgeError

DEBUG = "SHMBRIDGE_DEBUG"
_called = ""


def call_as(name: str) -> None:
    """Names this process as its user called it, such as `shmbridge train`, for all it says from now on."""
    global _called
    _called = name


def called(program: str) -> str:
    """Returns the program as the user called it, else as given."""
    return _called or program


def run_program(role: str, main: Callable[[], int], *, log_others: bool = True) -> int:
    """Runs `main` as this process' program; returns its exit code. For the `__main__` of a program.

    What is logged goes to standard error. If the output is a log file, every line in it gets time, level and
    role, but for a help. A Ctrl-C that ends the program shows no traceback; its exit status is as ever.

    `log_others`: see `log_format.log_to_stderr`.
    """
    if not {"-h", "--help"} & {*sys.argv[1:]}:  # a help is no log, wherever it goes
        log_format.stamp_files(role)
    log_format.log_to_stderr(role, others=log_others)
    sys.excepthook = _without_interrupts
    try:
        return main()
    finally:
        log_format.end_lines()


def tell(program: str, text: str) -> None:
    """Prints one line for the user; in a log, where each line has the role, without `program`."""
    named = not isinstance(sys.stdout, log_format.StampedLines)
    print(f"{program}: {text}" if named else text, flush=True)


def refuse(program: str, error: BaseException | str, hint: str = "") -> None:
    """Prints a user's mistake in one line: `PROGRAM: error: [SBnnn] what -> hint`.

    Args:
        program: what the user called.
        error: what is wrong; with its traceback before it if `debugging()`.
        hint: one next action, for an error that has none.
    """
    if debugging() and isinstance(error, BaseException):
        traceback.print_exception(error)
    has_hint = isinstance(error, ShmBridgeError) and error.hint
    text = str(error)
    if hint and not has_hint:
        text += f"; {hint}" if " -> " in text else f" -> {hint}"
    if isinstance(sys.stderr, log_format.StampedLines):
        sys.stderr.say("ERROR", text)
    else:
        print(f"{called(program)}: error: {text}", file=sys.stderr, flush=True)


def debugging() -> bool:
    """Returns whether errors of users show their traceback: `--debug`, or SHMBRIDGE_DEBUG=1."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if debugging() or not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)
