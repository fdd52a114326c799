"""Arrow to records: the records of one RecordBatch of an archive, in the form that `put` takes back."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from shmbridge.archive.encode import TAGS
from shmbridge.archive.layout import OF_RECORD, ORIGIN, Layout, has_origin
from shmbridge.put.recorded import FlatColumn, RecordedGroup
from shmbridge.record.record import Origin
from shmbridge.schema import Column, Kind, Tag

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class ArchivedRecord:
    """One record of an archive: what it says of itself, and its group, to put again.

    Times are CLOCK_MONOTONIC nanoseconds of the machine that recorded; versions are -1 where none was
    stamped.
    """

    producer_id: str
    sequence: int
    env_name: str
    group_id: str
    group_size: int
    min_policy_version: int
    max_policy_version: int
    t_created_ns: int
    t_publish_ns: int
    split: str
    redelivered: bool
    rows: int
    session: str  # of the recorder: times of two sessions may come from two boots of a machine
    group: RecordedGroup
    origin: Origin | None = None  # where it lay before a relay brought it; None if it was put there


def records_of(batch: pa.RecordBatch, layout: Layout) -> Iterator[ArchivedRecord]:
    """Yields the records of a batch in the order of its rows; a batch holds whole records."""
    if batch.num_rows == 0:
        return
    starts = np.flatnonzero(batch.column("record_row").to_numpy(zero_copy_only=False) == 0)
    ends = np.append(starts[1:], batch.num_rows)
    there = [name for name in OF_RECORD if name != ORIGIN or has_origin(batch.schema, layout.names)]
    firsts = batch.select(there).take(pa.array(starts)).to_pylist()
    arrays = {name: batch.column(file_name) for name, file_name in layout.names.items()}
    for first, start, end in zip(firsts, starts.tolist(), ends.tolist(), strict=True):
        rows = end - start
        odd = _odd(first["record_odd"])
        values: dict[str, FlatColumn | Tag] = {}
        for name, said in msgspec.json.decode(first["record_columns"], type=dict[str, str]).items():
            tag, column = TAGS[said], layout.columns[name]
            if tag is not Tag.VALUES:
                values[name] = tag
            elif name in odd:
                values[name] = flat_of(column, odd[name])
            else:
                values[name] = flat_of(column, arrays[name].slice(start, 1 if column.per_record else rows))
        group = RecordedGroup(layout.columns, values, first["env_id"], first["record_uneven"])
        yield ArchivedRecord(
            **{
                name: first[name]
                for name in (
                    "producer_id",
                    "sequence",
                    "env_name",
                    "group_id",
                    "group_size",
                    "min_policy_version",
                    "max_policy_version",
                    "t_created_ns",
                    "t_publish_ns",
                    "split",
                    "redelivered",
                )
            },
            rows=rows,
            session=layout.about.get("shmbridge.session", ""),
            group=group,
            origin=None if (origin := first.get(ORIGIN)) is None else Origin(**origin),
        )


def flat_of(column: Column, array: pa.Array) -> FlatColumn:
    """Returns some rows of a column in the form of a lane; the values of null rows are 0."""
    valid = None if array.null_count == 0 else array.is_valid().to_numpy(zero_copy_only=False)
    rows = len(array)
    if column.kind is Kind.SCALAR:
        values = _numbers(array, column.dtype)
        if valid is not None:
            values = np.where(valid, values, np.zeros(1, column.dtype))
        return FlatColumn(rows, values, valid=valid)
    if column.kind is Kind.BYTES:
        offsets, raw = _offsets_of(array), array.buffers()[2]
        values = np.frombuffer(raw or b"", np.uint8)[offsets[0] : offsets[-1]]
        return FlatColumn(rows, values, _lengths(offsets), valid=valid)
    offsets = array.offsets.to_numpy()
    child = array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0]))
    lengths = _lengths(offsets)
    if column.kind is Kind.LIST:
        return FlatColumn(rows, _numbers(child, column.dtype), lengths, valid=valid)
    if column.kind is Kind.LIST_LIST:
        inner = child.offsets.to_numpy()
        values = child.values.slice(int(inner[0]), int(inner[-1] - inner[0]))
        return FlatColumn(rows, _numbers(values, column.dtype), lengths, _lengths(inner), valid=valid)
    keys, numbers = child.field(0), child.field(1)  # of the slice
    key_offsets, raw = _offsets_of(keys), keys.buffers()[2]
    text = bytes(memoryview(raw or b"")[key_offsets[0] : key_offsets[-1]])
    return FlatColumn(rows, _numbers(numbers, column.dtype), lengths, _lengths(key_offsets), text, valid)


def _odd(raw: bytes | None) -> dict[str, pa.Array]:
    if raw is None:
        return {}
    batches = [
        pa.ipc.open_stream(each).read_next_batch() for each in msgspec.msgpack.decode(raw, type=list[bytes])
    ]
    return {batch.schema.names[0]: batch.column(0) for batch in batches}


def _offsets_of(text: pa.Array) -> Array:
    """Returns the offsets of a slice of text or bytes."""
    if len(text) == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(text.buffers()[1], np.int32)[text.offset : text.offset + len(text) + 1]


def _lengths(offsets: Array) -> Array:
    return np.diff(offsets).astype(np.uint32)


def _numbers(array: pa.Array, dtype: np.dtype[Any]) -> Array:
    """Returns an array's values, bit by bit, whatever lies under its nulls."""
    raw = array.buffers()[1]
    if len(array) == 0 or raw is None:
        return np.zeros(len(array), dtype)
    if dtype == np.bool_:
        bits = np.unpackbits(np.frombuffer(raw, np.uint8), bitorder="little")
        return bits[array.offset : array.offset + len(array)].astype(np.bool_)
    return np.frombuffer(raw, dtype)[array.offset : array.offset + len(array)]
