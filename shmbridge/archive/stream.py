"""An Arrow IPC stream that grows by whole messages: it opens after a kill at any instruction.

A message is written behind eight bytes of zeros, which end a stream for every reader, and its own first eight
bytes are written over them last. So the stream ends before the message, or behind it.
"""

import errno
import logging
import os
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

log = logging.getLogger(__name__)
_PREFIX = 8  # of a message: four bytes of ones, and the length of its head
_MOST_PIECES = 1024  # of one call: IOV_MAX
_ENDS = (b"", bytes(_PREFIX), b"\xff" * 4 + bytes(4))


class _Pieces:
    """A file for Arrow's writer that only notes what it is to write: the batches' buffers, not copied."""

    closed = False

    def __init__(self) -> None:
        self._noted: list[memoryview] = []

    def write(self, piece: "bytes | pa.Buffer") -> int:
        """Notes a piece."""
        self._noted.append(memoryview(piece))
        return len(piece)

    def taken(self) -> list[memoryview]:
        """Returns the pieces since the last call."""
        taken, self._noted = self._noted, []
        return [piece for piece in taken if piece]

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class StreamFile:
    """A stream under way. One thread at a time; blocks for the disk. Whole also after an OSError."""

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        self.path, self.bytes, self._fsync = path, 0, fsync
        self._pieces = _Pieces()
        self._encoder = pa.RecordBatchStreamWriter(pa.PythonFile(self._pieces, mode="w"), schema)
        self._encoder.write_batch(pa.RecordBatch.from_pylist([], schema=schema))  # the schema comes with it
        self._pieces.taken()
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self._append([memoryview(schema.serialize())])
        except BaseException:
            os.close(self._fd)
            with suppress(OSError):
                path.unlink()
            raise

    def append(self, batch: pa.RecordBatch) -> None:
        """Appends a batch; once this returns, it is in the file, also if the process is killed.

        Its buffers are written from where they lie. None of them is kept.
        """
        try:
            self._encoder.write_batch(batch)
        finally:
            pieces = self._pieces.taken()
        self._append(pieces)

    def _append(self, pieces: list[memoryview]) -> None:
        prefix, at = b"", self.bytes
        while len(prefix) < _PREFIX:
            more = pieces[0][: _PREFIX - len(prefix)]
            prefix += bytes(more)
            pieces[0] = pieces[0][len(more) :]
            if not pieces[0]:
                del pieces[0]
        size = _PREFIX + sum(map(len, pieces))
        try:
            self._write(pieces, at + _PREFIX)
            if self._fsync:
                os.fdatasync(self._fd)
            self._write([memoryview(prefix)], at)
            if self._fsync:
                os.fdatasync(self._fd)
            if not os.fstat(self._fd).st_nlink:  # else it would be lost without a word
                raise FileNotFoundError(errno.ENOENT, "removed while it was written", str(self.path))
            self.bytes = at + size
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._fd, at)
            raise

    def _write(self, pieces: list[memoryview], at: int) -> None:
        """Writes the pieces, one behind the other."""
        for first in range(0, len(pieces), _MOST_PIECES):
            some = pieces[first : first + _MOST_PIECES]
            while some:
                count = os.pwritev(self._fd, some, at)
                at += count
                whole = 0
                while whole < len(some) and count >= len(some[whole]):
                    count -= len(some[whole])
                    whole += 1
                del some[:whole]
                if some:
                    some[0] = some[0][count:]

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class ReadStream(NamedTuple):
    """A stream's schema, its batches up to the last whole one, and what stands behind that."""

    schema: pa.Schema
    batches: Iterator[pa.RecordBatch]
    unread: Callable[[], int]  # bytes behind the batches that were read so far, if not just zeros


def read_stream(path: Path) -> ReadStream | None:
    """Returns a stream to read; None if not even its schema is whole.

    What follows the last whole message of a torn file is left out; a message that is there and cannot be read
    is logged. A message under way begins with zeros.
    """
    source = pa.OSFile(str(path))
    try:
        reader = pa.ipc.open_stream(source)
    except BaseException as wrong:
        source.close()
        if not _is_torn(wrong):
            raise
        return None
    end = source.tell()

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal end
        with source:
            for batch, end in _whole(reader, source):  # noqa: B007
                yield batch
        if left := unread_behind(path, end):
            log.error("%s is damaged: %d bytes behind byte %d cannot be read", path, left, end)

    return ReadStream(reader.schema, batches(), lambda: unread_behind(path, end))


def unread_behind(path: Path, end: int) -> int:
    """Returns the bytes of a file from `end` on; 0 if a stream ends there, or a message was under way."""
    with path.open("rb") as file:
        file.seek(end)
        return path.stat().st_size - end if file.read(_PREFIX) not in _ENDS else 0


def _whole(reader: pa.RecordBatchStreamReader, source: pa.OSFile) -> Iterator[tuple[pa.RecordBatch, int]]:
    """Yields the whole batches, and where each ends in the file."""
    while True:
        try:
            batch = reader.read_next_batch()
            batch.validate(full=True)
        except StopIteration:
            return
        except BaseException as wrong:
            if not _is_torn(wrong):
                raise
            return
        yield batch, source.tell()


def _is_torn(wrong: BaseException) -> bool:
    """Returns whether the file ends there; what the machine refuses says nothing of the file."""
    return (
        isinstance(wrong, (pa.ArrowException, OSError))
        and not isinstance(wrong, MemoryError)
        and getattr(wrong, "errno", None) is None
    )
