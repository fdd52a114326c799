"""What a run directory holds in numbers: its steps, its facts, a summary, and what follows from them."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import shmbridge

METRICS_FILE = "metrics.jsonl"
# Phases of a step in order; runs of older releases have fewer.
PHASES = ("wait", "copy", "forward", "backward", "forward_backward", "sync", "update", "publish")
_EVALUATED = re.compile(r"eval/([^/]+)/(.+)")
# What comes with them, and what is of evaluation groups of that environment.
_ABOUT_EVALUATIONS = ("at_step", "at_version", "evaluations", "mean_score", "std_score")
MOST_POINTS = 600  # of a drawn line; more cannot be seen and make files large
FACTS_FILE = "run.json"
_PACKAGES = ("torch", "transformers", "numpy", "vllm", "atroposlib")
_WAITS = 0.3  # share of the time from which waiting is the first thing to change
_BUSY = 0.1  # share of waiting below which more environments bring nothing
_LARGE = 0.2  # share of the time from which a phase besides forward and backward is named
_FLAT = 0.5  # share of groups that teach nothing, and of answers cut, from which that is named
_CLEAR = 3.0  # standard errors by which a reward rose or fell
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


def write_facts(folder: Path, device: str, *, clock: float | None = None) -> None:
    """Adds this start to the facts of a run. Blocks for the disk; raises OSError.

    Args:
        folder: the run directory.
        device: what the learner computes on, in words.
        clock: now, in seconds since 1970; None: this machine's.
    """
    starts = [*read_facts(folder), _facts(device, time.time() if clock is None else clock)]
    unfinished = folder / f".{FACTS_FILE}.part"
    unfinished.write_text(json.dumps({"starts": starts}, indent=1) + "\n")
    unfinished.replace(folder / FACTS_FILE)


def read_facts(folder: Path) -> list[dict[str, Any]]:
    """Returns the facts of each start of a run, in order; none if there is no valid file. Blocks."""
    try:
        starts = json.loads((folder / FACTS_FILE).read_text())["starts"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return []
    return [each for each in starts if isinstance(each, dict)] if isinstance(starts, list) else []


def _facts(device: str, now: float) -> dict[str, Any]:
    packages = {}
    for name in _PACKAGES:
        try:
            packages[name] = version(name)
        except PackageNotFoundError:
            continue
    return {
        "started": time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now)),
        "shmbridge": shmbridge.__version__,
        "python": platform.python_version(),
        "packages": packages,
        "host": platform.node(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": len(os.sched_getaffinity(0)),
        "device": device,
    }


@dataclass(frozen=True)
class Conclusion:
    """One sentence, and whether it is good news, a hint, or a fault."""

    level: Literal["good", "hint", "fault"]
    text: str


def conclusions(run: RunMetrics, found: dict[str, Any]) -> list[Conclusion]:
    """Returns the conclusions of a run from its steps and its summary, faults first. Never blocks."""
    every = [
        *_reward(found),
        *_time(run, found),
        *_losses(run, found),
        *_sampler(run),
        *_batches(run),
        *_correctness(found),
    ]
    order = {"fault": 0, "good": 1, "hint": 2}
    return sorted(every, key=lambda each: order[each.level])


def _reward(found: dict[str, Any]) -> list[Conclusion]:
    first, last, noise = found["reward_first"], found["reward_last"], found["reward_noise"]
    if first is None or last is None:
        return [Conclusion("hint", "no trajectory has a score, so whether it learns cannot be told")]
    if noise is None:
        return []
    said = f"from {first:.3f} to {last:.3f}"
    if last - first > _CLEAR * noise:
        return [Conclusion("good", f"the reward rose {said}")]
    if first - last > _CLEAR * noise:
        return [Conclusion("fault", f"the reward fell {said}: lower --lr, or look at the groups")]
    return [
        Conclusion(
            "hint", f"the reward did not change beyond its noise ({said}): train longer, or raise --lr"
        )
    ]


def _time(run: RunMetrics, found: dict[str, Any]) -> list[Conclusion]:
    seconds, waits = run.running_phases, found["idle_frac_running"]
    spent = sum(seconds.values())
    if not spent or waits is None:
        return []
    shares = {name: each / spent for name, each in seconds.items()}
    said = []
    if waits >= _WAITS:
        said.append(
            f"the learner waits for environments {_percent(waits)} of the time: add environments, or make "
            "sampling faster"
        )
    elif waits < _BUSY:
        computes = sum(shares.get(name, 0.0) for name in ("forward", "backward", "forward_backward"))
        said.append(
            f"the learner computes without waiting: forward and backward take {_percent(computes)} of the "
            "time, so more environments would not make it faster"
        )
    else:
        said.append(
            f"the learner waits for environments {_percent(waits)} of the time: a few more of them would "
            "keep it busy"
        )
    for name, what in (
        (
            "copy",
            "bringing batches to the device takes {}: try --host-copy direct, or a larger --micro-tokens",
        ),
        ("sync", "ranks wait for one another {}: give each as many groups as the others"),
        ("update", "the optimizer takes {}: use larger batches, --groups or --accumulate"),
        ("publish", "publishing weights takes {}: raise --publish-every"),
    ):
        if shares.get(name, 0.0) >= _LARGE:
            said.append(what.format(f"{_percent(shares[name])} of the time"))
    return [Conclusion("hint", text) for text in said]


def _losses(run: RunMetrics, found: dict[str, Any]) -> list[Conclusion]:
    said = []
    advice = {
        "drops_full": "since their lane was full: raise lane_bytes, or let producers wait (on_full)",
        "drops_timeout": "since their lane stayed full: raise lane_bytes or timeout_s",
        "drops_invalid": "since they were invalid: read the environment's log",
        "drops_cancelled": "since the environment cancelled them",
        "discards_stale": "as too old: raise --max-staleness, or use fewer environments",
        "discards_partial": "since their group stayed incomplete: look for environments that end early",
        "discards_resume": "at the start, left by an earlier run",
        "discards_corrupt": "since their lane held garbage: see shmbridge inspect",
    }
    for name, why in advice.items():
        count = float(np.nanmax(run.column(f"bridge/{name}_total"), initial=0.0))
        if count:
            verb = "dropped by producers" if name.startswith("drops") else "discarded"
            records = "1 record was" if count == 1 else f"{count:,.0f} records were"
            said.append(Conclusion("hint", f"{records} {verb} {why}"))
    if not said and not found["dropped_total"] and not found["discarded_total"]:
        known = found["dropped_total"] is not None and found["discarded_total"] is not None
        return [Conclusion("good", "nothing was dropped or discarded")] if known else []
    return said


def _sampler(run: RunMetrics) -> list[Conclusion]:
    alarms = float(np.nanmax(run.column("mismatch_alarms_total"), initial=0.0))
    if not alarms:
        return []
    return [
        Conclusion(
            "fault",
            f"in {alarms:,.0f} steps the sampler was not the policy: its log-probabilities of fresh tokens "
            "differ by more than --mismatch-warn; check temperature, top_p and whether the engine has the "
            "newest weights",
        )
    ]


def _batches(run: RunMetrics) -> list[Conclusion]:
    said = []
    groups = np.nansum(run.column("groups"))
    flat = np.nansum(run.column("groups_flat")) / groups if groups else 0.0
    if flat >= _FLAT:
        said.append(
            f"{_percent(flat)} of the groups teach nothing, since no token of them has an advantage: use "
            "tasks of another difficulty, or larger groups"
        )
    rows = np.nansum(run.column("trajectories"))
    cut = np.nansum(run.column("trajectories_truncated")) / rows if rows else 0.0
    if cut >= _FLAT:
        said.append(f"{_percent(cut)} of the completions were cut before their end: raise their token limit")
    return [Conclusion("hint", text) for text in said]


def _correctness(found: dict[str, Any]) -> list[Conclusion]:
    said = []
    if differ := sum(found["rows_differ"].values()):
        rows = "1 row was" if differ == 1 else f"{differ:,} rows were"
        said.append(f"{rows} trained with other values than were put: end the run, and report it")
    if skipped := found["updates_skipped"]:
        updates = (
            "1 update was skipped, since its"
            if skipped == 1
            else f"{skipped:,} updates were skipped, since their"
        )
        said.append(f"{updates} gradient was not finite: lower --lr")
    return [Conclusion("fault", text) for text in said]


def _percent(share: float) -> str:
    return f"{100 * share:.0f} %"


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
