"""Reads an archive: every record once, in recorded order, in the form that `put` takes back.

Every batch comes checked (`Part.opened`), and so does what a record holds inside.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa

from shmbridge.archive import refusals
from shmbridge.archive.encode import TAGS
from shmbridge.archive.keys import SeenKeys
from shmbridge.archive.layout import OF_RECORD, ORIGIN, Layout, file_type, has_origin
from shmbridge.archive.parts import keys_of, parts_of
from shmbridge.errors import ArchiveUnreadable, InvalidRecord, shown
from shmbridge.put import FlatColumn, RecordedGroup
from shmbridge.record import Origin
from shmbridge.record.arrow import only_batch
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


_OF_ITSELF = tuple(ArchivedRecord.__annotations__)[:11]
_PLAUSIBLE: dict[str, Callable[[Any], bool]] = {
    "split": lambda split: split in ("train", "eval"),
    "sequence": lambda sequence: sequence >= 0,
    "t_publish_ns": lambda at_ns: at_ns >= 0,
    "env_id": lambda number: number is None or number >= 0,
}


def read_archive(folder: str | Path) -> Iterator[ArchivedRecord]:
    """Yields every record of a folder once, by (producer_id, sequence), in recorded order.

    Blocks for the disk; any thread. Reads beside a living recorder, up to the last whole message.

    Raises:
        ArchiveUnreadable: the folder holds no part, or a part is no archive of this build.
    """
    seen = SeenKeys()
    for layout, batches, path in batches_of(folder):
        for batch in batches:
            records = _records_of(batch, layout)
            while True:
                with refusals.reading(path):
                    record = next(records, None)
                if record is None:
                    break
                if seen.add(record.producer_id, record.sequence):
                    yield record


def counts_of(folder: str | Path) -> dict[str, int]:
    """Returns how many records there are of each producer; reads a few columns. Raises as read_archive."""
    folder = Path(folder)
    with refusals.reading(folder):
        return keys_of(folder).counts()


def layout_of(folder: str | Path) -> Layout:
    """Returns a layout with the columns of all parts. Raises ArchiveUnreadable."""
    found: Layout | None = None
    for layout, _, path in batches_of(folder):
        with refusals.reading(path):
            found = layout if found is None else found.with_columns(layout.columns)
    if found is None:
        raise ArchiveUnreadable(f"{folder} holds no record", hint="record first, or name another folder")
    return found


def batches_of(folder: str | Path) -> Iterator[tuple[Layout, Iterator[pa.RecordBatch], Path]]:
    """Yields each part's layout, its batches, and its path, in order. Raises as read_archive."""
    folder = Path(folder)
    with refusals.reading(folder):
        parts = parts_of(folder)
    if not parts:
        raise ArchiveUnreadable(
            f"{folder} holds no part-*.parquet, .arrow or .arrows",
            hint="name a folder that `shmbridge record` or a Recorder wrote",
        )
    for part in parts:
        try:
            opened = part.opened()
        except FileNotFoundError:  # finished by its recorder since the folder was listed
            part = next((again for again in parts_of(folder) if again.number == part.number), part)
            with refusals.reading(part.path):
                opened = part.opened() if part.path.exists() else None
        if opened is not None:
            yield *opened, part.path


def _records_of(batch: pa.RecordBatch, layout: Layout) -> Iterator[ArchivedRecord]:
    """Yields the records of a checked batch in the order of its rows; a batch holds whole records.

    Raises InvalidRecord, which names the record.
    """
    if batch.num_rows == 0:
        return
    rows_said = batch.column("record_row").to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(rows_said == 0)
    ends = np.append(starts[1:], batch.num_rows)
    wanted = np.arange(batch.num_rows) - (np.repeat(starts, ends - starts) if len(starts) else 1)
    if not np.array_equal(rows_said, wanted):
        row = int(np.flatnonzero(rows_said != wanted)[0])
        raise InvalidRecord(
            f"record_row is {rows_said[row]} in row {row}, where {max(wanted[row], 0)} follows"
        )
    there = [name for name in OF_RECORD if name != ORIGIN or has_origin(batch.schema, layout.names)]
    firsts = batch.select(there).take(pa.array(starts)).to_pylist()
    arrays = {name: batch.column(file_name) for name, file_name in layout.names.items()}
    for first, start, end in zip(firsts, starts.tolist(), ends.tolist(), strict=True):
        try:
            record = _record(first, arrays, start, end - start, layout)
        except (InvalidRecord, msgspec.MsgspecError, ValueError) as wrong:
            key = f"record {first['sequence']} of {shown(first['producer_id'])}"
            why = wrong.message if isinstance(wrong, InvalidRecord) else wrong
            raise InvalidRecord(f"{key}: {why}", column=getattr(wrong, "column", "")) from None
        yield record


def _record(
    first: dict[str, Any], arrays: dict[str, pa.Array], start: int, rows: int, layout: Layout
) -> ArchivedRecord:
    """Returns the record that has these rows of a batch; `first` is what its first row says of it."""
    for name, is_true in _PLAUSIBLE.items():
        if not is_true(first[name]):
            raise InvalidRecord(f"its {name} is {shown(first[name])}", column=name)
    said = msgspec.json.decode(first["record_columns"], type=dict[str, str])
    if unknown := said.keys() - layout.columns.keys() or {*said.values()} - TAGS.keys():
        raise InvalidRecord(f"record_columns says {shown(min(unknown))}", column="record_columns")
    odd = {} if first["record_odd"] is None else _odd(first["record_odd"], said, layout)
    if odd and not first["record_uneven"]:
        raise InvalidRecord("it has record_odd, and is not uneven", column="record_odd")
    values: dict[str, FlatColumn | Tag] = {}
    for name, tag in said.items():
        column = layout.columns[name]
        if TAGS[tag] is not Tag.VALUES:
            values[name] = TAGS[tag]
        elif name in odd:
            values[name] = flat_of(column, odd[name])
        else:
            values[name] = flat_of(column, arrays[name].slice(start, 1 if column.per_record else rows))
    origin = first.get(ORIGIN)
    return ArchivedRecord(
        **{name: first[name] for name in _OF_ITSELF},
        rows=rows,
        session=layout.about.get("shmbridge.session", ""),
        group=RecordedGroup(layout.columns, values, first["env_id"], first["record_uneven"]),
        origin=None if origin is None else Origin(**origin),
    )


def _odd(raw: bytes, said: dict[str, str], layout: Layout) -> dict[str, pa.Array]:
    """Returns the columns that have another number of rows than their record. Raises InvalidRecord."""
    types = {
        name: file_type(column)
        for name, column in layout.columns.items()
        if name != "tokens" and not column.per_record and said.get(name) == "values"
    }
    odd: dict[str, pa.Array] = {}
    for number, stream in enumerate(msgspec.msgpack.decode(raw, type=list[bytes])):
        try:
            batch = only_batch(stream, types, nullable=types)
            if len(batch.schema.names) != 1 or batch.schema.names[0] in odd:
                raise InvalidRecord(f"columns {shown(batch.schema.names)}, where one new column belongs")
        except InvalidRecord as wrong:
            raise InvalidRecord(
                f"record_odd, stream {number}: {wrong.message}", column=wrong.column
            ) from None
        odd[batch.schema.names[0]] = batch.column(0)
    return odd


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
