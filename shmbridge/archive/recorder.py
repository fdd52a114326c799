"""Records written into a folder: encoded as Arrow, as a tap of a hub, or from outside beside its consumer."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import msgspec
import numpy as np
import pyarrow as pa

from shmbridge.archive.files import StreamFile
from shmbridge.archive.folder import (
    STREAM,
    Format,
    Part,
    finish,
    finish_left,
    keys_of,
    parts_of,
    path_of,
    recording,
)
from shmbridge.archive.format import ORIGIN_TYPE, SAID, Layout, file_type, is_full, unwritable, writing
from shmbridge.config import parse_size
from shmbridge.errors import ArchiveFull, BadArgument, Closed, RecordTooBig, RecordUnreadable
from shmbridge.put import FlatColumn
from shmbridge.record import Origin, ReadableRecord, RecordMeta
from shmbridge.schema import Column, Columns, Kind, Tag, columns_of
from shmbridge.watch.observer import Observer, give_way

if TYPE_CHECKING:
    import pyarrow as pa

Array = np.ndarray[Any, Any]
MOST_VALUES = 2**31 - 1  # of one column of one message, which Arrow counts in int32
MOST_BYTES = 4 << 20  # of one message with several records: what caches hold is copied fastest
log = logging.getLogger(__name__)
OnFullDisk = Literal["stop", "skip"]
_LOOK_S = 0.2


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
    said = dict.fromkeys(names, "values") | {name: SAID[tag] for name, tag in tags}
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


class Recorder:
    """Writes every record that it is given into a folder, once; `Consumer(tap=Recorder(folder))`.

    A context manager; one thread at a time. A record is in the file, in the kernel's hands, when `take`
    returns: a SIGKILL after that loses nothing. Construction blocks to finish what a killed recorder left in
    the folder, and to read the keys of what is there: those records are not written again.

    Args:
        folder: made if it is not there.
        format: of finished parts, "parquet" or "arrow" (IPC file); the part in progress is an IPC stream.
        rotate_bytes: a part is finished once its stream has this many bytes, `"256M"` or a number.
        rotate_seconds: or once it is this old, at the next record; in a thread of its own.
        on_full_disk: "stop": `take` raises ArchiveFull until there is room; "skip": recording ends there and
            the records after it are counted.
        fsync: wait for the disk at every message, for machines that may lose power.
        schema: a pyarrow.Schema of further columns that the first part is to have; others begin a new part
            when they first come.

    Raises:
        ArchiveTaken: a living recorder writes to the folder.
        ArchiveUnreadable: a part is damaged, or none of ours.
        ArchiveUnwritable, ArchiveFull: the folder, or what a killed recorder left in it, cannot be written.
        BadArgument.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        format: Format = "parquet",
        rotate_bytes: int | str = "256M",
        rotate_seconds: float = 60.0,
        on_full_disk: OnFullDisk = "stop",
        fsync: bool = False,
        schema: "pa.Schema | None" = None,
    ) -> None:
        if format not in ("parquet", "arrow"):
            raise BadArgument(f'format={format!r} is not "parquet" or "arrow"')
        if on_full_disk not in ("stop", "skip"):
            raise BadArgument(f'on_full_disk={on_full_disk!r} is not "stop" or "skip"')
        self.folder, self._format, self._on_full_disk, self._fsync = Path(folder), format, on_full_disk, fsync
        if not rotate_seconds > 0:
            raise BadArgument(f"rotate_seconds={rotate_seconds!r} is no time", hint="rotate_seconds=60.0")
        self._rotate_bytes, self._rotate_seconds = parse_size(rotate_bytes), rotate_seconds
        about = {
            "shmbridge.session": uuid.uuid4().hex,
            "shmbridge.unix_minus_monotonic_ns": str(time.time_ns() - time.monotonic_ns()),
        }
        self._layout = Layout(columns_of(schema), about)
        self._table: Columns | None = None  # of the last record, which the layout has
        self._stream: StreamFile | None = None
        self._began_s, self._arena = 0.0, Arena()
        self._counts = dict.fromkeys(
            ("recorded_total", "again_total", "unreadable_total", "skipped_total", "bytes_total"), 0
        )
        self._full = self._closed = False
        with ExitStack() as held, writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(recording(self.folder))
            self.finished_left = finish_left(self.folder, format)
            self._seen = keys_of(self.folder)
            self._next = max((part.number for part in parts_of(self.folder)), default=-1) + 1
            self._held = held.pop_all()
        self._to_finish: queue.SimpleQueue[Part | None] = queue.SimpleQueue()
        self._finisher: threading.Thread | None = None

    def take(self, records: Sequence[ReadableRecord]) -> None:
        """Writes the records that are not in the folder yet. Blocks for the disk.

        Raises:
            ArchiveFull: no room, under on_full_disk="stop"; none of the message that failed is in the file.
            ArchiveUnwritable: the disk failed, or the part in progress was removed. The next call begins a
                new part.
            RecordTooBig: a column of a record has more values than a file can count, under
                on_full_disk="stop"; under "skip" that record alone is left out and counted.
            Closed.
        """
        if self._closed:
            raise Closed(f"the recorder of {self.folder} is closed")
        if self._full and self._on_full_disk == "skip":
            self._counts["skipped_total"] += len(records)
            return
        flat: list[FlatRecord] = []
        new: set[tuple[str, int]] = set()
        for record in records:
            key = record.meta.producer_id, record.meta.sequence
            if key in new or self._seen.has(*key):
                self._counts["again_total"] += 1
                continue
            new.add(key)
            try:
                flat.append(flat_record(record))
            except RecordUnreadable as wrong:
                self._counts["unreadable_total"] += 1
                log.error("record %d of %s is not recorded: %s", key[1], key[0], wrong)
        left = len(flat)
        failed: OSError | RecordTooBig | None = None
        for message in in_messages(flat):
            try:
                self._write(message)
            except RecordTooBig as wrong:
                if self._on_full_disk == "stop":
                    failed = wrong.with_traceback(None)
                    flat.clear()
                    message.clear()
                    break
                self._counts["skipped_total"] += len(message)
                log.error("not recorded: %s", str(wrong))  # the error itself would keep views
                left -= len(message)
                continue
            except OSError as wrong:
                failed = wrong.with_traceback(None)
                # An error's traceback must not keep views: they keep the records' room in the lanes.
                flat.clear()
                message.clear()
                break
            left -= len(message)
            for key in [(each.meta.producer_id, each.meta.sequence) for each in message]:
                self._seen.add(*key)
            self._counts["recorded_total"] += len(message)
        if failed is not None:
            self._failed(failed, left)

    def _write(self, message: list[FlatRecord]) -> None:
        layout, table = self._layout, self._table
        for record in message:
            if record.table is not table:  # one a lane
                table = record.table
                layout = layout.with_columns(table)
        if self._stream is not None and (
            layout is not self._layout
            or self._stream.bytes >= self._rotate_bytes
            or time.monotonic() - self._began_s >= self._rotate_seconds
        ):
            self._rotate()
        self._layout, self._table = layout, table  # not before: a rotation that fails is tried again
        self._arena.begin()
        batch = batch_of(message, layout, self._arena)
        if self._stream is None:
            path = path_of(self.folder, self._next, STREAM)
            self._stream = StreamFile(path, layout.schema, fsync=self._fsync)
            self._began_s = time.monotonic()
            self._next += 1
        before = self._stream.bytes
        self._stream.append(batch)
        self._counts["bytes_total"] += self._stream.bytes - before

    def _failed(self, wrong: OSError | RecordTooBig, records: int) -> None:
        if isinstance(wrong, RecordTooBig):
            raise wrong
        if not is_full(wrong):
            self._rotate()  # the next call begins a new part
            raise unwritable(self.folder, wrong) from wrong
        said = f"no room for {records} records in {self.folder}: {wrong.strerror}"
        if self._on_full_disk == "stop":
            raise ArchiveFull(
                said, hint="make room and take on: nothing is lost; or on_full_disk='skip'"
            ) from wrong
        self._full = True
        self._counts["skipped_total"] += records
        log.error("recording has ended: %s; further records are counted in skipped_total", said)

    def _rotate(self) -> None:
        """Hands the stream in progress to the thread that finishes parts."""
        stream, self._stream = self._stream, None
        if stream is None:
            return
        stream.close()
        if self._finisher is None:
            self._finisher = threading.Thread(
                target=self._finish_parts, name="shmbridge-archive", daemon=True
            )
            self._finisher.start()
        self._to_finish.put(Part(self._next - 1, stream.path))

    def _finish_parts(self) -> None:
        while (part := self._to_finish.get()) is not None:
            try:
                finish(part, self._format)
            except Exception as wrong:
                log.error("%s stays a stream: %s; the next recorder finishes it", part.path, wrong)

    def rotate(self) -> None:
        """Ends the part in progress; the next record begins another. Does not wait for the finished file."""
        self._rotate()

    @property
    def reached(self) -> dict[str, int]:
        """The last sequence in the folder of each producer."""
        return self._seen.reached()

    def stats(self) -> dict[str, float]:
        """Counters: records written, already there, unreadable, skipped for want of room; bytes. Any
        thread.
        """
        return dict(self._counts)

    def close(self) -> None:
        """Finishes the part in progress and lets the folder go. Blocks for the disk. Idempotent."""
        if self._closed:
            return
        self._closed = True
        try:
            self._rotate()
            if self._finisher is not None:
                self._to_finish.put(None)
                self._finisher.join()
        finally:
            self._held.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class Observed:
    """What became of the records of a bridge while it was observed."""

    recorded: int = 0
    missed: int = 0  # released before their copy was whole
    missed_lanes: int = 0  # that came and went before they could be opened
    skipped: int = 0  # for want of room on the disk
    again: int = 0  # in the folder already
    unreadable: int = 0
    reached: dict[str, int] = field(default_factory=dict)  # last sequence of each producer in the folder
    unreadable_lanes: dict[str, str] = field(default_factory=dict)  # and why
    finished_left: list[str] = field(default_factory=list)  # parts that a killed recorder had left


def observe(
    bridge: str,
    recorder: Recorder,
    *,
    limit: int | None = None,
    stopped: Callable[[], bool] = lambda: False,
    seconds: float | None = None,
) -> Observed:
    """Records copies of a bridge's records until `stopped()`, and closes the recorder.

    Waits for a bridge that does not exist yet. Copies in a thread that gives way to other processes once it
    has recorded what there is at first; the end of it all does not.

    Args:
        bridge: name of the bridge.
        recorder: where they are written; closed at the end.
        limit: end after so many records; None: no limit.
        stopped: asked several times a second.
        seconds: end after this time.

    Raises:
        BadArgument: no record or no time. BadBridgeName; as Recorder.take.
    """
    with recorder:
        if limit is not None and limit < 1:
            raise BadArgument(f"limit={limit} records are none", hint="give a number from 1, or no limit")
        if seconds is not None and not seconds >= 0:
            raise BadArgument(f"seconds={seconds} is no time", hint="give seconds from 0, or none")
        until_s = float("inf") if seconds is None else time.monotonic() + seconds
        over = threading.Event()

        def copy() -> None:
            has_given_way = False
            while not (over.is_set() or stopped()) and time.monotonic() < until_s:
                left = 256 if limit is None else min(256, limit - int(recorder.stats()["recorded_total"]))
                if left <= 0:
                    break
                records = observer.poll(left)
                if records:
                    recorder.take(records)
                    for record in records:
                        record.release()
                else:
                    observer.wait(min(_LOOK_S, max(until_s - time.monotonic(), 0.0)))
                del records
                if not has_given_way:
                    has_given_way = True
                    give_way()

        with Observer(bridge) as observer, ThreadPoolExecutor(1, "shmbridge-record") as apart:
            try:
                apart.submit(copy).result()
            finally:
                over.set()
            stats, missed, missed_lanes = recorder.stats(), observer.missed, observer.missed_lanes
            unreadable_lanes = dict(observer.unreadable)
    return Observed(
        int(stats["recorded_total"]),
        missed,
        missed_lanes,
        int(stats["skipped_total"]),
        int(stats["again_total"]),
        int(stats["unreadable_total"]),
        recorder.reached,
        unreadable_lanes,
        [str(path) for path in map(Path, recorder.finished_left)],
    )
