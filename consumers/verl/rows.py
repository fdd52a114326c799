"""The rows of a bridge's groups as verl stores them in TransferQueue: one row per trajectory.

A row's key is `{uid}_{session}_{index}`: the session is the rollout, the index counts the rows of one
rollout. Values are gathered once, from the batch's arrays into one array per field, and become jagged tensors
without another copy. Knows no bridge and no TransferQueue.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils

from shmbridge.consumers.trajectories import Trajectory

__all__ = ["COLUMNS", "Form", "NoScore", "Rows", "rows_of"]

# What is read of a record; all other columns are counted by name.
COLUMNS = frozenset(
    (
        *("tokens", "prompt_length", "loss_mask", "advantages", "score", "inference_logprobs"),
        *("repetition_id", "instance_id", "finish_reason", "temperature", "turn_ends", "reward_components"),
    )
)
_WITHOUT = (
    "algorithm.rollout_correction.bypass_mode=False actor_rollout_ref.rollout.calculate_log_probs=False"
)


class NoScore(ValueError):
    """verl computes advantages itself, or filters groups by score, and a row has none."""


@dataclass(frozen=True)
class Form:
    """What verl's configuration asks of a row."""

    per_token: bool  # rm_scores carry advantages; else the score, on the last trained token
    scored: bool  # a score is needed beside advantages
    logprobs: bool  # rollout_log_probs are needed
    temperature: float  # that verl divides logits by


@dataclass
class Rows:
    """Rows ready for one `kv_batch_put`, and where each belongs."""

    keys: list[str] = field(default_factory=list)
    tags: list[dict[str, Any]] = field(default_factory=list)
    fields: TensorDict | None = None  # None: no row
    counts: Counter[str] = field(default_factory=Counter)  # what was left out or differs, by reason


def rows_of(
    found: Sequence[Trajectory], uids: Sequence[str], first_versions: Sequence[tuple[int, int]], form: Form
) -> Rows:
    """Returns the rows of whole groups. Never blocks.

    Rows without a response are left out. The first token of a row has no log-probability: a row without a
    prompt loses it to the prompt. Both are counted.

    Args:
        found: the rows, those of a group side by side.
        uids: verl's prompt of each group, in the order of the groups; without "_".
        first_versions: smallest and largest version of each group, in verl's steps.
        form: what verl's configuration asks of a row.

    Raises:
        NoLogprobs: `form.logprobs`, and a row has none.
        NoScore: `form.scored`, or not `form.per_token`, and a row has no score.
    """
    rows, kept = Rows(), []
    sessions: Counter[tuple[int, int]] = Counter()
    for each in found:
        if (start := _response_start(each, rows.counts)) is None:
            continue
        group = int(each.batch.group_index[each.row])
        session = each.repetition_id
        rows.keys.append(f"{uids[group]}_{session}_{sessions[group, session]}")
        sessions[group, session] += 1
        low, high = first_versions[group]
        rows.tags.append(_tag(each, start, low, high))
        _check_temperature(each, form, rows.counts)
        kept.append((each, start, uids[group], (low, high)))
    if kept:
        rows.fields = _fields(kept, form)
    return rows


_Kept = tuple[Trajectory, int, str, tuple[int, int]]  # row, start of its response, uid, versions


def _response_start(row: Trajectory, counts: Counter[str]) -> int | None:
    """Returns the first token of verl's response, at least 1; None if there is no response."""
    start = max(row.prompt_length, 1)
    if start >= len(row.tokens):
        counts["rows_without_response"] += 1
        return None
    mask = row.value("loss_mask")
    if row.prompt_length == 0 if mask is None else mask[0]:
        counts["first_tokens_untrained"] += 1
    return start


def _tag(row: Trajectory, start: int, low: int, high: int) -> dict[str, Any]:
    return {
        "status": "success",
        "prompt_len": start,
        "response_len": len(row.tokens) - start,
        "seq_len": len(row.tokens),
        "global_steps": low + 1,
        "min_global_steps": low,
        "max_global_steps": high,
    }


def _check_temperature(row: Trajectory, form: Form, counts: Counter[str]) -> None:
    sampled = row.value("temperature")
    if sampled is not None and not np.isclose(sampled, form.temperature, rtol=1e-3):
        counts["rows_of_other_temperature"] += 1


def _fields(kept: Sequence[_Kept], form: Form) -> TensorDict:
    starts = [start for _, start, _, _ in kept]
    tokens = [row.tokens for row, _, _, _ in kept]
    masks = _jagged((row.trained[start:] for row, start, _, _ in kept), np.int64)
    values: dict[str, Any] = {
        "prompts": _jagged((row[:start] for row, start in zip(tokens, starts, strict=True)), np.int64),
        "responses": _jagged((row[start:] for row, start in zip(tokens, starts, strict=True)), np.int64),
        "input_ids": _jagged(tokens, np.int64),
        "position_ids": _jagged((np.arange(len(row)) for row in tokens), np.int64),
        "response_mask": masks,
        "loss_mask": masks,
        "rm_scores": _jagged((_rewards(row, start, form) for row, start, _, _ in kept), np.float32),
        "uid": [uid for _, _, uid, _ in kept],
        "num_turns": [_turns(row) for row, _, _, _ in kept],
        "multi_modal_inputs": [{} for _ in kept],
        "extra_fields": [_extra(row, versions) for row, _, _, versions in kept],
    }
    if form.logprobs:
        values["rollout_log_probs"] = _jagged(
            (row.known_logprobs(_WITHOUT)[start:] for row, start, _, _ in kept), np.float32
        )
    return tensordict_utils.get_tensordict(values)


def _jagged(rows: Iterable[npt.NDArray[Any]], kind: type[np.generic]) -> torch.Tensor:
    """Returns a jagged tensor of one array, into which the rows are copied once."""
    listed = list(rows)
    offsets = np.zeros(len(listed) + 1, np.int64)
    np.cumsum([len(row) for row in listed], out=offsets[1:])
    values = np.concatenate(listed, dtype=kind, casting="unsafe")
    return torch.nested.nested_tensor_from_jagged(torch.from_numpy(values), torch.from_numpy(offsets))


def _rewards(row: Trajectory, start: int, form: Form) -> npt.NDArray[np.float32]:
    """Returns rm_scores, (R,); verl's estimators carry a score back from the last trained token only."""
    score = row.score
    if score is None and (form.scored or not form.per_token):
        raise NoScore(
            f"{row.named} has no score, and "
            "verl's estimator or filter_groups needs one -> have the environment score its rows, or "
            "algorithm.adv_estimator=shmbridge algorithm.filter_groups.enable=False"
        )
    if form.per_token:
        return row.advantages[start:]
    rewards, trained = np.zeros(len(row.tokens) - start, np.float32), np.flatnonzero(row.trained[start:])
    rewards[trained[-1] if trained.size else -1] = score
    return rewards


def _turns(row: Trajectory) -> int:
    """Returns the answers of the policy: column `turn_ends`, or else runs of trained tokens."""
    if (ends := row.value("turn_ends")) is not None:
        return len(ends)
    return int(row.trained[0]) + int((row.trained[1:] & ~row.trained[:-1]).sum())


def _extra(row: Trajectory, versions: tuple[int, int]) -> dict[str, Any]:
    """Returns what verl carries beside the tensors; the origin names the record."""
    return {
        "min_global_steps": versions[0],
        "max_global_steps": versions[1],
        "reward_extra_info": dict(row.value("reward_components") or {})
        | ({} if row.score is None else {"score": row.score}),
        "origin": row.origin | {"finish_reason": row.finish_reason},
    }
