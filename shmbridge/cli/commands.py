"""All commands, in groups, each with its line of help; a command's module is imported when it is called."""

import argparse
import textwrap
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path

from shmbridge.cli.base import Command, Parser, bridge_name, require


@dataclass(frozen=True)
class Entry:
    """A command in the list.

    Attributes:
        help: a few words.
        module: has its `Command` by the command's name in capitals; with `options`, a program of producers or
            consumers that is run as `python -m` would.
        options: the module that has this program's parser.
        extras: those of pyproject.toml that it needs.
        on_a_bridge: whether its BRIDGE has to exist.
        unneeded: packages that its libraries import where they are installed, and that it makes no use of.
        instead: programs that run in place of this one, by the flag that asks for them.
    """

    help: str
    module: str
    options: str = ""
    extras: tuple[str, ...] = ()
    on_a_bridge: bool = False
    unneeded: tuple[str, ...] = ()
    instead: "Mapping[str, Entry]" = field(default_factory=dict)


GROUPS: dict[str, dict[str, Entry]] = {
    "start": {
        "demo": Entry(
            "a small model learns, here and now", "shmbridge.launch.command", extras=("atropos", "learner")
        ),
        "launch": Entry(
            "a whole run from one YAML file", "shmbridge.launch.command", extras=("launch", "learner")
        ),
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
        "gateway": Entry("the Atropos HTTP API over a bridge", "shmbridge.cli.remote", extras=("gateway",)),
        "relay": Entry("a bridge over more than one node", "shmbridge.cli.remote", extras=("ray",)),
    },
    "watch": {
        "top": Entry("a bridge, live", "shmbridge.cli.watching", extras=("tui", "ray"), on_a_bridge=True),
        "inspect": Entry(
            "what each bridge does, and what is wrong with it", "shmbridge.cli.bridges", on_a_bridge=True
        ),
        "tail": Entry("records as they come", "shmbridge.cli.watching", on_a_bridge=True),
        "logs": Entry("what the processes of a launch have logged", "shmbridge.launch.command"),
        "report": Entry(
            "finished runs of the learner, as a page", "shmbridge.cli.report", extras=("learner",)
        ),
    },
    "keep": {
        "record": Entry(
            "write a bridge's records into files", "shmbridge.cli.recordings", unneeded=("pandas",)
        ),
        "replay": Entry("put recorded files into a bridge again", "shmbridge.cli.recordings"),
        "export": Entry("copy recorded files into one", "shmbridge.cli.recordings"),
    },
    "host": {
        "doctor": Entry("check this host", "shmbridge.cli.doctor"),
        "clean": Entry("remove what dead processes left in memory", "shmbridge.cli.bridges"),
        "bench": Entry("measure this host", "shmbridge.cli.bench"),
        "completion": Entry(
            "print the completion of bash, zsh or fish", "shmbridge.cli.commands", extras=("completion",)
        ),
    },
}
COMMANDS = {name: entry for group in GROUPS.values() for name, entry in group.items()}


def command_of(name: str) -> Command:
    """Imports and returns a command that is not a program of its own."""
    command: Command = getattr(import_module(COMMANDS[name].module), name.upper())
    return command


def parser_of(name: str) -> Parser:
    """Returns the parser of a command. Imports its module, and none of the packages of its extras."""
    entry = COMMANDS[name]
    if entry.options:
        parser: Parser = import_module(entry.options).parser(f"shmbridge {name}")
        return parser
    command = command_of(name)
    parser = Parser(f"shmbridge {name}", description=command.help, examples=command.examples)
    if name != "completion":
        parser.add_argument("--json", action="store_true", help="one JSON document on standard output")
    command.prepare(parser)
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


# At Tab the shell itself looks up the names of bridges, in /dev/shm.
_BRIDGES = """_shmbridge_bridges() {
  local -a names=($(for f in /dev/shm/shmbridge.*.*; do
    [ -e "$f" ] || continue; f=${f#/dev/shm/shmbridge.}; echo "${f%%.*}"; done | sort -u))
  %s
}"""
_PREAMBLES = {
    "bash": _BRIDGES % 'compgen -W "${names[*]}" -- "$1"',
    "zsh": _BRIDGES % "compadd -a names",
    "fish": """function __shmbridge_bridges
    for f in /dev/shm/shmbridge.*.*
        string replace -r '^/dev/shm/shmbridge\\.([^.]*)\\..*' '$1' $f
    end | sort -u
end""",
}
_OF_BRIDGES = {"bash": "_shmbridge_bridges", "zsh": "_shmbridge_bridges", "fish": "(__shmbridge_bridges)"}
_FILES = ("DIR", "FILE", "PATH", "SCRIPT", "RUN_DIR", "CONFIG", "DIR_OR_ID", "FILE.yaml", "...")


def _completion_arguments(parser: Parser) -> None:
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def _completion(arguments: argparse.Namespace) -> int:
    """Prints the script, which shtab makes of the parsers."""
    require("completion")
    import shtab

    whole = argparse.ArgumentParser("shmbridge", allow_abbrev=False)
    whole.add_argument("--version", action="store_true", help="print the version")
    commands = whole.add_subparsers()
    for name, entry in COMMANDS.items():
        parser = commands.add_parser(name, help=entry.help, parents=[parser_of(name)], add_help=False)
        for action in parser._actions:
            if action.type is bridge_name or action.dest == "bridge":
                action.complete = _OF_BRIDGES  # type: ignore[attr-defined]
            elif action.type is Path or action.metavar in _FILES:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    print(shtab.complete(whole, arguments.shell, preamble=_PREAMBLES[arguments.shell]))
    return 0


COMPLETION = Command(
    "print a script that completes commands, flags, files and names of bridges at Tab",
    """examples:
  source <(shmbridge completion bash)                                  in ~/.bashrc
  source <(shmbridge completion zsh)                                   in ~/.zshrc, after compinit
  shmbridge completion fish > ~/.config/fish/completions/shmbridge.fish

It needs shtab: pip install "shmbridge[completion]".

exit codes: 0 printed; 1 shtab is not installed; 2 wrong arguments""",
    _completion_arguments,
    _completion,
)
