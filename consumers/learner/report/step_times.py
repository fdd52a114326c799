"""Times of a step's phases, and the step's CPU cost. Uses CUDA events if the work is on a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")

PHASES = ("copy", "forward", "backward", "sync")


class StepTimes:
    """Adds up the seconds of each phase of a step.

    On a GPU it measures device time, between two events of the stream. One thread.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._on_gpu = device.type == "cuda"
        self._seconds = dict.fromkeys(PHASES, 0.0)
        self._events: list[tuple[str, Any, Any]] = []

    @contextmanager
    def of(self, phase: str) -> Iterator[None]:
        """Counts the block as one of `PHASES`. Phases do not nest."""
        if self._on_gpu:
            make: Any = torch.cuda.Event
            begin, end = make(enable_timing=True), make(enable_timing=True)
            begin.record()
            yield
            end.record()
            self._events.append((phase, begin, end))
        else:
            begun = time.perf_counter()
            yield
            self._seconds[phase] += time.perf_counter() - begun

    def each(self, phase: str, items: Iterable[Item]) -> Iterator[Item]:
        """Yields the items; the time to produce each counts for a phase."""
        coming = iter(items)
        while True:
            with self.of(phase):
                item = next(coming, None)
            if item is None:
                return
            yield item

    def taken(self) -> dict[str, float]:
        """Returns `<phase>_s` since the last call, and the peak GPU memory so far. Waits for the GPU."""
        if self._events:
            self._events[-1][2].synchronize()
        for phase, begin, end in self._events:
            self._seconds[phase] += begin.elapsed_time(end) / 1e3
        found = {f"{phase}_s": seconds for phase, seconds in self._seconds.items()}
        if self._on_gpu:
            found["device_memory_peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
        self._seconds, self._events = dict.fromkeys(PHASES, 0.0), []
        return found


class StepCost:
    """The total cost of each step, counted from the end of the one before. One thread; never blocks."""

    def __init__(self) -> None:
        self._ended, self._cpu = time.monotonic(), time.process_time()

    def cpu_s(self) -> float:
        """Returns the CPU seconds of this process since the last call."""
        cpu = time.process_time()
        spent, self._cpu = cpu - self._cpu, cpu
        return spent

    def step(self, waited_s: float, cpu_s: float, tokens: int) -> dict[str, float]:
        """Returns the metrics of the step that ends now, from sums over all ranks."""
        ended = time.monotonic()
        took, self._ended = ended - self._ended, ended
        return {
            "step_s": took,
            "idle_frac": waited_s / took if took > 0.0 else 0.0,
            "host_cpu_s_per_mtoken": cpu_s / tokens * 1e6 if tokens else float("nan"),
        }
