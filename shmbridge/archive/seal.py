"""The checksums inside of a finished part, and a file that checks with them whatever is read of it.

A Parquet or Arrow file is read from its end: its footer says where all else lies. So there is room for a seal
before the footer, which other readers pass over:

    what the writer wrote, in blocks of 64 KiB | the seal | footer, its length, magic

The seal has a checksum of each block, one of all that stands behind it, and one of itself.
"""

import logging
import os
import struct
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, Self

import pyarrow as pa

from shmbridge._ext.checksum import checksum
from shmbridge.archive.layout import revision_of
from shmbridge.errors import ArchiveUnreadable

log = logging.getLogger(__name__)

BLOCK = 64 << 10
MARK = b"shmbridge-seal-1"
# Bytes before the seal, bytes of a block, checksum of what is behind the seal; checksum of the seal; its mark.
_COUNTS, _SUM = struct.Struct("<QQQ"), struct.Struct("<Q")
_FIXED = _COUNTS.size + _SUM.size + len(MARK)
_ENDS = {b"PAR1": struct.Struct("<I4s"), b"ROW1": struct.Struct("<I6s")}  # Parquet; Arrow's "ARROW1"


def seal(path: Path) -> None:
    """Puts the seal into a finished file that has none. Blocks for the disk. Raises OSError."""
    with path.open("r+b") as file:
        begin = _footer(file)
        file.seek(begin)
        footer = file.read()
        file.seek(0)
        sums, room = [], memoryview(bytearray(BLOCK))
        for at in range(0, begin, BLOCK):
            block = room[: min(BLOCK, begin - at)]
            file.readinto(block)
            sums.append(checksum([block]))
        said = struct.pack(f"<{len(sums)}Q", *sums) + _COUNTS.pack(begin, BLOCK, checksum([footer]))
        file.seek(begin)
        file.write(said + _SUM.pack(checksum([said])) + MARK + footer)


def _footer(file: BinaryIO) -> int:
    """Returns where the footer of a Parquet or Arrow file begins; the file's size if it has none."""
    size = file.seek(0, os.SEEK_END)
    file.seek(max(size - 16, 0))
    last = file.read()
    form = _ENDS.get(last[-4:])
    if form is None or len(last) < form.size:
        return size
    length, _ = form.unpack(last[-form.size :])
    return max(size - form.size - length, 0)


class CheckedFile:
    """A finished part as pyarrow.PythonFile reads it: each byte is in memory and checked before it is seen.

    One reader at a time, which pyarrow sees to. Blocks for the disk. Raises ArchiveUnreadable for a damaged
    seal, and where bytes are read that are not those that were written. A file without a seal is read as it
    is; `check_schema` says so, or refuses it.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._at = path, 0
        self._source = pa.OSFile(str(path))
        self._size = self._source.size()
        self._sums: tuple[int, ...] = ()
        self._data, self._block = self._size, BLOCK  # bytes before the seal
        self._tail = b""  # from the seal on
        self.sealed = self._read_seal()

    def _read_seal(self) -> bool:
        footer = _footer(self._source)
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
            return memoryview(self._source.read_at(end - begin, begin))
        first = begin // self._block
        at = first * self._block
        blocks = memoryview(self._source.read_at(min(-(-end // self._block) * self._block, self._data) - at, at))
        for number, place in enumerate(range(0, len(blocks), self._block), first):
            if checksum([blocks[place : place + self._block]]) != self._sums[number]:
                last = min((number + 1) * self._block, self._data)
                raise self._damaged(f"bytes {number * self._block} to {last} are not what was written")
        return blocks[begin - at : end - at]

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
        "%s has parts without checksums: an earlier revision wrote them, and damage to their values cannot be "
        "seen -> `shmbridge export %s --out FILE` writes a copy that carries them",
        folder,
        folder,
    )
