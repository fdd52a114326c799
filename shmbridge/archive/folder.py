"""A folder of parts: finished, read with every record once, and copied into one file.

A part is `part-000000.arrows` while it is written, then `.parquet` or `.arrow`.

A finished file is written beside the stream and renamed, and only then is the stream removed: whoever is
killed, one of them is whole.
"""

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from shmbridge.archive.files import CheckedFile, Damage, ReadStream, SealedFile, read_stream
from shmbridge.archive.format import (
    KEYS,
    OF_RECORD,
    ORIGIN,
    TAGS,
    Layout,
    SeenKeys,
    checked_keys,
    file_type,
    has_origin,
    marked,
    reading,
    writing,
)
from shmbridge.errors import ArchiveTaken, ArchiveUnreadable, ArchiveUnwritable, InvalidRecord, shown
from shmbridge.put import FlatColumn, RecordedGroup
from shmbridge.record import Origin
from shmbridge.record.arrow import only_batch
from shmbridge.schema import Column, Kind, Tag

log = logging.getLogger(__name__)

Format = Literal["parquet", "arrow"]
STREAM, WRITING, DAMAGED = ".arrows", ".writing", ".damaged"
_NAME = re.compile(r"part-(\d{6,})\.(arrows|parquet|arrow)")
_ROW_GROUP_BYTES = 32 << 20
_LOCK = ".recording"
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Part:
    """One part of a folder; `is_stream` while it is not finished."""

    number: int
    path: Path

    @property
    def is_stream(self) -> bool:
        """Whether it is still a stream, of a living recorder or of a killed one."""
        return self.path.suffix == STREAM

    def opened(self) -> tuple[Layout, Iterator[pa.RecordBatch]] | None:
        """Returns its layout and its batches, each of whole records; None for a stream that has not begun.

        Every byte is compared with its checksum before Arrow sees it, and every batch is checked in full
        before it is handed out: what lies in a damaged one could end the process. Raises ArchiveUnreadable,
        which the batches may too; FileNotFoundError.
        """
        with reading(self.path):
            if not self.is_stream:
                schema, batches = _read_finished(self.path)
            elif (stream := read_stream(self.path)) is None:
                return None
            elif stream.schema is None:
                raise self._damaged(stream.damage())
            else:
                schema, batches = stream.schema, self._to_its_end(stream)
            layout = Layout.of_schema(schema, self.path)
        return layout, self._checked(layout.checked, batches)

    def record_keys(self) -> Iterator[tuple[str, int]]:
        """Yields the key of each record; reads three columns, where the format allows it.

        Raises as opened.
        """
        if self.path.suffix == ".parquet":
            with reading(self.path):
                _, batches = _read_finished(self.path, list(KEYS))
            keys = self._checked(checked_keys, batches)
        else:
            opened = self.opened()
            keys = iter(()) if opened is None else opened[1]
        for batch in keys:
            columns = batch.select(KEYS).to_pydict()
            for producer_id, sequence, row in zip(*(columns[name] for name in KEYS), strict=True):
                if row == 0:
                    yield producer_id, sequence

    def _checked(
        self, check: Callable[[pa.RecordBatch], pa.RecordBatch], batches: Iterator[pa.RecordBatch]
    ) -> Iterator[pa.RecordBatch]:
        while True:
            with reading(self.path):
                batch = next(batches, None)
                if batch is None:
                    return
                batch = check(batch)
            yield batch

    def _to_its_end(self, stream: ReadStream) -> Iterator[pa.RecordBatch]:
        yield from stream.batches
        if damage := stream.damage():
            raise self._damaged(damage)

    def _damaged(self, damage: Damage | None) -> ArchiveUnreadable:
        return ArchiveUnreadable(
            f"{self.path} is damaged: {damage}",
            hint=f"once its recorder is gone, `shmbridge export {self.path.parent}` keeps what stands before",
        )


def parts_of(folder: Path) -> list[Part]:
    """Returns the parts of a folder in order; of one number the finished files before the stream.

    Several of one number are those of a recorder that was killed as it finished one, whose records come
    twice, or those of two folders in one.
    """
    found = [
        Part(int(match[1]), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := _NAME.fullmatch(path.name))
    ]
    return sorted(found, key=lambda part: (part.number, part.is_stream, part.path.name))


def path_of(folder: Path, number: int, suffix: str) -> Path:
    """Returns the path of a part."""
    return folder / f"part-{number:06d}{suffix}"


@contextmanager
def recording(folder: Path) -> Iterator[None]:
    """Holds a folder for one recorder; the kernel lets it go when the process ends. Raises ArchiveTaken."""
    fd = os.open(folder / _LOCK, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ArchiveTaken(
                f"another recorder writes to {folder}", hint="end it, or give another folder"
            ) from None
        yield
    finally:
        os.close(fd)


def finish_left(folder: Path, kind: Format) -> list[Path]:
    """Finishes the streams that killed recorders left in a folder; returns the finished files.

    For the holder of `recording`. Raises OSError; the streams are kept then.
    """
    for left in folder.glob(f"*{WRITING}"):
        if _NAME.fullmatch(left.name.removesuffix(WRITING)):
            left.unlink()
    parts, found = parts_of(folder), []
    for part in [part for part in parts if part.is_stream]:
        finished = [each for each in parts if each.number == part.number and not each.is_stream]
        if finished and (session := _session(part)) and session in [*map(_session, finished)]:
            part.path.unlink()  # killed between the rename and the removal
            continue
        if finished:  # of another folder
            number = max(each.number for each in parts) + 1
            part = Part(number, part.path.rename(path_of(folder, number, STREAM)))
            parts.append(part)
        found.append(finish(part, kind))
    return [path for path in found if path is not None]


def _session(part: Part) -> str | None:
    """Returns the session of a part's recorder; None for a stream without. Raises ArchiveUnreadable."""
    try:
        opened = part.opened()
    except ArchiveUnreadable:
        if not part.is_stream:
            raise
        return None
    return None if opened is None else opened[0].about.get("shmbridge.session")


def finish(part: Part, kind: Format) -> Path | None:
    """Turns a stream into a finished file; None, and no stream any more, if it holds nothing.

    A stream with a damaged message is kept under another name, beside what could be read of it. Blocks for
    the disk. Raises OSError; the stream is kept then.
    """
    stream = read_stream(part.path)
    first = None if stream is None else next(stream.batches, None)
    if stream is None or stream.schema is None or first is None:
        _put_away(part.path, None if stream is None else stream.damage())
        return None
    done = part.path.with_suffix(f".{kind}")
    writing = done.with_name(done.name + WRITING)
    try:
        with FinishedFile(writing, stream.schema, kind) as file:
            file.write(first)
            for batch in stream.batches:
                file.write(batch)
        os.replace(writing, done)
    except BaseException:
        with suppress(OSError):
            writing.unlink(missing_ok=True)
        raise
    _sync(done.parent)
    _put_away(part.path, stream.damage())
    return done


def _put_away(stream: Path, damage: Damage | None) -> None:
    """Removes a stream that is finished; keeps it under another name if some of it could not be read."""
    if damage:
        kept = stream.with_name(stream.name + DAMAGED)
        os.replace(stream, kept)
        log.error("%s is damaged: %s; it is kept as %s", stream, damage, kept)
    else:
        stream.unlink()


def keys_of(folder: Path) -> SeenKeys:
    """Returns the keys of all records of a folder; reads two columns of each part."""
    seen = SeenKeys()
    for part in parts_of(folder):
        try:
            keys = [*part.record_keys()]
        except FileNotFoundError:  # finished by its recorder since the folder was listed
            again = [each for each in parts_of(folder) if each.number == part.number]
            keys = [key for each in again for key in each.record_keys()]
        for producer_id, sequence in keys:
            seen.add(producer_id, sequence)
    return seen


class _Writer(Protocol):
    def write_table(self, table: pa.Table) -> object: ...
    def close(self) -> None: ...


class FinishedFile:
    """A Parquet or Arrow file under way, in groups of whole records; sealed and on disk when its `with` block
    ends.
    """

    def __init__(self, path: Path, schema: pa.Schema, kind: Format) -> None:
        self._path, self._schema = path, marked(schema)
        self._held: list[pa.RecordBatch] = []
        self._bytes = 0
        self._file = SealedFile(path)
        sink = pa.PythonFile(self._file, mode="w")
        self._writer: _Writer = (
            pq.ParquetWriter(sink, self._schema, compression="zstd", use_dictionary=_dictionaries(schema))
            if kind == "parquet"
            else pa.ipc.new_file(sink, self._schema)
        )

    def write(self, batch: pa.RecordBatch) -> None:
        """Adds a batch of whole records."""
        self._held.append(batch)
        self._bytes += batch.nbytes
        if self._bytes >= _ROW_GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        if self._held:
            table = pa.Table.from_batches(self._held, self._schema).combine_chunks()
            self._held, self._bytes = [], 0
            if isinstance(self._writer, pq.ParquetWriter):
                self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
            else:
                self._writer.write_table(table)

    def __enter__(self) -> "FinishedFile":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            try:
                if kind is None:
                    self._flush()
                    self._file.hold()
            finally:
                self._writer.close()
            if kind is None:
                self._file.seal()
        finally:
            self._file.close()
        if kind is None:
            _sync(self._path)


def _dictionaries(schema: pa.Schema) -> list[str]:
    """Returns the columns to encode by dictionary: text, which repeats; of floats it could merge NaNs."""
    return [field.name for field in schema if pa.types.is_string(field.type)]


def _read_finished(path: Path, names: list[str] | None = None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    """Returns the schema of a finished part, and its batches; of Parquet only the columns `names`, if any."""
    file = CheckedFile(path)
    with file.opening():
        opened = _open_parquet(file, names) if path.suffix == ".parquet" else _open_arrow(file)
    file.check_schema(opened[0])
    return opened


def _open_parquet(file: CheckedFile, names: list[str] | None) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    parquet = pq.ParquetFile(pa.PythonFile(file, mode="r"), pre_buffer=True)

    def batches() -> Iterator[pa.RecordBatch]:
        with file:
            for group in range(parquet.num_row_groups):
                yield from parquet.read_row_group(group, columns=names).combine_chunks().to_batches()

    return parquet.schema_arrow, batches()


def _open_arrow(file: CheckedFile) -> tuple[pa.Schema, Iterator[pa.RecordBatch]]:
    reader = pa.ipc.open_file(pa.PythonFile(file, mode="r"))

    def batches() -> Iterator[pa.RecordBatch]:
        with file:
            yield from map(reader.get_batch, range(reader.num_record_batches))

    return reader.schema, batches()


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


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
                with reading(path):
                    record = next(records, None)
                if record is None:
                    break
                if seen.add(record.producer_id, record.sequence):
                    yield record


def counts_of(folder: str | Path) -> dict[str, int]:
    """Returns how many records there are of each producer; reads a few columns. Raises as read_archive."""
    folder = Path(folder)
    with reading(folder):
        return keys_of(folder).counts()


def layout_of(folder: str | Path) -> Layout:
    """Returns a layout with the columns of all parts. Raises ArchiveUnreadable."""
    found: Layout | None = None
    for layout, _, path in batches_of(folder):
        with reading(path):
            found = layout if found is None else found.with_columns(layout.columns)
    if found is None:
        raise ArchiveUnreadable(f"{folder} holds no record", hint="record first, or name another folder")
    return found


def batches_of(folder: str | Path) -> Iterator[tuple[Layout, Iterator[pa.RecordBatch], Path]]:
    """Yields each part's layout, its batches, and its path, in order. Raises as read_archive."""
    folder = Path(folder)
    with reading(folder):
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
            with reading(part.path):
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


@dataclass
class Exported:
    """What a folder holds: records, and the last sequence of each producer; what was finished in it."""

    records: int = 0
    rows: int = 0
    again: int = 0  # records that were there twice, left out of a copy
    reached: dict[str, int] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)  # records of each producer
    finished: list[str] = field(default_factory=list)
    out: str | None = None


def finish_folder(folder: str | Path, kind: Format = "parquet") -> Exported:
    """Finishes the streams in a folder whose recorder is gone, and says what it holds. Blocks for the disk.

    Raises ArchiveTaken while a recorder writes to it, ArchiveUnreadable, ArchiveUnwritable, ArchiveFull.
    """
    folder = Path(folder)
    with reading(folder):
        found = parts_of(folder)
    if not found:
        raise ArchiveUnreadable(
            f"{folder} holds no part-*.parquet, .arrow or .arrows",
            hint="name a folder that `shmbridge record` or a Recorder wrote",
        )
    with writing(folder), recording(folder):
        finished = [str(path) for path in finish_left(folder, kind)]
    seen = keys_of(folder)
    counts = seen.counts()
    return Exported(sum(counts.values()), reached=seen.reached(), counts=counts, finished=finished)


def copy_folder(folder: str | Path, out: str | Path, kind: Format = "parquet") -> Exported:
    """Copies a folder into one file with the columns of all its parts. Beside a living recorder too.

    Blocks for the disk. The file appears when it is whole; one of that name is replaced.

    Raises ArchiveUnreadable, ArchiveUnwritable, ArchiveFull.
    """
    out, seen, done = Path(out), SeenKeys(), Exported(out=str(out))
    layout = layout_of(folder)
    if out.exists() and not out.is_file():
        raise ArchiveUnwritable(f"{out} is not a file", hint="give the path of the file to write")
    under_way = out.with_name(f"{out.name}.{os.getpid()}{WRITING}")
    try:
        with writing(out):
            with FinishedFile(under_way, layout.schema, kind) as file:
                for of_part, batches, path in batches_of(folder):
                    for batch in batches:
                        with reading(path):
                            new = _new_rows(batch, seen, done)
                            rows = _with_columns(new, of_part, layout)
                        if new.num_rows:
                            done.rows += new.num_rows
                            file.write(rows)
            os.replace(under_way, out)
    except BaseException:
        with suppress(OSError):
            under_way.unlink(missing_ok=True)
        raise
    done.reached, done.counts = seen.reached(), seen.counts()
    done.records = sum(done.counts.values())
    return done


def _new_rows(batch: pa.RecordBatch, seen: SeenKeys, done: Exported) -> pa.RecordBatch:
    """Returns the rows of the records that were not seen before."""
    row = batch.column("record_row").to_numpy(zero_copy_only=False)
    starts = np.flatnonzero(row == 0)
    firsts = batch.select(["producer_id", "sequence"]).take(pa.array(starts)).to_pydict()
    new = [
        seen.add(producer_id, sequence)
        for producer_id, sequence in zip(firsts["producer_id"], firsts["sequence"], strict=True)
    ]
    done.again += len(new) - sum(new)
    if all(new):
        return batch
    rows = np.diff(np.append(starts, len(row)))
    return batch.filter(pa.array(np.repeat(np.array(new, np.bool_), rows)))


def _with_columns(batch: pa.RecordBatch, of_part: Layout, layout: Layout) -> pa.RecordBatch:
    """Returns the batch with the columns of `layout`, in its order; its part may name them otherwise."""
    part_names: dict[str, str | None] = dict.fromkeys(OF_RECORD)
    if not has_origin(batch.schema, of_part.names):
        del part_names[ORIGIN]
    part_names |= {layout.names[name]: here for name, here in of_part.names.items()}
    try:
        arrays = [
            batch.column(part_names[each.name] or each.name).cast(each.type)
            if each.name in part_names
            else pa.nulls(batch.num_rows, each.type)
            for each in layout.schema
        ]
    except pa.ArrowException as wrong:
        raise ArchiveUnreadable(
            f"a column has two types in the parts of this folder: {wrong}",
            hint="export the parts of each type from a folder of their own",
        ) from wrong
    return pa.RecordBatch.from_arrays(arrays, schema=layout.schema)
