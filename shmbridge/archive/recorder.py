"""Recorder: writes records into the parts of a folder, as a tap of a hub or for an observer."""

import logging
import queue
import threading
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

from shmbridge.archive import encode, parts
from shmbridge.archive.layout import Layout
from shmbridge.archive.parts import Format, Part
from shmbridge.archive.refusals import is_full, unwritable, writing
from shmbridge.archive.stream import StreamFile
from shmbridge.config import parse_size
from shmbridge.errors import ArchiveFull, BadArgument, Closed, RecordTooBig, RecordUnreadable
from shmbridge.record import ReadableRecord
from shmbridge.schema import Columns, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

OnFullDisk = Literal["stop", "skip"]


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
        self._began_s, self._arena = 0.0, encode.Arena()
        self._counts = dict.fromkeys(
            ("recorded_total", "again_total", "unreadable_total", "skipped_total", "bytes_total"), 0
        )
        self._full = self._closed = False
        with ExitStack() as held, writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(parts.recording(self.folder))
            self.finished_left = parts.finish_left(self.folder, format)
            self._seen = parts.keys_of(self.folder)
            self._next = max((part.number for part in parts.parts_of(self.folder)), default=-1) + 1
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
        flat: list[encode.FlatRecord] = []
        new: set[tuple[str, int]] = set()
        for record in records:
            key = record.meta.producer_id, record.meta.sequence
            if key in new or self._seen.has(*key):
                self._counts["again_total"] += 1
                continue
            new.add(key)
            try:
                flat.append(encode.flat_record(record))
            except RecordUnreadable as wrong:
                self._counts["unreadable_total"] += 1
                log.error("record %d of %s is not recorded: %s", key[1], key[0], wrong)
        left = len(flat)
        failed: OSError | RecordTooBig | None = None
        for message in encode.in_messages(flat):
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

    def _write(self, message: list[encode.FlatRecord]) -> None:
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
        batch = encode.batch_of(message, layout, self._arena)
        if self._stream is None:
            path = parts.path_of(self.folder, self._next, parts.STREAM)
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
                parts.finish(part, self._format)
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
