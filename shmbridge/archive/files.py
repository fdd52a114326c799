"""The files of a recording, byte by byte: the stream under way, the finished part, and the checksums of both.

An Arrow IPC stream that grows by whole messages: it opens after a kill at any instruction.

A message is written behind eight bytes of zeros, which end a stream for every reader, and its own first eight
bytes are written over them last. So the stream ends before the message, or behind it.

Each message carries checksums: a stamp at the end of its head, where Arrow has padding. That of the head
continues the one of the message before, so none can be left out, come twice, or stand elsewhere.

A Parquet or Arrow file is read from its end: its footer says where all else lies. So there is room for a seal
before the footer, which other readers pass over:

    what the writer wrote, in blocks of 64 KiB | the seal | footer, its length, magic

The seal has a checksum of each block, one of all that stands behind it, and one of itself.
"""

import errno
import io
import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO, NamedTuple, Self

import pyarrow as pa

from shmbridge._ext.weights import checksum
from shmbridge.archive.format import marked, revision_of
from shmbridge.errors import ArchiveUnreadable, InvalidRecord
from shmbridge.record.arrow import first_line

log = logging.getLogger(__name__)

BLOCK = 64 << 10
MARK = b"shmbridge-seal-1"
# Bytes before the seal, bytes of a block, checksum of what is behind the seal; that of the seal; its mark.
_COUNTS, _SUM = struct.Struct("<QQQ"), struct.Struct("<Q")
_FIXED = _COUNTS.size + _SUM.size + len(MARK)
_FOOTERS = {b"PAR1": struct.Struct("<I4s"), b"ROW1": struct.Struct("<I6s")}  # Parquet; Arrow's "ARROW1"
_PREFIX = struct.Struct("<4sI")  # of a message: four bytes of ones, and the length of its head
_ONES = b"\xff" * 4
# The mark, bytes of the body, their checksum; then that of prefix and head up to there.
_STAMP, _CHAIN = struct.Struct("<8sQQ"), struct.Struct("<Q")
_MARK = b"sbstamp1"
_STAMP_BYTES = _STAMP.size + _CHAIN.size
_LONGEST_HEAD = 64 << 20  # a schema with 256 columns has 0.1 MB
_LOOK_BYTES = 1 << 20  # the head of a message ends within
_MOST_PIECES = 1024  # of one call: IOV_MAX
_ENDS = (b"", bytes(_PREFIX.size), _ONES + bytes(4))


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
    form = _FOOTERS.get(last[-4:])
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
        self._chain = 0
        self._pieces = _Pieces()
        schema = marked(schema)
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
        at = self.bytes
        _, head_bytes = _PREFIX.unpack(_taken(pieces, _PREFIX.size))
        head = _taken(pieces, head_bytes)
        body_bytes = sum(map(len, pieces))
        prefix = _PREFIX.pack(_ONES, head_bytes + _STAMP_BYTES)
        head += _STAMP.pack(_MARK, body_bytes, checksum(pieces))
        chain = checksum([prefix, head], self._chain)
        try:
            self._write([memoryview(head + _CHAIN.pack(chain)), *pieces], at + _PREFIX.size)
            if self._fsync:
                os.fdatasync(self._fd)
            self._write([memoryview(prefix)], at)
            if self._fsync:
                os.fdatasync(self._fd)
            if not os.fstat(self._fd).st_nlink:  # else it would be lost without a word
                raise FileNotFoundError(errno.ENOENT, "removed while it was written", str(self.path))
            self.bytes, self._chain = at + _PREFIX.size + head_bytes + _STAMP_BYTES + body_bytes, chain
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


def _taken(pieces: list[memoryview], count: int) -> bytes:
    """Takes the first bytes out of pieces."""
    taken = b""
    while len(taken) < count:
        more = pieces[0][: count - len(taken)]
        taken += bytes(more)
        pieces[0] = pieces[0][len(more) :]
        if not pieces[0]:
            del pieces[0]
    return taken


class Damage(NamedTuple):
    """What of a stream cannot be read: so many bytes from `at` on, and why."""

    at: int
    left: int
    why: str

    def __str__(self) -> str:
        return f"{self.left} bytes behind byte {self.at} cannot be read: {self.why}"


class ReadStream(NamedTuple):
    """A stream's schema, its batches up to the last whole one, and what is wrong with what stands behind it.

    `schema` is None if the stream is damaged where it begins. `damage` is known once all batches were read.
    """

    schema: pa.Schema | None
    batches: Iterator[pa.RecordBatch]
    damage: Callable[[], Damage | None]


class _NoStamp(InvalidRecord):
    """There is no message with checksums."""


class _Message(NamedTuple):
    raw: pa.Buffer
    end: int
    chain: int


def read_stream(path: Path) -> ReadStream | None:
    """Returns a stream to read; None if it has not begun.

    A message under way begins with zeros, and is left out. One that is there and cannot be read, or whose
    checksums are not its own, ends the stream: that is its damage.
    """
    source = open_part(path)
    found: list[Damage] = []
    try:
        try:
            first = _message(source, 0, 0)
            if first is None:
                source.close()
                return None
            schema = pa.ipc.read_schema(first.raw)
        except _NoStamp as wrong:
            return _without_stamps(path, source, wrong)
        except (InvalidRecord, pa.ArrowException, OSError) as wrong:
            if not _is_torn(wrong):
                raise
            return _damaged_from_the_start(source, wrong)
    except BaseException:
        source.close()
        raise

    def batches() -> Iterator[pa.RecordBatch]:
        end, chain = first.end, first.chain
        with source:
            try:
                while (message := _message(source, end, chain)) is not None:
                    batch = pa.ipc.read_record_batch(message.raw, schema)
                    batch.validate(full=True)
                    _, end, chain = message
                    yield batch
            except (InvalidRecord, pa.ArrowException, OSError) as wrong:
                if not _is_torn(wrong):
                    raise
                found.append(_damage(source, end, wrong))

    return ReadStream(schema, batches(), lambda: found[0] if found else None)


def _message(source: pa.OSFile, at: int, chain: int) -> _Message | None:
    """Returns the message at a place of a stream, once its checksums are true; None where the stream ends.

    Raises InvalidRecord for anything else.
    """
    while not any(source.read_at(_PREFIX.size, at)):
        if _is_under_way(source, at + _PREFIX.size, chain):
            return None
        if not any(source.read_at(_PREFIX.size, at)):  # else it became whole meanwhile, and more came
            raise InvalidRecord("zeros stand where a message began")
    prefix = source.read_at(_PREFIX.size, at)  # again: the first look may have come between two of its bytes
    ones, head_bytes = _PREFIX.unpack(prefix.ljust(_PREFIX.size, b"\0"))
    if ones != _ONES or not _STAMP_BYTES <= head_bytes <= _LONGEST_HEAD:
        raise _NoStamp("no message begins there")
    head = source.read_at(head_bytes, at + _PREFIX.size)
    if len(head) < head_bytes:
        raise InvalidRecord(f"the file ends in the {head_bytes} bytes of a message's head")
    mark, body_bytes, body_sum = _STAMP.unpack_from(head, head_bytes - _STAMP_BYTES)
    if mark != _MARK:
        raise _NoStamp("the message carries no checksum")
    (said,) = _CHAIN.unpack_from(head, head_bytes - _CHAIN.size)
    if said != checksum([prefix, head[: -_CHAIN.size]], chain):
        raise InvalidRecord("the message's head is not what was written there, or not at this place")
    body_at = at + _PREFIX.size + head_bytes
    if body_bytes > _size(source) - body_at:
        raise InvalidRecord(f"the file ends in the {body_bytes} bytes of a message's body")
    end = body_at + body_bytes
    source.seek(at)
    raw = source.read_buffer(end - at)  # in Arrow's memory, which is used again
    whole = memoryview(raw).cast("B")
    if whole[: body_at - at] != prefix + head or checksum([whole[body_at - at :]]) != body_sum:
        raise InvalidRecord(f"bytes {body_at} to {end} are not what was written")
    return _Message(raw, end, said)


def _is_under_way(source: pa.OSFile, at: int, chain: int) -> bool:
    """Returns whether what stands behind the zeros of a prefix is one message, as far as a recorder came.

    It writes from the front: a head, which continues the messages before, then no more than the head's body.
    """
    size = _size(source)
    first = source.read_at(_LOOK_BYTES, at)
    if (mark := first.find(_MARK)) < 0:
        # At the beginning of the file, another message's prefix means that a lost block stands before it.
        begun = any(first[: _PREFIX.size]) and len(first) < _LOOK_BYTES
        return (begun and (at > _PREFIX.size or _ONES not in first)) or _is_zero(source, at)
    head = first[: mark + _STAMP_BYTES]
    if len(head) < mark + _STAMP_BYTES:
        return True
    _, body_bytes, _ = _STAMP.unpack_from(head, mark)
    (said,) = _CHAIN.unpack_from(head, len(head) - _CHAIN.size)
    continues = said == checksum([_PREFIX.pack(_ONES, len(head)), head[: -_CHAIN.size]], chain)
    return continues and bool(size <= at + len(head) + body_bytes)


def _is_zero(source: pa.OSFile, at: int) -> bool:
    """Returns whether nothing but zeros, or nothing, stands from there on."""
    while some := source.read_at(_LOOK_BYTES, at):
        if some.count(0) < len(some):
            return False
        at += len(some)
    return True


def _without_stamps(path: Path, source: pa.OSFile, wrong: BaseException) -> ReadStream:
    """Returns a stream of an earlier revision, whose messages have no stamps; else one that is damaged."""
    found: list[Damage] = []
    source.seek(0)
    try:
        reader = pa.ipc.open_stream(source)
        stamped = revision_of(reader.schema) is not None
    except BaseException as unread:
        if not _is_torn(unread):
            raise
        stamped = True
    if stamped:
        return _damaged_from_the_start(source, wrong)
    say_unchecked(path.parent)
    end = source.tell()

    def batches() -> Iterator[pa.RecordBatch]:
        nonlocal end
        with source:
            try:
                while True:
                    batch = reader.read_next_batch()
                    batch.validate(full=True)
                    end = source.tell()
                    yield batch
            except StopIteration:
                return
            except BaseException as unread:
                if not _is_torn(unread):
                    raise
                if source.read_at(_PREFIX.size, end) not in _ENDS:
                    found.append(_damage(source, end, unread))

    return ReadStream(reader.schema, batches(), lambda: found[0] if found else None)


def _damaged_from_the_start(source: pa.OSFile, wrong: BaseException) -> ReadStream:
    damage = _damage(source, 0, wrong)
    source.close()
    return ReadStream(None, iter(()), lambda: damage)


def _damage(source: pa.OSFile, at: int, wrong: BaseException) -> Damage:
    why = wrong.message if isinstance(wrong, InvalidRecord) else first_line(wrong)
    return Damage(at, _size(source) - at, why)


def _size(source: pa.OSFile) -> int:
    """Returns the size that the file has now: its recorder may be at work."""
    return os.fstat(source.fileno()).st_size


def _is_torn(wrong: BaseException) -> bool:
    """Returns whether the file ends there; what the machine refuses says nothing of the file."""
    return (
        isinstance(wrong, (pa.ArrowException, OSError, InvalidRecord))
        and not isinstance(wrong, MemoryError)
        and getattr(wrong, "errno", None) is None
    )
