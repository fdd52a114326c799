"""Names and memory of segments: how they are called, created, reserved, opened and unlinked.

Knows inodes and memory limits; who takes part in a bridge and what is dead of it is participation.py's.
"""

import contextlib
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import posix_ipc

from shmbridge import liveness
from shmbridge._ext import header
from shmbridge._ext import mapping as mapping_module
from shmbridge._ext.mapping import Mapping
from shmbridge.config import check_bridge_name, format_size
from shmbridge.errors import ShmPermission, ShmTooSmall
from shmbridge.liveness import Byte

MOUNT = Path("/dev/shm")
_PREFIX = "shmbridge."
_SEGMENT_NAME = re.compile(r"shmbridge\.([A-Za-z0-9_-]{1,48})\.(?:c|w|s|l\.[0-9a-f]{16})")


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


def open_segment(name: str, flags: int = 0) -> int:
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
        close_segment(fd)


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


close_segment = mapping_module.close_watched


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
            fd = open_segment(name, posix_ipc.O_CREX)
        except FileExistsError:
            continue
        header.fault(b"segment.created")
        try:
            # A sweeper may take an unlocked, empty segment for the remains of a dead creator; then it is not ours any more.
            if not (liveness.lock_exclusive(fd, Byte.PRODUCER) and still_named(fd, name)):
                close_segment(fd)
                continue
            header.fault(b"segment.locked")
            reserve(fd, size, f"a lane of bridge {bridge!r}")
            header.fault(b"segment.reserved")
            return name, Mapping(fd, size)
        except BaseException:
            unlink(fd, name)
            close_segment(fd)
            raise


def create_weights(bridge: str, size: int) -> Mapping | None:
    """A new, writer-locked, reserved, empty weights segment; None if the name is taken."""
    name = weights_name(bridge)
    try:
        fd = open_segment(name, posix_ipc.O_CREX)
    except FileExistsError:
        return None
    try:
        if not (liveness.lock_exclusive(fd, Byte.WRITER) and still_named(fd, name)):
            close_segment(fd)
            return None
        reserve(fd, size, f"the weights segment of bridge {bridge!r}")
    except BaseException:
        unlink(fd, name)
        close_segment(fd)
        raise
    return Mapping(fd, size)


def remove_weights(bridge: str) -> None:
    """Removes the weights segment, or its remains, if no writer lives; readers that map it keep their version until they look again."""
    name = weights_name(bridge)
    with contextlib.suppress(FileNotFoundError):
        fd = open_segment(name)
        try:
            if liveness.lock_exclusive(fd, Byte.WRITER):
                unlink(fd, name)
        finally:
            close_segment(fd)


def open_mapping(name: str, *, readonly: bool = False, minimum: int = 1) -> Mapping | None:
    """Maps an existing segment whole; None if it is gone or not yet as large as `minimum`."""
    try:
        fd = open_segment(name)
    except FileNotFoundError:
        return None
    size = os.fstat(fd).st_size
    if size < minimum:
        close_segment(fd)
        return None
    return Mapping(fd, size, readonly)
