"""The summary of a run: its numbers by name, what follows from them, and both as text."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.learner.report.conclusions import conclusions
from shmbridge.consumers.learner.report.run_report import RunMetrics

_TAIL = 0.1  # share of the steps that "at the start" and "at the end" average over


def summary(run: RunMetrics) -> dict[str, Any]:
    """Returns the summary of a run by name; None for unknown values."""
    few = max(1, math.ceil(run.steps.size * _TAIL))
    reward, loss, staleness = run.column("reward_mean"), run.column("loss"), run.column("staleness_mean")
    phases = {name: float(values.sum()) for name, values in run.phases.items()}
    spent = sum(phases.values())
    running = run.running_phases
    best = int(np.nanargmax(reward)) if np.isfinite(reward).any() else None
    took = np.diff(run.column("time"))
    took = took[took > 0.0]
    found = {
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
        "evaluations": _evaluations(run),
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
        "idle_frac_running": running["wait"] / max(sum(running.values()), 1e-12)
        if "wait" in running
        else None,
        "time_s": phases,
        "reward_noise": _noise(reward[:few], reward[-few:]),
    }
    return found | {"conclusions": [each.text for each in conclusions(run, found)]}


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
    lines += [
        f"  evaluation {name} {_say(each['last'])} at step {each['last_step']}, {_say(each['first'])} at the "
        "first"
        for name, each in found["evaluations"].items()
    ]
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
    lines += [
        f"  {'so' if not place else '  '}         {text}" for place, text in enumerate(found["conclusions"])
    ]
    return "\n".join([*lines, *(["  besides    " + ", ".join(lost)] if lost else [])])


def _evaluations(run: RunMetrics) -> dict[str, dict[str, Any]]:
    """Returns the first and the last value of what each environment measured in evaluations of its own."""
    found = {}
    for (env, name), (steps, values) in run.evaluations.items():
        ends = {"first": float(values[0]), "last": float(values[-1]), "last_step": int(steps[-1])}
        found[f"{env}/{name}"] = ends
    return found


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


def _noise(first: npt.NDArray[np.float64], last: npt.NDArray[np.float64]) -> float | None:
    """Returns the standard error of the difference of two means; None of fewer than three steps each."""
    parts = [each[np.isfinite(each)] for each in (first, last)]
    if min(each.size for each in parts) < 3:
        return None
    return float(math.sqrt(sum(each.var(ddof=1) / each.size for each in parts)))
