"""Converts a batch to training arrays: trained tokens, advantages, log-probabilities; counts the rest.

In a packed batch any column but the tokens may be absent from any record.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.batch_facts import (
    Heat,
    cut_sampling,
    temperatures,
    trained_tokens,
    truncated_rows,
    without_mask,
)
from shmbridge.consumers.advantages.credit import Credit, credited, require_advantages
from shmbridge.consumers.advantages.from_scores import Reduce, alone, answer_lengths
from shmbridge.consumers.learner import Metrics, Untrainable
from shmbridge.metrics import rollout_metrics, rows_by_environment, usable_scores
from shmbridge.schema import is_logprob

NO_LOGPROB = np.nan  # the mark of "not recorded"
UNKNOWN = -1
Bools = npt.NDArray[np.bool_]
# Columns that training always reads, and columns that describe a row and are not meant for a loss.
_KNOWN = frozenset(
    {
        *("tokens", "prompt_length", "loss_mask", "masks", "score", "advantages", "advantages_mask"),
        *("inference_logprobs", "token_versions", "temperature", "finish_reason"),
        *("overrides", "group_overrides", "generation_params"),
        *("raw_score", "messages", "extra", "instance_id", "repetition_id", "row_index", "is_last"),
        *("turn_ends", "trace_spans", "env_id"),
    }
)
_NOTHING = frozenset({None, "", "null", "[]", "{}", '""'})
_SAID = {
    "trajectories_uneven": (
        "{count} trajectories have another number of values of {column} than tokens; these are left out -> "
        "write one value for each token, prompt included"
    ),
    "trajectories_without_mask": (
        "{count} trajectories have neither a mask nor prompt_length, or a mask that does not fit their "
        "tokens, and train nothing -> write loss_mask, one value for each token; --train-whole-rows is for "
        "rows without any"
    ),
    "trajectories_unknown_tokens": (
        "{count} trajectories have a token id that the model does not have, and train nothing -> start the "
        "environment with the learner's tokenizer"
    ),
    "trajectories_too_long": (
        "{count} trajectories are longer than the model's positions or --max-token-len, and train nothing -> "
        "have the environment end its episodes earlier"
    ),
    "trajectories_odd_versions": (
        "{count} trajectories say a policy version above the one that is trained, or a token version below "
        "-1; their age is unknown -> write the version that sampled each token, -1 where none did"
    ),
    "trajectories_binary_mask": (
        "{count} trajectories have masks of 0 and 1; Atropos masks are -100 where nothing is trained, so "
        "all their tokens are -> write -100 and token ids, or loss_mask"
    ),
    "trajectories_greedy": (
        "{count} trajectories were sampled at a temperature below 1e-5, whose log-probabilities say "
        "nothing; --temperature is used -> sample at the temperature that is trained"
    ),
    "trajectories_cut_sampling": (
        "{count} trajectories were sampled with top_p, top_k or min_p; ratios to their log-probabilities "
        "are biased -> sample with top_p=1 and without top_k and min_p"
    ),
    "columns_ignored": "{count} trajectories have {column}, which this learner does not read",
}
_COUNTER = re.compile(r"^atropos/([^/]+)/(\w+)(?:[{/](.+?)}?)?$")  # environment, counter, column


def known_count(logprobs: npt.NDArray[np.float32], where: npt.NDArray[np.bool_]) -> int:
    """Returns how many log-probabilities at these places were recorded. Never blocks."""
    return int(np.count_nonzero(where & is_logprob(logprobs)))


@dataclass(frozen=True)
class TrainingRows:
    """The arrays that the loss needs, row after row without padding; value i belongs to token i."""

    tokens: npt.NDArray[np.int32]  # (N,)
    cu_seqlens: npt.NDArray[np.int32]  # (B+1,) where each row begins, then N
    trained: npt.NDArray[np.bool_]  # (N,) False for the first token of a row: nothing predicts it
    advantages: npt.NDArray[np.float32]  # (N,) dimensionless
    sampled_logprobs: npt.NDArray[np.float32]  # (N,) nats; NO_LOGPROB if not recorded
    temperature: npt.NDArray[np.float32]  # (B,) > 0
    # (N,) as sampled_logprobs; None if not requested
    reference_logprobs: npt.NDArray[np.float32] | None = None
    # (N,) token_versions equals the version about to be trained; None if unknown
    fresh: npt.NDArray[np.bool_] | None = None
    # (N,) `trained` before the learner's own masking; None: not kept
    answers: npt.NDArray[np.bool_] | None = None

    @property
    def trained_count(self) -> int:
        """The number of trained tokens in this rank's batch."""
        return int(np.count_nonzero(self.trained))

    @property
    def answer_count(self) -> int:
        """The number of rows with a trained token in this rank's batch."""
        before = np.concatenate([[0], np.cumsum(self.trained)])  # cumulative count of trained tokens
        return int(np.count_nonzero(np.diff(before[self.cu_seqlens])))


def token_staleness(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.int32]:
    """Returns int32 (N,): the current version minus the token's; UNKNOWN if not recorded. Never blocks.

    Uses the token's own version if recorded, else the version under which generation of its record began. A
    version below -1 or above the current one is invalid and ignored.
    """
    stamped = [meta.min_policy_version for meta in batch.meta]
    versions = np.array([UNKNOWN if version is None else version for version in stamped], np.int64)
    staleness = np.repeat(_behind(versions, policy_version), batch.lengths)
    own = getattr(batch, "token_versions", None)
    if own is None:
        return staleness
    said = np.repeat(batch.has("token_versions"), batch.lengths) & (own != UNKNOWN)
    return np.where(said, _behind(own, policy_version), staleness)


def says_version(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (N,): tokens that this version sampled, according to `token_versions`. Never blocks.

    The version stamped on a record does not count: it was the published one when generation began, and an
    engine that loads it later still samples with the one before.
    """
    own = getattr(batch, "token_versions", None)
    if own is None:
        return np.zeros(len(batch.tokens), bool)
    said: npt.NDArray[np.bool_] = (
        np.repeat(batch.has("token_versions"), batch.lengths) & (own >= 0) & (own == policy_version)
    )
    return said


def odd_versions(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows with a version above the current one, or a token version below -1."""
    stamped = [meta.min_policy_version for meta in batch.meta]
    odd = np.array([version is not None and version > policy_version for version in stamped], bool)
    own = getattr(batch, "token_versions", None)
    if own is not None:
        places = np.flatnonzero((own < UNKNOWN) | (own > policy_version))
        rows = np.searchsorted(batch.cu_seqlens, places, side="right") - 1
        odd[rows[batch.has("token_versions")[rows]]] = True
    return odd


def _behind(versions: npt.NDArray[Any], policy_version: int) -> npt.NDArray[np.int32]:
    known = (versions >= 0) & (versions <= policy_version)
    return np.where(known, policy_version - versions, UNKNOWN).astype(np.int32)


class UnreadImages(Untrainable):
    """A batch has images, which this learner does not read; the message names the environment."""


def refuse_images(batch: shmbridge.Batch) -> None:
    """Raises `UnreadImages` if a row has images: its rollout depends on more than the text. Never blocks."""
    rows = np.flatnonzero(_filled(batch, "images"))
    if rows.size:
        meta = batch.meta[int(rows[0])]
        raise UnreadImages(
            f"{rows.size} trajectories have images, first in group {meta.group_id} of environment "
            f"{meta.env_name!r}: this learner trains text, and would take them for answers to the text "
            "alone -> --ignore-images, which trains the text alone"
        )


def left_out(
    batch: shmbridge.Batch,
    credit: Credit,
    heat: Heat,
    *,
    whole_rows: bool,
    with_reference: bool,
    unknown_tokens: Bools | None = None,
    too_long: Bools | None = None,
    odd_versions: Bools | None = None,
) -> Metrics:
    """Returns the counters of a batch, in total and per environment. Never blocks.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        credit: which columns advantages are computed from.
        heat: the batch's temperatures.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole.
        with_reference: whether the reference's log-probabilities are read.
        unknown_tokens, too_long: bool (B,), rows left out for a token outside the vocabulary, or for their
            length; None: no such row.
        odd_versions: bool (B,), rows with impossible policy versions; None: no such row.
    """
    none = np.zeros(len(batch.meta), bool)
    rows = {
        "trajectories_unknown_tokens": none if unknown_tokens is None else unknown_tokens,
        "trajectories_too_long": none if too_long is None else too_long,
        "trajectories_odd_versions": none if odd_versions is None else odd_versions,
        "trajectories_without_mask": without_mask(batch, whole_rows),
        "trajectories_binary_mask": _binary_masks(batch),
        "trajectories_greedy": heat.greedy,
        "trajectories_cut_sampling": cut_sampling(batch),
        **{f"trajectories_uneven{{{name}}}": uneven for name, uneven in getattr(batch, "uneven", {}).items()},
    }
    used = {"step_rewards", "step_ends"} if credit.steps != "off" else set()
    if credit.token_rewards != "off":
        used.add("token_rewards")
    if with_reference:
        used.add("ref_logprobs")
    for name in getattr(batch, "columns", ()):
        if name not in _KNOWN | used and (there := _filled(batch, name)).any():
            rows[f"columns_ignored/{name}"] = there
    found: Metrics = {name: int(which.sum()) for name, which in rows.items()}
    for env_name, of_it in rows_by_environment([meta.env_name for meta in batch.meta]).items():
        found |= {
            f"atropos/{env_name}/{name}": count
            for name, which in rows.items()
            if (count := int(which[of_it].sum()))
        }
    return found


def rows_with_unknown_tokens(batch: shmbridge.Batch, vocabulary: int) -> Bools | None:
    """Returns bool (B,): rows with a token id outside 0 .. `vocabulary` - 1, or None. Waits for a device."""
    tokens = batch.tokens
    if not len(tokens) or 0 <= tokens.min() <= tokens.max() < vocabulary:
        return None
    outside = (tokens < 0) | (tokens >= vocabulary)
    places = np.flatnonzero(outside if isinstance(outside, np.ndarray) else outside.cpu().numpy())
    rows = np.zeros(len(batch.meta), bool)
    rows[np.searchsorted(batch.cu_seqlens, places, side="right") - 1] = True
    return rows


class SaidOnce:
    """Explains each counter of each environment once, the first time it is not 0."""

    def __init__(self) -> None:
        self._said: set[str] = set()

    def sentences(self, metrics: Metrics) -> list[str]:
        """Returns the new explanations for a step's metrics over all ranks. Never blocks."""
        found = []
        for name, count in metrics.items():
            match = _COUNTER.match(name)
            if match is None or match[2] not in _SAID or not count or name in self._said:
                continue
            self._said.add(name)
            found.append(
                f"environment {match[1]}: {_SAID[match[2]].format(count=count, column=match[3])}; counted "
                f"as {match[2]}"
            )
        return found


def _filled(batch: shmbridge.Batch, name: str) -> Bools:
    """Returns bool (B,): rows in which a column has a value; text that means "nothing" does not count."""
    has: Bools = batch.has(name)
    values = getattr(batch, name, None) if has.any() else None
    if isinstance(values, list):
        has = has & np.array(
            [value not in _NOTHING if isinstance(value, str) else bool(value) for value in values], bool
        )
    return has


def _binary_masks(batch: shmbridge.Batch) -> Bools:
    """Returns bool (B,): rows whose column `masks`, which should have -100 and token ids, has 0 and 1."""
    rows: Bools = batch.has("masks")
    if not rows.any():
        return rows
    masks = batch["masks"]
    odd = (masks < 0) | (masks > 1)
    before = np.concatenate([[0], np.cumsum(odd)])
    binary: Bools = rows & (np.diff(before[batch.cu_seqlens]) == 0) & (batch.lengths > 0)
    return binary


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
