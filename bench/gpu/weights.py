"""Weights out of a model into the segment, and from there into an engine: pageable beside registered memory.

A part of `make gpu`.

The engine's side is vLLM where it is installed, else the same loads into tensors of torch; the rows say
which.
"""

from __future__ import annotations

import importlib.util
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import shmbridge
from shmbridge.bench.gpu.part import Figures, arguments
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.weights import WeightsReader, WeightsWriter

SIZES = {"smallest": (4 << 20, 16 << 20), "full": (1 << 30, 15 << 30)}
TENSOR_BYTES = {"smallest": 1 << 20, "full": 64 << 20}
ROUNDS = 3
_KEPT_FREE = 0.8  # largest part of the free memory for two slots


def main() -> int:
    """0 if every size was measured, as far as it fits."""
    options = arguments(__doc__ or "")
    figures = Figures(options.out, options.seconds)
    for wanted in SIZES[options.size]:
        if figures.time_left:
            _one_size(options, wanted, figures)
    return 0


def _one_size(options: Any, wanted: int, figures: Figures) -> None:
    most = int(_fits(options.device) // TENSOR_BYTES[options.size])
    count = min(wanted // TENSOR_BYTES[options.size], most)
    size = count * TENSOR_BYTES[options.size]
    cut = (
        "" if size == wanted else f", the most of {wanted >> 20} that two slots and both models have room for"
    )
    shape = (TENSOR_BYTES[options.size] // 2 // 1024, 1024)
    model = [
        (f"layer.{n}", torch.randn(shape, device=options.device).to(torch.bfloat16)) for n in range(count)
    ]
    engine = {name: torch.empty_like(tensor) for name, tensor in model}
    bridge = f"gpu-weights-{os.getpid()}"
    try:
        with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
            versions = iter(range(10_000))
            begun = time.perf_counter()
            for _ in range(2):  # both slots' pages are made
                writer.publish(next(versions), model)
            first = time.perf_counter() - begun

            def out() -> None:
                writer.publish(next(versions), model)
                _synchronize(options.device)

            def into() -> None:
                with reader.lease() as lease:
                    for name, values in lease.tensors.items():
                        engine[name].copy_(_as_tensor(values), non_blocking=True)
                    _synchronize(options.device)

            figures.add(f"{size >> 20} MiB{cut}: first two versions", seconds=first)
            _both_ways(f"{size >> 20} MiB, pageable", size, out, into, figures)
            _require_same(size, model, engine, figures)
            if options.device == "cuda":
                ends = PinnedWeights(writer), PinnedWeights(reader)
                for what, end in zip(("the writer's mapping", "the reader's"), ends, strict=True):
                    begun = time.perf_counter()
                    end.pin(options.device)
                    said = "registered" if end.bytes else "registration refused (see the log)"
                    figures.add(f"{what}: {said}", seconds=time.perf_counter() - begun)
                _both_ways(f"{size >> 20} MiB, registered", size, out, into, figures)
                _require_same(size, model, engine, figures)
                for end in ends:
                    end.close()
    finally:
        shmbridge.clean(bridge, dry_run=False)


def _both_ways(
    what: str, size: int, out: Callable[[], None], into: Callable[[], None], figures: Figures
) -> None:
    out_s, in_s = _median_s(out), _median_s(into)
    figures.add(
        what,
        out_s=out_s,
        out_gib_s=size / 2**30 / out_s,
        pause_s=in_s,
        in_gib_s=size / 2**30 / in_s,
        engine="torch, the loads alone"
        + (" (vLLM is installed: `make bench-vllm` times its update)" if _has_vllm() else ""),
    )


def _median_s(work: Callable[[], None]) -> float:
    seconds = []
    for _ in range(ROUNDS):
        begun = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - begun)
    return statistics.median(seconds)


def _require_same(
    size: int, model: list[tuple[str, torch.Tensor]], engine: dict[str, torch.Tensor], figures: Figures
) -> None:
    same = all(torch.equal(engine[name], tensor) for name, tensor in model)
    figures.add(f"{size >> 20} MiB: the engine has the model's bits", same=same)
    if not same:
        raise SystemExit("what was loaded is not what was published")
    for tensor in engine.values():
        tensor.zero_()


def _as_tensor(values: np.ndarray[Any, Any]) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is read-only memory, and only read
        return torch.frombuffer(values.data, dtype=torch.bfloat16).view(values.shape)


def _fits(device: str) -> float:
    """Bytes of one slot, where two must fit on the mount and in memory, and the model twice on the device."""
    about = os.statvfs("/dev/shm")
    free = [about.f_bavail * about.f_frsize / 2, _available() / (2 if device == "cuda" else 4)]
    if device == "cuda":
        free.append(torch.cuda.mem_get_info()[0] / 2)
    return min(free) * _KEPT_FREE


def _available() -> float:
    with open("/proc/meminfo") as lines:
        return next(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("MemAvailable"))


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _has_vllm() -> bool:
    return importlib.util.find_spec("vllm") is not None


if __name__ == "__main__":
    sys.exit(main())
