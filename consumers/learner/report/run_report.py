"""Reads the metrics.jsonl of a run: its steps, each once and in order."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

METRICS_FILE = "metrics.jsonl"
# Phases of a step in order; runs of older releases have fewer.
PHASES = ("wait", "copy", "forward", "backward", "forward_backward", "sync", "update", "publish")
_EVALUATED = re.compile(r"eval/([^/]+)/(.+)")
# What comes with them, and what is of evaluation groups of that environment.
_ABOUT_EVALUATIONS = ("at_step", "at_version", "evaluations", "mean_score", "std_score")
MOST_POINTS = 600  # of a drawn line; more cannot be seen and make files large


class NoRun(Exception):
    """A folder has no metrics of a run; the message names the path."""


@dataclass(frozen=True)
class RunMetrics:
    """The steps of one run, each once, in order.

    Attributes:
        name: of the run's folder.
        steps: int (S,).
        columns: name -> float64 (S,), NaN in steps without the metric.
        repeated: lines of steps repeated after a resume; the later line counts.
        torn: invalid JSON lines, left by a kill.
        row_difference: description of the first row trained with other values than were put; "" if none.
    """

    name: str
    steps: npt.NDArray[np.int64]
    columns: dict[str, npt.NDArray[np.float64]]
    repeated: int = 0
    torn: int = 0
    row_difference: str = ""

    def column(self, name: str) -> npt.NDArray[np.float64]:
        """Returns one metric, (S,); NaN where unknown."""
        return self.columns.get(name, np.full(self.steps.size, math.nan))

    @property
    def tokens_per_s(self) -> npt.NDArray[np.float64]:
        """Returns tokens per second of each step; NaN for the first, and after a resume."""
        took = np.diff(self.column("time"), prepend=math.nan)
        took[took <= 0.0] = math.nan
        return self.column("tokens") / took

    @property
    def phases(self) -> dict[str, npt.NDArray[np.float64]]:
        """Returns the seconds of each recorded phase, 0 in steps without it."""
        known = {phase: f"{phase}_s" for phase in PHASES if f"{phase}_s" in self.columns}
        if {"forward", "backward"} & known.keys():
            known.pop("forward_backward", None)
        return {phase: np.nan_to_num(self.columns[name]) for phase, name in known.items()}

    @property
    def evaluations(self) -> dict[tuple[str, str], tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
        """Returns (environment, name) -> the steps at which it evaluated, and what it measured."""
        found = {}
        for column, values in self.columns.items():
            match = _EVALUATED.match(column)
            if match is None or match[2] in _ABOUT_EVALUATIONS:
                continue
            known = np.isfinite(values) & (self.column(f"eval/{match[1]}/evaluations") > 0)
            if known.any():
                found[match[1], match[2]] = self.column(f"eval/{match[1]}/at_step")[known], values[known]
        return found

    @property
    def running_phases(self) -> dict[str, float]:
        """Returns the seconds of each phase in all, without the first step, which waits for the start."""
        first = min(1, self.steps.size - 1)
        return {phase: float(values[first:].sum()) for phase, values in self.phases.items()}


def read_run(folder: Path) -> RunMetrics:
    """Returns the metrics in a run directory. Blocks for the disk. Raises `NoRun` without any step."""
    path = folder / METRICS_FILE
    try:
        lines = path.read_text(errors="replace").splitlines()
    except OSError as error:
        raise NoRun(
            f"no metrics of a run in {folder}: {error.strerror} -> the folder that the learner's --run-dir "
            "names"
        ) from error
    by_step: dict[int, dict[str, Any]] = {}
    read = torn = 0
    for line in lines:
        try:
            said = json.loads(line)
            step = int(said["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            torn += bool(line.strip())
            continue
        read += 1
        # a resumed run repeats the steps that were not saved
        while by_step and next(reversed(by_step)) >= step:
            by_step.popitem()
        by_step[step] = said
    if not by_step:
        raise NoRun(f"{path} has no step yet")
    steps = list(by_step)
    names = {name for said in by_step.values() for name, value in said.items() if _is_number(value)}
    columns = {
        name: np.array([_number(by_step[step].get(name)) for step in steps], np.float64)
        for name in sorted(names)
    }
    differences = (
        said["row_difference"] for said in by_step.values() if isinstance(said.get("row_difference"), str)
    )
    return RunMetrics(
        folder.resolve().name,
        np.array(steps, np.int64),
        columns,
        read - len(steps),
        torn,
        next(differences, ""),
    )


def thinned(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Returns means of the known values over at most MOST_POINTS equal parts; NaN for a part without any."""
    size = -(-values.size // MOST_POINTS)
    starts = np.arange(0, values.size, size)
    known = np.isfinite(values)
    count = np.add.reduceat(known.astype(np.float64), starts)
    sums = np.add.reduceat(np.where(known, values, 0.0), starts)
    with np.errstate(invalid="ignore", divide="ignore"):
        found: npt.NDArray[np.float64] = sums / count
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _number(value: Any) -> float:
    try:
        number = float(value) if _is_number(value) else math.nan
    except OverflowError:  # an integer with hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
