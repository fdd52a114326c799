"""Segments of values, and receipts: what a bridge keeps beside its lanes.

Segments of values hold what one put of a TransferQueue has stored, read in place by any process until its
rows are released.

For stores whose values are read at random, by several readers, and which any process may clear: one segment
per put, written once, then read-only but for one byte per row, which says that the row is released. Whoever
releases the last row removes the name; the kernel keeps the memory until its last mapping is gone, so that a
reader's view outlives the release. docs/adr/0015-transfer-queue.md has the reasons.

    header (magic last) | released, a byte per row | owners, int64 per row | table | data, 64-byte aligned

The writer's lock lasts until the magic is there: a segment without either was never committed. A released
byte goes from 0 to 1 by pwrite, once, and is never read before it is written: of two processes that release
the last rows at once, at least one sees all of them, and nobody waits for anybody.

A receipt says what a lane that is gone had of a producer on another node, whose records a relay brought, or
of a producer here that continues later where it ended. It is a file of one line of JSON,
`/shmbridge.BRIDGE.r.ID`, with the ID of the lane. A process that removes a dead lane with an open origin
writes it first, under the lane's lock: a receipt that is not whole has its lane beside it.
docs/adr/0017-relay.md has the reasons.
"""

import contextlib
import os
import stat
import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import posix_ipc

from shmbridge._ext import header
from shmbridge._ext.header import Mapping
from shmbridge.errors import LayoutMismatch, RecordUnreadable, ShmPermission
from shmbridge.segments import locks, segment
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import (
    MOUNT,
    new_name,
    open_segment,
    reserve,
    still_named,
    unlink_segment,
    value_names,
)

VALUES_LAYOUT = 1
VALUES_ALIGNED = 64
_MAGIC = b"SHMBVALS"
_HEAD = struct.Struct("<8sIIQQQ24x")  # magic, layout, rows, bytes of the table, where data begins, size
_MOST_BUFFERS = 512  # of one pwritev
_MOST_ROWS = 1 << 24

Buffers = Sequence[Any]  # of bytes-like objects


@dataclass(frozen=True, slots=True)
class ValuesHead:
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


def write_values(
    bridge: str, owners: npt.NDArray[np.int64], table: bytes, parts: Iterable[tuple[int, Buffers]]
) -> str:
    """Commits one segment of values and returns its name; blocks while it copies.

    Args:
        bridge: the name of the bridge.
        owners: int64 (rows,), whom each row belongs to; `release_values` names rows by their place here.
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
            head = _HEAD.pack(_MAGIC, VALUES_LAYOUT, len(owners), len(table), data_at, size)
            _write(file.fd, [head], 0)
            header.fault(b"values.committed")
            return name
        except BaseException:
            unlink_segment(file.fd, name)
            raise
        finally:
            file.close()  # and with it the lock


def read_values_head(name: str) -> ValuesHead | None:
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


def release_values(name: str, rows: Iterable[int]) -> bool:
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
        unlink_segment(file.fd, name)
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
        return dry_run or unlink_segment(file.fd, name), "", held
    finally:
        file.close()


def value_bytes(bridge: str) -> tuple[int, int]:
    """Returns how many segments of values the bridge has, and their bytes. Never blocks."""
    count = total = 0
    for name in value_names(bridge):
        try:
            total += os.stat(MOUNT / name[1:]).st_size
            count += 1
        except FileNotFoundError:
            continue
    return count, total


def values_head(raw: npt.NDArray[np.uint8], name: str) -> ValuesHead:
    """Returns the head of a mapped segment, copied and checked; errors as `read_values_head`."""
    return _checked(bytes(raw[: _HEAD.size]), len(raw), name, lambda at, size: bytes(raw[at : at + size]))


def _head(fd: int, name: str) -> ValuesHead:
    return _checked(
        os.pread(fd, _HEAD.size, 0), os.fstat(fd).st_size, name, lambda at, size: os.pread(fd, size, at)
    )


def _checked(raw: bytes, there: int, name: str, read: Any) -> ValuesHead:
    if len(raw) < _HEAD.size or raw[: len(_MAGIC)] != _MAGIC:
        raise RecordUnreadable(f"{name} was never committed", hint="shmbridge clean removes it")
    _, layout, rows, table_bytes, data_at, size = _HEAD.unpack(raw)
    if layout != VALUES_LAYOUT:
        raise LayoutMismatch(
            f"{name} has layout {layout} of values, this build has {VALUES_LAYOUT}",
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
    return ValuesHead(owners, read(table_at, table_bytes), data_at, size)


def _held(fd: int, rows: int) -> int:
    return os.pread(fd, rows, _HEAD.size).count(0)


def _owners_at(rows: int) -> int:
    return (_HEAD.size + rows + 7) & ~7


def _aligned(size: int) -> int:
    return (size + VALUES_ALIGNED - 1) & -VALUES_ALIGNED


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


_LONGEST = 4096  # bytes: one page, written by one call


@dataclass(frozen=True, slots=True)
class Receipt:
    """The last record that a lane, now gone, had of a producer."""

    name: str  # of its file, as a segment's
    node: str  # "": this one
    producer_id: str
    sequence: int  # of that record, there


class _Line(msgspec.Struct):
    node: str
    producer_id: str
    sequence: int


def write_receipt(lane: str, mapping: Mapping) -> str:
    """Writes the receipt of a dead lane that is about to be removed, if it needs one.

    The caller holds the lane's lock, and the name leads to the lane. Returns "", or why the lane must stay.
    """
    try:
        said, newest = header.read_lane(mapping), header.newest_origin(mapping)
    except header.LaneCorrupt:
        return ""  # nothing it says can be believed
    if said is None or not said["origin_open"]:
        return ""
    producer_id = said["origin_producer_id"]
    if not producer_id:
        producer_id, newest = said["producer_id"], header.lane_counters(mapping)["tail"] - 1
    if newest is None or newest < 0:
        return ""
    line = msgspec.json.encode(_Line(said["origin_node"], producer_id, newest)) + b"\n"
    how = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(_path(_receipt_of(lane)), how, 0o600)
        try:
            os.fchmod(fd, 0o600)  # whatever the umask takes away
            header.fault(b"receipt.created")
            whole = os.write(fd, line) == len(line)
        finally:
            os.close(fd)
    except OSError as wrong:
        return f"its receipt cannot be written: {wrong.strerror}"
    header.fault(b"receipt.written")
    return "" if whole else "its receipt cannot be written: no room"


def read_receipts(bridge: str) -> list[Receipt]:
    """Returns the receipts of a bridge, by name. Never blocks.

    Leaves out those of other users, and what is no receipt: the lane of one that is not whole is still there.
    """
    found = (_read(name) for name in segment.receipt_names(bridge))
    return [receipt for receipt in found if receipt is not None]


def remove_receipts(bridge: str, wanted: Callable[[Receipt], bool]) -> list[str]:
    """Removes those receipts of a bridge that nobody will need again; returns their names. Never blocks.

    For the bridge's relay: of a producer that will send nothing again, or whose newer lane begins with what
    the receipt says.
    """
    names = [receipt.name for receipt in read_receipts(bridge) if wanted(receipt)]
    return [name for name in names if remove_receipt(name)]


def remove_receipt(name: str) -> bool:
    """Removes a receipt by name, whatever it says; returns whether it was there and could be removed."""
    with contextlib.suppress(OSError):
        os.unlink(_path(name))
        return True
    return False


def close_origin(bridge: str, producer_id: str) -> bool:
    """Notes in the dead lanes of a producer that it will send nothing again: they leave no
    receipts, and its partial groups are discarded.

    For the bridge's relay, which takes the place of those lanes' producers, and for one here that goes on in
    the place of that producer. Returns False if somebody else
    has the lock of one, who may be removing it: to be tried again. Never blocks.
    """
    closed = True
    for name in segment.lane_names(bridge):
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = segment.open_mapping(name)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is None or said is None:
                continue
            if (said["origin_producer_id"] or said["producer_id"]) != producer_id:
                continue
            if locks.lock_exclusive(mapping.fd, LockByte.PRODUCER):  # it is dead, and nobody removes it
                try:
                    header.close_origin(mapping)
                finally:
                    locks.unlock(mapping.fd, LockByte.PRODUCER)
            else:
                closed = False
    return closed


def newest_relayed(bridge: str) -> dict[str, tuple[str, int]]:
    """Returns what the bridge has of each producer on another node: its id -> (its node, the sequence there
    of the last record that is, or was, committed here). Never blocks.

    Exact for lanes whose relay is dead. Raises ProcessLimit: without a descriptor it cannot be known.
    """
    found: dict[str, tuple[str, int]] = {}

    def note(node: str, producer_id: str, sequence: int) -> None:
        if producer_id not in found or found[producer_id][1] < sequence:
            found[producer_id] = node, sequence

    # Lanes first: one that is removed in between has left its receipt.
    for name in segment.lane_names(bridge):
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = segment.open_mapping(name, readonly=True)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is None or said is None or not said["origin_producer_id"]:
                continue
            if (newest := header.newest_origin(mapping)) is not None:
                note(said["origin_node"], said["origin_producer_id"], newest)
    for receipt in read_receipts(bridge):
        if receipt.node:
            note(receipt.node, receipt.producer_id, receipt.sequence)
    return found


def committed_here(bridge: str, producer_id: str) -> int | None:
    """Returns how many records a producer of this node that has ended had committed; None if neither its lane
    nor a receipt is there. Never blocks.
    """
    for name in segment.lane_names(bridge):
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = segment.open_mapping(name, readonly=True)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is not None and said is not None and said["producer_id"] == producer_id:
                return int(header.lane_counters(mapping)["tail"])
    found = (each.sequence + 1 for each in read_receipts(bridge) if each.producer_id == producer_id)
    return next(found, None)


def forget_producer(bridge: str, producer_id: str) -> None:
    """Removes what `committed_here` needs of a producer that has ended, but for its lane. Never blocks."""
    close_origin(bridge, producer_id)
    remove_receipts(bridge, lambda receipt: receipt.producer_id == producer_id)


def _receipt_of(lane: str) -> str:
    bridge, number = lane.rsplit(".l.", 1)
    return f"{bridge}.r.{number}"


def _path(name: str) -> str:
    return os.fspath(segment.MOUNT / name[1:])


def _read(name: str) -> Receipt | None:
    try:
        fd = os.open(_path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except (FileNotFoundError, PermissionError):
        return None
    try:
        about = os.fstat(fd)
        if about.st_uid != os.geteuid() or not stat.S_ISREG(about.st_mode):
            return None
        line = msgspec.json.decode(os.read(fd, _LONGEST), type=_Line)
    except msgspec.MsgspecError:
        return None
    finally:
        os.close(fd)
    return Receipt(name, line.node, line.producer_id, line.sequence) if line.sequence >= 0 else None
