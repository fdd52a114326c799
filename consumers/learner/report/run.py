"""A run directory in numbers: its steps, a summary, and what follows from it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

METRICS_FILE = "metrics.jsonl"
Floats = npt.NDArray[np.float64]
# Phases of a step in order; runs of older releases have fewer.
PHASES = ("wait", "copy", "forward", "backward", "forward_backward", "sync", "update", "publish")
_EVALUATED = re.compile(r"eval/([^/]+)/(.+)")
# What comes with evaluations of an environment, and what is of evaluation groups of that environment.
_ABOUT_EVALUATIONS = ("at_step", "at_version", "evaluations", "mean_score", "std_score")
_TAIL = 0.1  # share of the steps that "at the start" and "at the end" average over

FAULT, GOOD, HINT = range(3)  # of a conclusion, in the order in which they are shown
_WAITS = 0.3  # share of the time from which waiting is the first thing to change
_BUSY = 0.1  # share of waiting below which more environments bring nothing
_LARGE = 0.2  # share of the time from which a phase besides forward and backward is named
_FLAT = 0.5  # share of groups that teach nothing, and of completions cut, from which that is named
_CLEAR = 3.0  # standard errors by which a reward rose or fell
_SLOW = {  # phase -> what it is, and what to do
    "copy": ("bringing batches to the device takes", "try --host-copy direct, or a larger --micro-tokens"),
    "sync": ("ranks wait for one another", "give each as many groups as the others"),
    "update": ("the optimizer takes", "use larger batches, --groups or --accumulate"),
    "publish": ("publishing weights takes", "raise --publish-every"),
}
_LOST = {  # counter of the bridge -> why, and what to do
    "drops_full": "since their lane was full: raise lane_bytes, or let producers wait (on_full)",
    "drops_timeout": "since their lane stayed full: raise lane_bytes or timeout_s",
    "drops_invalid": "since they were invalid: read the environment's log",
    "drops_cancelled": "since the environment cancelled them",
    "discards_stale": "as too old: raise --max-staleness, or use fewer environments",
    "discards_partial": "since their group stayed incomplete: look for environments that end early",
    "discards_resume": "at the start, left by an earlier run",
    "discards_corrupt": "since their lane held garbage: see shmbridge inspect",
}


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
    columns: dict[str, Floats]
    repeated: int = 0
    torn: int = 0
    row_difference: str = ""

    def column(self, name: str) -> Floats:
        """Returns one metric, (S,); NaN where unknown."""
        return self.columns.get(name, np.full(self.steps.size, math.nan))

    def total(self, name: str) -> float:
        """Returns the sum of one metric over all steps; 0 if unknown."""
        return float(np.nansum(self.column(name)))

    def counted(self, name: str) -> float:
        """Returns the highest value of a counter; 0 if unknown."""
        return float(np.nanmax(self.column(name), initial=0.0))

    @property
    def tokens_per_s(self) -> Floats:
        """Returns tokens per second of each step; NaN for the first, and after a resume."""
        took = np.diff(self.column("time"), prepend=math.nan)
        took[took <= 0.0] = math.nan
        return self.column("tokens") / took

    @property
    def phases(self) -> dict[str, Floats]:
        """Returns the seconds of each recorded phase, 0 in steps without it."""
        known = {phase: f"{phase}_s" for phase in PHASES if f"{phase}_s" in self.columns}
        if {"forward", "backward"} & known.keys():
            known.pop("forward_backward", None)
        return {phase: np.nan_to_num(self.columns[name]) for phase, name in known.items()}

    @property
    def running_phases(self) -> dict[str, float]:
        """Returns the seconds of each phase in all, without the first step, which waits for the start."""
        first = min(1, self.steps.size - 1)
        return {phase: float(values[first:].sum()) for phase, values in self.phases.items()}

    @property
    def evaluations(self) -> dict[tuple[str, str], tuple[Floats, Floats]]:
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
    for line in filter(str.strip, lines):
        try:
            metrics = json.loads(line)
            step = int(metrics["step"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
            torn += 1
            continue
        read += 1
        # a resumed run repeats the steps that were not saved
        while by_step and next(reversed(by_step)) >= step:
            by_step.popitem()
        by_step[step] = metrics
    if not by_step:
        raise NoRun(f"{path} has no step yet")
    every = by_step.values()
    names = {name for each in every for name, value in each.items() if isinstance(value, (int, float))}
    columns = {name: np.array([_number(each.get(name)) for each in every]) for name in sorted(names)}
    differences = (each["row_difference"] for each in every if isinstance(each.get("row_difference"), str))
    return RunMetrics(
        folder.resolve().name,
        np.array(list(by_step), np.int64),
        columns,
        read - len(by_step),
        torn,
        next(differences, ""),
    )


def _number(value: Any) -> float:
    """Returns a finite number; NaN for anything else, such as an integer with hundreds of digits."""
    try:
        number = float(value) if isinstance(value, (int, float)) else math.nan
    except OverflowError:
        return math.nan
    return number if math.isfinite(number) else math.nan


# --- the summary ------------------------------------------------------------------------------------------


def summary(run: RunMetrics) -> dict[str, Any]:
    """Returns the summary of a run by name; None for unknown values. Never blocks."""
    few = max(1, math.ceil(run.steps.size * _TAIL))
    reward, rate = run.column("reward_mean"), run.tokens_per_s
    phases = {name: float(values.sum()) for name, values in run.phases.items()}
    running = run.running_phases
    best = int(np.nanargmax(reward)) if np.isfinite(reward).any() else None
    took = np.diff(run.column("time"))
    took = took[took > 0.0]
    timed = np.isfinite(rate) & (rate > 0.0)
    tokens = run.column("tokens")[timed]
    found = {
        "run": run.name,
        "steps": int(run.steps[-1]),
        "lines_repeated": run.repeated,
        "lines_torn": run.torn,
        "wall_s": _of(took, np.sum),
        "reward_first": _of(reward[:few], np.mean),
        "reward_last": _of(reward[-few:], np.mean),
        "reward_best": None if best is None else float(reward[best]),
        "reward_best_step": None if best is None else int(run.steps[best]),
        "loss_last": _of(run.column("loss")[-few:], np.mean),
        "eval_last": _of(run.column("eval/mean_score"), itemgetter(-1)),
        "evaluations": {
            f"{env}/{name}": {"first": float(values[0]), "last": float(values[-1]), "last_step": int(at[-1])}
            for (env, name), (at, values) in run.evaluations.items()
        },
        "staleness_mean": _of(run.column("staleness_mean"), np.mean),
        "staleness_max": _of(run.column("staleness_max"), np.max),
        "tokens": int(run.total("tokens")),
        "tokens_per_s": float(tokens.sum() / (tokens / rate[timed]).sum()) if timed.any() else None,
        "updates_skipped": int(run.total("update_skipped")),
        "discarded_total": _of(run.column("discarded_total"), itemgetter(-1)),
        "dropped_total": _of(run.column("dropped_total"), itemgetter(-1)),
        "rows_compared": _by_environment(run, "rows_compared"),
        "rows_differ": _by_environment(run, "rows_differ"),
        "row_difference": run.row_difference or None,
        "host_cpu_s_per_mtoken": _of(run.column("host_cpu_s_per_mtoken"), np.mean),
        "idle_frac": _share(phases, "wait"),
        "idle_frac_running": _share(running, "wait"),
        "time_s": phases,
        "reward_noise": _noise(reward[:few], reward[-few:]),
    }
    return found | {"conclusions": conclusions(run, found)}


def as_text(found: dict[str, Any]) -> str:
    """Returns the summary as a few lines of text."""
    head = f"{found['run']}: {found['steps']} steps, {found['tokens']:,} tokens"
    if found["wall_s"]:
        head += f" in {found['wall_s']:,.0f} s, {_shown(found['tokens_per_s'], ',.0f')} tokens/s"
    best = f" at step {found['reward_best_step']}" if found["reward_best"] is not None else ""
    first, last = _shown(found["reward_first"]), _shown(found["reward_last"])
    mean, most = _shown(found["staleness_mean"], ".2f"), _shown(found["staleness_max"], ".0f")
    lines = [
        ("reward", f"{first} at the start, {last} at the end, best {_shown(found['reward_best'])}{best}"),
        ("loss", f"{_shown(found['loss_last'], '+.4f')} at the end"),
        ("staleness", f"{mean} versions, at most {most}"),
    ]
    if found["eval_last"] is not None:
        lines.append(("evaluation", f"{found['eval_last']:.3f} at the last"))
    for name, each in found["evaluations"].items():
        at = f"{_shown(each['last'])} at step {each['last_step']}, {_shown(each['first'])} at the first"
        lines.append(("evaluation", f"{name} {at}"))
    if sum(found["time_s"].values()):
        shares = (f"{name} {_share(found['time_s'], name):.0%}" for name in found["time_s"])
        lines.append(("time", ", ".join(shares)))
    if found["host_cpu_s_per_mtoken"] is not None:
        lines.append(("host CPU", f"{found['host_cpu_s_per_mtoken']:.2f} s per million tokens"))
    if compared := found["rows_compared"]:
        differ = {env: count for env, count in found["rows_differ"].items() if count}
        wrong = ", ".join(f"{env} {count} of {compared.get(env, 0)}" for env, count in differ.items())
        result = f"{sum(differ.values()):,} DIFFER: {wrong}" if differ else "none differs"
        lines.append(("rows", f"{sum(compared.values()):,} compared with what was put, {result}"))
    if found["row_difference"]:
        lines.append(("", f"first: {found['row_difference']}"))
    lines += [("" if place else "so", text) for place, text in enumerate(found["conclusions"])]
    besides = {
        "updates_skipped": "updates skipped",
        "dropped_total": "records dropped by producers",
        "discarded_total": "records discarded",
        "lines_repeated": "lines of steps that a resume took back",
        "lines_torn": "torn lines",
    }
    if lost := ", ".join(f"{found[key]:.0f} {words}" for key, words in besides.items() if found[key]):
        lines.append(("besides", lost))
    return "\n".join([head, *(f"  {name:10} {text}" for name, text in lines)])


def _by_environment(run: RunMetrics, name: str) -> dict[str, int]:
    """Returns the sum over all steps of each environment's `name{env}`."""
    mine = {each: match[1] for each in run.columns if (match := re.fullmatch(rf"{name}{{(.*)}}", each))}
    return {env: int(run.total(each)) for each, env in mine.items()}


def _of(values: Floats, how: Callable[[Floats], Any]) -> float | None:
    """Returns what `how` makes of the known values; None if there is none."""
    known = values[np.isfinite(values)]
    return float(how(known)) if known.size else None


def _share(seconds: dict[str, float], name: str) -> float | None:
    spent = sum(seconds.values())
    return seconds[name] / spent if spent and name in seconds else None


def _noise(first: Floats, last: Floats) -> float | None:
    """Returns the standard error of the difference of two means; None of fewer than three steps each."""
    parts = [each[np.isfinite(each)] for each in (first, last)]
    if min(each.size for each in parts) < 3:
        return None
    return float(math.sqrt(sum(each.var(ddof=1) / each.size for each in parts)))


def _shown(value: float | None, form: str = ".3f") -> str:
    return "unknown" if value is None else format(value, form)


# --- what follows -----------------------------------------------------------------------------------------


def conclusions(run: RunMetrics, found: dict[str, Any]) -> list[str]:
    """Returns what follows from a run's steps and its summary, and what to change: a sentence each.

    Faults come first, then good news. Never blocks.
    """
    every = [*_reward(found), *_time(run, found), *_lost(run, found), *_groups(run), *_faults(run, found)]
    return [text for _, text in sorted(every, key=itemgetter(0))]


def _reward(found: dict[str, Any]) -> Iterator[tuple[int, str]]:
    first, last, noise = found["reward_first"], found["reward_last"], found["reward_noise"]
    if first is None or last is None:
        yield HINT, "no trajectory has a score, so whether it learns is unknown"
    elif noise is not None and last - first > _CLEAR * noise:
        yield GOOD, f"the reward rose from {first:.3f} to {last:.3f}"
    elif noise is not None and first - last > _CLEAR * noise:
        yield FAULT, f"the reward fell from {first:.3f} to {last:.3f}: lower --lr, or look at the groups"
    elif noise is not None:
        change = f"from {first:.3f} to {last:.3f}"
        yield (HINT, f"the reward did not change beyond its noise ({change}): train longer, or raise --lr")


def _time(run: RunMetrics, found: dict[str, Any]) -> Iterator[tuple[int, str]]:
    waits, seconds = found["idle_frac_running"], run.running_phases
    if waits is None:
        return
    waiting = f"the learner waits for environments {waits:.0%} of the time"
    if waits >= _WAITS:
        yield HINT, f"{waiting}: add environments, or make sampling faster"
    elif waits >= _BUSY:
        yield HINT, f"{waiting}: a few more of them would keep it busy"
    else:
        computes = sum(_share(seconds, name) or 0.0 for name in ("forward", "backward", "forward_backward"))
        work = f"forward and backward take {computes:.0%} of the time"
        more = "so more environments would not make it faster"
        yield HINT, f"the learner computes without waiting: {work}, {more}"
    for name, (what, advice) in _SLOW.items():
        if (share := _share(seconds, name) or 0.0) >= _LARGE:
            yield HINT, f"{what} {share:.0%} of the time: {advice}"


def _lost(run: RunMetrics, found: dict[str, Any]) -> Iterator[tuple[int, str]]:
    for name, why in _LOST.items():
        if count := run.counted(f"bridge/{name}_total"):
            verb = "dropped by producers" if name.startswith("drops") else "discarded"
            yield HINT, f"{_number_of(count, 'record')} {verb} {why}"
    if found["dropped_total"] == 0 == found["discarded_total"]:
        yield GOOD, "nothing was dropped or discarded"


def _groups(run: RunMetrics) -> Iterator[tuple[int, str]]:
    flat = run.total("groups_flat") / max(run.total("groups"), 1.0)
    cut = run.total("trajectories_truncated") / max(run.total("trajectories"), 1.0)
    if flat >= _FLAT:
        why = f"{flat:.0%} of the groups teach nothing, since no token of them has an advantage"
        yield HINT, f"{why}: use tasks of another difficulty, or larger groups"
    if cut >= _FLAT:
        yield HINT, f"{cut:.0%} of the completions were cut before their end: raise their token limit"


def _faults(run: RunMetrics, found: dict[str, Any]) -> Iterator[tuple[int, str]]:
    if alarms := run.counted("mismatch_alarms_total"):
        where = f"in {alarms:,.0f} steps, first in {_first(run, 'mismatch_alarms_total')}"
        advice = "check temperature, top_p and whether the engine has the newest weights"
        what = f"{where}, the sampler was not the policy"
        yield FAULT, f"{what}: log-probabilities differ by more than --mismatch-warn; {advice}"
    if differ := sum(found["rows_differ"].values()):
        rows = _number_of(differ, "row")
        yield FAULT, f"{rows} trained with other values than were put: end the run, and report it"
    if skipped := found["updates_skipped"]:
        updates, first = _number_of(skipped, "update"), _first(run, "update_skipped")
        yield FAULT, f"{updates} skipped for a gradient that is not finite, first in {first}: lower --lr"


def _first(run: RunMetrics, name: str) -> str:
    """Returns the first step at which a metric is above 0."""
    return f"step {run.steps[np.flatnonzero(run.column(name) > 0)[0]]}"


def _number_of(count: float, what: str) -> str:
    return f"1 {what} was" if count == 1 else f"{count:,.0f} {what}s were"
