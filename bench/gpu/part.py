"""Shared by every part of `make gpu`: arguments, and a file to which each figure is written as soon as it is
known.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def arguments(about: str) -> argparse.Namespace:
    """The command line of a part: --device, --size, --out, --seconds."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--size", choices=("smallest", "full"), default="full")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="JSON, written after each figure"
    )
    parser.add_argument("--seconds", type=float, default=120.0, help="begin nothing new after so long")
    return parser.parse_args()


class Figures:
    """Rows of figures in a file that is whole at any moment."""

    def __init__(self, path: Path, seconds: float) -> None:
        self._path, self._until = path, time.monotonic() + seconds
        self._rows: list[dict[str, Any]] = []

    def add(self, what: str, **figures: Any) -> None:
        """Keeps one row and prints it."""
        self._rows.append({"what": what, **figures})
        print(
            f"  {what}: " + ", ".join(f"{name} {_told(value)}" for name, value in figures.items()), flush=True
        )
        partial = self._path.with_suffix(".part")
        partial.write_text(json.dumps(self._rows, indent=1))
        os.replace(partial, self._path)

    @property
    def time_left(self) -> bool:
        """Whether another figure may be begun."""
        return time.monotonic() < self._until


class Clock:
    """Seconds of work on a device: between two events of its stream, or by the processor's clock."""

    def __init__(self, device: str) -> None:
        import torch

        self._torch, self._on_gpu = torch, device == "cuda"

    def seconds(self, work: Callable[[], object], rounds: int) -> list[float]:
        """Returns the seconds of each of `rounds` rounds, after one that is not counted."""
        work()
        return [self._once(work) for _ in range(rounds)]

    def _once(self, work: Callable[[], object]) -> float:
        if not self._on_gpu:
            begun = time.perf_counter()
            work()
            return time.perf_counter() - begun
        make: Any = self._torch.cuda.Event
        begin, end = make(enable_timing=True), make(enable_timing=True)
        self._torch.cuda.synchronize()
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def gib_per_s(size_bytes: int, seconds: list[float]) -> float:
    """By the median."""
    return size_bytes / 2**30 / statistics.median(seconds)


def _told(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
