"""The figures in the demo's logs: rewards as environments measured them, the learner's metrics, a summary, a
plot.

Knows nothing of processes and of bridges. Called by `demo.py`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

Line = dict[str, Any]

WINDOW = 100  # groups of the moving average


class JsonLines:
    """A growing file of JSON objects, read from where the last look ended."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.seen: list[Line] = []
        self._offset = 0

    def read(self) -> list[Line]:
        """Returns everything so far. A torn last line waits for its end; one torn by a kill is skipped."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._offset)
                whole, newline, _ = file.read().rpartition(b"\n")
            self._offset += len(whole) + len(newline)
            self.seen += [line for line in map(_parsed, whole.splitlines()) if line is not None]
        return self.seen


@dataclass(frozen=True)
class Tenths:
    """Mean reward of the first and of the last tenth of the groups."""

    first: float
    last: float

    @property
    def gain(self) -> float:
        """How much the last is above the first."""
        return self.last - self.first


@dataclass
class Progress:
    """The rewards and metrics of a run, by the names of its environments."""

    metrics: JsonLines
    rewards: dict[str, JsonLines] = field(default_factory=dict)

    def read(self) -> None:
        """Reads on."""
        for log in (self.metrics, *self.rewards.values()):
            log.read()

    def measured(self, env: str | None = None) -> list[Line]:
        """Groups in the order of their time, of one environment or of all.

        Without any environment that measures, the learner's mean reward per step stands in.
        """
        logs = [self.rewards[env]] if env else list(self.rewards.values())
        lines = [line for log in logs for line in log.seen]
        if not self.rewards:
            lines = [
                {"t": line["time"], "mean": line["reward_mean"]}
                for line in self.metrics.seen
                if line["reward_mean"] is not None
            ]
        return sorted(lines, key=lambda line: line["t"])

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return max((line["step"] for line in self.metrics.seen), default=0)

    @property
    def dropped(self) -> int:
        """Groups that were discarded, over all consumers."""
        return max((line["dropped_total"] for line in self.metrics.seen), default=0)

    def tokens_per_s(self, last: int = 20) -> float:
        """Trained trajectories' tokens per second over the last steps."""
        lines = self.metrics.seen[-last:]
        if len(lines) < 2:
            return 0.0
        tokens: int = sum(line["tokens"] for line in lines[1:])
        seconds: float = lines[-1]["time"] - lines[0]["time"]
        return tokens / max(seconds, 1e-9)


def tenths(lines: list[Line]) -> Tenths:
    """Returns the mean reward of the first and the last tenth; NaN without any."""
    size = max(1, len(lines) // 10)
    return Tenths(mean(lines[:size]), mean(lines[-size:]))


def mean(lines: list[Line]) -> float:
    """Returns the mean reward; NaN without any."""
    return float(sum(line["mean"] for line in lines)) / len(lines) if lines else float("nan")


def progress_text(progress: Progress, steps: int) -> str:
    """Returns the progress of the run, in one line."""
    newest = progress.measured()[-WINDOW:]
    if not newest:
        return "starting: environments take ten seconds or so to their first group"
    envs = "".join(
        f"  {name} {mean(log.seen[-WINDOW:]):.2f}" for name, log in progress.rewards.items() if log.seen
    )
    rate = f"{progress.tokens_per_s():,.0f} tokens/s"
    return f"step {progress.step}/{steps}  reward {mean(newest):.2f}{envs}  {rate}"


def summary(progress: Progress) -> dict[str, str]:
    """Returns the summary of the logs: label -> text."""
    lines = progress.metrics.seen
    total = tenths(progress.measured())
    stale = sum(line["staleness_mean"] for line in lines) / max(len(lines), 1)
    worst = max((line["staleness_max"] for line in lines), default=0)
    rows = {"mean reward": f"{total.first:.2f} in the first tenth, {total.last:.2f} in the last"}
    for name in progress.rewards:
        own = tenths(progress.measured(name))
        rows[f"  {name}"] = f"{own.first:.2f}, {own.last:.2f}"
    return rows | {
        "optimizer steps": f"{progress.step:,}",
        "trajectories": f"{sum(line['trajectories'] for line in lines):,}",
        "  delivered again": f"{sum(line['trajectories_redelivered'] for line in lines):,}",
        "tokens": f"{sum(line['tokens'] for line in lines):,}",
        "staleness": f"{stale:.1f} policy versions on average, {worst} at most",
        "dropped": f"{progress.dropped}",
    }


def table(rows: dict[str, str]) -> str:
    """Returns labels and texts in two columns."""
    width = max(map(len, rows))
    return "\n".join(f"  {label:<{width}}  {text}" for label, text in rows.items())


def draw(progress: Progress, path: Path) -> None:
    """Draws the moving mean of the reward over time, per environment and in total. Blocks for a second."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    everything = progress.measured()
    figure, axes = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    for name in [*progress.rewards, None]:
        lines = progress.measured(name)
        seconds = [line["t"] - everything[0]["t"] for line in lines]
        style = {"alpha": 0.7, "linewidth": 1.2} if name else {"color": "black", "linewidth": 2.0}
        axes.plot(seconds, _moving_mean([line["mean"] for line in lines]), label=name or "all", **style)
    axes.set(
        xlabel="seconds since the first group",
        ylabel=f"reward, mean of {WINDOW} groups",
        ylim=(0, 1),
        title="Reward, as the environments measured it" if progress.rewards else "Reward per step",
    )
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def _moving_mean(values: list[float]) -> list[float]:
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    starts = [max(0, end - WINDOW) for end in range(1, len(sums))]
    return [(sums[end] - sums[start]) / (end - start) for end, start in enumerate(starts, start=1)]


def _parsed(line: bytes) -> Line | None:
    try:
        parsed: Line = json.loads(line)
    except ValueError:
        return None
    return parsed
