"""What follows from the numbers of a run: one sentence each, with what to change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shmbridge.consumers.learner.report.run_report import RunMetrics

_WAITS = 0.3  # share of the time from which waiting is the first thing to change
_BUSY = 0.1  # share of waiting below which more environments bring nothing
_LARGE = 0.2  # share of the time from which a phase besides forward and backward is named
_FLAT = 0.5  # share of groups that teach nothing, and of answers cut, from which that is named
_CLEAR = 3.0  # standard errors by which a reward rose or fell


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
