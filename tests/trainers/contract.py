"""What must reach the loss of every trainer: one comparison for all of them, and the table of its results.

    groups = loss_matrix()
    ...                                         # put them, and capture the rows in the trainer's own loss
    assert_contract("SkyRL", version("skyrl"), "`policy_loss_type=rollout_is`", groups, seen)

Each framework lives in an environment of its own, and has a file that captures rows. With LOSS_MATRIX=write
these tests write loss_matrix.jsonl, of which `docs/_generate` makes the table of docs/reference/trainers.md.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from shmbridge.testing.fixtures import KnownGroup, KnownRow

MATRIX = Path(__file__).with_name("loss_matrix.jsonl")
ROUNDING = 1e-5  # of advantages that are made of scores

Array = np.ndarray[Any, Any]


@dataclass(frozen=True)
class Seen:
    """A row as a loss got it; L tokens, unshifted and unpadded, value i belongs to token i."""

    tokens: Array  # (L,)
    mask: Array  # (L,) of trained tokens
    advantages: Array | None  # (L,) of trained tokens; None: the trainer makes them later
    old_logprobs: Array | None  # (L,) nats, NaN where there is none; None: the trainer computes all of them
    own_logprobs: Array | None = None  # (L,) of the weights in training, where they stand in for missing ones


@dataclass(frozen=True)
class Differences:
    """Of what a loss got from what was put; the numbers are the largest over all trained tokens."""

    rows: int  # in which something is trained, and which are as they should be or nearly
    missing: int  # rows, among them those with another token
    extra: int  # rows, among them those that came twice
    evaluated: int  # rows of evaluations
    mask: int  # tokens
    advantages: float | None  # None: all were made of scores
    advantages_of_scores: float | None  # of groups without their own; None: the trainer got none
    old_logprobs: float | None  # None: the trainer computed all of them

    def all_are_right(self) -> bool:
        counts = (self.missing, self.extra, self.evaluated, self.mask)
        exact = not any(counts) and not self.advantages and not self.old_logprobs
        return exact and (self.advantages_of_scores or 0.0) < ROUNDING


def compare(groups: Sequence[KnownGroup], seen: Iterable[Seen]) -> Differences:
    """Compares by tokens. Rows in which nothing is trained may be left out, and padding may be added."""
    wanted = {tuple(row.tokens.tolist()): (group, row) for group in groups for row in group.rows}
    assert len(wanted) == sum(len(group.rows) for group in groups), "rows are told apart by their tokens"
    trained = {key for key, (group, row) in wanted.items() if group.split == "train" and row.trained.any()}
    rows = [(tuple(row.tokens.tolist()), row) for row in seen if row.mask.any()]
    came = Counter(key for key, _ in rows)
    mask, worst = 0, dict[str, float]()
    for key, row in rows:
        if key not in wanted or wanted[key][0].split == "eval":
            continue
        group, put = wanted[key]
        own = "advantages" if "advantages" in group.fragments[0] else "advantages_of_scores"
        mask += int((row.mask.astype(bool) != put.trained).sum())
        if row.advantages is not None:
            worst[own] = max(worst.get(own, 0.0), _largest(row.advantages - put.advantages, put.trained))
        if row.old_logprobs is not None:
            worst["old_logprobs"] = max(worst.get("old_logprobs", 0.0), _of_logprobs(row, put))
    return Differences(
        rows=len(came.keys() & trained),
        missing=len(trained - came.keys()),
        extra=sum(count if key not in wanted else count - 1 for key, count in came.items()),
        evaluated=sum(key in wanted and wanted[key][0].split == "eval" for key in came),
        mask=mask,
        advantages=worst.get("advantages"),
        advantages_of_scores=worst.get("advantages_of_scores"),
        old_logprobs=worst.get("old_logprobs"),
    )


def _largest(differences: Array, at: Array) -> float:
    """The largest at some tokens; infinite if one is not a number."""
    return float(np.abs(np.nan_to_num(differences, nan=np.inf))[at].max(initial=0.0))


def _of_logprobs(row: Seen, put: KnownRow) -> float:
    """Where not all were recorded, the model's own stand in, or marks: for the missing tokens, or for all."""
    assert row.old_logprobs is not None
    recorded = np.full(len(put.tokens), np.nan) if put.logprobs is None else put.logprobs
    unknown = put.trained & np.isnan(recorded)
    if not unknown.any():
        return _largest(row.old_logprobs - recorded, put.trained)
    if row.own_logprobs is not None:
        return _largest(row.old_logprobs - row.own_logprobs, put.trained)
    got = put.trained & ~np.isnan(row.old_logprobs)
    as_put = (got == put.trained & ~unknown).all()
    return _largest(row.old_logprobs - recorded, got) if as_put or not got.any() else np.inf


def without(groups: Iterable[KnownGroup], *names: str) -> list[KnownGroup]:
    """The groups, but for some."""
    return [group for group in groups if group.name not in names]


def fully_recorded(groups: Iterable[KnownGroup]) -> list[KnownGroup]:
    """Those whose log-probabilities were all recorded: what a trainer takes that has no others."""
    return without(groups, "no columns", "unknown log-probabilities")


def without_truncated(groups: Iterable[KnownGroup]) -> list[KnownGroup]:
    """What a trainer trains that leaves out truncated rows."""
    return [
        replace(group, rows=[row for row in group.rows if row.finish_reason != "length"]) for group in groups
    ]


def scored(groups: Iterable[KnownGroup], estimate: Callable[[Array], Array]) -> list[KnownGroup]:
    """What a trainer trains that makes all advantages itself.

    Args:
        groups: as they were put.
        estimate: scores of the rows of a group that have a response -> their advantages.
    """
    made = []
    for group in groups:
        rows = [row for row in group.rows if row.prompt_length < len(row.tokens)]
        of_rows = estimate(np.array([row.score for row in rows]))
        rows = [replace(row, advantages=row.trained * each) for row, each in zip(rows, of_rows, strict=True)]
        fragments = [{k: v for k, v in each.items() if k != "advantages"} for each in group.fragments]
        made.append(replace(group, rows=rows, fragments=fragments))
    return made


def assert_contract(
    trainer: str, release: str, setting: str, groups: Sequence[KnownGroup], seen: Iterable[Seen]
) -> None:
    """Asserts that a loss got what was put, and that the table has its line; prints the line.

    Args:
        trainer: its name on the page.
        release: that ran.
        setting: what of the trainer's own is switched on, or "".
        groups: what should arrive.
        seen: what arrived.
    """
    found = compare(groups, seen)
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].split("[")[0].removeprefix("tests/")
    line = {"trainer": trainer, "setting": setting, "release": release, "test": test} | asdict(found)
    print(json.dumps(line))
    assert found.all_are_right(), found
    table = {
        (each["trainer"], each["setting"]): each for each in map(json.loads, MATRIX.read_text().splitlines())
    }
    if os.environ.get("LOSS_MATRIX") == "write":
        table[trainer, setting] = line
        MATRIX.write_text("".join(f"{json.dumps(table[key])}\n" for key in sorted(table)))
    there = table.get((trainer, setting), {})
    differs = [key for key in ("test", "rows") if there.get(key) != line[key]]
    differs += [key for key in line if (there.get(key) is None) != (line[key] is None)]
    assert not differs, f"{MATRIX.name} differs in {differs} -> LOSS_MATRIX=write, and python docs/_generate"
