"""Reads a `RewardConfig` from a mapping or a YAML file; a key that is not known is refused, never skipped."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from shmbridge.config import plain, read_yaml
from shmbridge.errors import BadConfig, shown
from shmbridge.producers.rewards.config import FormatMarker, LengthBounty, Linear, RewardConfig

# ROLL's bonus for length: a thousandth for each character.
_ROLL_RATE = 0.001


def read_config(given: RewardConfig | Mapping[str, Any] | str | Path | None) -> RewardConfig:
    """Returns the config that is given, or that a mapping or a YAML file holds. Blocks to read a file.

    The keys are the fields of `RewardConfig`. Also, as ROLL has them: `format_markers` may be a mapping from
    text to weight, `length_bounty_max: 0.2` is `length_bounty: {cap: 0.2, per: character, rate: 0.001}`, and
    all of it may be under one key `reward_config`.

    Args:
        given: a config, a mapping, or the path of a file; None: everything off.

    Raises:
        BadConfig: a key is not known, with the nearest that is; a value cannot be used; no such file.
    """
    if isinstance(given, RewardConfig):
        return given
    document: Any = _read(Path(given)) if isinstance(given, (str, Path)) else given
    document = {} if document is None else document
    if isinstance(document, Mapping) and set(document) == {"reward_config"}:
        document = document["reward_config"] or {}
    return _config(_section("", document, (*_names(RewardConfig), "length_bounty_max")))


def _config(given: Mapping[str, Any]) -> RewardConfig:
    values: dict[str, Any] = {}
    if given.get("base") is not None:
        values["base"] = _base(given["base"])
    if given.get("format_markers") is not None:
        values["format_markers"] = tuple(_markers(given["format_markers"]))
    if given.get("length_bounty") is not None:
        values["length_bounty"] = _made(LengthBounty, "length_bounty", given["length_bounty"])
    if given.get("length_bounty_max") is not None:
        if "length_bounty" in values:
            raise BadConfig("length_bounty and length_bounty_max are one thing", hint="give one of them")
        cap = _number("length_bounty_max", given["length_bounty_max"])
        values["length_bounty"] = LengthBounty(cap, "character", _ROLL_RATE)
    if given.get("clamp") is not None:
        values["clamp"] = _bounds(given["clamp"])
    if given.get("wrong_at_most") is not None:
        values["wrong_at_most"] = _number("wrong_at_most", given["wrong_at_most"])
    return RewardConfig(**values)


def _base(given: Any) -> Mapping[float, float] | Linear:
    if isinstance(given, Linear):
        return given
    if isinstance(given, Mapping) and given and not any(map(_is_number, given)):
        linear: Linear = _made(Linear, "base", given)
        return linear
    if not isinstance(given, Mapping):
        raise BadConfig(
            f"base: {shown(given)} is not a mapping", hint="base: {-1: 0}, or {scale: 2, offset: 1}"
        )
    becomes: dict[float, float] = {}
    for score, value in given.items():
        if (number := _number("base", score)) in becomes:
            raise BadConfig(f"base: {number:g} is given twice", hint="leave one of them out")
        becomes[number] = _number(f"base.{score}", value)
    return becomes


def _markers(given: Any) -> Iterable[FormatMarker]:
    if isinstance(given, Mapping):  # as ROLL has it; or text -> fields
        for pattern, value in given.items():
            rest = value if isinstance(value, Mapping) else {"weight": value}
            if "pattern" in rest:
                second = shown(rest["pattern"])
                raise BadConfig(
                    f"format_markers.{pattern}: the key is the pattern, and it has {second}, too",
                    hint="- {pattern: ..., name: ...}, in a list",
                )
            yield _made(FormatMarker, f"format_markers.{pattern}", {"pattern": pattern, **rest})
    elif isinstance(given, Sequence) and not isinstance(given, str):
        for at, each in enumerate(given):
            yield (
                each if isinstance(each, FormatMarker) else _made(FormatMarker, f"format_markers[{at}]", each)
            )
    else:
        raise BadConfig(f"format_markers: {shown(given)} is no mapping and no list", hint='{"<think>": 0.2}')


def _bounds(given: Any) -> tuple[float | None, float | None]:
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise BadConfig(f"clamp: {shown(given)} is no lowest and highest score", hint="clamp: [-1, null]")
    lowest, highest = (None if each is None else _number("clamp", each) for each in given)
    return lowest, highest


def _made(kind: Any, path: str, given: Any) -> Any:
    """One of the parts, from a mapping of its fields; numbers may be text, as YAML reads 1e-3."""
    if isinstance(given, kind):
        return given
    section = _section(path, given, _names(kind))
    numbers = {"weight", "cap", "rate", "scale", "offset"}
    values = {
        name: _number(f"{path}.{name}", value) if name in numbers else value
        for name, value in section.items()
    }
    try:
        return kind(**values)
    except TypeError as wrong:
        needed = " and ".join(each for each in ("pattern", "weight", "cap") if each in _names(kind))
        raise BadConfig(f"{path}: {shown(given)} lacks {needed}") from wrong


def _section(path: str, given: Any, known: Iterable[str]) -> Mapping[str, Any]:
    if not isinstance(given, Mapping):
        raise BadConfig(f"{path or 'the reward config'}: {shown(given)} is not a mapping of options")
    known = list(known)
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(str(name), known, n=1)
            where = f"{path}.{name}" if path else str(name)
            meant = f"did you mean {near[0]}?" if near else f"known are {', '.join(known)}"
            raise BadConfig(f"{where} is not known: {meant}", hint="docs/how-to/rewards.md lists the keys")
    return given


def _names(kind: Any) -> list[str]:
    return [each.name for each in fields(kind)]


def _is_number(value: object) -> bool:
    try:
        float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def _number(name: str, value: Any) -> float:
    if isinstance(value, bool) or not _is_number(value):
        raise BadConfig(f"{name}: {shown(value)} is not a number")
    return float(value)


def _read(path: Path) -> Any:
    try:
        return plain(read_yaml(path.read_bytes()))
    except ImportError as missing:
        raise BadConfig(f"{path} cannot be read without PyYAML", hint="pip install pyyaml") from missing
    except OSError as wrong:
        raise BadConfig(f"{path} cannot be read: {wrong.strerror}") from wrong
    except ValueError as wrong:
        raise BadConfig(f"{path}: {wrong}", hint="correct that line") from wrong
