"""The machine and versions with which a figure was made, without which it means nothing. Also: the core of
each process.
"""

import importlib.metadata
import os
import platform
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmbridge import __version__
from shmbridge.bench.groups import SEED, SOURCES

LANE_BYTES = 64 << 20  # what a producer has by default
MEASURED = (
    "numpy",
    "pyzmq",
    "pyarrow",
    "posix_ipc",
    "msgspec",
    "torch",
    "faster-fifo",
    "iceoryx2",
    "ray",
    "TransferQueue",
    "atroposlib",
    "pytest-benchmark",
)


@dataclass(frozen=True, slots=True)
class Cores:
    """The consumer has a core of its own; producers share the others.

    With one core in all, they share it.
    """

    producers: tuple[int, ...]
    consumer: int

    @property
    def all(self) -> tuple[int, ...]:
        return tuple(sorted({*self.producers, self.consumer}))

    def of_producer(self, n: int) -> int:
        return self.producers[n % len(self.producers)]


def _choose() -> Cores:
    *others, last = sorted(os.sched_getaffinity(0))
    return Cores(tuple(others) or (last,), last)


CORES = _choose()  # when this is first imported: before any process pins itself


def about() -> dict[str, Any]:
    """Processor, cores, kernel, versions, seed, lane size: the same for each run on one machine."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "caches": _caches(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "kernel": platform.release(),
        "libc": " ".join(platform.libc_ver()),
        "python": platform.python_version(),
        "versions": versions(),
        "seed": SEED,
        "sources": SOURCES,
        "pinned": {"producers": list(CORES.producers), "consumer": CORES.consumer},
        "lane_bytes": LANE_BYTES,
    }


def this_run() -> dict[str, Any]:
    """The load at this moment, the version of shmbridge, and its revision: what differs from run to run."""
    return {"load_before": round(os.getloadavg()[0], 2), "shmbridge": __version__, **revision()}


def versions() -> dict[str, str]:
    """Returns the versions of everything measured, or measured with; "not installed" for a missing one."""
    return {name: _version(name) for name in MEASURED}


def revision() -> dict[str, Any]:
    """The git revision of the tree this runs from, and whether it has changes; of an installed package
    "installed".
    """
    here = Path(__file__).resolve().parent
    if not (here.parent / ".git").exists():
        return {"revision": "installed", "dirty": False}
    try:
        return {
            "revision": _git(here, "rev-parse", "--short=12", "HEAD"),
            "dirty": bool(_git(here, "status", "--porcelain", "-uno")),
        }
    except (OSError, subprocess.CalledProcessError):
        return {"revision": "unknown", "dirty": True}


def slug() -> str:
    """A name for this machine's results: processor and cores."""
    return re.sub(r"[^a-z0-9.]+", "-", f"{_cpu()} {os.cpu_count()} cores".lower()).strip("-")


def _git(where: Path, *arguments: str) -> str:
    return subprocess.run(
        ["git", *arguments], cwd=where, capture_output=True, text=True, check=True
    ).stdout.strip()


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _cpu() -> str:
    """The processor's name; on machines whose kernel gives none, the architecture."""
    found = re.search(r"^model name\s*:\s*(.+)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    return found[1].replace("(R)", "").replace("(TM)", "") if found else platform.machine()


def _caches() -> dict[str, str]:
    """Level -> size, data and unified ones of the consumer's core; empty where the kernel does not say."""
    found = {}
    for index in sorted(Path(f"/sys/devices/system/cpu/cpu{CORES.consumer}/cache").glob("index*")):
        kind, level, size = ((index / name).read_text().strip() for name in ("type", "level", "size"))
        if kind != "Instruction":
            found[f"L{level}"] = size
    return found
