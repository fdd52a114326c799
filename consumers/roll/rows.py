"""Rows of a group as the columns of ROLL's DataProto, padded on the right: `roll_rows`. Numpy only.

Letters: B rows, S the pipeline's `sequence_length`, L tokens of one row.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from shmbridge import InvalidRecord
from shmbridge.consumers.trajectories import Trajectory

ADVANTAGES = "shm_advantages"  # the column of per-token advantages
GROUP = "shm_records"  # the column of what names a group to the bridge's reader
STEP = "shm_step"  # the column of the step whose weights sampled a row
# Columns of a record that have a place in ROLL's rows.
READ = frozenset(
    {"tokens", "loss_mask", "masks", "prompt_length", "advantages", "inference_logprobs", "score"}
    | {"token_rewards", "step_rewards", "step_ends", "instance_id", "repetition_id", "finish_reason"}
)


@dataclass(frozen=True)
class RollRows:
    """Columns of B rows."""

    tensors: dict[str, npt.NDArray[Any]]  # name -> (B, S), or (B, S - 1) for what ROLL shifts by one
    objects: dict[str, npt.NDArray[np.object_]]  # name -> (B,)
    counts: dict[str, int] = field(default_factory=dict)  # what was changed on the way, and why


@dataclass(frozen=True)
class _Piece:
    """A row to make: the first `end` tokens of a trajectory, trained from `begin`."""

    trajectory: Trajectory
    begin: int
    end: int
    step: int
    reward: float | None  # of this step


def roll_rows(
    rows: Sequence[Trajectory],
    length: int,
    *,
    pad: int,
    logprobs: bool = True,
    by: Literal["trajectory", "step"] = "trajectory",
) -> RollRows:
    """Returns the columns of a group's rows. Never blocks; one copy of every token.

    Columns of one value per token are those ROLL's own environment managers make: `input_ids`,
    `attention_mask`, `position_ids` int64, `response_mask` (the trained tokens), `prompt_mask` bool, `scores`
    float32, all (B, S); `infer_logprobs` float32 (B, S - 1), value i belongs to token i + 1; and
    `shm_advantages`, laid out as that.

    Args:
        rows: of one group, at least one.
        length: S; longer rows lose their last tokens, which is counted.
        pad: token id of the padding.
        logprobs: fill `infer_logprobs`.
        by: "step" makes a row of each step reward.

    Raises:
        InvalidRecord: log-probabilities or step rewards are asked for, and a row has none.
    """
    pieces = [piece for row in rows for piece in (_steps(row) if by == "step" else [_whole(row)])]
    counts = {"rows": len(pieces), "rows_trimmed": 0, "tokens_trimmed": 0, "rows_unscored": 0}
    if by == "step":
        ends = [pieces[-1].end for pieces in map(_steps, rows)]
        counts["tokens_after_last_step"] = sum(
            int(row.trained[end:].sum()) for row, end in zip(rows, ends, strict=True)
        )
    count = len(pieces)
    tensors: dict[str, npt.NDArray[Any]] = {
        "input_ids": np.full((count, length), pad, np.int64),
        "attention_mask": np.zeros((count, length), np.int64),
        "position_ids": np.zeros((count, length), np.int64),
        "response_mask": np.zeros((count, length), np.bool_),
        "prompt_mask": np.zeros((count, length), np.bool_),
        "scores": np.zeros((count, length), np.float32),
        ADVANTAGES: np.zeros((count, length - 1), np.float32),
    }
    if logprobs:
        tensors["infer_logprobs"] = np.zeros((count, length - 1), np.float32)
    for at, piece in enumerate(pieces):
        row, kept = piece.trajectory, min(piece.end, length)
        if kept < piece.end:
            counts["rows_trimmed"] += 1
            counts["tokens_trimmed"] += piece.end - kept
        trained = tensors["response_mask"][at]
        trained[piece.begin : kept] = row.trained[piece.begin : kept]
        tensors["input_ids"][at, :kept] = row.tokens[:kept]
        tensors["attention_mask"][at, :kept] = 1
        tensors["position_ids"][at, :kept] = np.arange(kept)
        tensors["prompt_mask"][at, : int(trained.argmax()) if trained.any() else kept] = True
        later = trained[1:kept]  # ROLL's column i is about token i + 1
        np.copyto(tensors[ADVANTAGES][at, : len(later)], row.advantages[1:kept], where=later)
        if logprobs:
            known = row.known_logprobs("env_config.infer_logprobs: false for all rows")
            np.copyto(tensors["infer_logprobs"][at, : len(later)], known[1:kept], where=later)
        counts["rows_unscored"] += _score(piece, tensors["scores"][at], kept)
    return RollRows(tensors, _objects(pieces), counts)


def _whole(row: Trajectory) -> _Piece:
    return _Piece(row, 0, len(row.tokens), 0, None)


def _steps(row: Trajectory) -> list[_Piece]:
    rewards, ends = row.value("step_rewards"), row.value("step_ends")
    if rewards is None or ends is None or not 0 < len(rewards) == len(ends):
        counted = [0 if each is None else len(each) for each in (rewards, ends)]
        raise InvalidRecord(
            f"{row.named} has {counted[0]} step_rewards and {counted[1]} step_ends",
            hint="rows: trajectory, or score the steps before the group is put (docs/how-to/rewards.md)",
            column="step_rewards",
            row=row.number,
        )
    bounds = [0, *(min(int(end), len(row.tokens)) for end in ends)]
    return [
        _Piece(row, begin, end, step, float(reward))
        for step, ((begin, end), reward) in enumerate(zip(pairwise(bounds), rewards, strict=True))
    ]


def _score(piece: _Piece, scores: npt.NDArray[np.float32], kept: int) -> bool:
    """Puts the rewards of a row on its tokens; ROLL sums them. Returns whether there were none."""
    row, last = piece.trajectory, max(kept - 1, 0)
    if piece.reward is not None:
        scores[last] = piece.reward
    elif (rewards := row.value("token_rewards")) is not None:
        scores[:kept] = rewards[:kept]
        scores[last] += rewards[kept:].sum()
    elif row.score is not None:
        scores[last] = row.score
    else:
        return True
    return False


def _objects(pieces: Sequence[_Piece]) -> dict[str, npt.NDArray[np.object_]]:
    by_step = pieces[0].reward is not None
    columns: dict[str, list[Any]] = {
        "episode_scores": [_episode_score(piece.trajectory) for piece in pieces],
        "step_scores": [_step_scores(piece) for piece in pieces],
        "shm_group": [piece.trajectory.meta.group_id for piece in pieces],
        "shm_instance": [piece.trajectory.instance_id for piece in pieces],
        "shm_repetition": [piece.trajectory.repetition_id for piece in pieces],
        "shm_finish_reason": [piece.trajectory.finish_reason or "" for piece in pieces],
        "shm_min_version": [int(piece.trajectory.meta.min_policy_version) for piece in pieces],
        "shm_max_version": [int(piece.trajectory.meta.max_policy_version) for piece in pieces],
    }
    if by_step:
        columns["step"] = [piece.step for piece in pieces]
        columns["state_hash"] = [
            hashlib.sha256(piece.trajectory.tokens[: piece.begin].tobytes()).hexdigest() for piece in pieces
        ]
    return {name: objects(values) for name, values in columns.items()}


def objects(values: Sequence[Any]) -> npt.NDArray[np.object_]:
    """Returns an object array (B,) of any values, lists among them. Never blocks."""
    column = np.empty(len(values), np.object_)
    column[:] = values
    return column


def _episode_score(row: Trajectory) -> float:
    if row.score is not None:
        return row.score
    rewards = row.value("token_rewards")
    return 0.0 if rewards is None else float(rewards.sum())


def _step_scores(piece: _Piece) -> Any:
    """One number in a row of a step, as gigpo wants it; else a list, as ROLL logs it."""
    if piece.reward is not None:
        return piece.reward
    rewards = piece.trajectory.value("step_rewards")
    return [_episode_score(piece.trajectory)] if rewards is None else [float(each) for each in rewards]
