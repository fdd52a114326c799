"""For tests of code that uses shmbridge: the ring's specification, fail-points, and fixtures.

    from shmbridge.testing import RingModel, wait_until      the lane's specification; waiting with a deadline
    from shmbridge.testing import json_lines                 what a live log has so far
    from shmbridge.testing.faults import Fault, FaultyChild  children that die at a labelled step; the build
    from shmbridge.testing.faults import fault_build         they need
    pytest_plugins = ["shmbridge.testing.fixtures"]          in a conftest.py; needs pytest

Does not import pytest. Imported by tests, never by the package.
"""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmbridge.testing.model import RingModel, Taken

__all__ = ["RingModel", "Taken", "json_lines", "wait_until"]


def wait_until(condition: Callable[[], object], timeout_s: float = 5.0, *, every_s: float = 0.002) -> None:
    """Polls until `condition()` is true; AssertionError after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError(f"not within {timeout_s} s: {getattr(condition, '__name__', condition)}")
        time.sleep(every_s)


def json_lines(path: Path) -> list[Any]:
    """Returns the objects of a JSONL file's whole lines: a live file's last one may be half written."""
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]] if path.exists() else []
