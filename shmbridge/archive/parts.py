"""The parts of a folder: `part-000000.arrows` while it is written, then `.parquet` or `.arrow`.

A finished file is written beside the stream and renamed, and only then is the stream removed: whoever is
killed, one of them is whole.
"""

import fcntl
import logging
import os
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

import pyarrow as pa
import pyarrow.parquet as pq

from shmbridge.archive.keys import SeenKeys
from shmbridge.archive.layout import KEYS, Layout, checked_keys, marked
from shmbridge.archive.refusals import reading
from shmbridge.archive.seal import CheckedFile, SealedFile
from shmbridge.archive.stream import Damage, ReadStream, read_stream
from shmbridge.errors import ArchiveTaken, ArchiveUnreadable

log = logging.getLogger(__name__)

Format = Literal["parquet", "arrow"]
STREAM, WRITING, DAMAGED = ".arrows", ".writing", ".damaged"
_NAME = re.compile(r"part-(\d{6,})\.(arrows|parquet|arrow)")
_ROW_GROUP_BYTES = 32 << 20
_LOCK = ".recording"


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
