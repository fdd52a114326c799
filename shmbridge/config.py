"""User settings and how they are written: sizes, names, the announcement of a training run, YAML files.

No I/O. PyYAML is imported on first use.
"""

import contextlib
import difflib
import json
import math
import operator
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import msgspec

from shmbridge.errors import BadArgument, BadBridgeName, kind_of, shown

_NAME = re.compile(r"[A-Za-z0-9_-]{1,48}")
_RUN_ID = re.compile(r"[0-9a-f]{16}")
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)i?b?\s*", re.IGNORECASE)
_DURATION = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*(ms|s|min|)\s*")
_SECONDS = {"ms": 0.001, "s": 1.0, "": 1.0, "min": 60.0}
_LONGEST_ID = 63
_LAST_PORT = 65535
_ARTICLE: dict[type, str] = {int: "a whole number", str: "text"}
_LARGEST_LANE = 1 << 50
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


class Run(msgspec.Struct, frozen=True):
    """A training run as its learner announces it; environments steer by it (Atropos' `/register`).

    `batch_size` counts trajectories, `max_token_len` tokens of one trajectory (0 or less: no limit),
    `num_steps` optimizer steps; `save_checkpoint_interval` is in steps, -1 never.
    `starting_step` is the number of the first step. `checkpoint_dir`, `wandb_group` and `wandb_project` are
    handed on to environments.
    """

    batch_size: int = 64
    max_token_len: int = 2048
    num_steps: int = 100
    starting_step: int = 0
    checkpoint_dir: str = ""
    save_checkpoint_interval: int = -1
    wandb_group: str = ""
    wandb_project: str = ""


def check_bridge_name(bridge: str) -> str:
    """Returns the name, or raises BadBridgeName."""
    if not isinstance(bridge, str) or not _NAME.fullmatch(bridge):
        raise BadBridgeName(
            f"bridge name {shown(bridge)} is not 1 to 48 of A-Z a-z 0-9 _ -",
            hint='choose a name such as "run1"',
        )
    return bridge


def check_producer_id(given: str | None) -> str:
    """Returns the given producer id, "" for none. Raises BadArgument for one that would be cut or altered."""
    if given is None:
        return ""
    if not isinstance(given, str):
        raise BadArgument(
            f"producer_id={shown(given)} is {kind_of(given)}, no text", hint='producer_id="mine"'
        )
    if (size := len(given.encode(errors="surrogatepass"))) > _LONGEST_ID:
        raise BadArgument(
            f"producer_id {given[:20]!r}... has {size} bytes of UTF-8, allowed are {_LONGEST_ID}",
            hint="shorten it; each record carries it, and the lane's own number behind it",
        )
    if "\0" in given:
        raise BadArgument(f"producer_id={given!r} has a NUL in it", hint="choose letters and digits")
    return given


def check_env_name(env_name: str) -> str:
    """Returns the environment's name. Raises BadArgument if it is not a text, or not valid Unicode."""
    if not isinstance(env_name, str):
        raise BadArgument(
            f"env_name={shown(env_name)} is {kind_of(env_name)}, no text", hint='env_name="gsm8k"'
        )
    try:
        env_name.encode()
    except UnicodeEncodeError:
        raise BadArgument(
            f"env_name={shown(env_name)} is not Unicode text", hint='env_name="gsm8k"'
        ) from None
    return env_name


def check_choice(name: str, given: object, allowed: tuple[str, ...]) -> None:
    """Raises BadArgument, with the nearest choice, unless `given` is one of those allowed."""
    word = given if isinstance(given, str) else ""
    if word in allowed:
        return
    near = difflib.get_close_matches(word, allowed, n=1, cutoff=0.55)
    hint = f'did you mean "{near[0]}"?' if near else f'{name}="{allowed[0]}"'
    choices = ", ".join(f'"{choice}"' for choice in allowed)
    raise BadArgument(f"{name}={shown(given)} is none of {choices}", hint=hint)


def check_run(run: Run | None) -> Run | None:
    """Returns the run, or raises BadArgument."""
    if isinstance(run, Run):
        for field, kind in Run.__annotations__.items():
            value = getattr(run, field)
            if isinstance(value, bool) or not isinstance(value, kind):
                hint = (
                    f"{field}={value}, without quotes"
                    if str(value).isdigit()
                    else f"{field} is {_ARTICLE[kind]}"
                )
                raise BadArgument(
                    f"run.{field}={shown(value)} is {kind_of(value)}, not {_ARTICLE[kind]}", hint=hint
                )
        return run
    if run is None:
        return run
    fields = (
        ", ".join(f"{key}={shown(value)}" for key, value in run.items())
        if isinstance(run, dict)
        else "batch_size=64"
    )
    raise BadArgument(
        f"run= is {kind_of(run)}, not a shmbridge.Run", hint=f"run=shmbridge.Run({fields:.200})"
    )


def check_lanes(lanes: int | str) -> int | None:
    """Returns the most lanes, None for "auto"; or raises BadArgument."""
    if isinstance(lanes, str) and lanes == "auto":
        return None
    if isinstance(lanes, bool) or not isinstance(lanes, int) or lanes < 1:
        raise BadArgument(
            f"lanes={shown(lanes)} is no number of lanes from 1",
            hint='lanes="auto", or as many as environments write at once',
        )
    return lanes


def whole_number(value: object) -> int | None:
    """Returns a whole number of any integer type as an int; None for anything else, True and False too."""
    if type(value) is int:
        return value
    if isinstance(value, bool) or "bool" in str(getattr(value, "dtype", "")):  # a tensor's True has an index
        return None
    try:
        return operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        return None


def check_count(name: str, count: object, least: int, most: int) -> int:
    """Returns a whole number from `least` to `most`, as an int; or raises BadArgument."""
    number = whole_number(count)
    if number is None or not least <= number <= most:
        digits = count.strip() if isinstance(count, str) else ""
        is_text = digits.isdecimal() and least <= int(digits) <= most
        raise BadArgument(
            f"{name}={shown(count)} is no whole number from {least} to {most}",
            hint=f"{name}={digits}, without quotes" if is_text else f"{name}={min(max(least, 1), most)}",
        )
    return number


def check_version(name: str, version: object) -> int:
    """Returns a policy version, from 0 and below 2**62; or raises BadArgument."""
    number = whole_number(version)
    if number is not None and 0 <= number < 1 << 62:
        return number
    said = version if isinstance(version, str) else ""
    hint = f"{name}={said}, without quotes" if said.isdigit() else f"{name} counts from 0, such as the step"
    raise BadArgument(f"{name}={shown(version)} is no whole number from 0", hint=hint)


def check_run_id(run_id: object) -> int:
    """Returns a training run's id as a number; or raises BadArgument."""
    if isinstance(run_id, str) and _RUN_ID.fullmatch(run_id) and (number := int(run_id, 16)):
        return number
    raise BadArgument(
        f"run_id={shown(run_id)} is not 16 hexadecimal digits, one of them above 0",
        hint="run_id=secrets.token_hex(8), once for a run",
    )


def check_staleness(max_staleness: object) -> int | None:
    """Returns the most versions that a group may be behind, None for any; or raises BadArgument."""
    if max_staleness is None:
        return None
    number = whole_number(max_staleness)
    if number is None or number < 0:
        raise BadArgument(
            f"max_staleness={shown(max_staleness)} is no whole number from 0",
            hint="max_staleness=2 versions behind, or None for no limit",
        )
    return number


def check_seconds(name: str, seconds: object) -> float:
    """Returns seconds, 0 or more; or raises BadArgument."""
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not seconds >= 0:
        raise BadArgument(f"{name}={shown(seconds)} is no number of seconds from 0", hint=f"{name}=10.0")
    return seconds


def check_timeout(timeout_s: float | None) -> float | None:
    """Returns seconds, None for ever; or raises BadArgument."""
    if timeout_s is None or (isinstance(timeout_s, (int, float)) and timeout_s == timeout_s):
        return timeout_s
    try:
        return float(operator.index(timeout_s))  # type: ignore[arg-type]
    except TypeError:
        pass
    try:
        seconds = float(timeout_s)
    except (TypeError, ValueError):
        seconds = math.nan
    if math.isnan(seconds):
        raise BadArgument(
            f"timeout_s={shown(timeout_s)} is no number of seconds",
            hint="timeout_s=5.0, or None to wait for ever",
        )
    if isinstance(timeout_s, str):
        raise BadArgument(f"timeout_s={timeout_s!r} is text", hint=f"timeout_s={timeout_s}, without quotes")
    return seconds


def deadline_of(timeout_s: float | None) -> float:
    """Returns time.monotonic() in so many seconds; infinite for None."""
    return math.inf if timeout_s is None else time.monotonic() + timeout_s


def check_lane_bytes(given: int | str, least: int) -> int:
    """Returns a lane's bytes, a multiple of 64. Raises BadArgument for no size, or less than `least`."""
    size: object = given
    if not isinstance(size, (bool, int, str)):
        with contextlib.suppress(TypeError):  # no number, which is said below
            size = operator.index(given)  # type: ignore[arg-type]
    if isinstance(size, bool) or not isinstance(size, (int, str)):
        whole = isinstance(size, float) and size >= least and size.is_integer()
        hint = f"lane_bytes={size:.0f}" if whole else 'lane_bytes="64M"'
        raise BadArgument(
            f'lane_bytes={shown(size)} is {kind_of(size)}: bytes as an int, or a text such as "64M"',
            hint=hint,
        )
    try:
        found = parse_size(size)
    except ValueError:
        digits = re.match(r"\s*(\d+)\s*[kmgtKMGT]?", str(size))
        unit = digits[0].strip().replace(" ", "").upper() if digits else "64M"
        raise BadArgument(
            f"lane_bytes={shown(size)} is not a size: bytes, or a number with K, M, G or T",
            hint=f'lane_bytes="{unit}"',
        ) from None
    if found < least:
        small = str(size).strip().isdigit() and 0 < int(size) <= 1 << 20
        raise BadArgument(
            f"lane_bytes={shown(size)} is less than the least, {least} ({format_size(least)})",
            hint=f'lane_bytes="{str(size).strip()}M", if mebibytes were meant'
            if small
            else 'lane_bytes="64M"',
        )
    if found > _LARGEST_LANE:
        raise BadArgument(
            f"lane_bytes={shown(size)} is more than the most, {format_size(_LARGEST_LANE)}",
            hint='lane_bytes="64M"',
        )
    return found & ~63


def parse_size(size: int | str) -> int:
    """Returns the bytes of `64M`, `1.5G`, `4096` or an int; units are powers of 1024."""
    if isinstance(size, int):
        return size
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"{size!r} is not a size: write bytes, or a number with K, M, G or T, such as 64M")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def parse_port(text: str) -> int:
    """Returns a TCP port, 0 for any free one; for argparse's `type`: raises its ArgumentTypeError."""
    if text.strip().isascii() and text.strip().isdigit() and int(text) <= _LAST_PORT:
        return int(text)
    from argparse import ArgumentTypeError

    raise ArgumentTypeError(f"{text!r} is not a port: 0 to {_LAST_PORT}, 0 for a free one")


def parse_duration(text: str) -> float:
    """Returns the seconds, more than 0, of `1s`, `500ms`, `2min` or `0.5`; for argparse's `type`: raises its
    ArgumentTypeError.
    """
    match = _DURATION.fullmatch(text)
    if match is not None and (seconds := float(match[1]) * _SECONDS[match[2]]) > 0:
        return seconds
    from argparse import ArgumentTypeError

    raise ArgumentTypeError(f"{text!r} is no time: 1s, 500ms or 2min")


def format_size(size: float) -> str:
    """Returns a size for people: `64 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB" if size < 1000 else f"{size:.0f} TiB"


_KINDS = {
    "int": "a whole number",
    "float": "a number",
    "str": "text",
    "bool": "true or false",
    "array": "a list",
    "object": "a mapping",
    "null": "null",
}
_SIGNS = {">=": "at least", "<=": "at most", ">": "above", "<": "below"}
_EXPECTED = re.compile(r"Expected `([^`]+)`(?: ([<>]=?) (\S+))?")
_STEP = re.compile(r"\[(\d+)\]|([^.\[\]]+)")


def wrong_value(message: str, document: Any, name: str = "") -> str:
    """Returns what a ValidationError of msgspec says, with the path first and the value in it.

    Args:
        message: the error's text.
        document: what was decoded or converted, as plain values.
        name: what the document itself is called; "" for a whole file or body.
    """
    text, _, path = message.partition(" - at ")
    inside = path.strip("`").removeprefix("$").removeprefix(".")
    where = f"{name}{inside if inside.startswith('[') or not name else '.' + inside}" if inside else name
    if missing := re.fullmatch(r"Object missing required field `(\w+)`", text):
        return f"{where}.{missing[1]} is missing" if where else f"{missing[1]} is missing"
    if not (found := _EXPECTED.match(text)):
        return f"{where}: {text[:1].lower()}{text[1:]}".replace("`", "")
    kinds = " or ".join(_KINDS.get(kind, kind) for kind in found[1].split(" | ") if kind != "null")
    limit = f", {_SIGNS[found[2]]} {found[3].removesuffix('.0')}" if found[2] else ""
    return f"{where or 'it'}: {shown_value(_at(document, inside))} is not {kinds}{limit}"


def wrong_json(message: str, body: bytes | bytearray, name: str = "") -> str:
    """Returns what `wrong_value` does, of a JSON text; without the value where Python cannot read that text:
    a number of thousands of digits, brackets without end.
    """
    try:
        return wrong_value(message, json.loads(body), name)
    except (ValueError, LookupError, TypeError, RecursionError):
        text, _, path = message.partition(" - at ")
        where = f"{name}{path.strip('`').removeprefix('$')}".lstrip(".")
        return f"{where or 'it'}: {text[:1].lower()}{text[1:]}".replace("`", "")


def _at(document: Any, path: str) -> Any:
    """Returns the value at a path such as `rows[0].name`."""
    for place, key in _STEP.findall(path):
        document = document[int(place)] if place else document[key]
    return document


def shown_value(value: Any) -> str:
    """Returns a value of a document as an error shows it: as it is written, cut if it is long or nested."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    return repr(value) if isinstance(value, Written) else shown(value)


# --- YAML -------------------------------------------------------------------------------------------------

_MOST_DEEP = 50
_MOST_SHOWN = 40
_MOST_LISTED = 20
_MOST_DIGITS = 4000  # Python's int() refuses 4,300
_NOTHING = re.compile(r"(?!)")
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)")
_PREFIX = "tag:yaml.org,2002:"
_EXPONENTS = (  # YAML 1.1 parses 1e-6 as text
    f"{_PREFIX}float",
    re.compile(r"[-+]?(?:\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+"),
    list("-+.0123456789"),
)


@dataclass(frozen=True, slots=True)
class Written:
    """A number, boolean or null of a YAML file, and its text there: 1.1 may be written 1.10, false as no.

    What YAML 1.1 takes for a number to another base, or for a date, has its text as its value.
    """

    value: Any
    text: str

    def __repr__(self) -> str:
        text = self.text or "null"
        return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."


def read_yaml(text: str | bytes, forbidden: re.Pattern[str] | None = None) -> Any:
    """Returns the one document of a YAML text: dicts with text as keys, lists, texts, `Written` for all else.

    Raises ValueError, in one line with the place, for what is not YAML, for a key that is given twice, for
    nesting deeper than 50 levels or of an anchor in itself, and for a text that has what is `forbidden`.
    """
    import yaml

    try:
        loader = _loader()(text)
        tree = loader.get_single_node()
        if wrong := list(_faults(tree, "", (), set(), forbidden or _NOTHING)):
            raise ValueError(listed(wrong))
        return None if tree is None else loader.construct_document(tree)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML: {_wrong_yaml(error)}") from error


def listed(wrong: list[str]) -> str:
    """Returns what is wrong with a file in one line, and how much more there is of it."""
    more = len(wrong) - _MOST_LISTED
    return "; ".join(wrong[:_MOST_LISTED]) + (f"; and {more:,} more" if more > 0 else "")


def plain(document: Any) -> Any:
    """Returns what `read_yaml` did with values alone, without their texts."""
    return _plain(document, {})


def _plain(value: Any, made: dict[int, Any]) -> Any:
    """Makes each list and dict once, however many aliases it has."""
    if not isinstance(value, (dict, list)):
        return value.value if isinstance(value, Written) else value
    if id(value) not in made:
        made[id(value)] = (
            {key: _plain(each, made) for key, each in value.items()}
            if isinstance(value, dict)
            else [_plain(each, made) for each in value]
        )
    return made[id(value)]


def _faults(
    node: Any, path: str, above: tuple[int, ...], seen: set[int], forbidden: re.Pattern[str]
) -> Iterator[str]:
    """Yields one line per fault that PyYAML's tree of a file shows and its values do not."""
    if node is None or (id(node) in seen and id(node) not in above):  # an alias of what was looked at
        return
    line = f"line {node.start_mark.line + 1}"
    if id(node) in above:
        yield f"{line}: {path} contains itself"
        return
    seen.add(id(node))
    if node.id == "scalar":
        if found := forbidden.search(node.value):
            yield f"{line}: the character {found[0]!a} in {path or 'the text'}"
        return
    lines: dict[str, int] = {}
    for index, each in enumerate(node.value):
        key, inner = each if node.id == "mapping" else (None, each)
        where = f"{path}[{index}]"
        if key is not None:
            name, number = str(key.value), key.start_mark.line + 1
            where = f"{path}.{name}" if path else name
            if key.id != "scalar":
                yield f"line {number}: a key in {path or 'the file'} is not text"
                continue
            if found := forbidden.search(name):
                yield f"line {number}: the character {found[0]!a} in a key in {path or 'the file'}"
            if name in lines:
                yield f"{where} is given twice, in lines {lines[name]} and {number}"
            lines[name] = number
        yield from _faults(inner, where, (*above, id(node)), seen, forbidden)


def _written(loader: Any, node: Any) -> Written:
    """Returns what a plain scalar stands for."""
    text, kind = loader.construct_scalar(node), node.tag.removeprefix(_PREFIX)
    value: Any = text
    digits = text.replace("_", "")
    if kind == "null":
        value = None
    elif kind == "bool":
        value = loader.bool_values.get(text.lower(), text)
    elif kind == "int" and len(digits) < _MOST_DIGITS and re.fullmatch(r"[-+]?\d+", digits):
        value = int(digits)
    elif kind == "float" and _NUMBER.fullmatch(digits):
        value = float(re.sub(r"\.(inf|nan)$", r"\1", digits.lower()))
    return Written(value, text)


@cache
def _loader() -> Any:
    """Returns a SafeLoader of `Written` values."""
    import yaml

    class Loader(yaml.SafeLoader):  # type: ignore[misc]  # PyYAML has no types
        depth = 0

        def compose_node(self, parent: Any, index: Any) -> Any:
            self.depth += 1
            if self.depth > _MOST_DEEP:
                mark = self.peek_event().start_mark
                raise yaml.composer.ComposerError(None, None, f"nested deeper than {_MOST_DEEP} levels", mark)
            node = super().compose_node(parent, index)
            self.depth -= 1
            return node

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            if node.id != "mapping":
                what = f"expected a mapping, but found a {node.id}"
                raise yaml.constructor.ConstructorError(None, None, what, node.start_mark)
            self.flatten_mapping(node)
            return {key.value: self.construct_object(inner, deep) for key, inner in node.value}

    Loader.add_implicit_resolver(*_EXPONENTS)
    for kind in ("null", "bool", "int", "float", "timestamp"):
        Loader.add_constructor(f"{_PREFIX}{kind}", _written)
    return Loader


def write_yaml(document: Any) -> str:
    """Returns plain values as YAML that `read_yaml` reads as the same ones."""
    import yaml

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]  # PyYAML has no types
        pass

    Dumper.add_implicit_resolver(*_EXPONENTS)
    return str(yaml.dump(document, Dumper=Dumper, sort_keys=False))


def _wrong_yaml(error: Exception) -> str:
    """Returns PyYAML's error in one line, with its place."""
    problem, mark = getattr(error, "problem", None), getattr(error, "problem_mark", None)
    if not problem or mark is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {' '.join(str(problem).split())}"
