"""Turns a mapping of the config into command-line flags, checked against the parser that will read them."""

from collections.abc import Collection, Mapping

from shmbridge.errors import BadConfig
from shmbridge.launch.config import Scalar, nearest
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
            wrong.append(
                nearest(path, name, [each.replace("-", "_") if "_" in name else each for each in known])
            )
        elif (actions[flag].nargs == 0) != isinstance(value, bool):
            wanted = "true or false" if actions[flag].nargs == 0 else "a value"
            wrong.append(f"{path}.{name}: it takes {wanted}, not {value}")
    if wrong:
        raise BadConfig("; ".join(wrong), hint=f"{parser.prog} --help lists its flags")


def check_values(path: str, argv: list[str], parser: Parser) -> None:
    """Raises BadConfig with the parser's own words if it refuses a value.

    Ignores flags that the parser does not know.
    """
    if wrong := parser.refusal(argv):
        what, _, hint = wrong.partition(" -> ")
        raise BadConfig(f"{path}: {what}", hint=hint or f"{parser.prog} --help lists its flags")
