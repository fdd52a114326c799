"""Encodes groups for `/batch`: Atropos' JSON, with every key in each group. Called in the hub's thread."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import msgspec
import numpy as np

from shmbridge.consumers.gateway.decode import KEYS
from shmbridge.consumers.gateway.floats import shortest
from shmbridge.record import Group, Record
from shmbridge.schema import ATROPOS_NO_LOGPROB, JSON_COLUMNS, LOGPROBS, recorded_logprobs

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
