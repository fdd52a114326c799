"""Checks what a machine has of the needs of `make gpu`. Standard library only: it runs before anything is
installed or built.
"""

from __future__ import annotations

import fcntl
import importlib.metadata
import importlib.util
import os
import platform
import resource
import struct
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

# module -> distribution; without these nothing can be measured
NEEDED = {
    "numpy": "numpy",
    "torch": "torch",
    "transformers": "transformers",
    "posix_ipc": "posix_ipc",
    "msgspec": "msgspec",
    "zmq": "pyzmq",
    "pyarrow": "pyarrow",
    "setuptools": "setuptools",
    "pytest": "pytest",
    "safetensors": "safetensors",
}
# Used where they are installed.
WELCOME = {
    "Cython": "Cython",
    "pytest_timeout": "pytest-timeout",
    "pytest_asyncio": "pytest-asyncio",
    "matplotlib": "matplotlib",
    "flash_attn": "flash-attn",
    "vllm": "vllm",
}


def missing(modules: dict[str, str]) -> list[str]:
    """Names of the distributions whose module this Python does not find."""
    return [name for module, name in modules.items() if importlib.util.find_spec(module) is None]


def look() -> dict[str, Any]:
    """Processor, kernel, limits, versions and the GPU, by asking the system; milliseconds but for torch's own
    question.
    """
    return {
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(_memory("MemTotal"), 1),
        "memory_free_gib": round(_memory("MemAvailable"), 1),
        "shm_free_gib": round(_free("/dev/shm"), 1),
        "locked_memory": _limit(resource.RLIMIT_MEMLOCK),
        "descriptors": _limit(resource.RLIMIT_NOFILE),
        "ofd_locks": has_ofd_locks(),
        "shm_huge_pages": _first_line("/sys/kernel/mm/transparent_hugepage/shmem_enabled"),
        "compiler": _output("cc", "--version"),
        "versions": {name: _version(name) for name in (*NEEDED.values(), *WELCOME.values())},
        "gpu": gpu(),
    }


def gpu() -> dict[str, Any] | None:
    """The first GPU that torch sees, asked in a process of its own; None without one."""
    asked = (
        "import json, torch\n"
        "assert torch.cuda.is_available()\n"
        "about = torch.cuda.get_device_properties(0)\n"
        "free, total = torch.cuda.mem_get_info(0)\n"
        "print(json.dumps({'name': about.name, 'count': torch.cuda.device_count(), 'memory_gib': "
        "round(total / 2**30, 1),\n"
        "                  'capability': list(torch.cuda.get_device_capability(0)), 'cuda': "
        "torch.version.cuda}))\n"
    )
    done = subprocess.run([sys.executable, "-c", asked], capture_output=True, text=True, check=False)
    if done.returncode:
        return None
    import json

    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found | {"driver": _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")}


def has_ofd_locks() -> bool:
    """Whether the kernel has locks on open file descriptions, by which a bridge knows who is alive."""
    command = getattr(fcntl, "F_OFD_SETLK", 37)
    with tempfile.TemporaryFile() as file:
        try:
            fcntl.fcntl(file, command, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 1, 0))
        except OSError:
            return False
    return True


def complaints(found: dict[str, Any], wants_gpu: bool) -> list[str]:
    """Returns what this machine lacks, each with its consequence, as text."""
    said = []
    if not found["ofd_locks"]:
        said.append(
            f"kernel {found['kernel']} has no OFD locks: no bridge can be opened, so only plain copies are "
            "measured"
        )
    if "always" not in found["shm_huge_pages"] and "advise" not in found["shm_huge_pages"]:
        said.append("the kernel tells of no huge pages for shared memory: registering memory takes longer")
    if wants_gpu and found["gpu"] is None:
        said.append("torch sees no GPU: `--device cpu` takes the processor for it")
    if not found["compiler"]:
        said.append("no C compiler: nothing can be built")
    said += [f"{name} is not installed" for name in missing(NEEDED)]
    said += [f"{name} is not installed: done without" for name in missing(WELCOME)]
    return said


def _version(name: str) -> str:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _memory(key: str) -> float:
    """GiB, by a line of /proc/meminfo."""
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) / 2**20
    return 0.0


def _free(mount: str) -> float:
    """GiB."""
    about = os.statvfs(mount)
    return about.f_bavail * about.f_frsize / 2**30


def _limit(kind: int) -> int:
    """The soft limit; -1: none."""
    return resource.getrlimit(kind)[0]


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().splitlines()[0]
    except (OSError, IndexError):
        return ""


def _cpu() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine()
    )


def _output(*command: str) -> str:
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[0].strip()
        )
    except (OSError, subprocess.CalledProcessError, IndexError):
        return ""
