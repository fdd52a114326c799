"""Records to Arrow: copies the columns of several records into one RecordBatch of an archive."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from shmbridge.archive.layout import ORIGIN_TYPE, Layout, file_type
from shmbridge.errors import RecordTooBig
from shmbridge.put import FlatColumn
from shmbridge.record import Origin, ReadableRecord, RecordMeta
from shmbridge.schema import Column, Columns, Kind, Tag

Array = np.ndarray[Any, Any]
MOST_VALUES = 2**31 - 1  # of one column of one message, which Arrow counts in int32
MOST_BYTES = 4 << 20  # of one message with several records: what caches hold is copied fastest
_SAID = {Tag.VALUES: "values", Tag.NULL: "null", Tag.EMPTY_LIST: "[]", Tag.EMPTY_MAP: "{}"}
TAGS = {said: tag for tag, said in _SAID.items()}


class Arena:
    """Memory for the values of one message after another: fresh memory costs more than the copy into it."""

    def __init__(self) -> None:
        self._memory, self._used = np.empty(2 * MOST_BYTES, np.uint8), 0

    def begin(self) -> None:
        """Gives all of it free; the message before is written, and nothing of it is kept."""
        self._used = 0

    def empty(self, count: int, dtype: np.dtype[Any]) -> Array:
        """Returns room for so many values, in the arena while it has room."""
        begin, size = self._used, count * dtype.itemsize
        if begin + size > len(self._memory):
            return np.empty(count, dtype)
        self._used = (begin + size + 63) & ~63
        return self._memory[begin : begin + size].view(dtype)


@dataclass(slots=True)
class FlatRecord:
    """A record's columns, flat and in place: views of the lane are kept until it is encoded.

    `bytes` are those of all values. Not changed once it is made.
    """

    meta: RecordMeta
    rows: int
    table: Columns
    values: dict[str, FlatColumn]
    tags: tuple[tuple[str, Tag], ...]
    bytes: int


def flat_record(record: ReadableRecord) -> FlatRecord:
    """Returns a record's columns, flat. Raises RecordUnreadable."""
    table, names = record._lane_columns, record.columns
    values = {name: _flat(record, table[name]) for name in names}
    tags = tuple(
        (name, tag) for name in table if name not in values and (tag := record.tag(name)) is not None
    )
    size = 0
    for column in values.values():
        size += column.values.nbytes
    return FlatRecord(record.meta, len(record), table, values, tags, size)


def in_messages(records: Sequence[FlatRecord]) -> Iterator[list[FlatRecord]]:
    """Yields the records in order, as many at a time as belong into one message."""
    message: list[FlatRecord] = []
    size = 0
    for record in records:
        if message and size + record.bytes > MOST_BYTES:
            yield message
            message, size = [], 0
        message.append(record)
        size += record.bytes
    if message:
        yield message


def batch_of(records: Sequence[FlatRecord], layout: Layout, arena: Arena | None = None) -> pa.RecordBatch:
    """Returns the records as a RecordBatch with the layout's schema, one row a trajectory.

    A copy, in `arena` until its next message; with one record, values may be in place.
    """
    rows = [record.rows for record in records]
    total = sum(rows)
    present = set().union(*(record.values for record in records))
    odd = [_odd(record) for record in records]
    arrays = [*_of_records(records, rows, odd)]
    for name, column in layout.columns.items():
        if name not in present:
            arrays.append(layout.nulls(name, total))
            continue
        flat = [
            None if skipped is not None and name in skipped[0] else record.values.get(name)
            for record, skipped in zip(records, odd, strict=True)
        ]
        if column.per_record:
            row_of = pa.array(np.repeat(np.arange(len(rows), dtype=np.int32), rows))
            arrays.append(array_of(column, flat, [1] * len(records)).take(row_of))
        else:
            arrays.append(array_of(column, flat, rows, arena))
    return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)


def _of_records(records: Sequence[FlatRecord], rows: list[int], odd: Sequence[Any]) -> Iterator[pa.Array]:
    """Yields the columns of layout.OF_RECORD, in that order."""
    metas = [record.meta for record in records]
    row_of = pa.array(np.repeat(np.arange(len(rows), dtype=np.int32), rows))

    def each(values: list[Any], kind: pa.DataType) -> pa.Array:
        return pa.array(values, kind).take(row_of)

    def number(name: str, dtype: type) -> pa.Array:
        return _plain(np.repeat(np.array([getattr(meta, name) for meta in metas], dtype), rows))

    yield each([meta.producer_id for meta in metas], pa.utf8())
    yield number("sequence", np.int64)
    yield _plain(np.concatenate([np.arange(count, dtype=np.int32) for count in rows]))
    yield each([meta.env_name for meta in metas], pa.utf8())
    yield each([meta.env_id for meta in metas], pa.int32())
    yield each([meta.group_id for meta in metas], pa.utf8())
    yield number("group_size", np.int32)
    for name in ("min_policy_version", "max_policy_version", "t_created_ns", "t_publish_ns"):
        yield number(name, np.int64)
    yield each([meta.split for meta in metas], pa.utf8())
    yield number("redelivered", np.bool_)
    yield each([_columns_said(tuple(record.values), record.tags) for record in records], pa.utf8())
    yield number("uneven", np.bool_)
    if all(skipped is None for skipped in odd):
        yield pa.nulls(sum(rows), pa.binary())
    else:
        first = [
            None if skipped is None or row else skipped[1]
            for skipped, count in zip(odd, rows, strict=True)
            for row in range(count)
        ]
        yield pa.array(first, pa.binary())
    if all(meta.origin is None for meta in metas):
        yield pa.nulls(sum(rows), ORIGIN_TYPE)
    else:
        yield each([_origin_said(meta.origin) for meta in metas], ORIGIN_TYPE)


def _origin_said(origin: Origin | None) -> dict[str, str | int] | None:
    return None if origin is None else {field.name: getattr(origin, field.name) for field in ORIGIN_TYPE}


@lru_cache
def _columns_said(names: tuple[str, ...], tags: tuple[tuple[str, Tag], ...]) -> str:
    said = dict.fromkeys(names, "values") | {name: _SAID[tag] for name, tag in tags}
    return msgspec.json.encode(said).decode()


def _odd(record: FlatRecord) -> tuple[set[str], bytes] | None:
    """Returns the columns that have not one entry a row, and an Arrow stream of each; None without any."""
    if not record.meta.uneven:
        return None
    names = [
        name
        for name, flat in record.values.items()
        if not record.table[name].per_record and flat.entries != record.rows
    ]
    if not names:
        return None
    streams = []
    for name in names:
        array = array_of(record.table[name], [record.values[name]], [record.values[name].entries])
        batch = pa.RecordBatch.from_arrays([array], names=[name])
        streams.append(bytes(batch.schema.serialize()) + bytes(batch.serialize()) + b"\0" * 8)
    return set(names), msgspec.msgpack.encode(streams)


# -- one column


def array_of(
    column: Column, flat: Sequence[FlatColumn | None], rows: Sequence[int], arena: Arena | None = None
) -> pa.Array:
    """Returns one column of several records, one after the other; null rows where a record has it not."""
    total = sum(rows)
    bitmap = _bitmap(flat, rows)
    found = [each for each in flat if each is not None]
    values = _joined([each.values for each in found], column.dtype, arena)
    kind = file_type(column)
    if column.kind is Kind.SCALAR:
        if len(found) != len(flat):
            nothing = [np.zeros(count, column.dtype) for count in rows]
            values = np.concatenate(
                [nothing[at] if each is None else each.values for at, each in enumerate(flat)]
            )
        return pa.Array.from_buffers(kind, total, [bitmap, _buffer(values)])
    lengths = np.concatenate(
        [
            np.zeros(count, np.uint32) if each is None else each.lengths
            for each, count in zip(flat, rows, strict=True)
        ]
    )
    offsets = _offsets(lengths)
    if column.kind is Kind.BYTES:
        return pa.Array.from_buffers(kind, total, [bitmap, offsets, pa.py_buffer(values)])
    child = _plain(values)
    if column.kind is Kind.LIST_LIST:
        inner = _joined([each.inner for each in found], np.dtype(np.uint32))
        child = pa.Array.from_buffers(kind.value_type, len(inner), [None, _offsets(inner)], children=[child])
    elif column.kind is Kind.MAP:
        inner = _joined([each.inner for each in found], np.dtype(np.uint32))
        raw = pa.py_buffer(b"".join(each.keys for each in found))
        keys = pa.Array.from_buffers(pa.utf8(), len(inner), [None, _offsets(inner), raw])
        child = pa.StructArray.from_arrays([keys, child], fields=list(kind.value_type))
    return pa.Array.from_buffers(kind, total, [bitmap, offsets], children=[child])


def _flat(record: ReadableRecord, column: Column) -> FlatColumn:
    """Returns a column as it lies in the lane; text, bytes and maps are copies."""
    name, value = column.name, record[column.name]
    if column.kind is Kind.SCALAR:
        return FlatColumn(len(value), value, valid=record.valid(name))
    if column.kind is Kind.LIST:
        return FlatColumn(len(value), value.values, value.lengths, valid=value.valid)
    if column.kind is Kind.LIST_LIST:
        return FlatColumn(len(value), value.values, value.lengths, value.inner_lengths, valid=value.valid)
    if column.kind is Kind.MAP:
        keys = [key.encode() for row in value for key in row]
        numbers = np.array([number for row in value for number in row.values()], column.dtype)
        return FlatColumn(
            len(value), numbers, _lengths(value), _lengths(keys), b"".join(keys), record.valid(name)
        )
    rows = [b"" if row is None else row.encode() if isinstance(row, str) else row for row in value]
    raw = np.frombuffer(b"".join(rows), np.uint8)
    return FlatColumn(len(rows), raw, _lengths(rows), valid=record.valid(name))


def _lengths(rows: Sequence[Any]) -> Array:
    return np.fromiter(map(len, rows), np.uint32, len(rows))


def _joined(parts: Sequence[Any], dtype: np.dtype[Any], arena: Arena | None = None) -> Array:
    if len(parts) == 1:
        return np.ascontiguousarray(parts[0])
    if not parts or arena is None:
        return np.concatenate(parts) if parts else np.empty(0, dtype)
    room = arena.empty(sum(map(len, parts)), parts[0].dtype)
    return np.concatenate(parts, out=room)


def _offsets(lengths: Array) -> pa.Buffer:
    offsets = np.zeros(len(lengths) + 1, np.int64)
    np.cumsum(lengths, out=offsets[1:])
    if offsets[-1] > MOST_VALUES:
        raise RecordTooBig(
            f"{offsets[-1]} values in one column of one record, and a file's column counts {MOST_VALUES}",
            hint="put smaller groups; or on_full_disk='skip' leaves such a record out and counts it",
        )
    return pa.py_buffer(offsets.astype(np.int32))


def _buffer(values: Array) -> pa.Buffer:
    packed = np.packbits(values, bitorder="little") if values.dtype == np.bool_ else values
    return pa.py_buffer(np.ascontiguousarray(packed))


def _plain(values: Array) -> pa.Array:
    kind = pa.bool_() if values.dtype == np.bool_ else pa.from_numpy_dtype(values.dtype)
    return pa.Array.from_buffers(kind, len(values), [None, _buffer(values)])


def _bitmap(flat: Sequence[FlatColumn | None], rows: Sequence[int]) -> pa.Buffer | None:
    if all(each is not None and each.valid is None for each in flat):
        return None
    valid = [
        np.zeros(count, np.bool_)
        if each is None
        else np.ones(count, np.bool_)
        if each.valid is None
        else each.valid
        for each, count in zip(flat, rows, strict=True)
    ]
    return pa.py_buffer(np.packbits(np.concatenate(valid), bitorder="little"))
