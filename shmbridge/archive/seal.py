"""The checksums inside of a finished part, and a file that checks with them whatever is read of it.

A Parquet or Arrow file is read from its end: its footer says where all else lies. So there is room for a seal
before the footer, which other readers pass over:

    what the writer wrote, in blocks of 64 KiB | the seal | footer, its length, magic

The seal has a checksum of each block, one of all that stands behind it, and one of itself.
"""

import io
import logging
import os
import struct
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Self

import pyarrow as pa

from shmbridge._ext.weights import checksum
from shmbridge.archive.layout import revision_of
from shmbridge.errors import ArchiveUnreadable
from shmbridge.record.arrow import first_line

log = logging.getLogger(__name__)

BLOCK = 64 << 10
MARK = b"shmbridge-seal-1"
# Bytes before the seal, bytes of a block, checksum of what is behind the seal; that of the seal; its mark.
_COUNTS, _SUM = struct.Struct("<QQQ"), struct.Struct("<Q")
_FIXED = _COUNTS.size + _SUM.size + len(MARK)
_ENDS = {b"PAR1": struct.Struct("<I4s"), b"ROW1": struct.Struct("<I6s")}  # Parquet; Arrow's "ARROW1"


class SealedFile:
    """A file that Arrow's writers write into, one piece behind the other, and that gets its seal at the end.

    One thread. Blocks for the disk. Raises OSError.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("wb", buffering=0)
        self._sums: list[int] = []
        self._begun: list[bytes] = []  # of the block that is not whole
        self._begun_bytes = self._bytes = 0
        self._last: list[bytes] | None = None

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return self._file.closed

    def write(self, piece: "bytes | pa.Buffer") -> int:
        """Writes a piece; once `hold` was called, keeps it."""
        whole = memoryview(piece).cast("B")
        if self._last is not None:
            self._last.append(bytes(whole))
            return len(whole)
        self._write(whole)
        self._bytes += len(whole)
        rest = whole
        if self._begun_bytes:
            rest = whole[BLOCK - self._begun_bytes :]
            self._begin(whole[: BLOCK - self._begun_bytes])
        for at in range(0, len(rest) - BLOCK + 1, BLOCK):
            self._sums.append(checksum([rest[at : at + BLOCK]]))
        self._begin(rest[len(rest) - len(rest) % BLOCK :])
        return len(whole)

    def _begin(self, some: memoryview) -> None:
        """Adds to the block that is not whole; the memory is the writer's, so it is copied."""
        if some:
            self._begun.append(bytes(some))
            self._begun_bytes += len(some)
        if self._begun_bytes == BLOCK:
            self._end_block()

    def _end_block(self) -> None:
        self._sums.append(checksum(self._begun))
        self._begun, self._begun_bytes = [], 0

    def _write(self, whole: memoryview) -> None:
        while whole:
            whole = whole[self._file.write(whole) :]

    def hold(self) -> None:
        """From here on what comes is the file's end, which belongs behind the seal."""
        self._last = []

    def seal(self) -> None:
        """Writes what was held, and the seal before the footer in it."""
        last = b"".join(self._last or ())
        footer = _footer(io.BytesIO(last))
        self._last = None
        self.write(last[:footer])  # data, if Arrow has kept some back
        if self._begun_bytes:
            self._end_block()
        said = struct.pack(f"<{len(self._sums)}Q", *self._sums)
        said += _COUNTS.pack(self._bytes, BLOCK, checksum([last[footer:]]))
        self._write(memoryview(said + _SUM.pack(checksum([said])) + MARK + last[footer:]))

    def flush(self) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Closes it, sealed or not. Idempotent."""
        self._file.close()


def _footer(file: BinaryIO) -> int:
    """Returns where the footer of a Parquet or Arrow file begins; the file's size if it has none."""
    size: int = file.seek(0, os.SEEK_END)
    file.seek(max(size - 16, 0))
    last = file.read()
    form = _ENDS.get(last[-4:])
    if form is None or len(last) < form.size:
        return size
    length: int = form.unpack(last[-form.size :])[0]
    return max(size - form.size - length, 0)


def open_part(path: Path) -> pa.OSFile:
    """Opens a part to read, whatever bytes its name has. Raises OSError; ArchiveUnreadable for what is not a
    file: a pipe would wait for its writer, a device has no end.
    """
    if not path.is_file() and os.path.lexists(path):
        raise ArchiveUnreadable(f"{path} is not a file", hint="move it away to read the others")
    return pa.OSFile(os.fsencode(path))


class CheckedFile:
    """A finished part as pyarrow.PythonFile reads it: each byte is in memory and checked before it is seen.

    One reader at a time, which pyarrow sees to. Blocks for the disk. Raises ArchiveUnreadable for a damaged
    seal, and where bytes are read that are not those that were written. A file without a seal is read as it
    is; `check_schema` says so, or refuses it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._source = open_part(path)
        self._size = self._source.size()
        self._sums: tuple[int, ...] = ()
        self._data, self._block = self._size, BLOCK  # bytes before the seal
        self._tail = b""  # from the seal on
        self._footer = _footer(self._source)
        self.sealed = self._read_seal()

    def _read_seal(self) -> bool:
        footer = self._footer
        fixed = self._source.read_at(_FIXED, footer - _FIXED) if footer >= _FIXED else b""
        if fixed[-len(MARK) :] != MARK:
            return False
        data, block, behind = _COUNTS.unpack_from(fixed)
        count = -(-data // max(block, 1))
        if not block or data + 8 * count + _FIXED != footer:
            raise self._damaged("its seal does not fit it")
        tail = self._source.read_at(self._size - data, data)
        said, footer_at = tail[: 8 * count + _COUNTS.size], 8 * count + _FIXED
        if _SUM.unpack_from(fixed, _COUNTS.size)[0] != checksum([said]):
            raise self._damaged(f"bytes {data} to {footer}, its seal, are not what was written")
        if behind != checksum([memoryview(tail)[footer_at:]]):
            raise self._damaged(f"bytes {footer} to {self._size}, its footer, are not what was written")
        self._sums = struct.unpack_from(f"<{count}Q", tail)
        self._data, self._block, self._tail = data, block, tail
        return True

    @contextmanager
    def opening(self) -> Iterator[None]:
        """Names the footer in what Arrow makes of one that it cannot read."""
        try:
            yield
        except pa.ArrowMemoryError:
            raise
        except (pa.ArrowException, OSError) as wrong:
            where = f"bytes {self._footer} to {self._size}"
            raise self._damaged(
                f"its footer, {where} by its length, cannot be read: {first_line(wrong)}"
            ) from wrong

    def check_schema(self, schema: pa.Schema) -> None:
        """Raises ArchiveUnreadable if the file's schema promises checksums, and there are none.

        Logs a line, once a folder, for a file of an earlier revision, which has none.
        """
        if not self.sealed and revision_of(schema) is not None:
            raise self._damaged("it says that it carries checksums, and they are not there")
        if not self.sealed:
            say_unchecked(self._path.parent)

    def read(self, count: int = -1) -> memoryview:
        """Returns the bytes from here on, fewer at the end."""
        begin = min(self._at, self._size)
        end = self._size if count < 0 else min(begin + count, self._size)
        self._at = end
        if begin >= self._data:
            return memoryview(self._tail)[begin - self._data : end - self._data]
        some = self._checked(begin, min(end, self._data))
        if end > self._data:
            some = memoryview(bytes(some) + self._tail[: end - self._data])
        return some

    def _checked(self, begin: int, end: int) -> memoryview:
        """Returns bytes before the seal."""
        if not self._sums:
            return self._read(begin, end)
        first = begin // self._block
        at = first * self._block
        blocks = self._read(at, min(-(-end // self._block) * self._block, self._data))
        for number, place in enumerate(range(0, len(blocks), self._block), first):
            if checksum([blocks[place : place + self._block]]) != self._sums[number]:
                last = min((number + 1) * self._block, self._data)
                raise self._damaged(f"bytes {number * self._block} to {last} are not what was written")
        return blocks[begin - at : end - at]

    def _read(self, begin: int, end: int) -> memoryview:
        self._source.seek(begin)
        return memoryview(self._source.read_buffer(end - begin)).cast(
            "B"
        )  # in Arrow's memory, which is used again

    def seek(self, at: int, whence: int = os.SEEK_SET) -> int:
        """Goes to a place; returns it."""
        self._at = at + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._size}[whence]
        return self._at

    def tell(self) -> int:
        """Returns the place that is read next."""
        return self._at

    @property
    def closed(self) -> bool:
        """Whether it was closed."""
        return bool(self._source.closed)

    def close(self) -> None:
        """Closes the file. Idempotent."""
        self._source.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _damaged(self, why: str) -> ArchiveUnreadable:
        return ArchiveUnreadable(
            f"{self._path} is damaged: {why}",
            hint="take it from another copy, or move that file away to read the others",
        )


@lru_cache(maxsize=1024)
def say_unchecked(folder: Path) -> None:
    """Logs, once for each folder, that it has parts without checksums."""
    log.warning(
        "%s has parts without checksums: an earlier revision wrote them, and damage to their values cannot "
        "be seen -> `shmbridge export %s --out FILE` writes a copy that carries them",
        folder,
        folder,
    )
