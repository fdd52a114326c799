"""Names, sizes and the life of segments: who creates, who may unlink, and why never a live one.

Knows locks, inodes and memory limits; knows nothing of records. docs/adr/0001-lanes.md, "Life of a name", is what this file does.
"""

import contextlib
import os
import re
import secrets
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import posix_ipc

from shmbridge import liveness
from shmbridge._ext import header
from shmbridge._ext import mapping as mapping_module
from shmbridge._ext.mapping import Mapping
from shmbridge.config import check_bridge_name, format_size
from shmbridge.errors import LayoutMismatch, NotReady, ShmPermission, ShmTooSmall
from shmbridge.liveness import Byte

MOUNT = Path("/dev/shm")
_PREFIX = "shmbridge."
_SEGMENT_NAME = re.compile(r"shmbridge\.([A-Za-z0-9_-]{1,48})\.(?:c|w|s|l\.[0-9a-f]{16})")
_READY_TIMEOUT_S = 10.0


def control_name(bridge: str) -> str:
    """Name of the bridge's control segment."""
    return f"/{_PREFIX}{check_bridge_name(bridge)}.c"


def weights_name(bridge: str) -> str:
    """Name of the bridge's weights segment."""
    return f"/{_PREFIX}{check_bridge_name(bridge)}.w"


def socket_directory(bridge: str) -> Path:
    """Owner-only directory of the bridge's control socket, on the same mount."""
    return MOUNT / f"{_PREFIX}{check_bridge_name(bridge)}.s"


def lane_names(bridge: str) -> list[str]:
    """Names of all lanes of the bridge that exist now, sorted."""
    prefix = f"{_PREFIX}{check_bridge_name(bridge)}.l."
    with contextlib.suppress(FileNotFoundError):
        return sorted(f"/{name}" for name in os.listdir(MOUNT) if name.startswith(prefix))
    return []


def bridges() -> list[str]:
    """Names of all bridges that have anything on the mount, sorted."""
    with contextlib.suppress(FileNotFoundError):
        found = (_SEGMENT_NAME.fullmatch(name) for name in os.listdir(MOUNT))
        return sorted({match[1] for match in found if match is not None})
    return []


def _open(name: str, flags: int = 0) -> int:
    """Descriptor of a named segment, not inherited by exec nor by fork. FileNotFoundError, FileExistsError, ShmPermission."""
    while True:
        forks = mapping_module.forks()
        fd = _open_once(name, flags)
        mapping_module.watch(fd)
        if mapping_module.forks() == forks:
            return fd
        # A child forked in between may hold this open file, and with it any lock we take on it: not this one, then.
        if flags & posix_ipc.O_EXCL:
            unlink(fd, name)
        _close(fd)


def _open_once(name: str, flags: int) -> int:
    try:
        return int(posix_ipc.SharedMemory(name, flags, mode=0o600, size=0).fd)
    except posix_ipc.ExistentialError as missing:
        if flags & posix_ipc.O_EXCL:
            raise FileExistsError(name) from missing
        raise FileNotFoundError(name) from missing
    except posix_ipc.PermissionsError as denied:
        info = os.stat(MOUNT / name[1:])
        raise ShmPermission(
            f"segment {name} belongs to uid {info.st_uid} with mode {info.st_mode & 0o777:04o}, this process is uid {os.geteuid()}",
            hint="run producers and consumer as the same user",
        ) from denied


_close = mapping_module.close_watched


def still_named(fd: int, name: str) -> bool:
    """Whether the name still leads to this open segment."""
    try:
        named = os.stat(MOUNT / name[1:])
    except FileNotFoundError:
        return False
    mine = os.fstat(fd)
    return (named.st_dev, named.st_ino) == (mine.st_dev, mine.st_ino)


def unlink(fd: int, name: str) -> bool:
    """Removes the name if it still leads to `fd`; the caller holds the segment's lock. False if it was gone already."""
    if not still_named(fd, name):
        return False
    with contextlib.suppress(posix_ipc.ExistentialError):
        posix_ipc.unlink_shared_memory(name)
        return True
    return False


def reserve(fd: int, size: int, what: str) -> None:
    """Reserves every page of a segment now, so that too little memory is ShmTooSmall here and never a SIGBUS later."""
    room = cgroup_headroom()
    if room is not None and size > room:
        raise ShmTooSmall(
            f"{what} needs {format_size(size)}, the memory cgroup has {format_size(room)} left",
            hint="give the container more memory, or lower lane_bytes",
        )
    try:
        os.posix_fallocate(fd, 0, size)
    except OSError as full:
        mount = os.statvfs(MOUNT)
        raise ShmTooSmall(
            f"{what} needs {format_size(size)}, {MOUNT} has {format_size(mount.f_bavail * mount.f_frsize)} free "
            f"of {format_size(mount.f_blocks * mount.f_frsize)}",
            hint="docker run --shm-size=16g (Kubernetes: emptyDir with medium Memory), or lower lane_bytes",
        ) from full


def cgroup_headroom() -> int | None:
    """Bytes this process' memory cgroup can still take, page cache that can be dropped counted as free; None without a limit."""
    for limit_file, used_file, drop in _cgroup_files():
        try:
            limit, used = limit_file.read_text().strip(), int(used_file.read_text())
            droppable = dict(line.split() for line in (used_file.parent / "memory.stat").read_text().splitlines())
        except (OSError, ValueError):
            continue
        if limit != "max" and int(limit) < 1 << 60:
            return max(int(limit) - used + int(droppable.get(drop, 0)), 0)
    return None


def _cgroup_files() -> Iterator[tuple[Path, Path, str]]:
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        below = path.lstrip("/")
        if controllers == "":
            for root in (Path("/sys/fs/cgroup") / below, Path("/sys/fs/cgroup")):
                yield root / "memory.max", root / "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            for root in (Path("/sys/fs/cgroup/memory") / below, Path("/sys/fs/cgroup/memory")):
                yield root / "memory.limit_in_bytes", root / "memory.usage_in_bytes", "total_inactive_file"


def create_lane(bridge: str, size: int) -> tuple[str, Mapping]:
    """A new, locked, reserved, empty lane segment. The caller formats it; until then it counts as dead to nobody but its locker."""
    while True:
        name = f"/{_PREFIX}{check_bridge_name(bridge)}.l.{secrets.token_hex(8)}"
        try:
            fd = _open(name, posix_ipc.O_CREX)
        except FileExistsError:
            continue
        header.fault(b"segment.created")
        try:
            # A sweeper may take an unlocked, empty segment for the remains of a dead creator; then it is not ours any more.
            if not (liveness.lock_exclusive(fd, Byte.PRODUCER) and still_named(fd, name)):
                _close(fd)
                continue
            header.fault(b"segment.locked")
            reserve(fd, size, f"a lane of bridge {bridge!r}")
            header.fault(b"segment.reserved")
            return name, Mapping(fd, size)
        except BaseException:
            unlink(fd, name)
            _close(fd)
            raise


def create_weights(bridge: str, size: int) -> Mapping | None:
    """A new, writer-locked, reserved, empty weights segment; None if the name is taken."""
    name = weights_name(bridge)
    try:
        fd = _open(name, posix_ipc.O_CREX)
    except FileExistsError:
        return None
    try:
        if not (liveness.lock_exclusive(fd, Byte.WRITER) and still_named(fd, name)):
            _close(fd)
            return None
        reserve(fd, size, f"the weights segment of bridge {bridge!r}")
    except BaseException:
        unlink(fd, name)
        _close(fd)
        raise
    return Mapping(fd, size)


def remove_weights(bridge: str) -> None:
    """Removes the weights segment, or its remains, if no writer lives; readers that map it keep their version until they look again."""
    name = weights_name(bridge)
    with contextlib.suppress(FileNotFoundError):
        fd = _open(name)
        try:
            if liveness.lock_exclusive(fd, Byte.WRITER):
                unlink(fd, name)
        finally:
            _close(fd)


def open_mapping(name: str, *, readonly: bool = False, minimum: int = 1) -> Mapping | None:
    """Maps an existing segment whole; None if it is gone or not yet as large as `minimum`."""
    try:
        fd = _open(name)
    except FileNotFoundError:
        return None
    size = os.fstat(fd).st_size
    if size < minimum:
        _close(fd)
        return None
    return Mapping(fd, size, readonly)


def open_control(bridge: str) -> header.Control:
    """The bridge's control segment, created and initialised if need be, with this process as a participant.

    Blocks while a living process initialises it, at most 10 s, then NotReady. The participants' lock lasts as long as the Control.
    """
    name = control_name(bridge)
    deadline = time.monotonic() + _READY_TIMEOUT_S
    while True:
        fd = _open(name, posix_ipc.O_CREAT)
        if not liveness.lock_exclusive(fd, Byte.INITIALISING):
            _close(fd)
            if time.monotonic() > deadline:
                raise NotReady(
                    f"{name} has been in initialisation by a living process for {_READY_TIMEOUT_S:.0f} s",
                    hint="look for a stopped process of this bridge: ps -eo pid,stat,cmd",
                )
            time.sleep(0.002)
        elif still_named(fd, name) and liveness.lock_shared(fd, Byte.PARTICIPANTS):
            return _enter_control(fd, name, bridge)
        else:  # swept between open and lock
            _close(fd)


def _enter_control(fd: int, name: str, bridge: str) -> header.Control:
    """Makes the segment whole if nobody did, and gives the initialisation lock back; whoever dies here leaves no magic."""
    try:
        if os.fstat(fd).st_size < header.control_bytes:
            reserve(fd, header.control_bytes, f"the control segment of bridge {bridge!r}")
        mapping = Mapping(fd, header.control_bytes)
    except BaseException:
        _close(fd)
        raise
    control = header.Control(mapping)
    header.fault(b"control.locked")
    if not control.ready:
        control.format(os.getpid())
    liveness.unlock(fd, Byte.INITIALISING)
    weakref.finalize(mapping, _leave_late, mapping.fd, bridge, os.getpid()).atexit = False
    if control.layout_version != header.layout_version:
        raise LayoutMismatch(
            f"{name} has layout version {control.layout_version}, this build has {header.layout_version}",
            hint="use one shmbridge version on both sides, or end the other side and run: shmbridge clean --yes",
        )
    return control


def leave(fd: int, bridge: str) -> None:
    """Gives up every part in a bridge that the control segment's `fd` stands for, and removes what is dead of it."""
    liveness.unlock(fd, Byte.HUB)
    liveness.unlock(fd, Byte.PARTICIPANTS)
    sweep(bridge)


def _leave_late(fd: int, bridge: str, pid: int) -> None:
    """The last reference goes and `fd` is still open; in a child of fork it is not."""
    if os.getpid() == pid:
        leave(fd, bridge)


@dataclass(slots=True)
class LaneFate:
    """What is known of one lane from outside: its header, whether its producer lives, and what it still holds."""

    name: str
    alive: bool
    held: int
    records: int
    info: dict[str, Any] | None
    size: int


@dataclass(slots=True)
class SweepReport:
    """What a sweep removed and what it left, each with its reason."""

    removed: list[str] = field(default_factory=list)
    kept: dict[str, str] = field(default_factory=dict)
    undelivered: dict[str, int] = field(default_factory=dict)


def lane_fate(name: str) -> LaneFate | None:
    """Looks at a lane without touching it; None if it is gone."""
    mapping = open_mapping(name, readonly=True)
    if mapping is None:
        return None
    alive = liveness.is_locked(mapping.fd, Byte.PRODUCER)
    info, held, records = None, 0, 0
    with contextlib.suppress(header.LaneCorrupt):
        info = header.read_lane(mapping)
        held = header.undelivered(mapping)
        records = header.lane_counters(mapping)["tail"] if info else 0
    return LaneFate(name, alive, held, records, info, mapping.size)


def remove_lane(name: str, *, with_records: bool = False, dry_run: bool = False) -> tuple[bool, str, int]:
    """Removes a lane if it is dead: (removed, reason it was kept or "", records it held). Never touches a live one."""
    try:
        fd = _open(name)
    except FileNotFoundError:
        return False, "gone already", 0
    size = os.fstat(fd).st_size
    mapping = Mapping(fd, size, True) if size else None  # owns the descriptor from here on
    try:
        if not liveness.lock_exclusive(fd, Byte.PRODUCER):
            return False, "its producer is alive", 0
        held = 0 if mapping is None else _undelivered(mapping)
        if held is None and not with_records:
            return False, "its header cannot be read", 0
        if held and not with_records:
            return False, f"holds {held} undelivered records", held
        header.fault(b"segment.unlinking")
        return dry_run or unlink(fd, name), "", held or 0
    finally:
        if mapping is None:
            _close(fd)


def _undelivered(lane: Mapping) -> int | None:
    """Undelivered records of a dead lane, 0 if it never became ready, None if its header makes no sense."""
    try:
        return header.undelivered(lane)
    except header.LaneCorrupt:
        return None


def sweep(bridge: str, *, with_records: bool = False, dry_run: bool = False) -> SweepReport:
    """Removes what is dead of a bridge: lanes without undelivered records (with them, if asked), then the rest if nobody takes part."""
    report = SweepReport()
    for name in lane_names(bridge):
        removed, reason, held = remove_lane(name, with_records=with_records, dry_run=dry_run)
        if removed:
            report.removed.append(name)
        elif reason != "gone already":
            report.kept[name] = reason
        if held:
            report.undelivered[name] = held
    _sweep_control(bridge, report, dry_run)
    return report


def _sweep_control(bridge: str, report: SweepReport, dry_run: bool) -> None:
    """Control, weights and socket directory go together, when nobody takes part and no lane is left."""
    name = control_name(bridge)
    present = [each for each in (name, weights_name(bridge)) if (MOUNT / each[1:]).exists()]
    if not present and not socket_directory(bridge).exists():
        return
    if report.kept if dry_run else lane_names(bridge):
        reason = "lanes of the bridge are left"
    else:
        # A lost control segment is made again for its lock: nobody may join while the rest goes.
        fd = _open(name, posix_ipc.O_CREAT)
        try:
            reason = _unused_control(fd, name)
            if not reason and not (dry_run and name in present):
                _remove_control(fd, name, bridge, keep_others=dry_run)
        finally:
            _close(fd)
    if reason:
        report.kept.update(dict.fromkeys(present, reason))
    else:
        report.kept.clear()  # lanes that others removed meanwhile
        report.removed.extend(present)


def _unused_control(fd: int, name: str) -> str:
    """Takes the control segment's locks, in the order that lets nobody join in between; why that failed, or ""."""
    if not liveness.lock_exclusive(fd, Byte.INITIALISING):
        return "is being initialised"
    if not liveness.lock_exclusive(fd, Byte.PARTICIPANTS):
        return "has living participants"
    return "" if still_named(fd, name) else "was made anew just now"


def _remove_control(fd: int, name: str, bridge: str, *, keep_others: bool) -> None:
    if not keep_others:
        with contextlib.suppress(posix_ipc.ExistentialError):
            posix_ipc.unlink_shared_memory(weights_name(bridge))
        with contextlib.suppress(FileNotFoundError):
            directory = socket_directory(bridge)
            for entry in directory.iterdir():
                entry.unlink()
            directory.rmdir()
    unlink(fd, name)
