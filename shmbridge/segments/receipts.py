"""Receipts: what a lane that is gone had of a producer on another node, whose records a relay brought, or
of a producer here that goes on later where it ended.

A receipt is a file of one line of JSON, `/shmbridge.BRIDGE.r.ID`, with the ID of the lane. A process that
removes a dead lane with an open origin writes it first, under the lane's lock: a receipt that is not whole
has its lane beside it. docs/adr/0017-relay.md says why.
"""

import contextlib
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from shmbridge._ext import header
from shmbridge._ext.header import Mapping
from shmbridge.errors import ShmPermission
from shmbridge.segments import locks, segment
from shmbridge.segments.locks import LockByte

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


def write(lane: str, mapping: Mapping) -> str:
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


def read_all(bridge: str) -> list[Receipt]:
    """Returns the receipts of a bridge, by name. Never blocks.

    Leaves out those of other users, and what is no receipt: the lane of one that is not whole is still there.
    """
    found = (_read(name) for name in segment.receipt_names(bridge))
    return [receipt for receipt in found if receipt is not None]


def remove(bridge: str, wanted: Callable[[Receipt], bool]) -> list[str]:
    """Removes those receipts of a bridge that nobody will need again; returns their names. Never blocks.

    For the bridge's relay: of a producer that will send nothing again, or whose newer lane begins with what
    the receipt says.
    """
    names = [receipt.name for receipt in read_all(bridge) if wanted(receipt)]
    return [name for name in names if remove_one(name)]


def remove_one(name: str) -> bool:
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
    for receipt in read_all(bridge):
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
    found = (each.sequence + 1 for each in read_all(bridge) if each.producer_id == producer_id)
    return next(found, None)


def forget(bridge: str, producer_id: str) -> None:
    """Removes what `committed_here` needs of a producer that has ended, but for its lane. Never blocks."""
    close_origin(bridge, producer_id)
    remove(bridge, lambda receipt: receipt.producer_id == producer_id)


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
