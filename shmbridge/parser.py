"""The parser of all commands and programs of ours: a mistake is one line, with what was probably meant."""

import argparse
import difflib
import os
import re
import shutil
from collections.abc import Callable, Iterable
from typing import Any, NoReturn

from shmbridge.config import check_bridge_name, parse_size
from shmbridge.errors import BadBridgeName
from shmbridge.log_format import use_json
from shmbridge.program import DEBUG, called, refuse

_UNKNOWN = "unrecognized arguments: "
_REQUIRED = "the following arguments are required: "
_KINDS = {"int": "a whole number", "float": "a number"}
# What argparse says, and what we say.
_WORDS: tuple[tuple[str, str | Callable[[re.Match[str]], str]], ...] = (
    (r"^argument (?=\S)", ""),
    (
        r"invalid (\w+) value: (.*)",
        lambda found: f"{found[2]} is not {_KINDS.get(found[1], f'of type {found[1]}')}",
    ),
    (r"expected one argument", "its value is missing"),
    (r"expected at least one argument", "its values are missing"),
    (r"expected (\d+) arguments", r"it takes \1 values"),
    (r"ignored explicit argument (.*)", r"it takes no value, not \1"),
    (f"^{_REQUIRED}", "missing: "),
    (r"^[^:]*: (?=\[SB\d+\] )", ""),
)
_NEGATIVE_NUMBER = re.compile(r"^-\.?(\d|inf)")  # also -1e-3 and -inf, which argparse takes for flags


class Refused(Exception):
    """The words of a command line are wrong; the message says how."""


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
        text = _said(message)
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

    def help_of(self, action: argparse.Action) -> str:
        """Returns an argument's line of help, with its default."""
        return self._get_formatter()._expand_help(action)

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
        """Returns what is said about words that no flag or argument takes."""
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
        """Keeps the words, for what is said of them."""
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


def none_of(word: str, known: Iterable[str]) -> str:
    """Returns what is said about a word that is not known: `'x' is none of a, b`, and the nearest of them."""
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


def _said(message: str) -> str:
    for theirs, ours in _WORDS:
        message = re.sub(theirs, ours, message)
    return message


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
