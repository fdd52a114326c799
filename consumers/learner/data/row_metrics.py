"""Metrics of a batch before training: scores, advantages, lengths. Pure numpy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.overlong import answer_lengths
from shmbridge.consumers.learner.data.loss_arrays import TrainingRows
from shmbridge.consumers.learner.types import Metrics
from shmbridge.metrics import rollout_metrics, rows_by_environment, usable_scores


def row_metrics(batch: shmbridge.Batch, rows: TrainingRows) -> Metrics:
    """Returns a packed batch's entries for metrics.jsonl, from its training arrays. Never blocks."""
    scores = (
        np.full(len(batch.meta), np.nan) if batch.scores is None else np.asarray(batch.scores, np.float64)
    )
    scores = np.where(batch.has("score") & usable_scores(scores), scores, np.nan)
    return {**_describe(batch, rows, scores[np.isfinite(scores)]), **_rollouts(batch, rows, scores)}


def _describe(batch: shmbridge.Batch, rows: TrainingRows, scores: npt.NDArray[np.float64]) -> Metrics:
    pushes = rows.advantages[rows.trained]
    groups = np.unique(batch.group_index).size
    # cumulative count of tokens with an advantage
    before = np.concatenate([[0], np.cumsum(rows.advantages != 0)])
    pushing = np.unique(batch.group_index[np.diff(before[batch.cu_seqlens]) > 0]).size
    return {
        "reward_mean": float(scores.mean()) if scores.size else float("nan"),
        "reward_std": float(scores.std()) if scores.size else float("nan"),
        "advantage_mean": float(pushes.mean(dtype=np.float64)) if pushes.size else 0.0,
        "advantage_std": float(pushes.std(dtype=np.float64)) if pushes.size else 0.0,
        "advantage_max_abs": float(np.abs(pushes).max(initial=0.0)),
        "tokens": len(rows.tokens),
        "trained_tokens": rows.trained_count,
        "trajectories": len(batch.meta),
        "trajectories_scored": int(scores.size),
        "trajectories_redelivered": sum(bool(meta.redelivered) for meta in batch.meta),
        "groups": int(groups),
        "groups_flat": int(groups - pushing),
    }


def _rollouts(batch: shmbridge.Batch, rows: TrainingRows, scores: npt.NDArray[np.float64]) -> Metrics:
    """Returns the metrics that dashboards expect; the advantages are the trained ones."""
    answers = rows.trained if rows.answers is None else rows.answers
    row_of_token = np.repeat(np.arange(len(batch.meta)), batch.lengths)
    at = np.flatnonzero(rows.trained)
    counts = np.bincount(row_of_token[at], minlength=len(batch.meta))
    scored, env_names = np.isfinite(scores), [meta.env_name for meta in batch.meta]
    found: Metrics = {"groups_scored": int(np.unique(batch.group_index[scored]).size)}
    # the counts behind each environment's means
    for env_name, of_it in rows_by_environment(env_names).items():
        found[f"atropos/{env_name}/trajectories_scored"] = int(np.count_nonzero(scored[of_it]))
        found[f"atropos/{env_name}/trajectories_trained"] = int(np.count_nonzero(counts[of_it]))
    sums = np.bincount(row_of_token[at], weights=rows.advantages[at], minlength=len(batch.meta))
    return found | rollout_metrics(
        env_names,
        batch.group_index,
        scores,
        advantages=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        response_lengths=answer_lengths(batch.cu_seqlens, answers),
    )
