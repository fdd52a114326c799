"""Decodes bodies of posts: gunzips within a limit, decodes, checks each column. Pure; called in threads."""

from __future__ import annotations

import json
import math
import re
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from typing import Annotated, Any, TypeVar

import msgspec

T = TypeVar("T")

_LARGEST = 3.4028234663852886e38  # float32
_Int = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Float = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
# finite, also where it is written "inf"
_Score = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Ints, _Floats = list[list[_Int]], list[list[_Float]]
# What the Atropos server knows and hands out, in its order.
_TYPES: dict[str, Any] = {
    "tokens": _Ints,
    "masks": _Ints,
    "scores": list[_Score],
    "advantages": _Floats | None,
    "ref_logprobs": _Floats | None,
    "messages": list[list[dict[str, Any]]] | None,
    "generation_params": dict[str, Any] | None,
    "inference_logprobs": _Floats | None,
    "overrides": list[dict[str, Any]] | None,
    "group_overrides": dict[str, Any] | None,
    "images": Any,
    "env_id": Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)] | None,
    "distill_token_ids": list[list[list[_Int]]] | None,
    "distill_logprobs": list[list[list[_Float]]] | None,
}
KEYS = tuple(_TYPES)
# columns of ours that Atropos does not have: carried as such if they fit
_STEPS: dict[str, Any] = {"step_rewards": _Floats, "step_ends": _Ints}
# 1.0 and "1" are 1 in these, and "1.5" is 1.5, as they are to pydantic
_NUMBERS = _TYPES.keys() - {"messages", "generation_params", "overrides", "group_overrides", "images"}
_DECODERS = {
    name: msgspec.json.Decoder(kind, strict=name not in _NUMBERS) for name, kind in (_TYPES | _STEPS).items()
}
_OBJECT = msgspec.json.Decoder(dict[str, msgspec.Raw])
_LIST = msgspec.json.Decoder(list[dict[str, msgspec.Raw]])
_FIRST_STEP, _LAST_STEP = 256, 1 << 16  # bytes given to a member at a time: what it leaves is copied
_PADDING = re.compile(rb"\0*")  # may follow a member
_REFUSED_THERE = ("header", "method", "incorrect")  # zlib's words for what Python's gzip calls no gzip file


class HttpError(Exception):
    """A request refused with an HTTP status and a reason."""

    def __init__(self, status: int, detail: str, kind: str) -> None:
        super().__init__(detail)
        self.status, self.detail, self.kind = status, detail, kind


@dataclass(slots=True)
class Posted:
    """One parsed body: its checked groups, and a digest that an equal body has, too."""

    groups: list[dict[str, Any]]
    digest: bytes


class BrokenOff(HttpError):
    """A gzip body that ends early or holds no valid data: the original fails there with status 500."""


def outcome(work: Callable[..., T], *arguments: Any) -> T | HttpError:
    """Returns what the call returns, or its HttpError without the frames that hold the body."""
    try:
        return work(*arguments)
    except HttpError as wrong:
        return type(wrong)(wrong.status, wrong.detail, wrong.kind)


def gunzip(raw: bytes, most: int) -> bytearray | None:
    """Returns the decompressed body; None if it has more than `most` bytes, of which only one more is made.

    The time grows with the bytes in and out, whatever the number of gzip members. Raises HttpError (400).
    """
    made, at, view = bytearray(), 0, memoryview(raw)
    try:
        while at < len(raw):
            member, step = zlib.decompressobj(31), _FIRST_STEP
            while not member.eof:
                given = view[at : at + step]
                if not given:
                    raise BrokenOff(400, "Invalid gzip payload: it ends too early", "gzip")
                made += member.decompress(given, most - len(made) + 1)
                if len(made) > most:
                    return None
                at += len(given) - len(member.unused_data)
                step = min(2 * step, _LAST_STEP)
            at = _PADDING.match(raw, at).end()  # type: ignore[union-attr]
    except zlib.error as wrong:
        kind = HttpError if any(word in str(wrong) for word in _REFUSED_THERE) else BrokenOff
        raise kind(400, f"Invalid gzip payload: {wrong}", "gzip") from None
    return made


def read_post(body: bytes, *, many: bool, extras: bool) -> Posted:
    """Returns the groups of a body; with `extras` also keys unknown to Atropos. Raises HttpError (422)."""
    try:
        raw = _LIST.decode(body) if many else [_OBJECT.decode(body)]
        groups = [_group(each, extras) for each in raw]
    except HttpError as wrong:
        raise HttpError(wrong.status, _not_finite(body) or wrong.detail, wrong.kind) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        expected = "a list of groups" if many else "a group"
        raise HttpError(
            422, _not_finite(body) or f"the body is not {expected}: {wrong}", "malformed"
        ) from None
    return Posted(groups, blake2b(body, digest_size=16, person=b"list" if many else b"one").digest())


def _group(raw: dict[str, msgspec.Raw], extras: bool) -> dict[str, Any]:
    missing = [name for name in ("tokens", "masks", "scores") if name not in raw]
    if missing:
        raise HttpError(422, f"the group has no {' and no '.join(missing)}", "malformed")
    group = {name: _value(name, raw.pop(name)) for name in KEYS if name in raw}
    if not group["tokens"]:
        raise HttpError(422, "the group is empty: `tokens` has no rows", "malformed")
    for row, messages in enumerate(group.get("messages") or ()):
        for place, message in enumerate(messages):
            if not ("role" in message and "content" in message):
                raise HttpError(422, f"messages[{row}][{place}] must have 'role' and 'content'", "malformed")
    return group | _extras(raw) if extras and raw else group


def _value(name: str, raw: msgspec.Raw) -> Any:
    if name in _NUMBERS - {"env_id"} and bytes(memoryview(raw)[:1]) == b'"':  # "null" in quotes would be none
        raise HttpError(422, f"Expected `array`, got `str` - at `{name}`", "malformed")
    try:
        return _DECODERS[name].decode(raw)
    except msgspec.ValidationError as wrong:
        raise HttpError(
            422,
            str(wrong).replace("`$", f"`{name}") if "`$" in str(wrong) else f"{name}: {wrong}",
            "malformed",
        ) from None


def _extras(raw: dict[str, msgspec.Raw]) -> dict[str, Any]:
    """Returns the keys that Atropos does not know: step rewards as columns, everything else in `extra`."""
    known: dict[str, Any] = {}
    other: dict[str, Any] = {}
    for name, value in raw.items():
        if name in _STEPS:
            try:
                known[name] = _DECODERS[name].decode(value)
                continue
            except msgspec.ValidationError:
                pass
        other[name] = msgspec.json.decode(value)
    return known | ({"extra": other} if other else {})


def _not_finite(body: bytes) -> str:
    """Returns where NaN or an infinity stands, which Python writes and JSON lacks; "" if nowhere."""
    if not any(word in body for word in (b"NaN", b"Infinity", b"e", b"E")):
        return ""
    try:
        for path, value in _floats("", json.loads(body)):
            if not math.isfinite(value):
                return f"{path or 'the body'} is {value}: scores and every other number must be finite"
    except (ValueError, RecursionError):
        pass
    return ""


def _floats(path: str, value: Any) -> Iterator[tuple[str, float]]:
    if isinstance(value, float):
        yield path, value
    elif isinstance(value, dict):
        for key, each in value.items():
            yield from _floats(f"{path}.{key}" if path else key, each)
    elif isinstance(value, list):
        for place, each in enumerate(value):
            yield from _floats(f"{path}[{place}]", each)
