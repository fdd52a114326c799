"""Reads the samples.jsonl of a run: each sampled group once, in order, as many as a page can hold."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shmbridge.consumers.learner.report.samples import SAMPLES_FILE

MOST_BYTES = 8 * 2**20  # of a run's samples in a page


@dataclass(frozen=True)
class Samples:
    """Sampled groups of one run.

    Attributes:
        groups: lines of samples.jsonl without the completions' texts, which their tokens have.
        left_out: further groups, for which there was no room; the kept ones are spread over the run.
        torn: invalid lines.
    """

    groups: list[dict[str, Any]]
    left_out: int = 0
    torn: int = 0


def read_samples(folder: Path, most_bytes: int = MOST_BYTES) -> Samples:
    """Returns the samples in a run directory; none if there is no file. Blocks for the disk."""
    try:
        lines = (folder / SAMPLES_FILE).read_text(errors="replace").split("\n")
    except OSError:
        return Samples([])
    found: list[dict[str, Any]] = []
    torn = 0
    for line in filter(str.strip, lines):
        try:
            group = _checked(json.loads(line))
        except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError):
            torn += 1
            continue
        # a resumed run samples the steps again that were not saved
        while found and (
            found[-1]["step"] > group["step"]
            or (group["step"], group["why"]) in {(each["step"], each["why"]) for each in found[-2:]}
        ):
            found.pop()
        found.append(group)
    sizes = [len(json.dumps(each)) for each in found]
    if sum(sizes) <= most_bytes:
        return Samples(found, torn=torn)
    share = most_bytes / sum(sizes)
    kept = [each for place, each in enumerate(found) if int((place + 1) * share) > int(place * share)]
    return Samples(kept, len(found) - len(kept), torn)


def _checked(said: Any) -> dict[str, Any]:
    """Returns a line's group with what a page needs of it, each value of the type it should have."""
    rows = []
    for row in said["trajectories"]:
        tokens, advantages = row["tokens"], row["advantages"]
        if len(tokens) != len(advantages):
            raise ValueError("tokens and advantages differ in number")
        rows.append(
            {
                "tokens": [str(each) for each in tokens],
                "advantages": [_finite(each) for each in advantages],
                "score": _finite(row.get("score")),
                "finish_reason": row.get("finish_reason") and str(row["finish_reason"]),
                **{name: int(row[name]) for name in ("cut", "cut_at") if name in row},
                **({"prompt": str(row["prompt"])} if "prompt" in row else {}),
                "step_rewards": [_finite(each) for each in row.get("step_rewards", ())],
                "step_ends": [int(each) for each in row.get("step_ends", ())],
            }
        )
    return {
        "step": int(said["step"]),
        "why": str(said.get("why", "")),
        "env_name": str(said.get("env_name", "")),
        "group_id": str(said.get("group_id", "")),
        "prompt": str(said.get("prompt", "")),
        "group_size": int(said.get("group_size", len(rows))),
        **{
            name: None if said.get(name) is None else int(said[name])
            for name in ("min_policy_version", "max_policy_version")
        },
        "trajectories": rows,
    }


def _finite(value: Any) -> float | None:
    """Returns a number; None for null and for what JSON has no form for."""
    number = math.nan if value is None else float(value)
    return number if math.isfinite(number) else None
