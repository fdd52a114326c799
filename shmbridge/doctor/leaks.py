"""What takes shared memory and is nobody's: segments of dead bridges, and those of other users."""

import contextlib
import os
from collections import defaultdict
from pathlib import Path

from shmbridge.config import format_size
from shmbridge.doctor.check import Check
from shmbridge.doctor.probe_file import MOUNT
from shmbridge.errors import ShmBridgeError
from shmbridge.segments import BridgeInfo, list_bridges

_PREFIX = "shmbridge."
_SHOWN = 3


def dead_bridges() -> Check:
    """The bridges of this user that no process takes part in, what they take and hold. Removes nothing."""
    try:
        every = list_bridges()
    except ShmBridgeError as wrong:
        return Check("dead bridges", "warn", wrong.message, wrong.hint)
    dead = sorted((each for each in every if not _lives(each)), key=_size, reverse=True)
    if not dead:
        return Check("dead bridges", "ok", f"none of {len(every)}")
    records = sum(lane.held for info in dead for lane in info.lanes)
    names = ", ".join(f"{info.name} ({format_size(_size(info))})" for info in dead[:_SHOWN])
    more = f" and {len(dead) - _SHOWN} more" if len(dead) > _SHOWN else ""
    text = f"{len(dead)} with {format_size(sum(map(_size, dead)))} and {records:,} undelivered records: "
    return Check(
        "dead bridges",
        "warn",
        f"{text}{names}{more}",
        "start a bridge's consumer again to take its records, or shmbridge clean, which lists them, and "
        "with --yes removes them",
    )


def _lives(info: BridgeInfo) -> bool:
    writer = info.weights.writer_pid if info.weights else None
    return bool(info.participants or info.consumer_pid or writer or any(lane.alive for lane in info.lanes))


def _size(info: BridgeInfo) -> int:
    return info.size_bytes + (info.weights.size_bytes if info.weights else 0)


def other_users(mount: Path = MOUNT, uid: int | None = None) -> Check:
    """The bridges of other users: their names cannot be used here, and their memory is not this user's to
    free.
    """
    uid = os.geteuid() if uid is None else uid
    sizes: defaultdict[int, int] = defaultdict(int)
    names: defaultdict[int, set[str]] = defaultdict(set)
    with os.scandir(mount) as entries:
        for entry in entries:
            if not entry.name.startswith(_PREFIX):
                continue
            with contextlib.suppress(FileNotFoundError):
                about = entry.stat(follow_symlinks=False)
                if about.st_uid != uid:
                    sizes[about.st_uid] += about.st_size
                    names[about.st_uid].add(entry.name.split(".")[1])
    if not sizes:
        return Check("other users", "ok", "no bridges of other users")
    taken = sorted(_printable(name) for each in names.values() for name in each)
    text = "; ".join(
        f"uid {each} has {len(names[each])} with {format_size(sizes[each])}" for each in sorted(sizes)
    )
    shown = ", ".join(taken[:_SHOWN]) + (f" and {len(taken) - _SHOWN} more" if len(taken) > _SHOWN else "")
    return Check(
        "other users",
        "warn",
        f"{text}: {shown}",
        f"run this bridge as the same user, or choose another name than {shown}",
    )


def _printable(name: str) -> str:
    """Returns a name that any user may have chosen as a terminal may show it."""
    return name if name.isprintable() else repr(name)
