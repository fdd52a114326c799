"""What a launch file hands on to programs: texts as they stand there, as flags that the programs' own parsers
have checked.
"""

import argparse
import re
from collections.abc import Collection, Mapping
from typing import Any

from shmbridge.cli.base import Parser
from shmbridge.errors import BadConfig
from shmbridge.shown import kind_of
from shmbridge.wrong_value import Written, listed, plain

Variables = dict[str, str]
Option = str | list[str] | dict[str, str]
Options = dict[str, Option]
_HANDED_ON = ("env", "args", "command", "again", "options", "lane_bytes", "log_bytes")
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def handed_on(value: object, path: str, wrong: list[str]) -> Any:
    """Returns what `read_yaml` has read, with the file's own text for all that is handed on to programs.

    Only a program knows whether 12.10 is a number. Options that are null are left out. Adds a line to
    `wrong`, by its path, for what is not a text. What has several aliases is made once.
    """
    return _handed_on(value, path, wrong, {})


def _handed_on(value: object, path: str, wrong: list[str], made: dict[int, Any]) -> Any:
    if not isinstance(value, (list, Mapping)):
        return value
    if id(value) not in made:
        made[id(value)] = (
            [_handed_on(each, f"{path}[{index}]", wrong, made) for index, each in enumerate(value)]
            if isinstance(value, list)
            else _mapping(value, path, wrong, made)
        )
    return made[id(value)]


def _mapping(value: Mapping[str, Any], path: str, wrong: list[str], made: dict[int, Any]) -> dict[str, Any]:
    found = {}
    for key, inner in value.items():
        where = f"{path}.{key}" if path else str(key)
        if key not in _HANDED_ON:
            found[key] = _handed_on(inner, where, wrong, made)
        elif key == "options" and isinstance(inner, Mapping):
            given = {name: each for name, each in inner.items() if plain(each) is not None}
            found[key] = {name: _texts(each, f"{where}.{name}", wrong) for name, each in given.items()}
        else:
            found[key] = _texts(inner, where, wrong)
    return found


def _texts(value: Any, path: str, wrong: list[str]) -> Any:
    """Returns a text, or the texts of a list or mapping."""
    if isinstance(value, Mapping):
        return {name: _text(each, f"{path}.{name}", wrong) for name, each in value.items()}
    if isinstance(value, list):
        return [_text(each, f"{path}[{index}]", wrong) for index, each in enumerate(value)]
    return _text(value, path, wrong)


def _text(value: Any, path: str, wrong: list[str]) -> str:
    if plain(value) is None:
        wrong.append(f"{path} has no value: write '' for an empty text")
    elif not isinstance(value, (str, Written)):
        wrong.append(f"{path} is {kind_of(value)}, and not a text or number")
    return value.text if isinstance(value, Written) else value if isinstance(value, str) else ""


def flags(values: Mapping[str, object]) -> list[str]:
    """Returns `{max_staleness: 4, run-dir: runs/a}` as `--max-staleness 4 --run-dir runs/a`."""
    return [word for name, value in values.items() for word in _flag(name, str(value))]


def dotted_flags(options: Variables) -> list[str]:
    """Returns `{env.group_size: 8, env.use_wandb: false}` in the form of an Atropos environment:
    `--env.group_size=8 --env.use_wandb=false`.
    """
    return [f"--{name}={value}" for name, value in options.items()]


def option_flags(path: str, options: Options, parser: Parser, taken: Collection[str]) -> list[str]:
    """Returns options as flags of a parser: a switch that is turned off as its opposite, a list or mapping as
    the values of one flag, or as the flag once for each.

    Raises BadConfig for a name that the parser does not know, or one of `taken`, which have a key of their
    own, and for a value of another shape than the flag's.
    """
    actions = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--")
    }
    words: list[str] = []
    wrong: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if flag in taken:
            wrong.append(f"{path}.{name} is set by a key of its own, outside options")
        elif flag not in actions or flag == "help":
            wrong.append(_unknown(path, name, actions.keys() - set(taken), parser))
        else:
            try:
                words += _words(flag, value, actions)
            except ValueError as error:
                wrong.append(f"{path}.{name}: {error}")
    if wrong:
        raise BadConfig(listed(wrong), hint=f"{parser.prog} --help lists its flags")
    return words


def _words(flag: str, value: Option, actions: Mapping[str, argparse.Action]) -> list[str]:
    """Returns a flag with its value; raises ValueError for a value of another shape."""
    action = actions[flag]
    shown = value if isinstance(value, str) else f"a {type(value).__name__} of {len(value)}"
    if action.nargs == 0:
        if not isinstance(value, str) or (is_on := _SWITCH.get(value.lower())) is None:
            raise ValueError(f"it takes true or false, not {shown}")
        opposite = flag.removeprefix("no-") if flag.startswith("no-") else f"no-{flag}"
        return [f"--{flag}"] if is_on else [f"--{opposite}"] if opposite in actions else []
    if isinstance(action.nargs, int):
        several = re.split(r"[\s,]+", value.strip()) if isinstance(value, str) else list(value)
        if len(several) != action.nargs or isinstance(value, dict):
            raise ValueError(f"it takes a list of {action.nargs} values, not {shown}")
        return [f"--{flag}", *several]
    if isinstance(value, str):
        return _flag(flag, value)
    if isinstance(value, dict) and "=" in str(action.metavar):
        value = [f"{key}={each}" for key, each in value.items()]
    if isinstance(value, list) and isinstance(action, argparse._AppendAction):
        return [word for each in value for word in _flag(flag, each)]
    if isinstance(value, list) and "," in str(action.metavar):
        return _flag(flag, ",".join(value))
    raise ValueError(f"it takes one value, not {shown}")


def _flag(name: str, value: str) -> list[str]:
    """Returns a flag and its value; joined where a parser would read the value as a flag, such as -1e-3."""
    flag = f"--{name.replace('_', '-')}"
    return [f"{flag}={value}"] if value.startswith("-") else [flag, value]


def _unknown(path: str, name: str, known: Collection[str], parser: Parser) -> str:
    """Returns what is said about an option that the parser does not know."""
    meant = (parser.nearest(f"--{name}") or "").removeprefix("--")
    if meant not in known or meant == "help":
        return f"{path}.{name} is not known"
    return f"{path}.{name}: did you mean {meant if '-' in name else meant.replace('-', '_')}?"


def check_values(path: str, argv: list[str], parser: Parser) -> None:
    """Raises BadConfig with the parser's own words if it refuses a value.

    Ignores flags that the parser does not know.
    """
    if wrong := parser.refusal(argv):
        what, _, hint = wrong.partition(" -> ")
        if flag := re.match(r"--([a-z-]+): ", what):
            path, what = f"{path}.{flag[1].replace('-', '_')}", what.removeprefix(flag[0])
        raise BadConfig(f"{path}: {what}", hint=hint or f"{parser.prog} --help lists its flags")
