"""JSON of groups: decodes and checks posts, in threads; encodes batches, every Atropos key in each group."""

from __future__ import annotations

import json
import math
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import islice
from typing import Annotated, Any

import msgspec
import numpy as np

from shmbridge.config import wrong_json
from shmbridge.httpd.door import Refused
from shmbridge.record import Group, Record
from shmbridge.schema import ATROPOS_NO_LOGPROB, JSON_COLUMNS, LOGPROBS, recorded_logprobs

_LARGEST = 3.4028234663852886e38  # float32
_Int = Annotated[int, msgspec.Meta(ge=-(1 << 31), lt=1 << 31)]
_Float = Annotated[float, msgspec.Meta(ge=-_LARGEST, le=_LARGEST)]
# finite, also where it is written "inf"
_Score = Annotated[float, msgspec.Meta(ge=-sys.float_info.max, le=sys.float_info.max)]
_Ints, _Floats, _Logprobs = list[list[_Int]], list[list[_Float]], list[list[_Float | None]]
# What the Atropos server knows and hands out, in its order.
_TYPES: dict[str, Any] = {
    "tokens": _Ints,
    "masks": _Ints,
    "scores": list[_Score],
    "advantages": _Floats | None,
    "ref_logprobs": _Logprobs | None,
    "messages": list[list[dict[str, Any]]] | None,
    "generation_params": dict[str, Any] | None,
    "inference_logprobs": _Logprobs | None,
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


@dataclass(slots=True)
class Posted:
    """One parsed body: its checked groups, and a digest that an equal body has, too."""

    groups: list[dict[str, Any]]
    digest: bytes


def read_post(body: bytes, *, many: bool, extras: bool) -> Posted:
    """Returns the groups of a body; with `extras` also keys unknown to Atropos. Raises Refused (422)."""
    try:
        raw = _LIST.decode(body) if many else [_OBJECT.decode(body)]
        groups = [_group(each, extras, f"group {place}: " if many else "") for place, each in enumerate(raw)]
    except Refused as wrong:
        raise Refused(wrong.status, _not_finite(body) or wrong.detail, wrong.kind) from None
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        expected = "a list of groups" if many else "a group"
        said = _not_finite(body) or f"the body is not {expected}: {_why(wrong, body)} -> {_FORMS[many]}"
        raise Refused(422, said, "malformed") from None
    return Posted(groups, blake2b(body, digest_size=16, person=b"list" if many else b"one").digest())


def _group(raw: dict[str, msgspec.Raw], extras: bool, where: str) -> dict[str, Any]:
    missing = [name for name in ("tokens", "masks", "scores") if name not in raw]
    if missing:
        said = f"{where}the group has no {' and no '.join(missing)}, it has {', '.join(raw) or 'nothing'}"
        raise Refused(422, f"{said} -> {_form(missing[0])}", "malformed")
    group = {name: _value(name, raw.pop(name), where) for name in KEYS if name in raw}
    if not group["tokens"]:
        raise Refused(422, f"{where}the group is empty: tokens has no rows -> do not post it", "malformed")
    for row, messages in enumerate(group.get("messages") or ()):
        for place, message in enumerate(messages):
            if not ("role" in message and "content" in message):
                said = f"{where}messages[{row}][{place}] must have role and content -> {_form('messages')}"
                raise Refused(422, said, "malformed")
    return group | _extras(raw) if extras and raw else group


def _value(name: str, raw: msgspec.Raw, where: str) -> Any:
    try:
        if name in _NUMBERS - {"env_id"} and bytes(memoryview(raw)[:1]) == b'"':
            raise msgspec.ValidationError("Expected `array`")  # "null" in quotes would be none
        value = _DECODERS[name].decode(raw)
        if value and name in LOGPROBS and b"null" in memoryview(raw).tobytes():
            return [[ATROPOS_NO_LOGPROB if each is None else each for each in row] for row in value]
        return value
    except msgspec.ValidationError as wrong:
        said = wrong_json(str(wrong), bytes(raw), name)
        raise Refused(422, f"{where}{said} -> {_form(name)}", "malformed") from None


_FORMS = ('{"tokens": [[1, 2]], "masks": [[-100, 2]], "scores": [1.0]}', "a list of such groups, also of one")
_EXAMPLES = {
    "tokens": "[[1, 2, 3]], one list of token ids a row",
    "masks": "[[-100, 2, 3]], one list a row: the token id where it is trained, else -100",
    "scores": "[1.0, 0.0], one number a row",
    "messages": '[[{"role": "user", "content": "..."}]], one list a row',
    "overrides": '[{"set_advantage_to_zero": true}], one object a row',
    "env_id": "3, the number that /register-env gave",
}


def _form(name: str) -> str:
    """Returns how a key is written."""
    if name in _EXAMPLES:
        return f'"{name}": {_EXAMPLES[name]}'
    if _TYPES[name] in (_Floats | None, _Logprobs | None):
        return f'"{name}": [[0.5, 0.5]], one list of numbers a row, one number a token'
    return f"docs/reference/atropos-fields.md has {name}"


def _why(wrong: Exception, body: bytes) -> str:
    """Returns in one line why a body is no JSON, or not of the right form."""
    if isinstance(wrong, UnicodeError):
        return "it is not UTF-8"
    if isinstance(wrong, msgspec.ValidationError):
        return wrong_json(str(wrong), body)
    if isinstance(wrong, RecursionError):
        return "it has brackets within brackets without end"
    return str(wrong) if body else "it is empty"


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


_FINITE = "find where the environment computes it, or do not post that group"


def _not_finite(body: bytes) -> str:
    """Returns where NaN or an infinity stands, which Python writes and JSON lacks; "" if nowhere."""
    if not any(word in body for word in (b"NaN", b"Infinity", b"e", b"E")):
        return ""
    try:
        for path, value in _floats("", json.loads(body)):
            if not math.isfinite(value):
                return f"{path or 'the body'} is {value}: every number must be finite -> {_FINITE}"
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


# columns that to_scored_data has words for
_SAID = frozenset(KEYS) | frozenset(JSON_COLUMNS) | {"score", "loss_mask", "extra"}
# float32 in a lane
_FLOATS = ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs", "step_rewards")
_encode = msgspec.json.Encoder().encode


def served(group: Group, *, extras: bool) -> dict[str, Any]:
    """Returns one whole group as a new dict; with `extras` also the columns that Atropos has no key for."""
    parts = [_part(record, extras) for record in group.records]
    whole = parts[0] if len(parts) == 1 else _joined(parts)
    answer = {key: whole.pop(key, None) for key in KEYS}
    return answer | whole if extras else answer


def _part(record: Record, extras: bool) -> dict[str, Any]:
    part = record.to_scored_data()
    for name in _FLOATS:
        if name in record and name in part:
            values = record[name].values
            if name in LOGPROBS:
                values = recorded_logprobs(values, ATROPOS_NO_LOGPROB)
            part[name] = _filled(part[name], iter(shortest(values).tolist()))
    if extras:
        part |= {name: _plain(record[name]) for name in record.columns if name not in _SAID}
    return part


def _filled(rows: list[Any], values: Iterator[float]) -> list[Any]:
    """Returns lists of the same shape with these values, in order."""
    return [
        row
        if row is None
        else list(islice(values, len(row)))
        if not row or isinstance(row[0], float)
        else _filled(row, values)
        for row in rows
    ]


def _plain(column: Any) -> Any:
    if isinstance(column, np.ndarray):
        return (shortest(column) if column.dtype == np.float32 else column).tolist()
    if isinstance(column, list):
        return [_map(row) if isinstance(row, dict) else row for row in column]
    return [_plain(column[row]) for row in range(len(column))]


def _map(row: dict[str, float]) -> dict[str, float]:
    return dict(zip(row, shortest(np.array([*row.values()], np.float32)).tolist(), strict=True))


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """Joins the fragments of a group: rows are appended; values given once per record are the first's."""
    whole = dict(parts[0])
    for name, first in whole.items():
        if isinstance(first, list):
            whole[name] = [row for part in parts for row in (part.get(name) or ())]
    return whole


def encoded_batch(groups: Sequence[Group], *, extras: bool, gzip: bool) -> bytes:
    """Returns the body of a batch, group by group, so that other threads run; the same groups give the same
    bytes.
    """
    pieces = _pieces(groups, extras)
    if not gzip:
        return b"".join(pieces)
    packer = zlib.compressobj(1, zlib.DEFLATED, 31)
    return b"".join([*(packer.compress(piece) for piece in pieces), packer.flush()])


def _pieces(groups: Sequence[Group], extras: bool) -> Iterator[bytes]:
    yield b'{"batch":['
    for place, group in enumerate(groups):
        yield (b"," if place else b"") + _encode(served(group, extras=extras))
    yield b"]}"


_TENS = 10.0 ** np.arange(23)  # those that a double holds exactly
_LEAST, _MOST = 1e-14, 1e16  # between them every power of ten that is wanted is one of these
_SURE, _ENOUGH = 6, 9  # so many digits always come back from a float32; so many always tell one from the next


def shortest(values: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Returns the doubles with the fewest decimal digits that round to these float32 values. Any thread."""
    exact = values.astype(np.float64)
    said, size = exact.copy(), np.abs(exact)
    usual = (size >= _LEAST) & (size < _MOST)
    left = np.flatnonzero(usual)
    exponent = np.floor(np.log10(size[left])).astype(np.intp)
    for digits in range(_SURE, _ENOUGH + 1):
        places = digits - 1 - exponent
        up, down = _TENS[np.maximum(places, 0)], _TENS[np.maximum(-places, 0)]
        # a whole number by an exact one: the nearest double
        rounded = np.rint(exact[left] * up / down) / up * down
        fits = rounded.astype(np.float32) == values[left]
        said[left[fits]] = rounded[fits]
        left, exponent = left[~fits], exponent[~fits]
        if not len(left):
            break
    for place in np.flatnonzero(~usual & (size > 0) & np.isfinite(size)):
        said[place] = float(str(values[place]))
    return said
