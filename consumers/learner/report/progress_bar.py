"""The learner's progress display: a line per step, or a bar on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.report.log import progress_line


@contextmanager
def progress(steps: int, done: int, every: int, *, bar: bool) -> Iterator[Callable[[Metrics], None]]:
    """Yields a function that shows one step, by its metrics.

    Args:
        steps: of the whole run.
        done: steps done before a resume.
        every: steps between two lines; the last step always has one.
        bar: a bar instead, where standard error is a terminal.
    """
    if not (bar and sys.stderr.isatty()):

        def print_line(metrics: Metrics) -> None:
            if metrics["step"] % every == 0 or metrics["step"] >= steps:
                print(progress_line(metrics, steps), flush=True)

        yield print_line
        return
    from tqdm import tqdm  # comes with transformers

    with tqdm(total=steps, initial=done, unit="step", dynamic_ncols=True) as drawn:

        def draw(metrics: Metrics) -> None:
            drawn.set_postfix_str(
                f"reward {metrics['reward_mean']:.3f}, loss {metrics['loss']:+.4f}, stale "
                f"{metrics['staleness_mean']:.1f}, wait {metrics['wait_s']:.2f}s",
                refresh=False,
            )
            drawn.update(metrics["step"] - drawn.n)

        yield draw
