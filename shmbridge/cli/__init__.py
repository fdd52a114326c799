"""The `shmbridge` command: one file per subcommand, each with `prepare_parser` and `run`."""

import argparse
from typing import Protocol

from shmbridge import __version__
from shmbridge.cli import (
    bench,
    clean,
    doctor,
    export,
    gateway,
    inspect,
    launch,
    logs,
    record,
    replay,
    report,
    tail,
    top,
)
from shmbridge.errors import ShmBridgeError
from shmbridge.program import add_debug_flag, refuse


class Command(Protocol):
    """The interface of a subcommand's module."""

    HELP: str
    EXAMPLES: str

    def prepare_parser(self, parser: argparse.ArgumentParser) -> None:
        """Adds the subcommand's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the subcommand; returns the exit code."""


_COMMANDS: dict[str, Command] = {
    "bench": bench,
    "clean": clean,
    "doctor": doctor,
    "export": export,
    "gateway": gateway,
    "inspect": inspect,
    "launch": launch,
    "logs": logs,
    "record": record,
    "replay": replay,
    "report": report,
    "tail": tail,
    "top": top,
}


_EXTRAS = {"gateway": "gateway", "launch": "launch", "report": "learner"}  # what each needs beyond the core


def main(argv: list[str] | None = None) -> int:
    """Entry point of the `shmbridge` command; returns the exit code: 2 for a usage error, 1 for an error of
    shmbridge.
    """
    parser = argparse.ArgumentParser(
        prog="shmbridge", description="Run, look at, clean up after and measure bridges in shared memory."
    )
    parser.add_argument("--version", action="version", version=f"shmbridge {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in _COMMANDS.items():
        sub = commands.add_parser(
            name,
            help=command.HELP,
            description=command.HELP,
            epilog=command.EXAMPLES,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.add_argument("--json", action="store_true", help="one JSON document on standard output")
        add_debug_flag(sub)
        command.prepare_parser(sub)
    arguments = parser.parse_args(argv)
    try:
        return _COMMANDS[arguments.command].run(arguments)
    except ShmBridgeError as error:
        refuse(f"shmbridge {arguments.command}", error)
        return 1
    except ModuleNotFoundError as missing:
        if not (missing.name and (extra := _EXTRAS.get(arguments.command))):
            raise
        refuse(f"shmbridge {arguments.command}", missing, f"pip install 'shmbridge[{extra}]'")
        return 1
    except KeyboardInterrupt:
        return 130
