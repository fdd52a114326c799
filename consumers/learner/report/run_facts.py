"""run.json in the run directory: when the run was started, by which versions, on which machine."""

from __future__ import annotations

import json
import os
import platform
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shmbridge

FACTS_FILE = "run.json"
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "atroposlib")


def write_facts(folder: Path, device: str, *, clock: float | None = None) -> None:
    """Adds this start to the facts of a run. Blocks for the disk; raises OSError.

    Args:
        folder: the run directory.
        device: what the learner computes on, in words.
        clock: now, in seconds since 1970; None: this machine's.
    """
    starts = [*read_facts(folder), _facts(device, time.time() if clock is None else clock)]
    unfinished = folder / f".{FACTS_FILE}.part"
    unfinished.write_text(json.dumps({"starts": starts}, indent=1) + "\n")
    unfinished.replace(folder / FACTS_FILE)


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """Returns the facts of each start of a run, in order; none if there is no valid file. Blocks."""
    try:
        starts = json.loads((folder / FACTS_FILE).read_text())["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [each for each in starts if isinstance(each, dict)] if isinstance(starts, list) else []


def _facts(device: str, now: float) -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        "shmbridge": shmbridge.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "device": device,
    }
