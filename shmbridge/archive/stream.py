"""An Arrow IPC stream that grows by whole messages: it opens after a kill at any instruction.

A message is written behind eight bytes of zeros, which end a stream for every reader, and its own first eight
bytes are written over them last. So the stream ends before the message, or behind it.

Each message carries checksums: a stamp at the end of its head, where Arrow has padding. That of the head
continues the one of the message before, so none can be left out, come twice, or stand elsewhere.
"""

import errno
import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from shmbridge._ext.weights import checksum
from shmbridge.archive.layout import marked, revision_of
from shmbridge.archive.seal import open_part, say_unchecked
from shmbridge.errors import InvalidRecord
from shmbridge.record.arrow import first_line

log = logging.getLogger(__name__)
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
