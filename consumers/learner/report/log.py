"""metrics.jsonl and the progress line after each step."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.world import say


class OtherLog:
    """Another receiver of the metrics; its failures are counted, and the first is printed.

    Args:
        name: in the metric that counts its failures.
        title: its name for the user.
        say: prints a line for the user.
    """

    def __init__(self, name: str, title: str, say: Callable[[str], None]) -> None:
        self.name, self.failures_total = name, 0
        self._title, self._say = title, say

    def log(self, metrics: Metrics) -> None:
        """Takes one step's metrics. Does not raise."""
        raise NotImplementedError

    def log_samples(self, samples: Sequence[Metrics]) -> None:
        """Takes sampled groups of a step: lines of samples.jsonl. Does not raise; ignored by default."""

    def counters(self) -> Metrics:
        """Returns what goes into each line of metrics.jsonl about this log."""
        return {f"{self.name}_failures_total": self.failures_total}

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """Counts an exception of the block, and hides it: no failure of a log may stop training."""
        try:
            yield
        except Exception as error:
            self.failures_total += 1
            if self.failures_total == 1:
                self._say(f"{self._title} cannot {what}, training goes on: {type(error).__name__}: {error}")


class MetricsLog:
    """Context manager over an append-only file of JSON lines; a kill leaves at most one torn line.

    Other receivers, `others`, get the same metrics; None entries are ignored.
    """

    def __init__(self, path: Path, *others: OtherLog | None) -> None:
        self.others = [each for each in others if each is not None]
        self._failures_total = 0
        self._torn = False
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        size = os.fstat(self._file).st_size
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            os.write(self._file, b"\n")  # a killed writer's half line must not merge with our first line

    def append(self, metrics: Metrics) -> None:
        """Appends one line in a single write; values that are not finite become null. Blocks for the disk.

        A line that cannot be written is lost: reported once, and counted in later lines.
        """
        for other in self.others:
            other.log(metrics)
        for other in self.others:
            metrics = metrics | other.counters()
        if self._failures_total:
            metrics["metrics_failures_total"] = self._failures_total
        line = json.dumps({name: plain(value) for name, value in metrics.items()}).encode() + b"\n"
        line = b"\n" + line if self._torn else line
        try:
            written = os.write(self._file, line)
        except OSError as error:
            self._failed(error.strerror)
            return
        self._torn = written < len(line)
        if self._torn:
            self._failed("the line was cut")

    def _failed(self, why: str | None) -> None:
        self._failures_total += 1
        if self._failures_total == 1:
            say(f"metrics.jsonl cannot be written, training goes on without: {why}")

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(self, *exc_info: object) -> None:
        os.close(self._file)


def progress_line(metrics: Metrics, steps: int) -> str:
    """Returns a progress line for the user: step, learning metrics, time shares."""
    return (
        f"step {metrics['step']:>{len(str(steps))}}/{steps}  version {metrics['policy_version']}"
        f"  reward {metrics['reward_mean']:.3f}  loss {metrics['loss']:+.4f}"
        f"  entropy {metrics['entropy']:.3f}  grad {metrics['grad_norm']:.2f}"
        f"  ratio {metrics['ratio_mean']:.3f}  clip {metrics['clip_frac']:.1%}"
        f"  stale {metrics['staleness_mean']:.1f}/{metrics['staleness_max']}"
        f"  wait {metrics['wait_s']:.2f}s  train {metrics['forward_backward_s']:.2f}s"
        f"  publish {metrics['publish_s'] * 1e3:.0f}ms"
        + ("  UPDATE SKIPPED" if metrics["update_skipped"] else "")
    )


def plain(value: Any) -> Any:
    """Returns the value, or None if it is not finite: standard JSON has no NaN."""
    return None if isinstance(value, float) and not math.isfinite(value) else value
