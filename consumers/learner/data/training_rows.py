"""Converts a batch to training arrays: trained tokens, advantages, log-probabilities; counts the rest.

In a packed batch any column but the tokens may be absent from any record.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit, credited, require_advantages
from shmbridge.consumers.advantages.from_scores import Reduce, alone, answer_lengths
from shmbridge.consumers.learner import Metrics, Untrainable
from shmbridge.metrics import rollout_metrics
from shmbridge.schema import is_logprob

NO_LOGPROB = np.nan  # the mark of "not recorded"
UNKNOWN = -1
Bools = npt.NDArray[np.bool_]
Floats = npt.NDArray[np.float64]
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


def known_count(logprobs: npt.NDArray[np.float32], places: npt.NDArray[np.intp]) -> int:
    """Returns how many log-probabilities at these places were recorded. Never blocks."""
    return int(np.count_nonzero(is_logprob(logprobs[places])))


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

    @cached_property
    def places(self) -> npt.NDArray[np.intp]:
        """The places of the trained tokens of this rank's batch, rising."""
        return np.flatnonzero(self.trained)

    @property
    def answer_places(self) -> npt.NDArray[np.intp]:
        """The places of the tokens of `answers`, rising."""
        if self.answers is None or self.answers is self.trained:
            return self.places
        return np.flatnonzero(self.answers)

    @cached_property
    def trained_lengths(self) -> npt.NDArray[np.intp]:
        """(B,) the trained tokens of each row."""
        return np.diff(np.searchsorted(self.places, self.cu_seqlens))

    @property
    def trained_count(self) -> int:
        """The number of trained tokens in this rank's batch."""
        return self.places.size

    @property
    def answer_count(self) -> int:
        """The number of rows with a trained token in this rank's batch."""
        return int(np.count_nonzero(self.trained_lengths))


def token_staleness(facts: BatchFacts, policy_version: int) -> npt.NDArray[np.int32]:
    """Returns int32 (N,): the current version minus the token's; UNKNOWN if not recorded. Never blocks.

    Uses the token's own version if recorded, else the version under which generation of its record began. A
    version below -1 or above the current one is invalid and ignored.
    """
    staleness = np.repeat(_behind(facts.versions, policy_version), facts.lengths)
    if (own := facts.column("token_versions")) is None:
        return staleness
    recorded = np.repeat(facts.has("token_versions"), facts.lengths) & (own != UNKNOWN)
    return np.where(recorded, _behind(own, policy_version), staleness)


def sampled_by(facts: BatchFacts, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (N,): tokens that this version sampled, according to `token_versions`. Never blocks.

    The version stamped on a record does not count: it was the published one when generation began, and an
    engine that loads it later still samples with the one before.
    """
    if policy_version < 0 or (own := facts.column("token_versions")) is None:
        return np.zeros(len(facts.batch.tokens), bool)
    sampled: npt.NDArray[np.bool_] = np.repeat(facts.has("token_versions"), facts.lengths) & (
        own == policy_version
    )
    return sampled


def odd_versions(facts: BatchFacts, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows with a version above the current one, or a token version below -1."""
    odd = facts.versions > policy_version
    if (own := facts.column("token_versions")) is not None:
        places = np.flatnonzero((own < UNKNOWN) | (own > policy_version))
        rows = np.searchsorted(facts.cu_seqlens, places, side="right") - 1
        odd[rows[facts.has("token_versions")[rows]]] = True
    return odd


def _behind(versions: npt.NDArray[Any], policy_version: int) -> npt.NDArray[np.int32]:
    known = (versions >= 0) & (versions <= policy_version)
    return np.where(known, policy_version - versions, UNKNOWN).astype(np.int32)


class UnreadImages(Untrainable):
    """A batch has images, which this learner does not read; the message names the environment."""


def refuse_images(batch: shmbridge.Batch | BatchFacts) -> None:
    """Raises `UnreadImages` if a row has images: its rollout depends on more than the text. Never blocks."""
    facts = BatchFacts.of(batch)
    rows = np.flatnonzero(_filled(facts, "images"))
    if rows.size:
        meta = facts.meta[int(rows[0])]
        raise UnreadImages(
            f"{rows.size} trajectories have images, first in group {meta.group_id} of environment "
            f"{meta.env_name!r}: this learner trains text, and would take them for answers to the text "
            "alone -> --ignore-images, which trains the text alone"
        )


def left_out(
    facts: BatchFacts, credit: Credit, *, with_reference: bool, unfit: Mapping[str, Bools | None]
) -> Metrics:
    """Returns the counters of a batch, in total and per environment. Never blocks.

    Args:
        facts: of the batch.
        credit: which columns advantages are computed from.
        with_reference: whether the reference's log-probabilities are read.
        unfit: bool (B,) by counter, rows that the caller found; None: no such row.
    """
    none = np.zeros(len(facts.meta), bool)
    rows = {
        **{name: none if which is None else which for name, which in unfit.items()},
        "trajectories_without_mask": facts.without_mask,
        "trajectories_binary_mask": _binary_masks(facts),
        "trajectories_greedy": facts.greedy,
        "trajectories_cut_sampling": facts.cut_sampling,
        **{f"trajectories_uneven{{{name}}}": uneven for name, uneven in facts.uneven.items()},
    }
    used = {"step_rewards", "step_ends"} if credit.steps != "off" else set()
    if credit.token_rewards != "off":
        used.add("token_rewards")
    if with_reference:
        used.add("ref_logprobs")
    for name in facts.columns:
        if name not in _KNOWN and name not in used and (filled := _filled(facts, name)).any():
            rows[f"columns_ignored/{name}"] = filled
    found: Metrics = {}
    for name, which in rows.items():
        found[name] = int(np.count_nonzero(which))
        for env_name, of_it in facts.environments.items() if found[name] else ():
            if count := int(np.count_nonzero(which[of_it])):
                found[f"atropos/{env_name}/{name}"] = count
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


def _filled(facts: BatchFacts, name: str) -> Bools:
    """Returns bool (B,): rows in which a column has a value; text that means "nothing" does not count."""
    has = facts.has(name)
    values = facts.column(name) if has.any() else None
    if isinstance(values, list):
        has = has & np.array(
            [value not in _NOTHING if isinstance(value, str) else bool(value) for value in values], bool
        )
    return has


def _binary_masks(facts: BatchFacts) -> Bools:
    """Returns bool (B,): rows whose column `masks`, which should have -100 and token ids, has 0 and 1."""
    rows = facts.has("masks")
    if not rows.any():
        return rows
    masks = facts.column("masks")
    odd = np.flatnonzero((masks < 0) | (masks > 1))
    binary: Bools = rows & (np.diff(np.searchsorted(odd, facts.cu_seqlens)) == 0) & (facts.lengths > 0)
    return binary


def row_metrics(facts: BatchFacts, rows: TrainingRows) -> Metrics:
    """Returns a packed batch's entries for metrics.jsonl, from its training arrays. Never blocks."""
    scored, group = facts.scored, facts.group_index
    scores, counts = facts.scores[scored], rows.trained_lengths
    # untrained tokens have 0, and do not count
    sums = _reduced(np.add, rows.advantages, facts.cu_seqlens)
    largest = _reduced(np.maximum, np.abs(rows.advantages), facts.cu_seqlens)
    mean = sums.sum() / max(rows.trained_count, 1)
    apart = rows.advantages[rows.trained] - mean
    group_count = np.unique(group).size
    found: Metrics = {
        "reward_mean": float(scores.mean()) if scores.size else float("nan"),
        "reward_std": float(scores.std()) if scores.size else float("nan"),
        "advantage_mean": float(mean),
        "advantage_std": math.sqrt(np.dot(apart, apart) / max(apart.size, 1)),
        "advantage_max_abs": float(largest.max(initial=0.0)),
        "tokens": len(rows.tokens),
        "trained_tokens": rows.trained_count,
        "trajectories": len(facts.meta),
        "trajectories_scored": int(scores.size),
        "trajectories_redelivered": sum([bool(meta.redelivered) for meta in facts.meta]),
        "groups": int(group_count),
        "groups_flat": int(group_count - np.unique(group[largest > 0]).size),
        "groups_scored": int(np.unique(group[scored]).size),
    }
    # the counts behind each environment's means
    for env_name, of_it in facts.environments.items():
        found[f"atropos/{env_name}/trajectories_scored"] = int(np.count_nonzero(scored[of_it]))
        found[f"atropos/{env_name}/trajectories_trained"] = int(np.count_nonzero(counts[of_it]))
    return found | rollout_metrics(
        facts.env_names,
        group,
        np.where(scored, facts.scores, np.nan),
        advantages=np.where(counts > 0, sums / np.maximum(counts, 1), np.nan),
        response_lengths=answer_lengths(facts.cu_seqlens, rows.answer_places),
    )


def _reduced(function: np.ufunc, values: npt.NDArray[Any], cu_seqlens: npt.NDArray[Any]) -> Floats:
    """Returns float64 (B,): a function over each row's values; 0 in a row without tokens."""
    found, filled = np.zeros(len(cu_seqlens) - 1), np.diff(cu_seqlens) > 0
    if filled.any():
        found[filled] = function.reduceat(values, cu_seqlens[:-1][filled], dtype=np.float64)
    return found


def prepare(
    batch: shmbridge.Batch | BatchFacts,
    temperature: float = 1.0,
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
) -> tuple[TrainingRows, Metrics]:
    """Returns a packed batch's training arrays, and its metrics. Blocks as long as `reduce` does.

    Args:
        batch: the facts of a packed batch; or the batch, `shmbridge.Batch` or anything with its attributes.
        temperature: sampling temperature of rows without a recorded one; of facts, theirs.
        credit: how advantages are computed.
        reduce: returns the sum of a float64 array over all ranks; by default there is one rank.
        with_reference: whether to include the reference's log-probabilities that records have.
        policy_version: the version about to be trained; None: token staleness is unknown.
        max_token_staleness: tokens sampled more versions ago are not trained; None: no limit.
        whole_rows: rows with neither a mask nor `prompt_length` are trained whole; otherwise they train
            nothing; of facts, theirs. A mask that does not fit its tokens trains nothing either way.
        truncated: treatment of truncated completions: "mask" does not train them, "drop" also ignores their
            scores.
        unknown_tokens, too_long: bool (B,), rows left out for a token outside the vocabulary, or for their
            length; None: no such row.

    Raises:
        NoAdvantages: a group needs the fallback that is not allowed.
    """
    facts = batch if isinstance(batch, BatchFacts) else BatchFacts(batch, temperature, whole_rows)
    answers, lengths = facts.trained_tokens, facts.lengths
    require_advantages(facts, answers, credit)
    known = answers
    for unfit in (unknown_tokens, too_long):
        if unfit is not None:
            known = known & ~np.repeat(unfit, lengths)
    staleness = None if policy_version is None else token_staleness(facts, policy_version)
    young = (
        known
        if staleness is None or max_token_staleness is None
        else known & (staleness <= max_token_staleness)
    )
    cut = facts.truncated
    trained = young if truncated == "keep" or not cut.any() else young & ~np.repeat(cut, lengths)
    advantages, credit_metrics = credited(
        facts, trained, credit, answers=answers, unscored=cut if truncated == "drop" else None, reduce=reduce
    )
    rows = TrainingRows(
        tokens=facts.batch.tokens,
        cu_seqlens=facts.cu_seqlens,
        trained=trained,
        advantages=advantages,
        sampled_logprobs=_logprobs(facts, "inference_logprobs"),
        temperature=facts.temperatures,
        reference_logprobs=_logprobs(facts, "ref_logprobs") if with_reference else None,
        fresh=None if policy_version is None else sampled_by(facts, policy_version),
        answers=answers,
    )
    stale_by = np.zeros(0, np.int32) if staleness is None else staleness[rows.places]
    stale_by = stale_by[stale_by != UNKNOWN]
    reference = rows.reference_logprobs
    return rows, {
        **row_metrics(facts, rows),
        **credit_metrics,
        **left_out(
            facts,
            credit,
            with_reference=with_reference,
            unfit={
                "trajectories_unknown_tokens": unknown_tokens,
                "trajectories_too_long": too_long,
                "trajectories_odd_versions": None
                if policy_version is None
                else odd_versions(facts, policy_version),
            },
        ),
        "trajectories_odd_temperature": int(np.count_nonzero(facts.odd_temperature)),
        "trajectories_truncated": int(np.count_nonzero(cut)),
        "trajectories_without_finish_reason": int(np.count_nonzero(facts.without_finish_reason)),
        "tokens_masked_truncated": int(np.count_nonzero(young)) - rows.trained_count,
        "tokens_masked_stale": int(np.count_nonzero(known)) - int(np.count_nonzero(young)),
        "tokens_without_logprob": rows.trained_count - known_count(rows.sampled_logprobs, rows.places),
        "tokens_without_reference": 0
        if reference is None
        else rows.trained_count - known_count(reference, rows.places),
        "tokens_without_version": rows.trained_count - stale_by.size,
        "token_staleness_mean": float(stale_by.mean()) if stale_by.size else 0.0,
        "token_staleness_max": int(stale_by.max(initial=0)),
    }


def _logprobs(facts: BatchFacts, column: str) -> npt.NDArray[np.float32]:
    """Returns float32 (N,): the recorded values, NO_LOGPROB in rows of records without the column."""
    has: Bools = facts.has(column)
    if (recorded := facts.column(column)) is None:
        return np.full(len(facts.batch.tokens), NO_LOGPROB, np.float32)
    if has.all():
        return recorded  # type: ignore[no-any-return]
    return np.where(np.repeat(has, facts.lengths), recorded, np.float32(NO_LOGPROB))
