"""Writes the learner's metrics to TensorBoard; its failures never stop training. The only file of the learner
that imports tensorboard, and only if enabled. Used by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmbridge.consumers.learner.checkpoint.checkpoint import load_progress
from shmbridge.consumers.learner.types import Metrics

FOLDER = "tensorboard"  # in the run directory


class TensorboardMissing(Exception):
    """The tensorboard package is not installed; the message says how to get it."""


class TensorboardLog:
    """Context manager over one folder of event files; a failure is reported once, counted, and otherwise
    ignored. A resumed learner hides what a killed one wrote for the steps that are repeated. One thread;
    blocks for the disk.

    Args:
        run_dir: the run directory.
        source: the checkpoint that the run resumes from; the log's later steps are hidden. None for a fresh
            start.
        say: prints a line for the user.

    Raises:
        TensorboardMissing: the package is not installed.
    """

    name = "tensorboard"

    def __init__(self, run_dir: Path, source: Path | None, say: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TensorboardMissing(
                f"--tensorboard needs the tensorboard package ({error}): pip install 'shmbridge[tensorboard]'"
            ) from error
        self.failures_total = 0
        self._say = say
        purge_step = None if source is None else load_progress(source).step + 1
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=purge_step)

    def log(self, metrics: Metrics) -> None:
        """Writes one step's metrics, at their step and time; values that are not finite numbers are left
        out.
        """
        self._guarded(lambda: self._write(metrics))

    def __enter__(self) -> TensorboardLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._guarded(self._writer.close)

    def _write(self, metrics: Metrics) -> None:
        for name, value in metrics.items():
            if (
                isinstance(value, (bool, int, float))
                and math.isfinite(value)
                and name not in ("step", "time")
            ):
                tag = name if "/" in name else f"learner/{name}"
                self._writer.add_scalar(tag, value, metrics["step"], walltime=metrics["time"])
        self._writer.flush()

    def _guarded(self, call: Callable[[], object]) -> None:
        try:
            call()
        except Exception as error:  # no failure of the log may stop training
            self.failures_total += 1
            if self.failures_total == 1:
                self._say(
                    f"TensorBoard cannot take metrics, training goes on: {type(error).__name__}: {error}"
                )
