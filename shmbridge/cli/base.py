"""What all programs of ours share: the parser of their command line, how they print, and how they refuse."""

import argparse
import contextlib
import difflib
import io
import os
import re
import select
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from types import TracebackType
from typing import Any, NoReturn

from shmbridge.cli.log import StampedLines, end_lines, log_to_stderr, stamp_files, use_json
from shmbridge.config import check_bridge_name, parse_size
from shmbridge.errors import BadBridgeName, ShmBridgeError

DEBUG = "SHMBRIDGE_DEBUG"
_MOST_NAMED = 8  # bridges that a hint names
_called = ""
_ROLLOUT = ("aiohttp", "transformers")
_UNKNOWN = "unrecognized arguments: "
_REQUIRED = "the following arguments are required: "
_NEGATIVE_NUMBER = re.compile(r"^-\.?(\d|inf)")  # also -1e-3 and -inf, which argparse takes for flags


def call_as(name: str) -> None:
    """Names this process as its user called it, such as `shmbridge train`, in all its output from now on."""
    global _called
    _called = name


def called(program: str) -> str:
    """Returns the program as the user called it, else as given."""
    return _called or program


def run_program(role: str, main: Callable[[], int], *, log_others: bool = True) -> int:
    """Runs `main` as this process' program; returns its exit code. For the `__main__` of a program.

    What is logged goes to standard error. If the output is a log file, every line in it gets time, level and
    role, but for a help. A Ctrl-C that ends the program shows no traceback; its exit status is as ever.

    `log_others`: see `log_to_stderr`.
    """
    if not {"-h", "--help"} & {*sys.argv[1:]}:  # a help is no log, wherever it goes
        stamp_files(role)
    log_to_stderr(role, others=log_others)
    sys.excepthook = _without_interrupts
    try:
        return main()
    finally:
        end_lines()


def tell(program: str, text: str) -> None:
    """Prints one line for the user; in a log, where each line has the role, without `program`."""
    named = not isinstance(sys.stdout, StampedLines)
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
    if isinstance(sys.stderr, StampedLines):
        sys.stderr.say("ERROR", text)
    else:
        print(f"{called(program)}: error: {text}", file=sys.stderr, flush=True)


def debugging() -> bool:
    """Returns whether errors of users show their traceback: `--debug`, or SHMBRIDGE_DEBUG=1."""
    return os.environ.get(DEBUG, "0") not in ("", "0")


def _without_interrupts(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if debugging() or not issubclass(kind, KeyboardInterrupt):
        sys.__excepthook__(kind, error, trace)


# Extra of pyproject.toml -> the modules of its packages.
MODULES: dict[str, tuple[str, ...]] = {
    "atropos": ("atroposlib", "transformers"),
    "completion": ("shtab",),
    "gateway": ("fastapi", "uvicorn"),
    "gem": ("gem", *_ROLLOUT),
    "launch": ("yaml",),
    "learner": ("torch", "transformers", "safetensors", "starlette", "uvicorn", "matplotlib", "yaml"),
    "ray": ("ray",),
    "skyrl-gym": ("skyrl_gym", *_ROLLOUT),
    "tui": ("textual",),
    "verifiers": ("verifiers", "renderers", "starlette", "uvicorn", *_ROLLOUT),
}


def install(*extras: str) -> str:
    """Returns the command that installs them."""
    return f"pip install 'shmbridge[{','.join(extras)}]'"


def require(*extras: str) -> None:
    """Raises ModuleNotFoundError if a package of one of the extras is not installed; imports none."""
    for module in (module for extra in extras for module in MODULES[extra]):
        if find_spec(module) is None:
            raise ModuleNotFoundError(f"No module named {module!r}", name=module)


def is_of(missing: ModuleNotFoundError, *extras: str) -> bool:
    """Returns whether the module that was not found belongs to one of the extras."""
    package = (missing.name or "").split(".")[0]
    return any(package in MODULES[extra] for extra in extras)


def refuse_missing(program: str, missing: ModuleNotFoundError, *extras: str) -> None:
    """Prints in one line which package is not installed, and the command that installs it."""
    package = (missing.name or "").split(".")[0]
    if debugging():
        refuse(program, missing, install(*extras))
    else:
        refuse(program, f"{package} is not installed", install(*extras))


def explain_missing(program: str, extra: str) -> None:
    """From now on a package of the extra that is missing ends this process with one line, exit code 1; for a
    program whose module imports them, before it does.
    """
    above = sys.excepthook

    def explain(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if isinstance(error, ModuleNotFoundError) and is_of(error, extra):
            refuse_missing(program, error, extra)
        else:
            above(kind, error, trace)

    sys.excepthook = explain


class Refused(Exception):
    """A command line is wrong; the message is the mistake."""


class Parser(argparse.ArgumentParser):
    """Parses one command line. A mistake is `PROGRAM: error: what -> hint` on standard error, exit code 2.

    Flags are written out in full. `--debug` is one of them.

    Args:
        prog: the program, such as `shmbridge inspect`; shown as the user called it.
        description: what it does, in one sentence.
        examples: examples and exit codes, shown as they are at the end of the help; %(prog)s: the program.
        usage: what follows the program in the first line of the help [made of the arguments].
        meant: name of a flag that does not exist, without its hyphens -> the flag that is meant, or None.
        argument_default: as of ArgumentParser.
    """

    def __init__(
        self,
        prog: str,
        *,
        description: str,
        examples: str = "",
        usage: str = "",
        meant: Callable[[str], str | None] | None = None,
        argument_default: Any = None,
    ) -> None:
        super().__init__(
            prog=called(prog),
            description=description,
            epilog=examples.replace("%(prog)s", called(prog)),
            formatter_class=_Layout,
            allow_abbrev=False,
            add_help=False,
            argument_default=argument_default,
        )
        self._meant, self._first_line = meant, usage
        self._quiet = False
        self._words: list[str] = []
        self._negative_number_matcher = _NEGATIVE_NUMBER
        self._positionals.title, self._optionals.title = "arguments", "flags"
        self.add_argument("-h", "--help", action="help", default=argparse.SUPPRESS, help="show this and end")
        self._add_switch(
            "--debug", _show_tracebacks, "show the traceback of every error, as SHMBRIDGE_DEBUG=1 does"
        )

    def add_json_log(self) -> None:
        """Adds the `--json` of a program that logs: from then on each line it prints is a JSON object."""
        self._add_switch(
            "--json",
            use_json,
            "print a JSON object per line: time, name, level, text; as SHMBRIDGE_LOG=json does",
        )

    def _add_switch(self, flag: str, does: Callable[[], None], text: str) -> None:
        """Adds a flag that does something as soon as it is read."""
        self.add_argument(flag, action=_Switch, does=does, default=argparse.SUPPRESS, help=text)

    def error(self, message: str) -> NoReturn:
        """Prints the mistake in one line and ends the process with exit code 2."""
        text = _shortened(message)
        if message.startswith(_UNKNOWN):
            text = self._unknown(message.removeprefix(_UNKNOWN).split())
        elif message.startswith(_REQUIRED) and (misspelt := self._misspelt(message)):
            text = self._unknown(misspelt)
        if self._quiet:
            raise Refused(text)
        refuse(self.prog, text, "" if " -> " in text else f"{self.prog} --help")
        raise SystemExit(2)

    def refusal(self, words: list[str]) -> str:
        """Returns what is wrong with the words, "" if nothing. Passes over flags that it does not know."""
        self._quiet = True
        try:
            self.parse_known_args(words)
        except Refused as refused:
            return str(refused)
        finally:
            self._quiet = False
        return ""

    def format_help(self) -> str:
        """The help: required flags in the first line, all others by name below it."""
        self.usage = f"{self.prog} {self._first_line or self._arguments()}".replace("%", "%%")
        return super().format_help()

    def _arguments(self) -> str:
        layout = self._get_formatter()
        assert isinstance(layout, _Layout)
        flags = [layout.invocation(each) for each in self._actions if each.option_strings and each.required]
        places = [
            layout._format_args(each, layout._get_default_metavar_for_positional(each))
            for each in self._actions
            if not each.option_strings and each.help != argparse.SUPPRESS
        ]
        return " ".join([*flags, "[FLAG ...]", *places])

    def _unknown(self, words: list[str]) -> str:
        """Returns the mistake of words that no flag or argument takes."""
        flags = [each.split("=")[0] for each in words if each.startswith("-")]
        near = list(dict.fromkeys(filter(None, map(self.nearest, flags or words))))
        if flags:
            what = f"unknown flag{'s' if len(flags) > 1 else ''} {', '.join(flags)}"
        else:
            what = f"one argument too many: {' '.join(words)}"
        return f"{what} -> did you mean {', '.join(near)}?" if near else what

    def _misspelt(self, message: str) -> list[str]:
        """Returns the unknown flags that were meant as one of those that are missing."""
        missing = message.removeprefix(_REQUIRED).split(", ")
        unknown = [
            each for each in self._words if each[:1] == "-" and each not in self._option_string_actions
        ]
        return [each for each in unknown if self.nearest(each.split("=")[0]) in missing]

    def _parse_known_args(self, arg_strings: list[str], *rest: Any, **more: Any) -> Any:
        """Keeps the words, to find misspelt flags among them."""
        self._words = list(arg_strings)
        return super()._parse_known_args(arg_strings, *rest, **more)

    def nearest(self, word: str) -> str | None:
        """Returns the flag that was probably meant by a word that is none."""
        name = word.lstrip("-").replace("_", "-")
        if self._meant is not None and (found := self._meant(name)):
            return found
        shown = {
            flag.lstrip("-"): flag
            for each in self._actions
            for flag in each.option_strings
            if each.help != argparse.SUPPRESS and len(flag) > 2
        }
        close = difflib.get_close_matches(name, shown, n=1, cutoff=0.6 if word.startswith("-") else 0.9)
        return shown[close[0]] if close else None

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Names the choices, and the one that is nearest."""
        if action.choices is not None and value not in action.choices:
            raise argparse.ArgumentError(action, none_of(str(value), map(str, action.choices)))


@dataclass(frozen=True)
class Command:
    """A command of `shmbridge`: texts of its help, what adds its arguments, what runs it (an exit code)."""

    help: str
    examples: str  # and the exit codes
    prepare: Callable[[Parser], None]
    run: Callable[[argparse.Namespace], int]


def none_of(word: str, known: Iterable[str]) -> str:
    """Returns the mistake of an unknown word: `'x' is none of a, b`, and the nearest of them."""
    known = list(known)
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.5)
    return f"{word!r} is none of {', '.join(known)}" + (f" -> did you mean {near[0]}?" if near else "")


def bridge_name(text: str) -> str:
    """Returns the name of a bridge; for argparse's `type`: raises its ArgumentTypeError."""
    try:
        return check_bridge_name(text)
    except BadBridgeName as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None


def add_host_name(parser: argparse.ArgumentParser, text: str) -> None:
    """Adds the option `--host-name NAME`, which may be repeated; `text` is its help."""
    parser.add_argument(
        "--host-name",
        action="append",
        default=[],
        type=_host_name,
        metavar="NAME",
        help=f"{text}; may be repeated",
    )


def _host_name(text: str) -> str:
    """Returns a host name, for argparse."""
    if "/" in text or ":" in text or not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a name alone, such as node7.example.org")
    return text


def size(text: str) -> int:
    """Returns the bytes of `64M`; for argparse's `type`: raises its ArgumentTypeError."""
    try:
        if found := parse_size(text):
            return found
    except (ValueError, OverflowError) as wrong:
        raise argparse.ArgumentTypeError(str(wrong)) from None
    raise argparse.ArgumentTypeError(f"{text!r} is not a size above 0, such as 64M")


def whole(least: int) -> Callable[[str], int]:
    """Returns argparse's `type` of a whole number from `least` on, below 2**62."""

    def typed(text: str) -> int:
        try:
            if least <= (value := int(text)) < 1 << 62:
                return value
        except ValueError:
            pass
        wanted = "above 0" if least == 1 else f"of {least} or above"
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {wanted}")

    return typed


def amount(text: str) -> float:
    """Returns a number from 0 to below 1e9, such as seconds; for argparse's `type`: raises its
    ArgumentTypeError.
    """
    try:
        if 0 <= (value := float(text)) < 1e9:
            return value
    except ValueError:
        pass
    raise argparse.ArgumentTypeError(f"{text!r} is not a number of 0 or above")


def _shortened(message: str) -> str:
    """Returns argparse's message without its first words; with an error code of ours, from the code on."""
    message = message.replace(_REQUIRED, "missing: ").removeprefix("argument ")
    return re.sub(r"^[^:]*: (?=\[SB\d+\] )", "", message)


def _show_tracebacks() -> None:
    """Holds for processes that this one starts, too."""
    os.environ[DEBUG] = "1"


class _Switch(argparse.Action):
    def __init__(self, *, does: Callable[[], None], **rest: Any) -> None:
        super().__init__(nargs=0, **rest)
        self._does = does

    def __call__(self, *_: Any) -> None:
        self._does()


class _Layout(argparse.RawDescriptionHelpFormatter):
    """Help in two columns, the same in every release of Python."""

    def __init__(self, prog: str) -> None:
        columns = min(shutil.get_terminal_size().columns, 110)
        super().__init__(prog, max_help_position=max(min(26, columns // 3), 8), width=max(columns - 1, 20))

    def invocation(self, action: argparse.Action) -> str:
        """A flag with its value: `-f, --file FILE`."""
        flags = ", ".join(action.option_strings)
        if action.nargs == 0:
            return flags
        return f"{flags} {self._format_args(action, self._get_default_metavar_for_optional(action))}"

    def _format_action_invocation(self, action: argparse.Action) -> str:
        return self.invocation(action) if action.option_strings else super()._format_action_invocation(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        """Breaks a description of one line; leaves examples as they are."""
        if "\n" in text:
            return super()._fill_text(text, width, indent)
        return argparse.HelpFormatter._fill_text(self, text, width, indent)


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


def refuse_unknown_bridge(program: str, bridge: str) -> bool:
    """Returns whether the bridge does not exist; then prints that in one line on standard error."""
    if hint := hint_if_unknown(bridge):
        refuse(program, f"no bridge {bridge!r}", hint)
    return bool(hint)


def hint_if_unknown(bridge: str) -> str:
    """Returns which bridges there are, and which was probably meant; "" if the bridge exists."""
    from shmbridge.segments import bridge_names

    there = sorted(bridge_names())
    if bridge in there:
        return ""
    if not there:
        return "there are none; they begin with an environment or a learner"
    named = ", ".join(there[:_MOST_NAMED]) + (
        f" and {len(there) - _MOST_NAMED} more" if len(there) > _MOST_NAMED else ""
    )
    near = next(iter(difflib.get_close_matches(bridge, there, n=1)), None)
    return f"did you mean {near}? There are {named}" if near else f"there are {named}"


def report_none(program: str, bridge: str | None) -> None:
    """Says on standard error that the bridge does not exist any more; None: that there is none at all."""
    if bridge is None:
        print("no bridges", file=sys.stderr)
    else:
        refuse_unknown_bridge(program, bridge)
