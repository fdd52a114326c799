"""The curves of a page, as data: which metrics of which runs go into which chart."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.learner.report.run_report import RunMetrics, thinned

Chart = dict[str, Any]
_ENVIRONMENT = re.compile(r"^atropos/(.+)/mean_score$")
_MOST_ENVIRONMENTS = 7  # lines that can be told apart
_MOST_EVALUATIONS = 8  # charts of them
_REASON = re.compile(r"^bridge/(drops|discards)_(\w+)_total$")


def curves(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns the charts of learning: title, unit and series each, the values of every run thinned."""
    return [
        _chart("Reward", "mean score of a batch", _rewards(runs), smooth=True),
        *_evaluations(runs),
        _chart("Loss", "", _of(runs, ("loss", "")), smooth=True),
        _chart(
            "Staleness",
            "policy versions",
            _of(runs, ("staleness_mean", "mean"), ("staleness_max", "largest")),
            zero=True,
        ),
        _chart(
            "Sampler against policy",
            "nats, difference of log-probabilities",
            _of(runs, ("logprob_diff_mean", "all tokens"), ("logprob_diff_mean_fresh", "fresh tokens")),
            zero=True,
            smooth=True,
        ),
        _chart(
            "Throughput",
            "tokens per second",
            [_series(run, _name(runs, run, ""), run.tokens_per_s) for run in runs],
            zero=True,
            smooth=True,
        ),
        _time(runs),
        _chart("Entropy", "nats", _of(runs, ("entropy", "")), zero=True, smooth=True),
        _chart(
            "Length of completions",
            "tokens, mean",
            _of(runs, ("atropos/avg_response_length", "")),
            zero=True,
            smooth=True,
        ),
        _chart("Lost records", "in total, by reason", _lost(runs), zero=True, steps=True, whole=True),
    ]


def lanes(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns the charts of the lanes over time."""
    states = ("live", "dead", "quarantined", "refused")
    kept = [
        (f"bridge/lanes_{state}", state)
        for state in states
        if state == "live" or any(np.nansum(run.column(f"bridge/lanes_{state}")) for run in runs)
    ]
    return [
        _chart("Lanes", "by state", _of(runs, *kept), zero=True, steps=True, whole=True),
        _chart(
            "Fill of the lanes",
            "share of their memory",
            _of(runs, ("bridge/lane_fill_frac", "")),
            zero=True,
            how="%",
        ),
        _chart(
            "Groups waiting",
            "committed, in no batch yet",
            _of(runs, ("bridge/queue_groups", "")),
            zero=True,
            whole=True,
        ),
        _chart(
            "Age of a group",
            "seconds from its commit to its batch",
            _of(runs, ("bridge/group_wait_s", "")),
            zero=True,
        ),
    ]


def lost_by_reason(run: RunMetrics) -> dict[str, int]:
    """Returns reason -> records that were dropped or discarded for it, where there are any."""
    found = {}
    for name, values in run.columns.items():
        match = _REASON.match(name)
        if match and (count := int(np.nanmax(values, initial=0.0))):
            found[f"{'dropped' if match[1] == 'drops' else 'discarded'}, {match[2]}"] = count
    return found


def _rewards(runs: Sequence[RunMetrics]) -> list[Chart]:
    names = [match[1] for name in runs[0].columns if (match := _ENVIRONMENT.match(name))]
    several = len(runs) == 1 and len(names) > 1
    found = []
    for run in runs:
        series = _series(run, _name(runs, run, "all" if several else ""), run.column("reward_mean"))
        evaluated = np.flatnonzero(np.isfinite(run.column("eval/mean_score")))
        if evaluated.size:
            values = run.column("eval/mean_score")[evaluated]
            series["marks"] = [
                [int(step), float(value)] for step, value in zip(run.steps[evaluated], values, strict=True)
            ]
        found.append(series)
    if several:
        found += [
            _series(runs[0], name, runs[0].column(f"atropos/{name}/mean_score"))
            for name in names[:_MOST_ENVIRONMENTS]
        ]
    return found


def _evaluations(runs: Sequence[RunMetrics]) -> list[Chart]:
    """Returns a chart for each name that environments measured in evaluations of their own."""
    by_name: dict[str, list[Chart]] = {}
    for run in runs:
        for (env, name), (steps, values) in run.evaluations.items():
            several = sum(name == other for _, other in run.evaluations) > 1
            series = {
                "name": _name(runs, run, env if several else ""),
                "x": _numbers(thinned(steps)),
                "y": _numbers(thinned(values)),
            }
            by_name.setdefault(name, []).append(series)
    return [
        _chart(f"Evaluation: {name}", "of environments, by themselves", series)
        for name, series in list(by_name.items())[:_MOST_EVALUATIONS]
    ]


def _time(runs: Sequence[RunMetrics]) -> Chart:
    """Returns the shares of a step's time for one run, and the share of waiting for several."""
    if len(runs) > 1:
        waits = [
            _series(run, run.name, run.column("wait_s") / np.maximum(_spent(run), 1e-12)) for run in runs
        ]
        return _chart(
            "Waiting for environments", "share of a step's time", waits, zero=True, smooth=True, how="%"
        )
    (run,) = runs
    parts = [thinned(values) for values in run.phases.values()]
    whole = np.maximum(np.sum(parts, axis=0), 1e-12) if parts else np.zeros(0)
    seconds = run.running_phases
    all_of_it = max(sum(seconds.values()), 1e-12)
    words = {"wait": "waiting for environments", "sync": "waiting for ranks", "copy": "copying"}
    words |= {"publish": "publishing weights", "forward_backward": "forward and backward"}
    series = [
        {
            "name": words.get(name, name),
            "x": _numbers(thinned(run.steps)),
            "y": _numbers(part / whole),
            "mean": seconds[name] / all_of_it,
        }
        for name, part in zip(run.phases, parts, strict=True)
    ]
    return _chart("Where the time goes", "share of a step's time", series, stack=True, smooth=True, how="%")


def _lost(runs: Sequence[RunMetrics]) -> list[Chart]:
    found = []
    for run in runs:
        for name in run.columns:
            match = _REASON.match(name)
            if match and np.nanmax(run.columns[name], initial=0.0) > 0:
                verb = "dropped" if match[1] == "drops" else "discarded"
                found.append(_series(run, _name(runs, run, f"{verb}, {match[2]}"), run.columns[name]))
    return found


def _spent(run: RunMetrics) -> npt.NDArray[np.float64]:
    parts = list(run.phases.values())
    return np.sum(parts, axis=0) if parts else np.zeros(run.steps.size)


def _of(runs: Sequence[RunMetrics], *metrics: tuple[str, str]) -> list[Chart]:
    return [
        _series(run, _name(runs, run, words), run.column(name)) for run in runs for name, words in metrics
    ]


def _name(runs: Sequence[RunMetrics], run: RunMetrics, words: str) -> str:
    return words if len(runs) == 1 else f"{run.name} {words}".strip()


def _series(run: RunMetrics, name: str, values: npt.NDArray[np.float64]) -> Chart:
    return {"name": name, "x": _numbers(thinned(run.steps)), "y": _numbers(thinned(values))}


def _chart(title: str, unit: str, series: list[Chart], **more: Any) -> Chart:
    return {"title": title, "unit": unit, "series": series, **more}


def _numbers(values: npt.NDArray[np.float64]) -> list[float | None]:
    """Returns values with six digits, None where unknown: JSON has no NaN."""
    return [float(f"{each:.6g}") if np.isfinite(each) else None for each in values.tolist()]
