"""Taking part in a bridge: entering through its control segment, leaving, and sweeping what the dead have
left.

Knows which lock proves what and in which order locks are taken; names and memory are segment.py's.
docs/adr/0001-lanes.md, "Life of a name", is what both do.
"""

import contextlib
import os
import time
import weakref
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import posix_ipc

from shmbridge._ext import header
from shmbridge._ext.mapping import Descriptor, Mapping
from shmbridge.errors import LayoutMismatch, NotReady, ShmPermission
from shmbridge.segments import engine_folders, locks, os_limits
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import (
    control_name,
    foreign_owner,
    lane_names,
    map_segment,
    open_mapping,
    open_segment,
    remove_folder,
    reserve,
    socket_directory,
    stands_there,
    still_named,
    unlink,
    weights_name,
)

_READY_TIMEOUT_S = 10.0
_EPOCHS = 1 << 31
_OVERWRITTEN = "something overwrote it: end what uses the bridge and run: shmbridge clean <bridge> --yes"
_DESCRIPTORS = 8  # control, a lane or weights, and what is open only for a moment


def open_control(bridge: str) -> header.Control:
    """The bridge's control segment, created and initialised if need be, with this process as a participant.

    Blocks while a living process initialises it, at most 10 s, then NotReady. The participants' lock lasts as
    long as the Control.
    """
    name = control_name(bridge)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    os_limits.check_descriptors(_DESCRIPTORS, f"taking part in bridge {bridge!r}")
    while True:
        file = open_segment(name, posix_ipc.O_CREAT)
        if not locks.lock_exclusive(file.fd, LockByte.INITIALISING):
            file.close()
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{name} has been in initialisation by a living process for {_READY_TIMEOUT_S:.0f} s",
                    hint="look for a stopped process of this bridge: ps -eo pid,stat,cmd",
                )
            time.sleep(0.002)
        elif _joins(file, name):
            return _enter_control(file, name, bridge)
        else:  # swept between open and lock
            file.close()


def _joins(file: Descriptor, name: str) -> bool:
    """Takes part in what the name leads to, if that is still this segment."""
    try:
        return still_named(file.fd, name) and locks.lock_shared(file.fd, LockByte.PARTICIPANTS)
    except BaseException:
        file.close()  # the error's frames keep it
        raise


def _enter_control(file: Descriptor, name: str, bridge: str) -> header.Control:
    """Makes the segment whole if nobody did, and gives the initialisation lock back; whoever dies here leaves
    no magic.
    """
    try:
        if os.fstat(file.fd).st_size < header.control_bytes:
            reserve(file.fd, header.control_bytes, f"the control segment of bridge {bridge!r}")
        mapping = map_segment(file, header.control_bytes, f"the control segment of bridge {bridge!r}")
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):  # made just now, in vain
            _sweep_control(bridge, SweepReport(), dry_run=False)
        raise
    try:
        control = header.Control(mapping)
        header.fault(b"control.locked")
        if not control.ready:
            control.format(os.getpid())
        locks.unlock(file.fd, LockByte.INITIALISING)
        weakref.finalize(mapping, _leave_late, mapping.fd, bridge, os.getpid()).atexit = False
        _check_layout(control, name)
    except BaseException as wrong:
        locks.unlock_all(file.fd)  # the error's frames keep the mapping, and that the locks
        if isinstance(wrong, header.LaneCorrupt):
            raise LayoutMismatch(f"{name}: {wrong}", hint=_OVERWRITTEN) from None
        raise
    return control


def _check_layout(control: header.Control, name: str) -> None:
    if control.layout_version != header.layout_version:
        raise LayoutMismatch(
            f"{name} has layout version {control.layout_version}, this build has {header.layout_version}",
            hint="use one shmbridge version on both sides, or end the other side and run: shmbridge clean "
            "<bridge> --yes",
        )
    _epoch(control)


def join_epoch(control: header.Control) -> int:
    """Says, by a lock, that this rank may hold memory which the present hub hands out; that hub's epoch, 0 if
    there was none yet.

    A hub that comes between the load and the lock is seen by the second load; one that comes later sees the
    lock.
    """
    while True:
        epoch = _epoch(control)
        if epoch == 0:
            return 0
        header.fault(b"rank.epoch_loaded")
        locks.lock_shared(control.mapping.fd, LockByte.FIRST_EPOCH + epoch)
        header.fault(b"rank.epoch_locked")
        if control.hub_epoch == epoch:
            return epoch
        leave_epoch(control, epoch)


def leave_epoch(control: header.Control, epoch: int) -> None:
    """Nothing that the hub of `epoch` handed out is held here any more."""
    locks.unlock(control.mapping.fd, LockByte.FIRST_EPOCH + epoch)


def ranks_before(control: header.Control) -> bool:
    """Whether a rank lives that may hold what a hub before the present one handed out."""
    return locks.is_locked(control.mapping.fd, LockByte.FIRST_EPOCH, min(int(control.hub_epoch), _EPOCHS))


def _epoch(control: header.Control) -> int:
    epoch = int(control.hub_epoch)
    if epoch >= _EPOCHS:
        raise LayoutMismatch(f"the control segment counts {epoch} consumers", hint=_OVERWRITTEN)
    return epoch


def leave(fd: int, bridge: str) -> None:
    """Gives up every part in a bridge that the control segment's `fd` stands for, and removes what is dead of
    it.
    """
    locks.unlock_all(fd)
    sweep(bridge)


def _leave_late(fd: int, bridge: str, pid: int) -> None:
    """The last reference goes and `fd` is still open; in a child of fork it is not."""
    if os.getpid() == pid:
        leave(fd, bridge)


@dataclass(slots=True)
class LaneFate:
    """What is known of one lane from outside: its header, whether its producer lives, what it holds, what of
    that a hub dropped.
    """

    name: str
    alive: bool
    held: int
    dropped: int
    records: int
    info: dict[str, Any] | None
    size: int
    released: int  # as its hub counted them
    unaccounted: int | None  # what its slots show as released beyond that; None: it was too busy to tell
    data_writable: bool  # by a reader, for its GPU


@dataclass(slots=True)
class SweepReport:
    """What a sweep removed and what it left, each with its reason."""

    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    undelivered: dict[str, int] = field(default_factory=dict)


def lane_header(name: str) -> dict[str, Any] | None:
    """What a lane's header says; None if it is gone, another user's, or says nothing that could be true.

    Quick, also of a busy lane.
    """
    with contextlib.suppress(ShmPermission, header.LaneCorrupt):
        mapping = open_mapping(name, readonly=True)
        return None if mapping is None else header.read_lane(mapping)
    return None


def lane_fate(name: str) -> LaneFate | None:
    """Looks at a lane without touching it; None if it is gone, or another user's."""
    try:
        mapping = open_mapping(name, readonly=True)
    except ShmPermission:
        return None
    if mapping is None:
        return None
    alive = locks.is_locked(mapping.fd, LockByte.PRODUCER)
    writable = locks.is_locked(mapping.fd, LockByte.WRITABLE_DATA)
    info, held, dropped, records, released = None, 0, 0, 0, 0
    shown: int | None = 0
    with contextlib.suppress(header.LaneCorrupt):
        info = header.read_lane(mapping)
        held = header.undelivered(mapping)
        if info:
            words = header.lane_counters(mapping)
            dropped, records = words["leases_dropped"], words["tail"]
        released, shown = header.releases(mapping)
    unaccounted = None if shown is None else shown - released
    return LaneFate(name, alive, held, dropped, records, info, mapping.size, released, unaccounted, writable)


def remove_lane(name: str, *, with_records: bool = False, dry_run: bool = False) -> tuple[bool, str, int]:
    """Removes a lane if it is dead: (removed, reason it was kept or "", records it held).

    Never touches a live one.
    """
    try:
        file = open_segment(name)
    except FileNotFoundError:
        return False, "gone already", 0
    except ShmPermission as foreign:
        return False, foreign.message, 0
    try:
        size = os.fstat(file.fd).st_size
        mapping = map_segment(file, size, f"segment {name}", readonly=True) if size else None
        if not locks.lock_exclusive(file.fd, LockByte.PRODUCER):
            return False, "its producer is alive", 0
        held = 0 if mapping is None else _undelivered(mapping)
        if held is None and not with_records:
            return False, "its header cannot be read", 0
        if held and not with_records:
            return False, f"holds {held} undelivered records", held
        header.fault(b"segment.unlinking")
        return dry_run or unlink(file.fd, name), "", held or 0
    finally:
        locks.unlock(file.fd, LockByte.PRODUCER)  # an error's frames keep the mapping, and that the lock
        file.close()


def _undelivered(lane: Mapping) -> int | None:
    """Undelivered records of a dead lane, 0 if it never became ready, None if its header makes no sense."""
    try:
        return header.undelivered(lane)
    except header.LaneCorrupt:
        return None


def sweep(bridge: str, *, with_records: bool = False, dry_run: bool = False) -> SweepReport:
    """Removes what is dead of a bridge: lanes without undelivered records (with them, if asked), then the
    rest if nobody takes part.

    While a consumer lives, undelivered records are never removed: they are on their way to it.
    """
    report = SweepReport()
    with_records = with_records and not _has_consumer(bridge)
    for name in lane_names(bridge):
        removed, reason, held = remove_lane(name, with_records=with_records, dry_run=dry_run)
        if removed:
            report.removed.append(name)
        elif reason != "gone already":
            report.kept[name] = reason
        if held:
            report.undelivered[name] = held
    _sweep_control(bridge, report, dry_run)
    dead, kept = engine_folders.remove_dead(bridge, dry_run=dry_run)
    report.removed += dead
    report.kept.update(kept)
    return report


def _has_consumer(bridge: str) -> bool:
    mapping = open_mapping(control_name(bridge), readonly=True)
    return mapping is not None and locks.is_locked(mapping.fd, LockByte.HUB)


def _sweep_control(bridge: str, report: SweepReport, dry_run: bool) -> None:
    """Control, weights and socket directory go together, when nobody takes part and no lane is left; not what
    is another user's.
    """
    name, weights, directory = control_name(bridge), weights_name(bridge), f"/{socket_directory(bridge).name}"
    odd = {each: foreign for each in (weights, directory) if (foreign := foreign_owner(each))}
    odd.update((each, "is no segment") for each in (name, weights) if stands_there(each) == "other")
    present = [each for each in (name, weights) if stands_there(each) == "segment" and each not in odd]
    if name in odd or not (present or (socket_directory(bridge).exists() and directory not in odd)):
        report.kept.update(odd)
        return
    if report.kept if dry_run else lane_names(bridge):
        reason = "lanes of the bridge are left"
    else:
        # A lost control segment is made again for its lock: nobody may join while the rest goes.
        file = open_segment(name, posix_ipc.O_CREAT)
        try:
            reason = _unused_control(file.fd, name) or (
                "" if dry_run or not lane_names(bridge) else "lanes of the bridge are left"
            )
            if not reason and not (dry_run and name in present):
                _remove_control(file.fd, bridge, {weights, directory} if dry_run else odd)
        finally:
            file.close()
    if reason:
        report.kept.update(dict.fromkeys(present, reason))
    else:
        report.kept.clear()  # lanes that others removed meanwhile
        report.removed.extend(present)
    report.kept.update(odd)


def _unused_control(fd: int, name: str) -> str:
    """Takes the control segment's locks, in the order that lets nobody join in between; why that failed, or
    "".
    """
    if not locks.lock_exclusive(fd, LockByte.INITIALISING):
        return "is being initialised"
    if not locks.lock_exclusive(fd, LockByte.PARTICIPANTS):
        return "has living participants"
    return "" if still_named(fd, name) else "was made again just now"


def _remove_control(fd: int, bridge: str, kept: Collection[str]) -> None:
    if weights_name(bridge) not in kept:
        with contextlib.suppress(posix_ipc.ExistentialError, IsADirectoryError):
            posix_ipc.unlink_shared_memory(weights_name(bridge))
    if f"/{socket_directory(bridge).name}" not in kept:
        remove_folder(socket_directory(bridge))
    unlink(fd, control_name(bridge))
