"""Converts a batch to training arrays: trained tokens, advantages, log-probabilities.

In a packed batch any column but the tokens may be absent from any record.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.credit import Credit, credited, require_advantages
from shmbridge.consumers.advantages.row_settings import temperatures, truncated_rows
from shmbridge.consumers.advantages.trained_tokens import trained_tokens
from shmbridge.consumers.advantages.whole_batch import Reduce, alone
from shmbridge.consumers.learner.data.left_out import left_out
from shmbridge.consumers.learner.data.loss_arrays import NO_LOGPROB, TrainingRows, known_count
from shmbridge.consumers.learner.data.row_metrics import row_metrics
from shmbridge.consumers.learner.data.token_staleness import (
    UNKNOWN,
    odd_versions,
    says_version,
    token_staleness,
)
from shmbridge.consumers.learner.types import Metrics


def prepare(
    batch: shmbridge.Batch,
    temperature: float,
    credit: Credit = Credit(),  # noqa: B008
    *,
    reduce: Reduce = alone,
    with_reference: bool = False,
    policy_version: int | None = None,
    max_token_staleness: int | None = None,
    whole_rows: bool = False,
    truncated: Literal["keep", "mask", "drop"] = "keep",
    unknown_tokens: npt.NDArray[np.bool_] | None = None,
    too_long: npt.NDArray[np.bool_] | None = None,
    answers: npt.NDArray[np.bool_] | None = None,
) -> tuple[TrainingRows, Metrics]:
    """Returns a packed batch's training arrays, and its metrics. Blocks as long as `reduce` does.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        temperature: sampling temperature of rows without a recorded one.
        credit: how advantages are computed.
        reduce: returns the sum of a float64 array over all ranks; by default there is one rank.
        with_reference: whether to include the reference's log-probabilities that records have.
        policy_version: the version about to be trained; None: token staleness is unknown.
        max_token_staleness: tokens sampled more versions ago are not trained; None: no limit.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise they train
            nothing. A mask that does not fit its tokens trains nothing either way.
        truncated: treatment of truncated completions: "mask" does not train them, "drop" also ignores their
            scores.
        unknown_tokens, too_long: bool (B,), rows left out for a token outside the vocabulary, or for their
            length; None: no such row.
        answers: the result of `checked_answers` for this batch; None: it is called here.

    Raises:
        NoAdvantages: a group needs the fallback that is not allowed.
    """
    if answers is None:
        answers = checked_answers(batch, credit, whole_rows)
    known = answers
    for unfit in (unknown_tokens, too_long):
        if unfit is not None:
            known = known & ~np.repeat(unfit, batch.lengths)
    staleness = None if policy_version is None else token_staleness(batch, policy_version)
    young = (
        known
        if staleness is None or max_token_staleness is None
        else known & (staleness <= max_token_staleness)
    )
    cut, unnamed = truncated_rows(batch)
    trained = young if truncated == "keep" else young & ~np.repeat(cut, batch.lengths)
    heat = temperatures(batch, temperature)
    advantages, credit_metrics = credited(
        batch, trained, credit, answers=answers, unscored=cut if truncated == "drop" else None, reduce=reduce
    )
    rows = TrainingRows(
        tokens=batch.tokens,
        cu_seqlens=batch.cu_seqlens,
        trained=trained,
        advantages=advantages,
        sampled_logprobs=_logprobs(batch, "inference_logprobs"),
        temperature=heat.values,
        reference_logprobs=_logprobs(batch, "ref_logprobs") if with_reference else None,
        fresh=None if policy_version is None else says_version(batch, policy_version),
        answers=answers,
    )
    stale_by = np.zeros(0, np.int32) if staleness is None else staleness[trained & (staleness != UNKNOWN)]
    reference = rows.reference_logprobs
    return rows, {
        **row_metrics(batch, rows),
        **credit_metrics,
        **left_out(
            batch,
            credit,
            heat,
            whole_rows=whole_rows,
            with_reference=with_reference,
            unknown_tokens=unknown_tokens,
            too_long=too_long,
            odd_versions=None if policy_version is None else odd_versions(batch, policy_version),
        ),
        "trajectories_odd_temperature": int(np.count_nonzero(heat.odd)),
        "trajectories_truncated": int(np.count_nonzero(cut)),
        "trajectories_without_finish_reason": int(np.count_nonzero(unnamed)),
        "tokens_masked_truncated": int(np.count_nonzero(young)) - rows.trained_count,
        "tokens_masked_stale": int(np.count_nonzero(known)) - int(np.count_nonzero(young)),
        "tokens_without_logprob": rows.trained_count - known_count(rows.sampled_logprobs, trained),
        "tokens_without_reference": 0
        if reference is None
        else rows.trained_count - known_count(reference, trained),
        "tokens_without_version": rows.trained_count - stale_by.size,
        "token_staleness_mean": float(stale_by.mean()) if stale_by.size else 0.0,
        "token_staleness_max": int(stale_by.max(initial=0)),
    }


def checked_answers(
    batch: shmbridge.Batch, credit: Credit, whole_rows: bool = False
) -> npt.NDArray[np.bool_]:
    """Returns `trained_tokens` of a batch. Never blocks. Raises `NoAdvantages` as `require_advantages`."""
    answers = trained_tokens(batch, whole_rows)
    require_advantages(batch, answers, credit)
    return answers


def _logprobs(batch: shmbridge.Batch, column: str) -> npt.NDArray[np.float32]:
    """Returns float32 (N,): the recorded values, NO_LOGPROB in rows of records without the column."""
    found, recorded = np.full(len(batch.tokens), NO_LOGPROB, np.float32), getattr(batch, column, None)
    return (
        found if recorded is None else np.where(np.repeat(batch.has(column), batch.lengths), recorded, found)
    )
