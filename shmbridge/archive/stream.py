"""An Arrow IPC stream that grows by whole messages: it opens after a kill at any instruction.

A message is written behind eight bytes of zeros, which end a stream for every reader, and its own first eight
bytes are written over them last. So the stream ends before the message, or behind it.
"""

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pyarrow as pa

_PREFIX = 8  # of a message: four bytes of ones, and the length of its head


class StreamFile:
    """A stream under way. One thread at a time; blocks for the disk. Whole also after an OSError."""

    def __init__(self, path: Path, schema: pa.Schema, *, fsync: bool = False) -> None:
        self.path, self.bytes, self._fsync = path, 0, fsync
        self._fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        try:
            self._append(schema.serialize())
        except BaseException:
            os.close(self._fd)
            with suppress(OSError):
                path.unlink()
            raise

    def append(self, batch: pa.RecordBatch) -> None:
        """Appends a batch; once this returns, it is in the file, also if the process is killed."""
        self._append(batch.serialize())

    def _append(self, message: pa.Buffer) -> None:
        data, at = memoryview(message), self.bytes
        try:
            self._write(data[_PREFIX:], at + _PREFIX)
            if self._fsync:
                os.fdatasync(self._fd)
            self._write(data[:_PREFIX], at)
            if self._fsync:
                os.fdatasync(self._fd)
            self.bytes = at + len(data)
        except BaseException:
            with suppress(OSError):
                os.ftruncate(self._fd, at)
            raise

    def _write(self, data: memoryview, at: int) -> None:
        while data:
            count = os.pwrite(self._fd, data, at)
            data, at = data[count:], at + count

    def close(self) -> None:
        """Closes the file. Idempotent."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


def read_stream(path: Path) -> tuple[pa.Schema, Iterator[pa.RecordBatch]] | None:
    """Returns a stream's schema, and its batches up to the last whole one; None if not even its schema is.

    What follows the last whole message of a torn file is left out.
    """
    source = pa.OSFile(str(path))
    try:
        reader = pa.ipc.open_stream(source)
    except (pa.ArrowException, OSError) as wrong:
        source.close()
        if not _is_torn(wrong):
            raise
        return None

    def batches() -> Iterator[pa.RecordBatch]:
        with source:
            while True:
                try:
                    batch = reader.read_next_batch()
                    batch.validate()
                except StopIteration:
                    return
                except (pa.ArrowException, OSError) as wrong:
                    if not _is_torn(wrong):
                        raise
                    return
                yield batch

    return reader.schema, batches()


def _is_torn(wrong: BaseException) -> bool:
    """Returns whether the file ends there; what the machine refuses says nothing of the file."""
    return not isinstance(wrong, MemoryError) and getattr(wrong, "errno", None) is None
