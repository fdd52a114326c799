"""Reads the metrics.jsonl of a run: the steps in order, and a summary as numbers and as text."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

METRICS_FILE = "metrics.jsonl"
# Phases of a step in order; runs of older releases have fewer.
PHASES = ("wait", "copy", "forward", "backward", "forward_backward", "sync", "update", "publish")
_TAIL = 0.1  # share of the steps that "at the start" and "at the end" average over


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
        except (ValueError, KeyError, TypeError, OverflowError):
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


def summary(run: RunMetrics) -> dict[str, Any]:
    """Returns the summary of a run by name; None for unknown values."""
    few = max(1, math.ceil(run.steps.size * _TAIL))
    reward, loss, staleness = run.column("reward_mean"), run.column("loss"), run.column("staleness_mean")
    phases = {name: float(values.sum()) for name, values in run.phases.items()}
    spent = sum(phases.values())
    best = int(np.nanargmax(reward)) if np.isfinite(reward).any() else None
    took = np.diff(run.column("time"))
    took = took[took > 0.0]
    return {
        "run": run.name,
        "steps": int(run.steps[-1]),
        "lines_repeated": run.repeated,
        "lines_torn": run.torn,
        "wall_s": _plain(took.sum()) if took.size else None,
        "reward_first": _mean(reward[:few]),
        "reward_last": _mean(reward[-few:]),
        "reward_best": None if best is None else float(reward[best]),
        "reward_best_step": None if best is None else int(run.steps[best]),
        "loss_last": _mean(loss[-few:]),
        "eval_last": _last(run.column("eval/mean_score")),
        "staleness_mean": _mean(staleness),
        "staleness_max": _plain(np.nanmax(run.column("staleness_max"), initial=-math.inf)),
        "tokens": int(np.nansum(run.column("tokens"))),
        "tokens_per_s": _mean_rate(run),
        "updates_skipped": int(np.nansum(run.column("update_skipped"))),
        "discarded_total": _last(run.column("discarded_total")),
        "dropped_total": _last(run.column("dropped_total")),
        "rows_compared": _by_environment(run, "rows_compared"),
        "rows_differ": _by_environment(run, "rows_differ"),
        "row_difference": run.row_difference or None,
        "host_cpu_s_per_mtoken": _mean(run.column("host_cpu_s_per_mtoken")),
        "idle_frac": phases["wait"] / spent if spent and "wait" in phases else None,
        "time_s": phases,
    }


def as_text(found: dict[str, Any]) -> str:
    """Returns the summary as a few lines of text."""
    lines = [
        f"{found['run']}: {found['steps']} steps, {found['tokens']:,} tokens"
        + (
            f" in {found['wall_s']:,.0f} s, {_say(found['tokens_per_s'], ',.0f')} tokens/s"
            if found["wall_s"]
            else ""
        ),
        (
            f"  reward     {_say(found['reward_first'])} at the start, {_say(found['reward_last'])} at the "
            f"end, best {_say(found['reward_best'])}"
        )
        + ("" if found["reward_best"] is None else f" at step {found['reward_best_step']}"),
        f"  loss       {_say(found['loss_last'], '+.4f')} at the end",
        (
            f"  staleness  {_say(found['staleness_mean'], '.2f')} versions, at most "
            f"{_say(found['staleness_max'], '.0f')}"
        ),
    ]
    if found["eval_last"] is not None:
        lines.append(f"  evaluation {_say(found['eval_last'])} at the last")
    spent = sum(found["time_s"].values())
    if spent:
        parts = ", ".join(f"{name} {seconds / spent:.0%}" for name, seconds in found["time_s"].items())
        lines.append(f"  time       {parts}")
    if found["host_cpu_s_per_mtoken"] is not None:
        lines.append(f"  host CPU   {found['host_cpu_s_per_mtoken']:.2f} s per million tokens")
    lines += _rows_in_words(found)
    lost = [
        f"{found[key]:.0f} {words}"
        for key, words in (
            ("updates_skipped", "updates skipped"),
            ("dropped_total", "records dropped by producers"),
            ("discarded_total", "records discarded"),
            ("lines_repeated", "lines of steps that a resume took back"),
            ("lines_torn", "torn lines"),
        )
        if found[key]
    ]
    return "\n".join([*lines, *(["  besides    " + ", ".join(lost)] if lost else [])])


def _by_environment(run: RunMetrics, name: str) -> dict[str, int]:
    """Returns the sum over all steps of each environment's `name{env}`."""
    begin = f"{name}{{"
    mine = [each for each in run.columns if each.startswith(begin) and each.endswith("}")]
    return {each[len(begin) : -1]: int(np.nansum(run.columns[each])) for each in sorted(mine)}


def _rows_in_words(found: dict[str, Any]) -> list[str]:
    """Returns a sentence on how many rows were compared with the put values, and how many differ."""
    compared, differ = found["rows_compared"], found["rows_differ"]
    if not compared:
        return []
    wrong = ", ".join(f"{env} {count} of {compared.get(env, 0)}" for env, count in differ.items() if count)
    said = f"{sum(differ.values()):,} DIFFER: {wrong}" if wrong else "none differs"
    lines = [f"  rows       {sum(compared.values()):,} compared with what was put, {said}"]
    return [*lines, f"             first: {found['row_difference']}"] if found["row_difference"] else lines


def _mean_rate(run: RunMetrics) -> float | None:
    rate, tokens = run.tokens_per_s, run.column("tokens")
    known = np.isfinite(rate) & (rate > 0.0)
    return float(tokens[known].sum() / (tokens[known] / rate[known]).sum()) if known.any() else None


def _mean(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known.mean()) if known.size else None


def _last(values: npt.NDArray[np.float64]) -> float | None:
    known = values[np.isfinite(values)]
    return float(known[-1]) if known.size else None


def _plain(value: Any) -> float | None:
    return float(value) if math.isfinite(value) else None


def _say(value: float | None, how: str = ".3f") -> str:
    return "unknown" if value is None else format(value, how)


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float))


def _number(value: Any) -> float:
    try:
        number = float(value) if _is_number(value) else math.nan
    except OverflowError:  # an integer with hundreds of digits
        return math.nan
    return number if math.isfinite(number) else math.nan
