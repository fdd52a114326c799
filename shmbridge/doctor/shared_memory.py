"""The shared-memory mount and the memory behind it: size, inodes, what may still be taken, mapped writes."""

import mmap
import os
from pathlib import Path

from shmbridge.config import format_size
from shmbridge.doctor.check import Check
from shmbridge.doctor.probe_file import MOUNT, probe_file
from shmbridge.segments import memory_headroom

LANE_BYTES = 64 << 20  # of a producer that asks for nothing else
_WITH_HEADERS = LANE_BYTES + (2 << 20)
_MANY_LANES = 16
_CONTAINER_DEFAULT = 64 << 20
_FEW_INODES = 64
_PROBE_BYTES = 64 << 10
_WRITTEN = b"by mmap."
_LARGER = "docker run --shm-size=16g (Kubernetes: emptyDir with medium Memory), or lower lane_bytes"


def mount(path: Path = MOUNT, mounts: Path = Path("/proc/self/mounts")) -> Check:
    """Whether segments can be made on the mount, and for how many lanes of default size it has room."""
    name = "shared memory"
    if not path.is_dir():
        return Check(
            name, "fail", f"{path} is not there", f"mount a tmpfs at {path}, or docker run --ipc=host"
        )
    about = os.statvfs(path)
    if about.f_flag & os.ST_RDONLY:
        return Check(
            name, "fail", f"{path} is mounted read-only", f"docker run -v {path}:{path}:rw, or remount it"
        )
    if not os.access(path, os.W_OK | os.X_OK):
        return Check(
            name,
            "fail",
            f"{path} has mode {path.stat().st_mode & 0o7777:04o}: uid {os.geteuid()} may not create there",
            f"chmod 1777 {path}",
        )
    kind = _kind(path, mounts)
    if kind not in ("tmpfs", ""):
        return Check(
            name,
            "warn",
            f"{path} lies on {kind}, which is no tmpfs: lanes may be written to a disk",
            f"mount -t tmpfs tmpfs {path}",
        )
    if not about.f_blocks:
        return Check(name, "ok", f"{path} has no limit of its own")
    free, size = about.f_bavail * about.f_frsize, about.f_blocks * about.f_frsize
    lanes = free // _WITH_HEADERS
    text = f"{format_size(free)} free of {format_size(size)}: {_room(lanes)}"
    if size == _CONTAINER_DEFAULT:
        return Check(name, "fail", f"{text}; 64 MiB is what a container gets by default", _LARGER)
    if lanes >= _MANY_LANES:
        return Check(name, "ok", text)
    fix = _LARGER if size // _WITH_HEADERS < _MANY_LANES else "df, ls -l /dev/shm: others fill it"
    return Check(name, "warn" if lanes else "fail", text, fix)


def _room(lanes: int) -> str:
    counted = {0: "no room for a lane", 1: "room for one lane"}.get(lanes, f"room for {lanes} lanes")
    return f"{counted} of {format_size(LANE_BYTES)}"


def _kind(path: Path, mounts: Path) -> str:
    """Returns the kind of file system that a path lies on; "" if it cannot be told."""
    real, found = os.path.realpath(path), ("", "")
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    for line in lines:
        _, point, kind, *_ = line.split()
        if (real == point or real.startswith(point.rstrip("/") + "/")) and len(point) >= len(found[0]):
            found = point, kind
    return found[1]


def inodes(path: Path = MOUNT) -> Check:
    """How many more segments the mount takes."""
    about = os.statvfs(path)
    if not about.f_files:
        return Check("inodes", "ok", f"{path} has no limit of inodes")
    left = about.f_favail
    text = f"{left:,} of {about.f_files:,} left; a bridge takes one per lane and three more"
    if left >= _FEW_INODES:
        return Check("inodes", "ok", text)
    fix = "shmbridge clean, or mount it with a higher nr_inodes"
    return Check("inodes", "warn" if left > 1 else "fail", text, fix)


def memory(root: Path = Path("/"), path: Path = MOUNT) -> Check:
    """What the machine and this process' memory cgroups leave for lanes, beside the mount's own size."""
    left, whose = memory_headroom(root)
    about = os.statvfs(path)
    size, lanes = about.f_blocks * about.f_frsize, left // _WITH_HEADERS
    text = f"{whose} has {format_size(left)} left: {_room(lanes)}"
    if about.f_blocks and left < about.f_bavail * about.f_frsize:
        text += f"; less than {path} has, whose size is {format_size(size)}"
    if lanes >= _MANY_LANES:
        return Check("memory", "ok", text)
    return Check(
        "memory",
        "warn" if lanes else "fail",
        text,
        "give the container more memory (lanes count as memory of their producers), or lower lane_bytes",
    )


def mapped_writes(path: Path = MOUNT) -> Check:
    """Whether memory can be reserved on the mount, and a write through a mapping is seen by others."""
    name, size = "mapped writes", format_size(_PROBE_BYTES)
    try:
        with probe_file(path) as fd:
            os.posix_fallocate(fd, 0, _PROBE_BYTES)
            reserved = os.fstat(fd).st_blocks * 512
            with mmap.mmap(fd, _PROBE_BYTES) as mapping:
                mapping[-8:] = _WRITTEN
                seen = os.pread(fd, 8, _PROBE_BYTES - 8)
    except OSError as wrong:
        return Check(name, "fail", f"{size} could not be reserved and written: {wrong.strerror}", _LARGER)
    if seen != _WRITTEN:
        return Check(
            name, "fail", f"a write through a mapping of {path} was not seen in the file", "mount a tmpfs"
        )
    if reserved < _PROBE_BYTES:
        return Check(
            name,
            "warn",
            f"{size} were reserved, of which the file system shows {format_size(reserved)}",
            f"mount a tmpfs at {path}: what is not reserved may be missing later",
        )
    return Check(name, "ok", f"{size} reserved and written through a mapping")
