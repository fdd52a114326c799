"""Membership in a bridge: joining through its control segment, leaving, and sweeping dead members' segments.

Defines which lock proves what and the lock order. docs/adr/0001-lanes.md, "Life of a name", describes both.
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
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Descriptor
from shmbridge._ext.weights import Versions
from shmbridge.errors import LayoutMismatch, NotReady, ShmPermission
from shmbridge.segments import engine_folders, locks, os_limits, receipts, values
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import (
    control_name,
    foreign_owner,
    lane_names,
    map_now,
    map_segment,
    open_mapping,
    open_segment,
    remove_folder,
    reserve,
    socket_directory,
    stands_there,
    still_named,
    unlink,
    value_names,
    weights_name,
)

_READY_TIMEOUT_S = 10.0
_EPOCHS = 1 << 31
_LEFT = "lanes or values of the bridge are left"
_OVERWRITTEN = "something overwrote it: end what uses the bridge and run: shmbridge clean <bridge> --yes"
_DESCRIPTORS = 8  # control, a lane or weights, and short-lived ones


def open_control(bridge: str) -> header.Control:
    """Returns the bridge's control segment, created and initialised if need be, with this process as a
    participant.

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
    """Becomes a participant of the segment, if the name still leads to it; returns whether it did."""
    try:
        return still_named(file.fd, name) and locks.lock_shared(file.fd, LockByte.PARTICIPANTS)
    except BaseException:
        file.close()  # the error's frames keep `file`
        raise


def _enter_control(file: Descriptor, name: str, bridge: str) -> header.Control:
    """Initialises the segment if it is not yet, and frees the initialisation lock; a death in here leaves no
    magic number.
    """
    try:
        if os.fstat(file.fd).st_size < header.control_bytes:
            reserve(file.fd, header.control_bytes, f"the control segment of bridge {bridge!r}")
        mapping = map_segment(file, header.control_bytes, f"the control segment of bridge {bridge!r}")
    except BaseException:
        file.close()
        with contextlib.suppress(OSError):  # created just now, in vain
            _sweep_control(bridge, CleanReport(dry_run=False))
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
        locks.unlock_all(file.fd)  # the error's frames keep the mapping, and so the locks
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
    """Locks the present hub's epoch: this rank may hold memory that this hub hands out. Returns the epoch, 0
    if there is none yet.

    If a new hub comes between the load and the lock, the second load sees it; a later hub sees the lock.
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
    """Unlocks `epoch`: this rank holds nothing more that its hub handed out."""
    locks.unlock(control.mapping.fd, LockByte.FIRST_EPOCH + epoch)


def ranks_before(control: header.Control) -> bool:
    """Returns whether a living rank may hold memory that a hub before the present one handed out."""
    return locks.is_locked(control.mapping.fd, LockByte.FIRST_EPOCH, min(int(control.hub_epoch), _EPOCHS))


def _epoch(control: header.Control) -> int:
    epoch = int(control.hub_epoch)
    if epoch >= _EPOCHS:
        raise LayoutMismatch(f"the control segment counts {epoch} consumers", hint=_OVERWRITTEN)
    return epoch


def leave(fd: int, bridge: str) -> None:
    """Frees every lock held through the control segment's `fd`, and removes the dead segments of the
    bridge.
    """
    locks.unlock_all(fd)
    sweep(bridge)


def _leave_late(fd: int, bridge: str, pid: int) -> None:
    """Runs when the last reference goes while `fd` is still open; does nothing in a child of fork."""
    if os.getpid() == pid:
        leave(fd, bridge)


@dataclass(slots=True)
class CleanReport:
    """The names that clean() removed (or would remove) and those it kept and why, the undelivered records
    removed or kept with each lane, and the trained version removed with a bridge whose learner was killed.
    """

    dry_run: bool
    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    undelivered: dict[str, int] = field(default_factory=dict)
    trained: dict[str, int] = field(default_factory=dict)


def lane_header(name: str) -> dict[str, Any] | None:
    """Returns a lane's header; None if the lane is gone, another user's, or its header cannot be true.

    Quick, even for a busy lane.
    """
    with contextlib.suppress(ShmPermission, header.LaneCorrupt):
        mapping = open_mapping(name, readonly=True)
        return None if mapping is None else header.read_lane(mapping)
    return None


def remove_lane(name: str, *, with_records: bool = False, dry_run: bool = False) -> tuple[bool, str, int]:
    """Removes a lane if it is dead; returns (removed, reason it was kept or "", records it held).

    Never touches a live lane. One whose records came from another node leaves a receipt for the last of them.
    """
    try:
        file = open_segment(name)
    except FileNotFoundError:
        return False, "gone already", 0
    except ShmPermission as foreign:
        return False, foreign.message, 0
    try:
        if not locks.lock_exclusive(file.fd, LockByte.PRODUCER):
            return False, "its producer is alive", 0
        mapping = map_now(file, name, readonly=True)  # not before: the producer may have made it larger since
        held = 0
        try:
            if mapping is not None:
                held = header.undelivered(mapping)  # 0 if it never became ready
        except header.LaneCorrupt:
            if not with_records:
                return False, "its header cannot be read", 0
        if held and not with_records:
            return False, f"holds {held} undelivered records", held
        if mapping is not None and not dry_run:
            if not still_named(file.fd, name):
                return False, "gone already", held
            if kept := receipts.write(name, mapping):
                return False, kept, held
        header.fault(b"segment.unlinking")
        return dry_run or unlink(file.fd, name), "", held
    finally:
        locks.unlock(file.fd, LockByte.PRODUCER)  # an error's frames keep the mapping, and so the lock
        file.close()


def sweep(bridge: str, *, with_records: bool = False, dry_run: bool = False) -> CleanReport:
    """Removes the dead segments of a bridge: lanes without undelivered records (with them, if asked), then
    the rest if there is no participant; what a killed learner has trained only with the records.

    While a consumer lives, undelivered records are never removed: the consumer will take them.
    """
    report = CleanReport(dry_run)
    lanes_too = with_records and not _has_consumer(bridge)
    for name in lane_names(bridge):
        removed, reason, held = remove_lane(name, with_records=lanes_too, dry_run=dry_run)
        if removed:
            report.removed.append(name)
        elif reason != "gone already":
            report.kept[name] = reason
        if held:
            report.undelivered[name] = held
    _sweep_values(bridge, report, with_records)
    _sweep_control(bridge, report, with_trained=with_records)
    dead, kept = engine_folders.remove_dead(bridge, dry_run=dry_run)
    report.removed += dead
    report.kept.update(kept)
    return report


def _sweep_values(bridge: str, report: CleanReport, with_records: bool) -> None:
    """Removes the segments of values that hold nothing; with them, if asked, those of a queue that ended."""
    names = value_names(bridge)  # first: what a queue that begins now puts is not among them
    ended = not _is_locked(bridge, LockByte.VALUES)
    for name in names:
        removed, reason, held = values.remove_values(
            name, with_records=with_records and ended, dry_run=report.dry_run
        )
        if removed:
            report.removed.append(name)
        elif reason != "gone already":
            report.kept[name] = reason if ended or not held else f"{reason}; its queue is alive"
        if held:
            report.undelivered[name] = held


def _has_consumer(bridge: str) -> bool:
    return _is_locked(bridge, LockByte.HUB)


def _is_locked(bridge: str, byte: LockByte) -> bool:
    mapping = open_mapping(control_name(bridge), readonly=True)
    return mapping is not None and locks.is_locked(mapping.fd, byte)


def _left(bridge: str) -> list[str]:
    return lane_names(bridge) + value_names(bridge)


def _sweep_control(bridge: str, report: CleanReport, *, with_trained: bool = False) -> None:
    """Removes control segment, weights and socket directory together, once there is no participant and no
    lane; keeps another user's, and what a killed learner has trained, unless `with_trained`.
    """
    name, weights, directory = control_name(bridge), weights_name(bridge), f"/{socket_directory(bridge).name}"
    odd = {each: foreign for each in (weights, directory) if (foreign := foreign_owner(each))}
    odd.update((each, "is no segment") for each in (name, weights) if stands_there(each) == "other")
    present = [each for each in (name, weights) if stands_there(each) == "segment" and each not in odd]
    if name in odd or not (present or (socket_directory(bridge).exists() and directory not in odd)):
        report.kept.update(odd)
        return
    if report.kept if report.dry_run else _left(bridge):
        reason = _LEFT
    else:
        # Recreate a lost control segment for its lock: so no process can join while the rest is removed.
        file = open_segment(name, posix_ipc.O_CREAT)
        try:
            reason = _unused_control(file.fd, name) or ("" if report.dry_run or not _left(bridge) else _LEFT)
            if not reason and (trained := _unsaved(bridge)) is not None:
                if with_trained:
                    report.trained[present[-1]] = trained
                else:
                    reason = f"version {trained} is there, trained by a learner that was killed"
            if not reason and not (report.dry_run and name in present):
                _remove_control(file.fd, bridge, {weights, directory} if report.dry_run else odd)
        finally:
            file.close()
    if reason:
        report.kept.update(dict.fromkeys(present, reason))
    else:
        report.kept.clear()  # lanes that other processes have removed since
        report.removed.extend(present)
    report.kept.update(odd)


def _unused_control(fd: int, name: str) -> str:
    """Takes the control segment's locks, in the order that lets no process join in between; returns why that
    failed, or "".
    """
    if not locks.lock_exclusive(fd, LockByte.INITIALISING):
        return "is being initialised"
    if not locks.lock_exclusive(fd, LockByte.PARTICIPANTS):
        return "has living participants"
    return "" if still_named(fd, name) else "was made again just now"


def trained_version(control: header.Control, weights: int | None) -> int | None:
    """Returns the version whose weights the newest one has, if these can hold a trained step; else None.

    `weights`: the newest version of the weights segment.
    """
    newest, (started, same_as) = (
        max(control.policy_version, -1 if weights is None else weights),
        control.start,
    )
    trained = same_as if newest == started else newest
    return int(trained) if trained > 0 else None


def weights_version(bridge: str) -> int | None:
    """Returns the newest version in the weights segment; None without one."""
    mapping = open_mapping(weights_name(bridge), readonly=True, minimum=versions.header_bytes)
    found = None if mapping is None else Versions(mapping)
    latest = found.latest if found is not None and found.ready else None
    return None if latest is None else int(latest[0])


def _unsaved(bridge: str) -> int | None:
    """Returns the version that a learner has trained which was killed, or is still there; else None."""
    mapping = open_mapping(control_name(bridge), readonly=True, minimum=header.control_bytes)
    if mapping is None:
        return None
    control = header.Control(mapping)
    if control.layout_version != header.layout_version or not control.run_open:
        return None
    return trained_version(control, weights_version(bridge))


def _remove_control(fd: int, bridge: str, kept: Collection[str]) -> None:
    if weights_name(bridge) not in kept:
        with contextlib.suppress(posix_ipc.ExistentialError, IsADirectoryError):
            posix_ipc.unlink_shared_memory(weights_name(bridge))
    if f"/{socket_directory(bridge).name}" not in kept:
        remove_folder(socket_directory(bridge))
    unlink(fd, control_name(bridge))
