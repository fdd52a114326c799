"""Turns a mapping of the config into command-line flags, checked against the parser that will read them."""

import re
from collections.abc import Collection, Mapping

from shmbridge.errors import BadConfig
from shmbridge.launch.config import Scalar
from shmbridge.parser import Parser

Scalars = Mapping[str, Scalar]


def flags(options: Scalars) -> list[str]:
    """Returns `{max_staleness: 4, resume: true}` as `--max-staleness 4 --resume`; omits a false switch."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            text = str(value)
            # A parser reads -1e-3 as a flag.
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def dotted_flags(options: Scalars) -> list[str]:
    """Returns `{env.group_size: 8, env.use_wandb: false}` in the form of an Atropos environment:
    `--env.group_size=8 --env.use_wandb=false`.
    """
    return [f"--{name}={word(value)}" for name, value in options.items()]


def word(value: Scalar) -> str:
    """Returns a value in the form of a command line."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_options(path: str, options: Scalars, parser: Parser, taken: Collection[str]) -> None:
    """Raises BadConfig for a name that the parser does not know, or one of `taken`, which have a key of their
    own.
    """
    actions = {
        flag.removeprefix("--"): action
        for flag, action in parser._option_string_actions.items()
        if flag.startswith("--")
    }
    known = sorted(actions.keys() - set(taken) - {"help"})
    wrong = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if flag in taken:
            wrong.append(f"{path}.{name} is set by a key of its own, outside options")
        elif flag not in known:
            wrong.append(_unknown(path, name, known, parser))
        elif (actions[flag].nargs == 0) != isinstance(value, bool):
            wanted = "true or false" if actions[flag].nargs == 0 else "a value"
            wrong.append(f"{path}.{name}: it takes {wanted}, not {value}")
    if wrong:
        raise BadConfig("; ".join(wrong), hint=f"{parser.prog} --help lists its flags")


def _unknown(path: str, name: str, known: list[str], parser: Parser) -> str:
    """Returns what is said about an option that the parser does not know."""
    meant = (parser.nearest(f"--{name}") or "").removeprefix("--")
    if meant not in known:
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
