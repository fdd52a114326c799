"""All commands, in groups, each with its line of help; a command's module is imported when it is called."""

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Protocol

from shmbridge.parser import Parser


class Command(Protocol):
    """The interface of a command's module."""

    HELP: str
    EXAMPLES: str

    def prepare_parser(self, parser: Parser) -> None:
        """Adds the command's own arguments."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


@dataclass(frozen=True)
class Entry:
    """A command in the list.

    Attributes:
        help: a few words.
        program: of producers or consumers, run as `python -m` would; "" for a command of `cli`.
        options: the module that has this program's parser.
        extras: those of pyproject.toml that it needs.
        on_a_bridge: whether its BRIDGE has to exist.
        unneeded: packages that its libraries import where they are installed, and that it makes no use of.
        instead: programs that run in place of this one, by the flag that asks for them.
    """

    help: str
    program: str = ""
    options: str = ""
    extras: tuple[str, ...] = ()
    on_a_bridge: bool = False
    unneeded: tuple[str, ...] = ()
    instead: "Mapping[str, Entry]" = field(default_factory=dict)


GROUPS: dict[str, dict[str, Entry]] = {
    "start": {
        "demo": Entry("a small model learns, here and now", extras=("atropos", "learner")),
        "launch": Entry("a whole run from one YAML file", extras=("launch", "learner")),
        "train": Entry(
            "the GRPO learner",
            "shmbridge.consumers.grpo",
            "shmbridge.consumers.learner.config.flags",
            ("learner",),
        ),
        "serve": Entry(
            "an inference server that follows the learner",
            "shmbridge.consumers.policy_server",
            "shmbridge.consumers.policy_server",
            ("learner",),
        ),
        "env": Entry(
            "an environment of Atropos or verifiers, unedited",
            "shmbridge.producers.atropos",
            "shmbridge.producers.atropos.options",
            ("atropos",),
            instead={
                "--verifiers": Entry(
                    "an environment of verifiers, unedited",
                    "shmbridge.producers.verifiers",
                    "shmbridge.producers.verifiers.options",
                    ("verifiers",),
                )
            },
        ),
        "gateway": Entry("the Atropos HTTP API over a bridge", extras=("gateway",)),
        "relay": Entry("a bridge over more than one node", extras=("ray",)),
    },
    "watch": {
        "top": Entry("a bridge, live", extras=("tui", "ray"), on_a_bridge=True),
        "inspect": Entry("what each bridge does, and what is wrong with it", on_a_bridge=True),
        "tail": Entry("records as they come", on_a_bridge=True),
        "logs": Entry("what the processes of a launch have logged"),
        "report": Entry("finished runs of the learner, as a page", extras=("learner",)),
    },
    "keep": {
        "record": Entry("write a bridge's records into files", unneeded=("pandas",)),
        "replay": Entry("put recorded files into a bridge again"),
        "export": Entry("copy recorded files into one"),
    },
    "mend": {
        "doctor": Entry("check this host"),
        "clean": Entry("remove what dead processes left in memory"),
        "bench": Entry("measure this host"),
        "completion": Entry("print the completion of bash, zsh or fish"),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def module_of(name: str) -> Command:
    """Imports and returns the module of a command of `cli`."""
    command: Command = import_module(f"shmbridge.cli.{name}")
    return command


def parser_of(name: str) -> Parser:
    """Returns the parser of a command. Imports its module, and none of the packages of its extras."""
    entry = COMMANDS[name]
    if entry.options:
        parser: Parser = import_module(entry.options).parser(f"shmbridge {name}")
        return parser
    command = module_of(name)
    parser = Parser(f"shmbridge {name}", description=command.HELP, examples=command.EXAMPLES)
    if name != "completion":
        parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    command.prepare_parser(parser)
    return parser


def help_text(columns: int) -> str:
    """Returns the list of commands, for so many columns."""
    lines = ["usage: shmbridge COMMAND [FLAG ...]", ""]
    for group, entries in GROUPS.items():
        for at, (name, entry) in enumerate(entries.items()):
            head = f"{'' if at else group:<7} {name:<11}"
            lines += textwrap.wrap(
                entry.help, max(columns, 40), initial_indent=head, subsequent_indent=" " * 19
            )
    ends = ["shmbridge COMMAND --help: its flags, examples and exit codes; --version"]
    return "\n".join([*lines, "", *ends])
