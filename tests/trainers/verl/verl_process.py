"""A process of verl that records what its loss gets, and its end."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil


def until(true: Callable[[], Any], within_s: float, what: Callable[[], str]) -> None:
    """Waits until something is true."""
    deadline = time.monotonic() + within_s
    while not true():
        assert time.monotonic() < deadline, what()
        time.sleep(0.05)


@dataclass
class Trainer:
    """A process of verl that records what its loss gets."""

    process: subprocess.Popen[bytes]
    folder: Path

    def log(self) -> str:
        return (self.folder / "log").read_text(errors="replace")

    def loss(self, number: int) -> dict[str, np.ndarray]:
        """What the loss got at its call of that number, from 1."""
        return dict(np.load(self.folder / f"loss-{number}.npz"))

    def wait_for_loss(self, number: int) -> None:
        self.wait_for(f"loss-{number}.npz")

    def wait_for(self, name: str, within_s: float = 400.0) -> None:
        """Waits for a file in its folder."""

        def there() -> bool:
            assert self.process.poll() is None, self.log()[-1500:]
            return (self.folder / name).exists()

        until(there, within_s, lambda: self.log()[-1500:])

    def kill(self) -> None:
        """SIGKILL to verl's process, then to those of Ray that it leaves behind."""
        family = [self.process, *psutil.Process(self.process.pid).children(recursive=True)]
        os.kill(self.process.pid, signal.SIGKILL)
        self.process.wait()
        for each in family[1:]:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        psutil.wait_procs(family[1:], timeout=60)
