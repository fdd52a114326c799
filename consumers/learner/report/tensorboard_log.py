"""The learner's TensorBoard log. The only file of the learner that imports tensorboard, if enabled."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shmbridge.consumers.learner import Metrics, Refusal
from shmbridge.consumers.learner.checkpoint.checkpoint import load_progress
from shmbridge.consumers.learner.report.log import OtherLog

FOLDER = "tensorboard"  # in the run directory


class TensorboardMissing(Refusal):
    """The tensorboard package is not installed; the message says how to get it."""


class TensorboardLog(OtherLog):
    """Context manager over one folder of event files. Blocks for the disk. Raises `TensorboardMissing`.

    Args:
        run_dir: the run directory.
        source: the checkpoint that the run resumes from; the log's later steps are hidden. None for a fresh
            start.
        say: prints a line for the user.
    """

    def __init__(self, run_dir: Path, source: Path | None, say: Callable[[str], None]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise TensorboardMissing(
                f"--tensorboard needs its package ({error}) -> pip install 'shmbridge[tensorboard]'"
            ) from error
        super().__init__("tensorboard", "TensorBoard", say)
        purge_step = None if source is None else load_progress(source).step + 1
        self._writer: Any = SummaryWriter(str(run_dir / FOLDER), purge_step=purge_step)

    def log(self, metrics: Metrics) -> None:
        """Writes one step's finite numbers, at their step and time."""
        with self.guarded("take metrics"):
            for name, value in metrics.items():
                if (
                    isinstance(value, (bool, int, float))
                    and math.isfinite(value)
                    and name not in ("step", "time")
                ):
                    tag = name if "/" in name else f"learner/{name}"
                    self._writer.add_scalar(tag, value, metrics["step"], walltime=metrics["time"])
            self._writer.flush()

    def __enter__(self) -> TensorboardLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        with self.guarded("take metrics"):
            self._writer.close()
