"""A mapping of the config as command-line flags, checked against the parser that will read them.

Knows no program.
"""

import argparse
import contextlib
import io
import re
from collections.abc import Collection, Mapping

from shmbridge.errors import BadConfig
from shmbridge.launch.config import Scalar, nearest


def flags(options: Mapping[str, Scalar]) -> list[str]:
    """`{max_staleness: 4, resume: true}` as `--max-staleness 4 --resume`; a false switch is left out."""
    words: list[str] = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words += [flag] if value else []
        else:
            text = str(value)
            # a parser takes -1e-3 for a flag
            words += [f"{flag}={text}"] if text.startswith("-") else [flag, text]
    return words


def dotted_flags(options: Mapping[str, Scalar]) -> list[str]:
    """`{env.group_size: 8, env.use_wandb: false}` as an Atropos environment takes them:
    `--env.group_size=8 --env.use_wandb=false`.
    """
    return [f"--{name}={word(value)}" for name, value in options.items()]


def word(value: Scalar) -> str:
    """A value as a command line has it."""
    return str(value).lower() if isinstance(value, bool) else str(value)


def check_options(
    path: str, options: Mapping[str, Scalar], parser: argparse.ArgumentParser, taken: Collection[str]
) -> None:
    """Raises BadConfig if the parser does not know a name, or if it is one of `taken`, which have a key of
    their own.
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
            wrong.append(
                nearest(path, name, [each.replace("-", "_") if "_" in name else each for each in known])
            )
        elif (actions[flag].nargs == 0) != isinstance(value, bool):
            wanted = "true or false" if actions[flag].nargs == 0 else "a value"
            wrong.append(f"{path}.{name}: it takes {wanted}, not {value}")
    if wrong:
        raise BadConfig("; ".join(wrong), hint=f"{parser.prog} --help lists its flags")


def check_values(path: str, argv: list[str], parser: argparse.ArgumentParser) -> None:
    """Raises BadConfig with the parser's own words if it refuses a value.

    Flags it does not know are for others to judge.
    """
    said = io.StringIO()
    try:
        with contextlib.redirect_stderr(said):
            parser.parse_known_args(argv)
    except SystemExit as refused:
        last = said.getvalue().strip().splitlines()[-1:]
        reason = re.sub(r"^.*?: error: ", "", "".join(last))
        raise BadConfig(f"{path}: {reason}", hint=f"{parser.prog} --help lists its flags") from refused
