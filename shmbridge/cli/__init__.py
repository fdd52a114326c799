"""The `shmbridge` command, and in `base` and `log` what all programs of ours share.

It starts other rooms' commands and programs by name, and imports none of them.
"""

import difflib
import errno
import os
import runpy
import shutil
import sys
from importlib import import_module

from shmbridge import __version__
from shmbridge.cli.base import call_as, is_of, refuse, refuse_missing, refuse_unknown_bridge
from shmbridge.cli.commands import COMMANDS, Entry, command_of, help_text, parser_of
from shmbridge.errors import BadBridgeName, ShmBridgeError

NO_BRIDGE = 3  # exit code


class _Unneeded:
    """A module finder that hides some installed packages."""

    def __init__(self, packages: tuple[str, ...]) -> None:
        self._packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raises ModuleNotFoundError for those packages; leaves all others to the next finder."""
        if name in self._packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `shmbridge` command; returns the exit code: 2 for a usage error, 1 for an error of
    shmbridge, 130 after Ctrl-C.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    if argv is None and words and words[0] in COMMANDS:  # a process of its own
        sys.meta_path.insert(0, _Unneeded(COMMANDS[words[0]].unneeded))
    try:
        code = _run(words)
        if sys.stdout is not None:
            sys.stdout.flush()
    except BrokenPipeError:  # `| head`: the reader has gone, also for what the interpreter flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC or error.filename is not None:
            raise
        sys.stdout = None  # the interpreter would try to flush it once more
        refuse("shmbridge", f"standard output: {error.strerror}")
        return 1
    except KeyboardInterrupt:
        return 130
    return code


def _run(words: list[str]) -> int:
    """Runs the command that the first word names."""
    if words[:1] == ["help"]:  # `shmbridge help inspect`
        words = [*words[1:2], "--help"]
    if not words or words[0] in ("-h", "--help"):
        print(help_text(shutil.get_terminal_size().columns))
        return 0
    name, *rest = words
    if name in ("-V", "--version"):
        print(f"shmbridge {__version__}")
        return 0
    if name not in COMMANDS:
        return _unknown(name)
    entry = COMMANDS[name]
    if not rest[:1] or rest[0].startswith("-"):  # behind a script stand words of its own
        entry = next((other for flag, other in entry.instead.items() if _is_flagged(flag, rest)), entry)
    try:
        return _run_program(name, entry, rest) if entry.options else _run_command(name, entry, rest)
    except BadBridgeName as error:
        refuse(f"shmbridge {name}", error)
        return 2
    except ShmBridgeError as error:
        refuse(f"shmbridge {name}", error)
        return 1
    except ModuleNotFoundError as missing:
        if not is_of(missing, *entry.extras):
            raise
        refuse_missing(f"shmbridge {name}", missing, *entry.extras)
        return 1


def _is_flagged(flag: str, words: list[str]) -> bool:
    return any(word.split("=")[0] == flag for word in words)


def _run_command(name: str, entry: Entry, words: list[str]) -> int:
    arguments = parser_of(name).parse_args(words)
    bridge = arguments.bridge if entry.on_a_bridge else None
    if bridge is not None and refuse_unknown_bridge(f"shmbridge {name}", bridge):
        return NO_BRIDGE
    return command_of(name).run(arguments)


def _run_program(name: str, entry: Entry, words: list[str]) -> int:
    """Runs a program of producers or consumers in this process, as `python -m` would; exits with its code.

    Wrong words are refused first: the program itself imports torch, which takes seconds.
    """
    call_as(f"shmbridge {name}")
    try:
        import_module(entry.options).parse(words)
        sys.argv = [f"shmbridge {name}", *words]
        if not sys.flags.safe_path:
            sys.path[0] = os.getcwd()
        runpy.run_module(entry.module, run_name="__main__", alter_sys=True)
    finally:
        call_as("")
    return 0


def _unknown(word: str) -> int:
    """Says which command was probably meant."""
    if word.startswith("-"):
        near = difflib.get_close_matches(word, ["--help", "--version"], n=1, cutoff=0.7)
        hint = f"did you mean {near[0]}?" if near else f"flags follow the command: shmbridge COMMAND {word}"
        refuse("shmbridge", f"no command before {word}", hint)
        return 2
    known = {each: each for each in COMMANDS} | {"help": "--help", "version": "--version"}
    near = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    hint = f"did you mean {known[near[0]]}?" if near else "shmbridge --help lists all"
    refuse("shmbridge", f"no command {word!r}", hint)
    return 2
