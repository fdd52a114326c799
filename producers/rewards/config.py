"""What a reward bridge does with a score: bonuses for markers and length, another scale, bounds.

Everything is off by default. `config_file.py` reads it from a mapping or a file.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from shmbridge.config import plain, read_yaml
from shmbridge.errors import BadConfig, shown

# ROLL's bonus for length: a thousandth for each character.
_ROLL_RATE = 0.001


@dataclass(frozen=True)
class FormatMarker:
    """Something in a response that is worth a bonus, or costs one.

    Args:
        pattern: text that is looked for; a regular expression if `regex`.
        weight: what it adds to the score.
        regex: whether `pattern` is a regular expression; it is searched, and `.` matches line ends, too.
        count: "once", or for "each" occurrence.
        when: "always", or only if the environment's score says "wrong".
        name: in `reward_components`; default: the pattern.
    """

    pattern: str
    weight: float
    regex: bool = False
    count: Literal["once", "each"] = "once"
    when: Literal["always", "wrong"] = "always"
    name: str = ""

    def __post_init__(self) -> None:
        _finite(f"format_markers: weight of {self.pattern!r}", self.weight)
        _one_of("format_markers.count", self.count, ("once", "each"))
        _one_of("format_markers.when", self.when, ("always", "wrong"))
        if not isinstance(self.pattern, str) or not self.pattern:
            raise BadConfig(f"format_markers: {self.pattern!r} is no text to look for")
        if not isinstance(self.regex, bool) or not isinstance(self.name, str):
            raise BadConfig(f"format_markers: {self.pattern!r} has regex {self.regex!r}, name {self.name!r}")
        try:
            _ = self._compiled
        except re.error as wrong:
            raise BadConfig(
                f"format_markers: {self.pattern!r} is no regular expression: {wrong}", hint="regex: false"
            ) from wrong

    @property
    def label(self) -> str:
        """Its name among the components."""
        return self.name or self.pattern

    @cached_property
    def _compiled(self) -> re.Pattern[str]:
        return re.compile(self.pattern if self.regex else re.escape(self.pattern), re.DOTALL)

    def bonus(self, text: str) -> float:
        """Returns what a response gets for it."""
        if self.count == "once":
            return self.weight if self._compiled.search(text) else 0.0
        return self.weight * sum(1 for _ in self._compiled.finditer(text))


@dataclass(frozen=True)
class LengthBounty:
    """A bonus that grows with the length of a wrong response: `min(cap, rate * length)`.

    Args:
        cap: its most.
        per: what the length counts: trained tokens ("token"), or characters of the response ("character").
        rate: bonus for one of them.
    """

    cap: float
    per: Literal["token", "character"] = "token"
    rate: float = 0.001

    def __post_init__(self) -> None:
        _one_of("length_bounty.per", self.per, ("token", "character"))
        for name, value in (("cap", self.cap), ("rate", self.rate)):
            if _finite(f"length_bounty.{name}", value) < 0:
                raise BadConfig(f"length_bounty.{name}: {value} is below 0", hint="give it 0 or more")


@dataclass(frozen=True)
class Linear:
    """A base that is `scale * score + offset`."""

    scale: float = 1.0
    offset: float = 0.0

    def __post_init__(self) -> None:
        _finite("base.scale", self.scale)
        _finite("base.offset", self.offset)


@dataclass(frozen=True)
class RewardConfig:
    """What becomes of a score: `clamp(base(score) + markers + length bounty)`. By default the score itself.

    Args:
        base: what each score of the environment becomes, `{-1: 0}`, others as they are; or a `Linear`.
        format_markers: bonuses for what a response has in it.
        length_bounty: bonus for long wrong responses.
        clamp: lowest and highest score; None: no bound.
        wrong_at_most: a score of the environment up to this one counts as wrong.

    Raises:
        BadConfig: a value that nothing can be done with.
    """

    base: Mapping[float, float] | Linear = field(default_factory=dict)
    format_markers: tuple[FormatMarker, ...] = ()
    length_bounty: LengthBounty | None = None
    clamp: tuple[float | None, float | None] | None = None
    wrong_at_most: float = 0.0

    def __post_init__(self) -> None:
        _finite("wrong_at_most", self.wrong_at_most)
        if not isinstance(self.base, Linear):
            for score, becomes in self.base.items():
                _finite("base", score)
                _finite(f"base of {score}", becomes)
        if self.clamp is not None and len(self.clamp) != 2:
            raise BadConfig(f"clamp: {self.clamp} is no lowest and highest score", hint="clamp: [-1, None]")
        bounds = [_finite("clamp", each) for each in self.clamp or () if each is not None]
        if bounds != sorted(bounds):
            raise BadConfig(f"clamp: {self.clamp} is no lowest and highest score", hint="clamp: [-1, 1]")
        labels = ["base", "length_bounty", "clamp", *(each.label for each in self.format_markers)]
        if twice := [label for label in labels if labels.count(label) > 1]:
            raise BadConfig(
                f"format_markers: two components are called {twice[0]!r}", hint="give the marker a name:"
            )

    @property
    def is_off(self) -> bool:
        """Whether scores pass unchanged."""
        return not (self.base or self.format_markers or self.length_bounty or self.clamp)

    @property
    def needs_text(self) -> bool:
        """Whether it looks at responses' text."""
        per_character = self.length_bounty is not None and self.length_bounty.per == "character"
        return bool(self.format_markers) or per_character

    def components(self, score: float, text: str, tokens: int) -> dict[str, float]:
        """Returns the named parts of a row's new score, whose sum it is.

        Args:
            score: the environment's.
            text: of the response; "" if not `needs_text`.
            tokens: how many of the row are trained.
        """
        wrong = score <= self.wrong_at_most
        parts = {"base": self._base(score)}
        for marker in self.format_markers:
            parts[marker.label] = marker.bonus(text) if wrong or marker.when == "always" else 0.0
        if (bounty := self.length_bounty) is not None:
            length = tokens if bounty.per == "token" else len(text)
            parts["length_bounty"] = min(bounty.cap, bounty.rate * length) if wrong else 0.0
        if self.clamp is not None:
            total = sum(parts.values())
            parts["clamp"] = self._clamped(total) - total
        return parts

    def total(self, parts: Mapping[str, float]) -> float:
        """Returns the new score that components make."""
        return self._clamped(sum(value for name, value in parts.items() if name != "clamp"))

    def _base(self, score: float) -> float:
        if isinstance(self.base, Linear):
            return self.base.scale * score + self.base.offset
        return self.base.get(score, score)

    def _clamped(self, score: float) -> float:
        lowest, highest = self.clamp or (None, None)
        score = score if lowest is None else max(score, lowest)
        return score if highest is None else min(score, highest)


def _finite(name: str, value: float) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise BadConfig(f"{name}: {value!r} is not a finite number")
    return value


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise BadConfig(f"{name}: {value!r} is none of {', '.join(allowed)}")


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
