"""Who takes part in a bridge, and what is left of it: joining, leaving, sweeping, listing and cleaning.

Defines which lock proves what and the lock order; docs/adr/0001-lanes.md, "Life of a name", describes both.
Folders with weights for engines that load from a path are here, too: the writer locks its folder, and any
later start removes one without a lock.
"""

import contextlib
import fcntl
import os
import re
import time
import weakref
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import posix_ipc

from shmbridge._ext import header
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Descriptor
from shmbridge._ext.weights import Versions
from shmbridge.config import check_bridge_name
from shmbridge.errors import LayoutMismatch, NotReady, ShmBridgeError, ShmPermission
from shmbridge.segments import locks, stored
from shmbridge.segments.locks import LockByte
from shmbridge.segments.segment import (
    MOUNT,
    bridge_names,
    control_name,
    engine_folder_prefix,
    foreign_owner,
    gateway_directory,
    lane_names,
    map_now,
    map_segment,
    open_mapping,
    open_segment,
    receipt_names,
    remove_folder,
    reserve,
    socket_directory,
    stands_there,
    still_named,
    unlink_segment,
    value_names,
    weights_name,
)


class EngineFolder:
    """A new empty folder of this process, named after the bridge; its lock keeps others from removing it."""

    def __init__(self, bridge: str) -> None:
        """Does not block.

        Raises OSError: no room on the mount, or no descriptor left; then there is no folder.
        """
        self._file: Descriptor | None = None
        while self._file is None:
            self.path = MOUNT / f"{engine_folder_prefix(bridge)}{os.urandom(8).hex()}"
            self.path.mkdir(mode=0o700)
            try:
                with contextlib.suppress(FileNotFoundError):
                    self.path.chmod(0o700)  # whatever the umask takes away
                # None: another process took it for a dead one's, and removes it
                self._file = _lock_folder(self.path)
            except BaseException:
                with contextlib.suppress(OSError):
                    self.path.rmdir()
                raise

    def remove(self) -> None:
        """Removes the folder and its contents. Idempotent."""
        if self._file is not None:
            remove_folder(self.path)
            self._file.close()
            self._file = None


def remove_dead_folders(bridge: str, *, dry_run: bool = False) -> tuple[list[str], dict[str, str]]:
    """Removes the folders whose writers are dead (with `dry_run` only finds them); returns their names, and
    the kept folders, each with the reason.

    Never blocks.
    """
    dead: list[str] = []
    kept: dict[str, str] = {}
    for folder in _folders(bridge):
        name = f"/{folder.name}"
        try:
            file = _lock_folder(folder)
        except OSError as wrong:
            kept[name] = f"cannot be opened: {wrong.strerror}"
            continue
        if file is None and folder.exists():
            kept[name] = "its writer is alive"
            continue
        dead.append(name)
        if file is not None:
            if not dry_run:
                remove_folder(folder)
            file.close()
    return dead, kept


def _folders(bridge: str) -> Iterator[Path]:
    for folder in sorted(MOUNT.glob(f"{engine_folder_prefix(bridge)}*")):
        with contextlib.suppress(OSError):
            if folder.is_dir() and not folder.is_symlink() and folder.lstat().st_uid == os.geteuid():
                yield folder


def _lock_folder(folder: Path) -> Descriptor | None:
    """Opens and locks the folder; None if another process holds the lock, or the folder is gone.

    Raises OSError, for example when no descriptor is left.
    """
    with contextlib.suppress(BlockingIOError, FileNotFoundError):
        file = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC))
        fcntl.flock(file.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(file.fd), folder.lstat()):
            return file
    return None


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
    locks.check_descriptors(_DESCRIPTORS, f"taking part in bridge {bridge!r}")
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


def leave_bridge(fd: int, bridge: str) -> None:
    """Frees every lock held through the control segment's `fd`, and removes the dead segments of the
    bridge.
    """
    locks.unlock_all(fd)
    sweep_bridge(bridge)


def _leave_late(fd: int, bridge: str, pid: int) -> None:
    """Runs when the last reference goes while `fd` is still open; does nothing in a child of fork."""
    if os.getpid() == pid:
        leave_bridge(fd, bridge)


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
            if kept := stored.write_receipt(name, mapping):
                return False, kept, held
        header.fault(b"segment.unlinking")
        return dry_run or unlink_segment(file.fd, name), "", held
    finally:
        locks.unlock(file.fd, LockByte.PRODUCER)  # an error's frames keep the mapping, and so the lock
        file.close()


def sweep_bridge(bridge: str, *, with_records: bool = False, dry_run: bool = False) -> CleanReport:
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
    dead, kept = remove_dead_folders(bridge, dry_run=dry_run)
    report.removed += dead
    report.kept.update(kept)
    return report


def _sweep_values(bridge: str, report: CleanReport, with_records: bool) -> None:
    """Removes the segments of values that hold nothing; with them, if asked, those of a queue that ended."""
    names = value_names(bridge)  # first: what a queue that begins now puts is not among them
    ended = not _is_locked(bridge, LockByte.VALUES)
    for name in names:
        removed, reason, held = stored.remove_values(
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
    unlink_segment(fd, control_name(bridge))


_OWN_LANE = re.compile(r"-([0-9a-f]{16})$")  # the end of a producer's id


@dataclass(frozen=True, slots=True)
class LaneInfo:
    """One lane as seen from outside.

    `held` counts committed, un-released records, `dropped` those of them that its consumer has dropped
    without release; `size_bytes` is the whole segment.

    `released` is counted by its consumers; `unaccounted` is the number released beyond that, as the lane's
    slots show: 0, except at most one between a consumer's death and the next consumer, unless a record was
    lost; None if the lane was too busy to tell. `data_writable`: a reader maps its data writable, for a GPU.
    `origin_node` is the node from which a relay brings its records, "" for a producer here.
    """

    name: str
    producer_id: str
    env_name: str
    pid: int
    alive: bool
    held: int
    records: int
    size_bytes: int
    dropped: int = 0
    released: int = 0
    unaccounted: int | None = 0
    data_writable: bool = False
    origin_node: str = ""


@dataclass(frozen=True, slots=True)
class WeightsInfo:
    """The weights of a bridge as seen from outside.

    `version` is None before the first, `writer_pid` is None when no writer is alive.
    """

    version: int | None
    writer_pid: int | None
    size_bytes: int


@dataclass(frozen=True, slots=True)
class BridgeInfo:
    """One bridge as seen from outside.

    `consumer_pid` is None when no consumer is alive; `policy_version` -1 before the first.

    `weights` is None if no version was ever begun. `waiting` names the lanes for which the living consumer
    has no room yet. `receipts` counts lanes of other nodes' records that are gone, and whose last record a
    relay may have to know: all that is left of a bridge may be these.

    `trained_version` is the version whose weights the newest one has, if these can hold a trained step, and
    `run_id` the training run of the versions, "" if its learner stored none.
    """

    name: str
    consumer_pid: int | None
    participants: bool
    policy_version: int
    lanes: list[LaneInfo]
    weights: WeightsInfo | None
    waiting: list[str] = field(default_factory=list)
    receipts: int = 0
    run_id: str = ""
    trained_version: int | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of all its lanes."""
        return sum(lane.size_bytes for lane in self.lanes)


def list_bridges() -> list[BridgeInfo]:
    """Returns all bridges of this user's mount, by name. Never blocks, changes nothing."""
    return [_bridge(name) for name in bridge_names()]


def unreleased_sequences(producers: Iterable[str]) -> dict[str, set[int]]:
    """Returns the sequences of each producer's committed, un-released records, by `producer_id`, on any
    bridge.

    Never blocks, changes nothing.

    Empty for a producer whose lane is gone. A producer is left out if its state is unknown: its lane cannot
    be read, or its id does not name one.
    """
    own = {producer: match[1] for producer in producers if (match := _OWN_LANE.search(producer))}
    try:
        lanes = (
            {lane.rpartition(".")[2]: lane for name in bridge_names() for lane in lane_names(name)}
            if own
            else {}
        )
    except OSError:  # for example no descriptor left
        return {}
    found = {
        producer: set[int]() if lane not in lanes else _unreleased(lanes[lane])
        for producer, lane in own.items()
    }
    return {producer: sequences for producer, sequences in found.items() if sequences is not None}


def _unreleased(lane: str) -> set[int] | None:
    try:
        mapping = open_mapping(lane, readonly=True)
        return None if mapping is None else set(header.unreleased(mapping))
    except (OSError, ShmBridgeError, header.LaneCorrupt):
        return None


def _bridge(name: str) -> BridgeInfo:
    lanes = [lane for lane in map(lane_info, lane_names(name)) if lane is not None]
    mapping = open_mapping(control_name(name), readonly=True, minimum=header.control_bytes)
    left, weights = len(receipt_names(name)), _weights(name)
    if mapping is None:
        trained = None if weights is None else weights.version or None  # whether by a step is not known
        return BridgeInfo(name, None, False, -1, lanes, weights, receipts=left, trained_version=trained)
    control = header.Control(mapping)
    alive = locks.is_locked(mapping.fd, LockByte.HUB)
    participants = locks.is_locked(mapping.fd, LockByte.PARTICIPANTS)
    pid, waiting = control.hub_pid if alive else None, _waiting(lanes) if alive else []
    run_id = f"{control.run_id:016x}" if control.run_id else ""
    return BridgeInfo(
        name,
        pid,
        participants,
        control.policy_version,
        lanes,
        weights,
        waiting,
        left,
        run_id,
        trained_version(control, None if weights is None else weights.version),
    )


def _waiting(lanes: list[LaneInfo]) -> list[str]:
    """Returns lanes with a living producer or with records that a consumer reading other lanes does not
    read.
    """
    unread = [lane for lane in lanes if not _is_read(lane.name)]
    return [lane.name for lane in unread if lane.alive or lane.held] if len(unread) < len(lanes) else []


def _is_read(lane: str) -> bool:
    mapping = open_mapping(lane, readonly=True)
    return mapping is not None and locks.is_locked(mapping.fd, LockByte.READER)


def _weights(bridge: str) -> WeightsInfo | None:
    try:
        mapping = open_mapping(weights_name(bridge), readonly=True, minimum=versions.header_bytes)
    except ShmPermission:
        return None
    if mapping is None:
        return None
    found = Versions(mapping)
    latest = found.latest if found.ready else None
    writer = found.writer_pid if locks.is_locked(mapping.fd, LockByte.WRITER) else None
    return WeightsInfo(None if latest is None else latest[0], writer, mapping.size)


def lane_info(name: str) -> LaneInfo | None:
    """Inspects a lane read-only; None if it is gone, or another user's."""
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
    said = info or {"producer_id": "", "env_name": "", "pid": 0, "origin_node": ""}
    return LaneInfo(
        name,
        said["producer_id"],
        said["env_name"],
        said["pid"],
        alive,
        held,
        records,
        mapping.size,
        dropped,
        released,
        unaccounted=None if shown is None else shown - released,
        data_writable=writable,
        origin_node=said["origin_node"],
    )


def clean(bridge: str | None = None, dry_run: bool = True) -> CleanReport:
    """Removes every segment that no living process uses, undelivered records included; with `dry_run` only
    reports them.

    Never blocks, never touches a live lane, or the control segment of a bridge that has participants.

    Args:
        bridge: one bridge, or None for all.
        dry_run: only report.
    """
    report = CleanReport(dry_run)
    for name in bridge_names() if bridge is None else [check_bridge_name(bridge)]:
        swept = sweep_bridge(name, with_records=True, dry_run=dry_run)
        report.removed += swept.removed
        report.kept.update(swept.kept)
        report.undelivered.update(swept.undelivered)
        report.trained.update(swept.trained)
        _forget_receipts(name, report)
        _forget_gateway(name, report)
    return report


def _forget_receipts(bridge: str, report: CleanReport) -> None:
    """Removes the receipts of a dead bridge; only here, because a relay that comes back needs them."""
    for name in receipt_names(bridge):
        if kept := foreign_owner(name) or report.kept.get(control_name(bridge)):
            report.kept[name] = kept
        elif report.dry_run or stored.remove_receipt(name):
            report.removed.append(name)


def _forget_gateway(bridge: str, report: CleanReport) -> None:
    """Removes a gateway's saved state with the rest of a dead bridge; only here, because a restarted gateway
    needs it.
    """
    folder = gateway_directory(bridge)
    if stands_there(f"/{folder.name}") != "other":
        return
    if kept := foreign_owner(f"/{folder.name}") or report.kept.get(control_name(bridge)):
        report.kept[f"/{folder.name}"] = kept
        return
    report.removed.append(f"/{folder.name}")
    if not report.dry_run:
        remove_folder(folder)
