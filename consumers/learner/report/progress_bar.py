"""The learner's progress display: a line per step, or a bar on a terminal.

Used by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import sys
from typing import Any

from shmbridge.consumers.learner.report.log import progress_line
from shmbridge.consumers.learner.types import Metrics


class ProgressLines:
    """Context manager that prints a line for every `every`th step, and for the last.

    Args:
        steps: of the whole run.
        every: steps between two lines.
    """

    def __init__(self, steps: int, every: int) -> None:
        self._steps, self._every = steps, every

    def show(self, metrics: Metrics) -> None:
        """Shows one step."""
        if metrics["step"] % self._every == 0 or metrics["step"] >= self._steps:
            print(progress_line(metrics, self._steps), flush=True)

    def __enter__(self) -> ProgressLines:
        return self

    def __exit__(self, *exc_info: object) -> None:
        pass


class ProgressBar:
    """Context manager over a tqdm bar on standard error; tqdm comes with transformers.

    Args:
        steps: of the whole run.
        done: steps done before a resume.
    """

    def __init__(self, steps: int, done: int) -> None:
        from tqdm import tqdm

        self._bar: Any = tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True)

    def show(self, metrics: Metrics) -> None:
        """Shows one step."""
        self._bar.set_postfix_str(
            f"reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:+.4f}, stale "
            f"{metrics['staleness_mean']:.1f}, wait {metrics['wait_s']:.2f}s",
            refresh=False,
        )
        self._bar.update(metrics["step"] - self._bar.n)

    def __enter__(self) -> ProgressBar:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.close()


def progress(steps: int, done: int, every: int, *, bar: bool) -> ProgressLines | ProgressBar:
    """Returns the bar if requested and standard error is a terminal, else lines on standard output."""
    return ProgressBar(steps, done) if bar and sys.stderr.isatty() else ProgressLines(steps, every)
