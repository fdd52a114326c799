"""Ten steps of the learner on a model of the shape of Qwen2.5-0.5B in bfloat16: packed, padded, and packed
with its tokens copied straight from the ring.

A part of `make gpu`.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

import shmbridge
from shmbridge.bench.gpu import learner
from shmbridge.bench.gpu.part import Figures, arguments

STEPS = 10
BATCH = {"smallest": (2, 2), "full": (8, 8)}  # groups, rows of each
TOKENS = {"smallest": (4, 16), "full": (256, 1024)}  # of a row, from and to
WARM = 3  # steps that are not counted
# what it is called, and the learner's flags
WAYS = {
    "packed": ("--batch-layout", "packed", "--host-copy", "batch"),
    "padded": ("--batch-layout", "padded"),
    "packed straight from the ring": ("--batch-layout", "packed", "--host-copy", "direct"),
}


def main() -> int:
    """0 if every way was measured, and every row was trained as it was put."""
    options = arguments(__doc__ or "")
    figures = Figures(options.out, options.seconds)
    until = time.monotonic() + options.seconds
    with tempfile.TemporaryDirectory(prefix="shmbridge-gpu-") as folder:
        model = learner.make_model(Path(folder) / "model", options.size)
        wrong = False
        for number, (way, flags) in enumerate(WAYS.items()):
            found = _steps(options, model, Path(folder) / str(number), flags, until)
            figures.add(f"{STEPS} steps, {way}, {math.prod(BATCH[options.size])} rows", **found)
            if wrong := wrong or not found["rows_compared"] or bool(found["rows_differ"]):
                print(
                    f"{way}: {found['rows_differ']} of {found['rows_compared']} rows differ from what "
                    "was put",
                    file=sys.stderr,
                )
    return int(wrong)


def _steps(options: Any, model: Path, run_dir: Path, flags: tuple[str, ...], until: float) -> dict[str, Any]:
    bridge = f"gpu-training-{os.getpid()}-{run_dir.name}"
    groups, rows = BATCH[options.size]
    with (
        learner.running(bridge, model, run_dir, options.device, groups, rows, *flags) as process,
        shmbridge.Producer(bridge, lane_bytes="64M") as producer,
    ):
        lines = learner.feed(
            producer, process, run_dir / "metrics.jsonl", STEPS, lambda n: _group(n, options.size), until
        )
        counted = lines[WARM:STEPS]
        step_s = statistics.median(line["step_s"] for line in counted)
        tokens = statistics.median(line["tokens"] for line in counted)
        phases = {
            f"{name}_s": statistics.median(line[f"{name}_s"] for line in counted)
            for name in ("wait", "copy", "forward", "backward", "update", "publish")
        }
        peak = lines[-1].get("device_memory_peak_gib", learner.peak_memory_gib(process))
        return {
            "step_s": step_s,
            "tokens_s": tokens / step_s,
            **phases,
            "peak_memory_gib": peak,
            **_checked(lines),
        }


def _checked(lines: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns the rows whose checksum was compared with the one that the environment put, over all steps, and
    those that differed.
    """
    return {
        kind: sum(value for line in lines for name, value in line.items() if name.startswith(kind + "{"))
        for kind in ("rows_compared", "rows_differ")
    }


def _group(number: int, size: str) -> dict[str, Any]:
    random = np.random.default_rng(number)
    (fewest, most), rows = TOKENS[size], BATCH[size][1]
    lengths = random.integers(fewest, most, rows)
    vocabulary = learner.SHAPES[size]["vocab_size"]
    masks = []
    for length in lengths:
        mask = np.ones(length, np.uint8)
        mask[: length // 4] = 0
        masks.append(mask)
    return {
        "tokens": [random.integers(0, vocabulary, length, dtype=np.int32) for length in lengths],
        "loss_mask": masks,
        "inference_logprobs": [np.full(length, -np.log(vocabulary), np.float32) for length in lengths],
        "scores": random.random(rows).tolist(),
    }


if __name__ == "__main__":
    sys.exit(main())
