"""The file of `shmbridge launch`: its keys as typed structs, its errors by path, its options as flags."""

import argparse
import difflib
import os
import re
import shlex
import shutil
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from shmbridge.cli.base import Parser, none_of
from shmbridge.config import (
    Written,
    check_bridge_name,
    format_size,
    listed,
    parse_size,
    plain,
    read_yaml,
    wrong_value,
)
from shmbridge.errors import BadConfig, ShmBridgeError, kind_of

Variables = dict[str, str]
Option = str | list[str] | dict[str, str]
Options = dict[str, Option]
_HANDED_ON = ("env", "args", "command", "again", "options", "lane_bytes", "log_bytes")
_SWITCH = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
_NO_ARGUMENT = re.compile("[\0\ud800-\udfff]")  # NUL ends an argument; half a surrogate pair is not UTF-8
MOST_PROCESSES = 1024  # as many lanes a consumer has at most
LEAST_LOG_BYTES = 64 << 10
Seconds = Annotated[float, Meta(ge=0, le=1e9)]  # a plan is JSON, which has no infinity; this is thirty years
Count = Annotated[int, Meta(ge=1, le=10**12)]
Port = Annotated[int, Meta(ge=0, le=65535)]  # 0: a free one is chosen
_ENV_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")
SECTIONS = ("policy_server", "vllm", "learner", "gateway", "trainer")


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


class PolicyServer(Struct, kw_only=True):
    """`shmbridge.consumers.policy_server`. `options` are its flags without their dashes."""

    model: str
    host: str = "127.0.0.1"
    port: Port = 9004
    ready_timeout: Seconds = 60.0
    stop_grace: Seconds = 10.0
    options: Options = {}
    env: Variables = {}


class Vllm(Struct, kw_only=True):
    """vLLM's own OpenAI server. `args` go to it as they are.

    `python`: the interpreter that has vLLM and shmbridge; the launcher's own if empty. `follow`: it loads
    each new version of the bridge's weights; `pause` says what happens to requests in flight during that.
    """

    model: str
    python: str = ""
    follow: bool = True
    pause: Literal["keep", "wait", "abort"] = "keep"
    host: str = "127.0.0.1"
    port: Port = 8001
    ready_timeout: Seconds = 600.0
    stop_grace: Seconds = 10.0
    args: list[str] = []
    env: Variables = {}


class Gateway(Struct, kw_only=True):
    """`shmbridge gateway`, the rollout server for trainers that poll one.

    Its address: given here, or `trainer.atropos.api_url`, or 127.0.0.1:8000.
    """

    host: str = ""
    port: Port | None = None
    compat: Literal["default", "strict"] = "default"
    token: str = ""
    ready_timeout: Seconds = 30.0
    stop_grace: Seconds = 10.0
    options: Options = {}
    env: Variables = {}


class Restart(Struct, kw_only=True):
    """When a dead process starts again: after `first_delay` seconds, twice as long each time, `max_delay`
    at most.

    After `reset_after` seconds of running the delays start over. More than `max_restarts` within `window`
    seconds end the launch.
    """

    when: Literal["failure", "always", "never"] = "failure"
    first_delay: Seconds = 0.5
    max_delay: Seconds = 30.0
    reset_after: Seconds = 60.0
    max_restarts: Annotated[int, Meta(ge=0, le=10**12)] = 10
    window: Seconds = 600.0


class Learner(Struct, kw_only=True):
    """`shmbridge.consumers.grpo`.

    `options` are its flags without their dashes; it gets time to save a checkpoint when it is stopped.
    `restart`: when it was killed; one that ends by itself with an error would end so again.
    """

    model: str
    steps: Count
    ready_timeout: Seconds = 120.0
    stop_grace: Seconds = 60.0
    options: Options = {}
    env: Variables = {}
    restart: Restart = msgspec.field(default_factory=Restart)


class Environment(Struct, kw_only=True):
    """`count` processes of an Atropos environment's script.

    `args`: its flags, as a mapping without dashes or as a list of words.

    `settle`: seconds it must stay alive to count as started.
    """

    script: str
    name: str = ""
    count: Annotated[int, Meta(ge=1, le=MOST_PROCESSES)] = 1
    args: Variables | list[str] = {}
    lane_bytes: str = "64M"
    on_full: Literal["block", "raise", "drop"] = "block"
    cwd: str = ""
    env: Variables = {}
    settle: Seconds = 2.0
    stop_grace: Seconds = 10.0
    restart: Restart = msgspec.field(default_factory=Restart)


class Atropos(Struct, kw_only=True):
    """The recipe's keys: times in seconds; `retry_delay` is the first delay, `max_wait_time` the sum for a
    batch.

    If none of the four wait limits is given, the learner waits without limit: a group's rollouts
    may take longer than the 30 s that the recipe waits by default.
    """

    api_url: str = ""
    timeout: Annotated[float, Meta(gt=0)] | None = None
    use_advantages: bool = True
    fallback_to_grpo: bool = True
    retry_attempts: Count | None = None
    retry_delay: Seconds | None = None
    max_wait_time: Annotated[float, Meta(gt=0)] | None = None


class Trainer(Struct, kw_only=True):
    """`command`: another trainer's program, which is the hub of the bridge, as words or as text for a shell.

    `python`: the interpreter that the words go to; without it the first one is the program. `again`: words
    that follow from its second start on. Without a command this is the recipe's section, of which `atropos`
    is used.
    """

    command: list[str] | str | None = None
    again: list[str] | str = []
    python: str = ""
    cwd: str = ""
    env: Variables = {}
    ready_timeout: Seconds = 600.0
    stop_grace: Seconds = 60.0
    restart: Restart = msgspec.field(default_factory=Restart)
    atropos: Atropos | None = None


class Config(Struct, kw_only=True):
    """A whole run: at most one inference server, exactly one hub, any number of environments."""

    bridge: str
    run_dir: str = ""
    log_bytes: str = "64M"
    policy_server: PolicyServer | None = None
    vllm: Vllm | None = None
    learner: Learner | None = None
    gateway: Gateway | None = None
    environments: list[Environment] = []
    trainer: Trainer = msgspec.field(default_factory=Trainer)


def load(path: Path) -> Config:
    """Returns the config of a YAML file.

    Raises:
        BadConfig: the file cannot be read, or a value in it is wrong; the message names the path of each
            wrong key.
        ImportError: PyYAML is not installed.
    """
    try:
        document = read_yaml(path.read_text(encoding="utf-8"), forbidden=_NO_ARGUMENT)
    except ImportError as missing:
        raise ImportError("PyYAML is not installed -> pip install 'shmbridge[launch]'") from missing
    except OSError as error:
        raise BadConfig(
            f"{path}: {error.strerror}",
            hint="give the path of a YAML file, such as the one in docs/how-to/launch.md",
        ) from error
    except UnicodeDecodeError as error:
        raise BadConfig(f"{path} is not text in UTF-8", hint="give the path of a YAML file") from error
    except ValueError as error:
        hint = "indent with spaces" if "\\t" in str(error) else "correct that line"
        raise BadConfig(f"{path}: {error}", hint=hint) from error
    return parse(document)


def parse(document: object) -> Config:
    """Returns the config of what `read_yaml` has read; raises BadConfig."""
    if not isinstance(document, Mapping):
        raise BadConfig(
            f"the file holds {_kind(plain(document))} and no keys",
            hint="it needs at least bridge: and a hub, such as learner:",
        )
    if unknown := [*_unknown_keys(document, Config, "")]:
        raise BadConfig(listed(unknown), hint="correct the names: unknown keys are never skipped")
    wrong: list[str] = []
    values = handed_on(document, "", wrong)
    if wrong:
        raise BadConfig(listed(wrong), hint="docs/reference/launch-file.md has each key")
    try:
        config = msgspec.convert(plain(values), Config)
    except msgspec.ValidationError as error:
        raise _wrong_value(str(error), document) from error
    _check(config)
    return config


def nearest(path: str, name: str, known: list[str]) -> str:
    """Returns a hint for an unknown name: `path.name: did you mean this?`, or all known names."""
    close = difflib.get_close_matches(name, known, n=1)
    where = f"{path}.{name}" if path else name
    return (
        f"{where}: did you mean {close[0]}?"
        if close
        else f"{where} is not known; known are {', '.join(sorted(known))}"
    )


def _unknown_keys(value: object, annotation: Any, path: str) -> Iterator[str]:
    """Yields one line per key, at any depth, that its struct does not have."""
    for part in get_args(annotation) if isinstance(annotation, UnionType) else [annotation]:
        if isinstance(value, list) and get_origin(part) is list:
            for index, each in enumerate(value):
                yield from _unknown_keys(each, get_args(part)[0], f"{path}[{index}]")
        elif isinstance(value, Mapping) and isinstance(part, type) and issubclass(part, Struct):
            fields = {field.encode_name: field.type for field in msgspec.structs.fields(part)}
            for key, inner in value.items():
                if key in fields:
                    yield from _unknown_keys(inner, fields[key], f"{path}.{key}" if path else key)
                else:
                    yield nearest(path, str(key), list(fields))


def _wrong_value(message: str, document: object) -> BadConfig:
    """Returns the error for msgspec's message, with values as the file has them."""
    if choice := re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(.*)`", message):
        what, _, hint = none_of(choice[1], get_args(_annotation_at(choice[2]))).partition(" -> ")
        return BadConfig(f"{choice[2]}: {what}", hint=hint or "choose one of these")
    what = wrong_value(message, document)
    if what.endswith(" is missing"):
        return BadConfig(what, hint="add that key")
    hint = (
        "write it in quotes"
        if what.endswith(" is not text")
        else "docs/reference/launch-file.md has each key"
    )
    return BadConfig(what, hint=hint)


def _annotation_at(path: str) -> Any:
    """Returns the type of the key at a path such as `environments[0].on_full`."""
    kind: Any = Config
    for name in re.sub(r"\[\d+\]", "", path).split("."):
        parts = [kind, *(get_args(kind) if isinstance(kind, UnionType) or get_origin(kind) is list else ())]
        struct = next((part for part in parts if isinstance(part, type) and issubclass(part, Struct)), None)
        if struct is not None:
            kind = {field.encode_name: field.type for field in msgspec.structs.fields(struct)}[name]
    return kind


def _kind(value: object) -> str:
    return "nothing" if value is None else kind_of(value)


# --- checks beyond types ----------------------------------------------------------------------------------


def _check(config: Config) -> None:
    try:
        check_bridge_name(config.bridge)
    except ShmBridgeError as error:
        raise BadConfig(f"bridge: {error.message}", hint=error.hint) from error
    if config.policy_server and config.vllm:
        raise BadConfig(
            "policy_server and vllm are both given", hint="keep the one that environments are to ask"
        )
    hubs = [
        name
        for name, given in (
            ("learner", config.learner),
            ("gateway", config.gateway),
            ("trainer.command", config.trainer.command is not None),
        )
        if given
    ]
    if len(hubs) != 1:
        how = f"{' and '.join(hubs)} are given" if hubs else "no learner, gateway or trainer.command is given"
        raise BadConfig(f"a bridge has one hub, and {how}", hint="give exactly one of them")
    _check_trainer(config.trainer)
    sections = {name: getattr(config, name) for name in SECTIONS}
    sections |= {f"environments[{index}]": each for index, each in enumerate(config.environments)}
    for path, section in sections.items():
        for name in section.env if section else ():
            if not name or "=" in name:
                raise BadConfig(f"{path}.env: {name!r} cannot name a variable", hint="write NAME: value")
    if config.vllm:
        _check_vllm(config.vllm)
    _check_size("log_bytes", config.log_bytes, LEAST_LOG_BYTES)
    _check_run_dir(Path(config.run_dir or f"runs/{config.bridge}"))
    if (processes := sum(environment.count for environment in config.environments)) > MOST_PROCESSES:
        raise BadConfig(
            f"environments: they are {processes:,} processes", hint=f"give {MOST_PROCESSES:,} at most"
        )
    names: set[str] = {*SECTIONS, "launch"}
    for index, environment in enumerate(config.environments):
        _check_environment(environment, f"environments[{index}]", names)


def _check_vllm(vllm: Vllm) -> None:
    if vllm.python and not os.path.isfile(vllm.python):
        raise BadConfig(
            f"vllm.python: there is no file {vllm.python}", hint="paths count from where the command runs"
        )
    for each in vllm.args if vllm.follow else ():
        if (flag := str(each).partition("=")[0].replace("_", "-")) in (
            "--weight-transfer-config",
            "--additional-config",
        ):
            raise BadConfig(
                f"vllm.args: {flag} is set by vllm.follow",
                hint="leave it out, or say follow: false and give it all",
            )


def _check_trainer(trainer: Trainer) -> None:
    if trainer.command is None:
        for name in ("again", "python", "cwd", "env"):
            if getattr(trainer, name):
                raise BadConfig(f"trainer.{name} is given without trainer.command", hint="give the command")
        return
    if trainer.atropos is not None:
        raise BadConfig(
            "trainer.atropos is given beside trainer.command",
            hint="give these keys to the trainer: in its own configuration, or as words of the command",
        )
    if trainer.python and not os.path.isfile(trainer.python):
        raise BadConfig(
            f"trainer.python: there is no file {trainer.python}",
            hint="paths count from where the command runs",
        )
    _check_folder("trainer.cwd", trainer.cwd)
    words = as_words("trainer.command", trainer.command)
    as_words("trainer.again", trainer.again)
    if not words:
        raise BadConfig("trainer.command has no words", hint="write the words that start the trainer")
    if not trainer.python and shutil.which(words[0], path=trainer.env.get("PATH")) is None:
        raise BadConfig(
            f"trainer.command: there is no program {words[0]}",
            hint="give its path, counted from where the command runs; or trainer.python, an interpreter, "
            "and words such as -m verl.trainer.main_ppo",
        )


def as_words(path: str, command: list[str] | str) -> list[str]:
    """Returns the words of a command; a text is split as a shell does. Raises BadConfig: an open quote."""
    try:
        return shlex.split(command) if isinstance(command, str) else command
    except ValueError as error:
        raise BadConfig(f"{path}: {error}", hint="close the quote, or write a list of words") from error


def _check_folder(path: str, folder: str) -> None:
    if folder and not os.path.isdir(folder):
        raise BadConfig(
            f"{path}: there is no folder {folder}", hint="paths count from where the command runs"
        )


def _check_environment(environment: Environment, path: str, names: set[str]) -> None:
    environment.name = environment.name or Path(environment.script).stem
    if not _ENV_NAME.fullmatch(environment.name):
        raise BadConfig(
            f"{path}.name: {environment.name!r} is not 1 to 64 of A-Z a-z 0-9 _ . -",
            hint="it names the log file",
        )
    for name in instances(environment):
        if name in names:
            raise BadConfig(
                f"{path}.name: {name} is taken", hint="give each environment a name of its own, or use count:"
            )
        names.add(name)
    if not os.path.isfile(environment.script):
        raise BadConfig(
            f"{path}.script: there is no file {environment.script}",
            hint="paths count from where the command runs",
        )
    _check_folder(f"{path}.cwd", environment.cwd)
    _check_size(f"{path}.lane_bytes", environment.lane_bytes, 1)


def _check_size(path: str, given: str, least: int) -> None:
    try:
        if (size := parse_size(given)) < least or size >= 1 << 62:
            raise ValueError(f"{given} is {f'below {format_size(least)}' if size < least else 'too much'}")
    except (ValueError, OverflowError) as error:
        raise BadConfig(f"{path}: {error}", hint=f"{path.rpartition('.')[2]}: 64M") from error


def _check_run_dir(run_dir: Path) -> None:
    """Raises BadConfig if the folder cannot be made: the path is too long, has a file in it, or is not
    writable.
    """
    try:
        run_dir.lstat()
    except (FileNotFoundError, NotADirectoryError):
        pass
    except OSError as error:
        raise BadConfig(f"run_dir: {error.strerror}", hint="set another run_dir") from error
    there = next(each for each in (run_dir, *run_dir.absolute().parents) if os.path.lexists(each))
    if not os.path.isdir(there):
        raise BadConfig(f"run_dir: {there} is not a folder", hint="set another run_dir")
    if not os.access(there, os.W_OK | os.X_OK):
        raise BadConfig(f"run_dir: {there} is not writable", hint="set one that this user can write to")


def instances(environment: Environment) -> list[str]:
    """Returns the names of its processes: its own, or with `-0`, `-1`, ... if there are several."""
    if environment.count == 1:
        return [environment.name]
    return [f"{environment.name}-{index}" for index in range(environment.count)]
