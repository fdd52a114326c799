"""One plot of one or several runs. The only file that imports matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from shmbridge.consumers.learner.report.run_report import PHASES, RunMetrics, thinned

_LINES = ("-", "--", ":", "-.")
# with the line patterns, distinguishable in grey, too
_INKS = ("#000000", "#0072b2", "#d55e00", "#7f7f7f", "#009e73", "#cc79a7")
_COLOURS = ("#ffffff", "#e0e0e0", "#56b4e9", "#0072b2", "#3690c0", "#d55e00", "#a0a0a0", "#404040")
_FILLS = dict(zip(PHASES, _COLOURS, strict=True))
_HATCHES = dict(zip(PHASES, ("", "..", "", "//", "", "xx", "", ""), strict=True))


class MatplotlibMissing(Exception):
    """The matplotlib package is not installed; the message says how to get it."""


def plot(runs: Sequence[RunMetrics], file: Path) -> None:
    """Draws the runs into a file, .svg or .png. Blocks. Raises `MatplotlibMissing`."""
    try:
        import matplotlib as mpl
        from matplotlib.figure import Figure  # not pyplot: no window, no state
    except ImportError as error:
        raise MatplotlibMissing(
            f"a plot needs the matplotlib package ({error}): pip install 'shmbridge[learner]', or --format "
            "none"
        ) from error
    with mpl.rc_context(
        {"font.size": 8, "svg.fonttype": "none", "svg.hashsalt": "shmbridge", "hatch.linewidth": 0.4}
    ):
        figure = Figure(figsize=(7.0, 9.0), layout="constrained")
        axes = figure.subplots(5, 1, sharex=len(runs) == 1)
        curves = (
            ("mean reward of a batch", lambda run: run.column("reward_mean")),
            ("loss", lambda run: run.column("loss")),
            ("staleness, versions", lambda run: run.column("staleness_mean")),
            ("tokens per second", lambda run: run.tokens_per_s),
        )
        for axis, (label, values) in zip(axes, curves, strict=False):
            for number, run in enumerate(runs):
                ink, line = _INKS[number % len(_INKS)], _LINES[number % len(_LINES)]
                axis.plot(
                    thinned(run.steps), thinned(values(run)), line, color=ink, linewidth=1.0, label=run.name
                )
            axis.set_ylabel(label)
            axis.grid(linewidth=0.3, color="#cccccc")
        # the user's evaluation, if any, as markers on the reward
        for number, run in enumerate(runs):
            known = np.isfinite(run.column("eval/mean_score"))
            if known.any():
                ink = _INKS[number % len(_INKS)]
                marks = run.column("eval/mean_score")[known]
                axes[0].plot(
                    run.steps[known], marks, "o", color=ink, markersize=3, label=f"{run.name}, evaluation"
                )
        if len(axes[0].get_legend_handles_labels()[0]) > 1:
            axes[0].legend(fontsize=7)
        axes[3].set_xlabel("" if len(runs) == 1 else "step")
        if len(runs) == 1:
            _time_by_step(axes[4], runs[0])
        else:
            _time_by_run(axes[4], runs)
        file.parent.mkdir(parents=True, exist_ok=True)
        metadata = {"Date": None} if file.suffix == ".svg" else None  # makes the file reproducible
        figure.savefig(file, dpi=100, metadata=metadata)


def _time_by_step(axis: Any, run: RunMetrics) -> None:
    """Returns the time shares of a step, averaged per drawn point."""
    phases = run.phases
    if not phases:
        return
    steps = thinned(run.steps)
    parts = [thinned(values) for values in phases.values()]
    whole = np.maximum(np.sum(parts, axis=0), 1e-12)
    stack = axis.stackplot(
        steps,
        *[part / whole for part in parts],
        labels=list(phases),
        colors=[_FILLS[name] for name in phases],
        edgecolor="#000000",
        linewidth=0.3,
    )
    for area, name in zip(stack, phases, strict=True):
        area.set_hatch(_HATCHES[name])
    axis.set(ylim=(0.0, 1.0), ylabel="share of a step's time", xlabel="step")
    axis.legend(fontsize=7, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)


def _time_by_run(axis: Any, runs: Sequence[RunMetrics]) -> None:
    names = [run.name for run in runs]
    left = np.zeros(len(runs))
    for phase in PHASES:
        seconds = np.array([run.phases[phase].sum() if phase in run.phases else 0.0 for run in runs])
        whole = np.array([sum(values.sum() for values in run.phases.values()) for run in runs])
        shares = seconds / np.maximum(whole, 1e-12)
        if shares.any():
            axis.barh(
                names,
                shares,
                left=left,
                label=phase,
                color=_FILLS[phase],
                hatch=_HATCHES[phase],
                edgecolor="#000000",
                linewidth=0.4,
            )
        left += shares
    axis.set(xlim=(0.0, 1.0), xlabel="share of the time")
    axis.invert_yaxis()
    axis.legend(fontsize=7, ncols=len(PHASES), loc="upper center", bbox_to_anchor=(0.5, -0.28), frameon=False)
