"""What a batch says about training: which tokens, with what advantage, sampled with what probability.

Turns a packed batch, in which any column but the tokens may be missing from any record, into arrays that the
loss can use as they are, and describes it in numbers. Knows nothing of torch and of models. Called by
`grpo_update.py`.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.advantages import group_normalised, override_rows, spread_to_tokens
from shmbridge.consumers.metrics_log import Metrics
from shmbridge.metrics import rollout_metrics

# A log-probability is never positive, so a positive one says "none was recorded": Atropos writes 1.0 where no
# token was sampled, and rows whose record carried no log-probabilities get the same mark here.
NO_LOGPROB = 1.0

_LARGEST = float(np.finfo(np.float32).max)


class NoAdvantages(Exception):
    """A group came without advantages of its own, and falling back to its scores is not allowed."""


@dataclass(frozen=True)
class TrainingRows:
    """What the loss needs of a batch, row after row without padding; value i belongs to token i."""

    tokens: npt.NDArray[np.int32]  # (N,)
    cu_seqlens: npt.NDArray[np.int32]  # (B+1,) where each row begins, then N
    trained: npt.NDArray[np.bool_]  # (N,) never true for the first token of a row: nothing predicts it
    advantages: npt.NDArray[np.float32]  # (N,) dimensionless
    sampled_logprobs: npt.NDArray[np.float32]  # (N,) nats; NO_LOGPROB where none was recorded
    temperature: npt.NDArray[np.float32]  # (B,) > 0

    @property
    def trained_count(self) -> int:
        """Trained tokens of the whole batch: the denominator of the token mean."""
        return int(np.count_nonzero(self.trained))


def prepare(
    batch: Any, temperature: float, *, use_advantages: bool = True, fallback_to_grpo: bool = True
) -> tuple[TrainingRows, Metrics]:
    """Return what the loss needs of a packed batch, and metrics that describe it. Never blocks.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        temperature: sampling temperature of rows whose record does not say.
        use_advantages: whether the records' own advantages replace those from the scores.
        fallback_to_grpo: whether a row without its own gets those from the scores, if own ones are used.

    Raises:
        NoAdvantages: a group needs the fallback that is not allowed.
    """
    scores = np.zeros(len(batch.meta)) if batch.scores is None else np.asarray(batch.scores)
    scored = batch.has("score") & np.isfinite(scores)
    own = batch.has("advantages") if use_advantages else np.zeros(len(batch.meta), bool)
    silenced = _silenced(batch)
    fallen_back = ~own & ~silenced if use_advantages else np.zeros(len(batch.meta), bool)
    if fallen_back.any() and not fallback_to_grpo:
        raise _no_advantages(batch, fallen_back)
    trained = _trained(batch)
    heat, odd_temperature = _temperature(batch, temperature)
    rows = TrainingRows(
        tokens=batch.tokens,
        cu_seqlens=batch.cu_seqlens,
        trained=trained,
        advantages=_advantages(batch, scores, scored, own, silenced, trained),
        sampled_logprobs=_sampled_logprobs(batch),
        temperature=heat,
    )
    return rows, {
        **_describe(batch, rows, scores[scored]),
        "trajectories_own_advantages": int(batch.has("advantages").sum()),
        "trajectories_no_signal": int((~scored & ~own).sum()),
        "trajectories_silenced": int(silenced.sum()),
        "trajectories_odd_temperature": odd_temperature,
        "groups_fallback": int(np.unique(batch.group_index[fallen_back]).size),
        **_rollouts(batch, rows, np.where(scored, scores, np.nan)),
    }


def _trained(batch: Any) -> npt.NDArray[np.bool_]:
    """Return bool (N,): the loss mask; where a record has none, everything after its prompt."""
    prompt = np.zeros(len(batch.meta), np.int32) if batch.prompt_length is None else batch.prompt_length
    trained: npt.NDArray[np.bool_] = batch.position_ids >= np.repeat(prompt, batch.lengths)
    if batch.loss_mask is not None:
        masked = np.repeat(batch.has("loss_mask"), batch.lengths)
        trained = np.where(masked, batch.loss_mask != 0, trained)
    predicted: npt.NDArray[np.bool_] = batch.position_ids > 0
    return trained & predicted


def _advantages(
    batch: Any,
    scores: npt.NDArray[np.float64],
    scored: npt.NDArray[np.bool_],
    own: npt.NDArray[np.bool_],
    silenced: npt.NDArray[np.bool_],
    trained: npt.NDArray[np.bool_],
) -> npt.NDArray[np.float32]:
    """Return float32 (N,): from the scores, then the records' own, then those an environment has silenced."""
    per_row = group_normalised(scores, batch.group_index, usable=scored)
    advantages = spread_to_tokens(per_row, batch.cu_seqlens, trained)
    if own.any():
        advantages = override_rows(advantages, batch.advantages, own, batch.cu_seqlens, trained)
    return np.where(np.repeat(silenced, batch.lengths), np.float32(0.0), advantages)


def _silenced(batch: Any) -> npt.NDArray[np.bool_]:
    """Return bool (B,): rows whose overrides set their advantage to zero."""
    silenced = np.zeros(len(batch.meta), bool)
    for row, wanted in _settings(batch.overrides, "set_advantage_to_zero"):
        silenced[row] = bool(wanted)
    return silenced


def _no_advantages(batch: Any, without: npt.NDArray[np.bool_]) -> NoAdvantages:
    first = int(np.flatnonzero(without)[0])
    meta = batch.meta[first]
    rows = batch.group_index == batch.group_index[first]
    return NoAdvantages(
        f"group {meta.group_id} of environment {meta.env_name!r} has {int(rows.sum())} trajectories, and "
        f"{int((rows & without).sum())} of them without advantages -> let that environment write advantages, "
        "or run without --no-fallback-to-grpo"
    )


def _sampled_logprobs(batch: Any) -> npt.NDArray[np.float32]:
    sampled = np.full(len(batch.tokens), NO_LOGPROB, np.float32)
    if batch.inference_logprobs is None:
        return sampled
    recorded = np.repeat(batch.has("inference_logprobs"), batch.lengths)
    return np.where(recorded, batch.inference_logprobs, sampled)


def _temperature(batch: Any, default: float) -> tuple[npt.NDArray[np.float32], int]:
    """Return float32 (B,): the record's own column, else where Atropos keeps it, else the default; and how many rows say no number.

    Those get the default too: one odd word in a record must not end a run, and the next one that is given the record.
    """
    heat = np.full(len(batch.meta), default, np.float32)
    odd = np.zeros(len(batch.meta), bool)
    # The narrowest has the last word, as in the reference trainer of Atropos.
    for texts in (batch.group_overrides, batch.generation_params, batch.overrides):
        for row, value in _settings(texts, "temperature"):
            if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < _LARGEST:
                heat[row] = value
            else:
                odd[row] = True
    if batch.temperature is not None:
        heat = np.where(batch.has("temperature"), batch.temperature, heat)
    usable = np.isfinite(heat) & (heat > 0)  # greedy (0) has no distribution to divide
    return np.where(usable, heat, np.float32(default)), int(np.count_nonzero(odd | ~np.isfinite(heat)))


def _settings(texts: list[str | None] | None, key: str) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) for the rows whose JSON object has the key."""
    for row, text in enumerate(texts or ()):
        if text is not None and key in text:  # parse only what may matter
            try:
                settings = json.loads(text)
            except ValueError:  # no settings then, whatever it is
                continue
            if isinstance(settings, dict) and settings.get(key) is not None:
                yield row, settings[key]


def _describe(batch: Any, rows: TrainingRows, scores: npt.NDArray[np.float64]) -> Metrics:
    pushes = rows.advantages[rows.trained]
    groups = np.unique(batch.group_index).size
    pushing = np.unique(np.repeat(batch.group_index, batch.lengths)[rows.advantages != 0]).size
    return {
        "reward_mean": float(scores.mean()) if scores.size else float("nan"),
        "reward_std": float(scores.std()) if scores.size else float("nan"),
        "advantage_mean": float(pushes.mean()) if pushes.size else 0.0,
        "advantage_std": float(pushes.std()) if pushes.size else 0.0,
        "advantage_max_abs": float(np.abs(pushes).max(initial=0.0)),
        "tokens": len(rows.tokens),
        "trained_tokens": rows.trained_count,
        "trajectories": len(batch.meta),
        "trajectories_redelivered": sum(bool(meta.redelivered) for meta in batch.meta),
        "groups": int(groups),
        "groups_flat": int(groups - pushing),
    }


def _rollouts(batch: Any, rows: TrainingRows, scores: npt.NDArray[np.float64]) -> Metrics:
    """What dashboards know trajectories by; the advantages are those that are trained with."""
    row_of_token = np.repeat(np.arange(len(batch.meta)), batch.lengths)
    at = np.flatnonzero(rows.trained)
    counts = np.bincount(row_of_token[at], minlength=len(batch.meta))
    sums = np.bincount(row_of_token[at], weights=rows.advantages[at], minlength=len(batch.meta))
    begins = np.array(batch.lengths, np.int64)  # of what the policy wrote; at the end where it wrote nothing
    begins[row_of_token[at[::-1]]] = batch.position_ids[at[::-1]]  # the first of a row is written last
    return rollout_metrics(
        [meta.env_name for meta in batch.meta],
        batch.group_index,
        scores,
        advantages=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        response_lengths=batch.lengths - begins,
    )
