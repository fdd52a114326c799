"""In what pages lanes lie: huge ones, locked ones, and on which NUMA node."""

import os
import platform
import re
import resource
from pathlib import Path

from shmbridge.config import format_size
from shmbridge.doctor.check import Check
from shmbridge.doctor.probe_file import MOUNT, probe_file
from shmbridge.doctor.shared_memory import LANE_BYTES
from shmbridge.segments import HUGE_PAGE, fill_huge_pages, huge_pages_wanted, memory_headroom

_SETTING = "sys/kernel/mm/transparent_hugepage/shmem_enabled"
_LEFT_ALONE_BYTES = 16 << 20
_CAP_IPC_LOCK = 14


def huge_pages(root: Path = Path("/"), mount: Path = MOUNT) -> Check:
    """Whether lanes lie in huge pages: by making one, as a producer does, whatever the setting says."""
    setting = f"shmem_enabled is {_setting(root)}"
    size = format_size(HUGE_PAGE)
    if not huge_pages_wanted():
        return Check("huge pages", "ok", f"turned off by SHMBRIDGE_HUGE_PAGES=never; {setting}")
    if memory_headroom()[0] < _LEFT_ALONE_BYTES:
        return Check("huge pages", "warn", f"too little memory is left to try one; {setting}", "free some")
    with probe_file(mount) as fd:
        made = fill_huge_pages(fd, 0, HUGE_PAGE)
    if made:
        return Check("huge pages", "ok", f"a page of {size} was made on request; {setting}")
    old = tuple(map(int, re.findall(r"\d+", platform.release())[:2])) < (6, 1)
    return Check(
        "huge pages",
        "warn",
        f"no page of {size} could be made, so lanes have small ones, which cost speed only; {setting}",
        "Linux 6.1 or newer"
        if old
        else "free memory that lies together (echo 1 > /proc/sys/vm/compact_memory), and no `deny` in "
        f"/{_SETTING}",
    )


def _setting(root: Path) -> str:
    try:
        found = re.search(r"\[(\w+)\]", (root / _SETTING).read_text())
    except OSError:
        return "not there"
    return found[1] if found else "not there"


def locked_memory(root: Path = Path("/")) -> Check:
    """How much of its lane a producer can lock, if it was asked to."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    free = soft == resource.RLIM_INFINITY or _may_lock_all(root)
    limit = "no limit for this process" if free else f"RLIMIT_MEMLOCK is {format_size(soft)} for each process"
    if os.environ.get("SHMBRIDGE_LOCK_MEMORY", "") != "1":
        return Check("locked memory", "ok", f"{limit}; lanes are locked with SHMBRIDGE_LOCK_MEMORY=1 only")
    if free or soft >= LANE_BYTES:
        return Check("locked memory", "ok", f"{limit}; SHMBRIDGE_LOCK_MEMORY=1")
    return Check(
        "locked memory",
        "warn",
        f"{limit}, a lane has {format_size(LANE_BYTES)}: SHMBRIDGE_LOCK_MEMORY=1 locks a part of it",
        "ulimit -l unlimited (docker run --ulimit memlock=-1)",
    )


def _may_lock_all(root: Path) -> bool:
    """Returns whether the limit does not hold for this process."""
    try:
        status = (root / "proc/self/status").read_text()
    except OSError:
        return False
    found = re.search(r"^CapEff:\s*([0-9a-f]+)", status, re.MULTILINE)
    return bool(found and int(found[1], 16) >> _CAP_IPC_LOCK & 1)


def numa(root: Path = Path("/")) -> Check:
    """How many NUMA nodes there are; the kernel takes a lane's memory from its producer's."""
    nodes = [path.name for path in (root / "sys/devices/system/node").glob("node[0-9]*")]
    if len(nodes) <= 1:
        return Check("numa", "ok", "one node")
    return Check(
        "numa",
        "ok",
        f"{len(nodes)} nodes: a lane lies on its producer's; numactl --preferred NODE starts one near a GPU",
    )
