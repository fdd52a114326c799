"""`shmbridge completion`: completion of commands, flags, choices, files and bridges for a shell.

The script is made of the parsers; only the names of bridges are looked up at Tab, by the shell, in /dev/shm.
"""

import argparse
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmbridge.cli.commands import COMMANDS, parser_of
from shmbridge.parser import Parser, bridge_name

HELP = "print a script that completes commands, flags, files and names of bridges at Tab"
EXAMPLES = """examples:
  source <(shmbridge completion bash)                                  in ~/.bashrc
  source <(shmbridge completion zsh)                                   in ~/.zshrc, after compinit
  shmbridge completion fish > ~/.config/fish/completions/shmbridge.fish

exit codes: 0 printed; 2 wrong arguments"""
BRIDGE, FILE, NOTHING = "bridge", "file", "nothing"
_FILES = ("DIR", "FILE", "PATH", "SCRIPT", "RUN_DIR", "CONFIG", "DIR_OR_ID", "FILE.yaml", "...")


@dataclass(frozen=True)
class Flag:
    """A flag: its spellings, its line of help, and what its value is: BRIDGE, FILE, NOTHING, choices; None if
    it has none.
    """

    names: tuple[str, ...]
    help: str
    value: str | tuple[str, ...] | None


@dataclass(frozen=True)
class Words:
    """What can follow a command: its flags, and what its arguments are."""

    flags: tuple[Flag, ...]
    arguments: str | tuple[str, ...]


def prepare_parser(parser: Parser) -> None:
    """Adds the arguments of `completion`."""
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), metavar="SHELL", help="bash, zsh or fish")


def run(arguments: argparse.Namespace) -> int:
    """Prints the script."""
    found = {name: words_of(parser_of(name)) for name in COMMANDS}
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[arguments.shell](found), end="")
    return 0


def words_of(parser: Parser) -> Words:
    """Returns what a parser takes, without what its help does not show."""
    shown = [each for each in parser._actions if each.help != argparse.SUPPRESS]
    flags = tuple(
        Flag(tuple(each.option_strings), parser.help_of(each), _value(each))
        for each in shown
        if each.option_strings
    )
    places = [_value(each) for each in shown if not each.option_strings]
    return Words(flags, next((each for each in places if each), NOTHING))


def _value(action: argparse.Action) -> Any:
    if action.nargs == 0:
        return None
    if action.choices is not None:
        return tuple(map(str, action.choices))
    if action.type is bridge_name or action.dest == "bridge":
        return BRIDGE
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    return FILE if action.type is Path or metavar in _FILES else NOTHING


_BRIDGES = """for f in /dev/shm/shmbridge.*.*; do
      [ -e "$f" ] || continue; f=${f#/dev/shm/shmbridge.}; echo "${f%%.*}"
    done | sort -u"""


def _bash(commands: dict[str, Words]) -> str:
    """One function; a `case` per command for its words, one per flag with a value."""
    values, words = [], []
    for name, each in commands.items():
        flags = " ".join(flag for one in each.flags for flag in one.names)
        for one in each.flags:
            if one.value is not None:
                values.append(
                    f"    {'|'.join(f'{name}:{flag}' for flag in one.names)}) {_reply(one.value)};;"
                )
        words.append(
            f'    {name}) if [[ $cur == -* ]]; then COMPREPLY=($(compgen -W "{flags}" -- "$cur"));'
            f" else {_reply(each.arguments)}; fi;;"
        )
    newline = "\n"
    return f"""# bash completion of shmbridge
_shmbridge_bridges() {{
    {_BRIDGES}
}}
_shmbridge() {{
  local cur=${{COMP_WORDS[COMP_CWORD]}} prev=${{COMP_WORDS[COMP_CWORD-1]}} command=${{COMP_WORDS[1]}}
  COMPREPLY=()
  if [ "$COMP_CWORD" = 1 ]; then
    COMPREPLY=($(compgen -W "{" ".join(commands)} --help --version" -- "$cur")); return
  fi
  case "$command:$prev" in
{newline.join(values)}
  *)
    case "$command" in
{newline.join(words)}
    esac;;
  esac
}}
complete -F _shmbridge shmbridge
"""


def _reply(value: str | tuple[str, ...]) -> str:
    """Bash for what completes a value."""
    if value == BRIDGE:
        return 'COMPREPLY=($(compgen -W "$(_shmbridge_bridges)" -- "$cur"))'
    if value == FILE:
        return 'compopt -o filenames; COMPREPLY=($(compgen -f -- "$cur"))'
    if isinstance(value, tuple):
        return f'COMPREPLY=($(compgen -W "{" ".join(value)}" -- "$cur"))'
    return ":"


def _zsh(commands: dict[str, Words]) -> str:
    """`_arguments` for each command."""
    lines = ["#compdef shmbridge", "_shmbridge_bridges() {", "  local -a there"]
    lines += [f'  there=(${{(f)"$({_BRIDGES})"}})'.replace("\n    ", "\n  "), "  compadd -a there", "}"]
    lines += ["_shmbridge() {", "  if (( CURRENT == 2 )); then", "    local -a commands=("]
    lines += [f"      {shlex.quote(f'{name}:{entry.help}')}" for name, entry in COMMANDS.items()]
    lines += ["    )", "    _describe command commands; return", "  fi"]
    lines += ["  local command=$words[2]", "  shift words; (( CURRENT-- ))", "  case $command in"]
    for name, each in commands.items():
        lines += [f"  {name}) _arguments -s \\"]
        for one in each.flags:
            text = _zsh_text(one.help)
            value = "" if one.value is None else f":value:{_zsh_action(one.value)}"
            lines += [f"    {shlex.quote(f'{flag}[{text}]{value}')} \\" for flag in one.names]
        lines += [f"    {shlex.quote(f'*:argument:{_zsh_action(each.arguments)}')};;"]
    lines += ["  esac", "}", "compdef _shmbridge shmbridge"]
    return "\n".join(lines) + "\n"


def _zsh_text(text: str) -> str:
    return text.replace("[", "(").replace("]", ")").replace(":", "\\:")


def _zsh_action(value: str | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"({' '.join(value)})"
    return {BRIDGE: "_shmbridge_bridges", FILE: "_files"}.get(value, " ")


def _fish(commands: dict[str, Words]) -> str:
    """A `complete` per flag."""
    lines = ["# fish completion of shmbridge", "function __shmbridge_bridges"]
    lines += ["    for f in /dev/shm/shmbridge.*.*"]
    lines += ["        string replace -r '^/dev/shm/shmbridge\\.([^.]*)\\..*' '$1' $f"]
    lines += ["    end | sort -u", "end", "complete -c shmbridge -f"]
    for name, entry in COMMANDS.items():
        lines += [f"complete -c shmbridge -n __fish_use_subcommand -a {name} -d {_quoted(entry.help)}"]
    for name, each in commands.items():
        begin = f"complete -c shmbridge -n '__fish_seen_subcommand_from {name}'"
        for one in each.flags:
            spelt = " ".join(f"-l {flag[2:]}" if flag[:2] == "--" else f"-s {flag[1:]}" for flag in one.names)
            lines += [f"{begin} {spelt} -d {_quoted(one.help)}{_fish_value(one.value)}"]
        if each.arguments != NOTHING:
            lines += [f"{begin}{_fish_value(each.arguments).replace(' -x', '').replace(' -r', '')}"]
    return "\n".join(lines) + "\n"


def _fish_value(value: str | tuple[str, ...] | None) -> str:
    if isinstance(value, tuple):
        return f" -x -a '{' '.join(value)}'"
    return {None: "", BRIDGE: " -x -a '(__shmbridge_bridges)'", FILE: " -r -F"}.get(value, " -x")


def _quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"
