"""Segments of values: what one put has stored, read in place by any process until its rows are released.

For stores whose values are read at random, by several readers, and cleared by a word of anybody: one segment
per put, written once, then read-only but for one byte per row, which says that the row is released. Whoever
releases the last row removes the name; the kernel keeps the memory until its last mapping is gone, so that a
reader's view outlives the release. docs/adr/0015-transfer-queue.md has the reasons.

    header (magic last) | released, a byte per row | owners, int64 per row | table | data, 64-byte aligned

The writer's lock lasts until the magic is there: a segment without either was never committed. A released
byte goes from 0 to 1 by pwrite, once, and is never read before it is written: of two processes that release
the last rows at once, at least one sees all of them, and nobody waits for anybody.
"""

import os
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import posix_ipc

from shmbridge._ext import header
from shmbridge.errors import LayoutMismatch, RecordUnreadable, ShmPermission
from shmbridge.segments import locks
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import (
    MOUNT,
    new_name,
    open_segment,
    reserve,
    still_named,
    unlink,
    value_names,
)

LAYOUT = 1
ALIGNED = 64
_MAGIC = b"SHMBVALS"
_HEAD = struct.Struct("<8sIIQQQ24x")  # magic, layout, rows, bytes of the table, where data begins, size
_MOST_BUFFERS = 512  # of one pwritev
_MOST_ROWS = 1 << 24

Buffers = Sequence[Any]  # of bytes-like objects


@dataclass(frozen=True, slots=True)
class Head:
    """What a segment of values says of itself, checked; a private copy.

    Attributes:
        owners: int64 (rows,), whom each row belongs to.
        table: bytes that only the writer's and the reader's code understand.
        data_at: where the data begins, in bytes from the start.
        size: of the whole segment, in bytes.
    """

    owners: npt.NDArray[np.int64]
    table: bytes
    data_at: int
    size: int


def write(
    bridge: str, owners: npt.NDArray[np.int64], table: bytes, parts: Iterable[tuple[int, Buffers]]
) -> str:
    """Commits one segment of values and returns its name; blocks while it copies.

    Args:
        bridge: the name of the bridge.
        owners: int64 (rows,), whom each row belongs to; `release` names rows by their place here.
        table: what a reader needs to find the values.
        parts: bytes from the start of the data, and the buffers that stand there one after the other.

    Raises:
        ShmTooSmall: the mount or the memory cgroup has no room; nothing was committed.
    """
    placed = [(at, list(buffers)) for at, buffers in parts]
    data_at = _aligned(_HEAD.size + 9 * len(owners) + 7 + len(table))
    size = data_at + max((at + sum(map(_size, buffers)) for at, buffers in placed), default=0)
    while True:
        name = new_name(bridge, "v")
        file = open_segment(name, posix_ipc.O_CREX)
        try:
            header.fault(b"values.created")
            # A sweeper may take an unlocked segment for that of a dead writer.
            if not (locks.lock_exclusive(file.fd, LockByte.PRODUCER) and still_named(file.fd, name)):
                continue
            header.fault(b"values.locked")
            reserve(file.fd, size, f"a put of bridge {bridge!r}", less="clear what is no longer needed")
            for at, buffers in placed:
                _write(file.fd, buffers, data_at + at)
            _write(file.fd, [np.ascontiguousarray(owners, np.int64), table], _owners_at(len(owners)))
            header.fault(b"values.written")
            head = _HEAD.pack(_MAGIC, LAYOUT, len(owners), len(table), data_at, size)
            _write(file.fd, [head], 0)
            header.fault(b"values.committed")
            return name
        except BaseException:
            unlink(file.fd, name)
            raise
        finally:
            file.close()  # and with it the lock


def read_head(name: str) -> Head | None:
    """Returns what a committed segment says of itself, or None if it is gone. Never blocks.

    Raises:
        LayoutMismatch: it was written by another layout of this format.
        RecordUnreadable: it was never committed, or what it says cannot be true.
    """
    try:
        file = open_segment(name)
    except FileNotFoundError:
        return None
    try:
        return _head(file.fd, name)
    finally:
        file.close()


def release(name: str, rows: Iterable[int]) -> bool:
    """Releases rows of any writer, and removes the segment with its last one; returns whether it is
    gone. Idempotent, never blocks.
    """
    try:
        file = open_segment(name)
    except FileNotFoundError:
        return True
    try:
        count = len(_head(file.fd, name).owners)
        wanted = sorted({row for row in rows if 0 <= row < count})
        for _, run in groupby(enumerate(wanted), lambda pair: pair[1] - pair[0]):
            first, *rest = (row for _, row in run)
            _write(file.fd, [b"\x01" * (1 + len(rest))], _HEAD.size + first)
        header.fault(b"values.released")
        if _held(file.fd, count):
            return False
        unlink(file.fd, name)
        return True
    finally:
        file.close()


def remove_values(name: str, *, with_records: bool = False, dry_run: bool = False) -> tuple[bool, str, int]:
    """Removes a segment that its writer never committed, or whose rows are all released; with `with_records`
    any committed one, too.

    Returns (removed, reason it was kept or "", rows it held). Never blocks.
    """
    try:
        file = open_segment(name)
    except FileNotFoundError:
        return False, "gone already", 0
    except ShmPermission as foreign:
        return False, foreign.message, 0
    try:
        if not locks.lock_exclusive(file.fd, LockByte.PRODUCER):
            return False, "it is being written", 0
        held = 0
        if os.pread(file.fd, len(_MAGIC), 0) == _MAGIC:
            try:
                held = _held(file.fd, len(_head(file.fd, name).owners))
            except (LayoutMismatch, RecordUnreadable) as wrong:
                if not with_records:
                    return False, wrong.message, 0
        if held and not with_records:
            return False, f"holds {held} rows that nobody has cleared", held
        return dry_run or unlink(file.fd, name), "", held
    finally:
        file.close()


def stored_bytes(bridge: str) -> tuple[int, int]:
    """Returns how many segments of values the bridge has, and their bytes. Never blocks."""
    count = total = 0
    for name in value_names(bridge):
        try:
            total += os.stat(MOUNT / name[1:]).st_size
            count += 1
        except FileNotFoundError:
            continue
    return count, total


def head_of(raw: npt.NDArray[np.uint8], name: str) -> Head:
    """Returns the head of a mapped segment, copied and checked; errors as `read_head`."""
    return _checked(bytes(raw[: _HEAD.size]), len(raw), name, lambda at, size: bytes(raw[at : at + size]))


def _head(fd: int, name: str) -> Head:
    return _checked(
        os.pread(fd, _HEAD.size, 0), os.fstat(fd).st_size, name, lambda at, size: os.pread(fd, size, at)
    )


def _checked(raw: bytes, there: int, name: str, read: Any) -> Head:
    if len(raw) < _HEAD.size or raw[: len(_MAGIC)] != _MAGIC:
        raise RecordUnreadable(f"{name} was never committed", hint="shmbridge clean removes it")
    _, layout, rows, table_bytes, data_at, size = _HEAD.unpack(raw)
    if layout != LAYOUT:
        raise LayoutMismatch(
            f"{name} has layout {layout} of values, this build has {LAYOUT}",
            hint="use one shmbridge version in all processes of the queue",
        )
    owners_at = _owners_at(rows)
    table_at = owners_at + 8 * rows
    if rows > _MOST_ROWS or not table_at + table_bytes <= data_at <= size <= there:
        raise RecordUnreadable(
            f"{name} says: {rows} rows, a table of {table_bytes} bytes, data from {data_at} to {size}; it "
            f"has {there} bytes",
            hint="something overwrote it: put its rows again",
        )
    owners = np.frombuffer(read(owners_at, 8 * rows), np.int64)
    return Head(owners, read(table_at, table_bytes), data_at, size)


def _held(fd: int, rows: int) -> int:
    return os.pread(fd, rows, _HEAD.size).count(0)


def _owners_at(rows: int) -> int:
    return (_HEAD.size + rows + 7) & ~7


def _aligned(size: int) -> int:
    return (size + ALIGNED - 1) & -ALIGNED


def _size(buffer: Any) -> int:
    return memoryview(buffer).nbytes


def _write(fd: int, buffers: Sequence[Any], at: int) -> None:
    left = [memoryview(buffer).cast("B") for buffer in buffers if _size(buffer)]
    while left:
        written = os.pwritev(fd, left[:_MOST_BUFFERS], at)
        at += written
        while left and written >= len(left[0]):
            written -= len(left.pop(0))
        if left and written:
            left[0] = left[0][written:]
