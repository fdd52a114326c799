"""Credit assignment: the advantage of each token of a batch, from all rewards in its records.

Order: advantages from the scores, mixed with step and token rewards, then replaced by a record's own
advantages, and last set to 0 in silenced rows. A row that lacks one of these keeps the result of the earlier
stage, and is counted. Pure numpy; the formulas are in `from_scores.py` and `process_rewards.py`.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.from_scores import (
    Reduce,
    alone,
    answer_lengths,
    batch_normalised,
    clip_to_range,
    group_advantages,
    group_normalised,
    leave_one_out,
    overlong_penalty,
    override_tokens,
    silence_rows,
    spread_to_tokens,
)
from shmbridge.consumers.advantages.process_rewards import (
    Steps,
    mixed,
    process_advantages,
    token_reward_advantages,
)

FloatArray = npt.NDArray[np.float32]
Bools = npt.NDArray[np.bool_]


class NoAdvantages(Exception):
    """A group came without advantages of its own, and falling back to its scores is not allowed."""


@dataclass(frozen=True)
class Credit:
    """How advantages are computed."""

    estimator: Literal["grpo", "dr_grpo", "rloo", "batch"] = "grpo"  # from the scores
    use_own: bool = True  # use the records' own advantages if present
    fallback: bool = True  # compute advantages for rows without their own
    steps: Literal["off", "to_go", "step"] = "off"  # which step rewards a token gets
    step_over: Literal["group", "place"] = "group"  # which step rewards are normalised together
    step_discount: float = 1.0
    step_weight: float = 0.5  # of step rewards; 1 - weight goes to the outcome
    token_rewards: Literal["off", "group", "batch"] = "off"  # normalised over the group or the batch
    token_discount: float = 1.0
    token_weight: float = 0.5  # of token rewards; 1 - weight goes to the advantages before
    # tokens; a completion this long loses 1 of its score; None: no penalty
    overlong_length: int | None = None
    overlong_buffer: int = 0  # tokens before that over which the penalty grows
    # normalise the result again over the trained tokens of a rank or of all ranks
    normalise: Literal["none", "batch", "global"] = "none"
    clip: tuple[float, float] | None = None  # smallest and largest advantage

    def __post_init__(self) -> None:
        """Raises BadArgument if a word is none of its field's."""
        for name, kind in get_type_hints(type(self)).items():
            if get_origin(kind) is Literal and (word := getattr(self, name)) not in get_args(kind):
                raise shmbridge.BadArgument(
                    f"credit: {name}={word!r}", hint=f"one of {', '.join(get_args(kind))}"
                )


def credited(
    batch: shmbridge.Batch | BatchFacts,
    trained: Bools,
    credit: Credit = Credit(),
    *,
    answers: Bools | None = None,
    unscored: Bools | None = None,
    reduce: Reduce = alone,
) -> tuple[FloatArray, dict[str, float]]:
    """Returns the advantage of each token, and metrics on the sources used. Blocks as long as `reduce` does.

    Every rank calls `reduce` equally often, whatever its batch contains.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes; or its facts.
        trained: bool (N,), the trained tokens; the others get 0.
        credit: how advantages are computed.
        answers: bool (N,), tokens that the policy wrote, for completion lengths; None: `trained`.
        unscored: bool (B,), rows whose score is ignored; None: none.
        reduce: returns the sum of a float64 array over all ranks; by default there is one rank.

    Returns:
        float32 (N,), dimensionless, and metrics.
    """
    facts = BatchFacts.of(batch)
    row_count, cu_seqlens = len(facts.meta), facts.cu_seqlens
    scores = facts.scores
    scored = facts.scored if unscored is None else facts.scored & ~unscored
    own, odd_mask = _own_tokens(facts, credit.use_own)
    has_own = facts.has("advantages") & credit.use_own
    fallen_back = _fallen_back(facts, trained, own, credit)
    penalty = np.zeros(row_count, np.float32)  # of each completion's score, at most 0
    if credit.overlong_length is not None:
        lengths = answer_lengths(cu_seqlens, np.flatnonzero(trained if answers is None else answers))
        penalty = overlong_penalty(lengths, credit.overlong_length, credit.overlong_buffer)
    advantages = _from_scores(facts, scores + penalty, scored, trained, credit, reduce)
    advantages, has_steps, odd_steps = _with_steps(facts, advantages, trained, credit)
    advantages, has_rewards = _with_token_rewards(facts, advantages, trained, credit, reduce)
    if own is not None:
        advantages = override_tokens(advantages, facts.column("advantages"), own, trained)
    if credit.normalise != "none":
        advantages = batch_normalised(
            advantages, trained, reduce=reduce if credit.normalise == "global" else alone
        )
    if credit.clip is not None:
        advantages = clip_to_range(advantages, *credit.clip)
    signalled = scored | has_own | has_steps | has_rewards
    silenced = facts.silenced
    if silenced.any():
        advantages = silence_rows(advantages, silenced, cu_seqlens)
    return advantages, {
        "trajectories_own_advantages": int(facts.has("advantages").sum()),
        "trajectories_partly_own": int((has_own & fallen_back).sum()),
        "trajectories_no_signal": int((~signalled).sum()),
        "trajectories_silenced": int(silenced.sum()),
        "trajectories_without_steps": int((~has_steps).sum()) if credit.steps != "off" else 0,
        "trajectories_without_token_rewards": int((~has_rewards).sum())
        if credit.token_rewards != "off"
        else 0,
        "trajectories_odd_credit": int((odd_mask | odd_steps).sum()),
        "overlong_penalty_mean": float(-penalty.mean()) if row_count else 0.0,
        "groups_fallback": int(np.unique(facts.group_index[fallen_back]).size),
    }


def require_advantages(batch: shmbridge.Batch | BatchFacts, trained: Bools, credit: Credit) -> None:
    """Raises `NoAdvantages` if a group needs the fallback that is not allowed; arguments as `credited`.

    Never blocks.
    """
    if credit.fallback:
        return
    facts = BatchFacts.of(batch)
    without = _fallen_back(facts, trained, _own_tokens(facts, credit.use_own)[0], credit)
    if without.any():
        first = int(without.argmax())
        meta, rows = facts.meta[first], facts.group_index == facts.group_index[first]
        raise NoAdvantages(
            f"group {meta.group_id} of environment {meta.env_name!r} has {int(rows.sum())} trajectories, and "
            f"{int((rows & without).sum())} of them without advantages -> run without --no-fallback-to-grpo, "
            "as what that environment writes from now on does not change what it has put"
        )


def _fallen_back(facts: BatchFacts, trained: Bools, own: Bools | None, credit: Credit) -> Bools:
    """Returns bool (B,): rows that lack advantages of their own, for some or all trained tokens."""
    without = ~facts.has("advantages")
    if own is not None and facts.column("advantages_mask") is not None:
        row_of_token = np.repeat(np.arange(len(facts.meta)), facts.lengths)
        without |= np.bincount(row_of_token[trained & ~own], minlength=len(facts.meta)) > 0
    fallen_back: Bools = without & ~facts.silenced & credit.use_own
    return fallen_back


def _own_tokens(facts: BatchFacts, wanted: bool) -> tuple[Bools | None, Bools]:
    """Returns bool (N,): tokens with an own advantage, None if there are none; bool (B,): rows whose mask of
    these does not fit. The record's advantages apply to all tokens of such a row.
    """
    has, odd = facts.has("advantages"), np.zeros(len(facts.meta), bool)
    if not (wanted and has.any()):
        return None, odd
    own: Bools = np.repeat(has, facts.lengths)
    mask = facts.column("advantages_mask")
    if mask is None:
        return own, odd
    has_mask = facts.has("advantages_mask")
    if isinstance(mask, np.ndarray):
        return own & ((mask != 0) | ~np.repeat(has_mask, facts.lengths)), odd
    fits = has_mask & (mask.lengths == facts.lengths)
    own[np.repeat(fits, facts.lengths)] &= mask.values[np.repeat(fits, mask.lengths)] != 0
    return own, has_mask & ~fits


def _from_scores(
    facts: BatchFacts,
    scores: npt.NDArray[np.float64],
    scored: Bools,
    trained: Bools,
    credit: Credit,
    reduce: Reduce,
) -> FloatArray:
    group = facts.group_index
    if credit.estimator == "grpo":
        per_row = group_normalised(scores, group, usable=scored)
    elif credit.estimator == "rloo":
        per_row = leave_one_out(scores, group, usable=scored)
    else:
        per_row = group_advantages(scores, group, usable=scored, scale="none")
    advantages = spread_to_tokens(per_row, facts.cu_seqlens, trained)
    if credit.estimator != "batch":
        return advantages
    # Groups without signal keep 0, and are excluded from the batch's mean and deviation.
    speaking = np.bincount(group, weights=per_row != 0)[group] > 0
    return batch_normalised(advantages, trained & np.repeat(speaking & scored, facts.lengths), reduce=reduce)


def _with_steps(
    facts: BatchFacts, outcome: FloatArray, trained: Bools, credit: Credit
) -> tuple[FloatArray, Bools, Bools]:
    """Returns advantages with step rewards, rows that have steps, and rows whose steps do not fit."""
    nobody = np.zeros(len(facts.meta), bool)
    rewards, ends = facts.column("step_rewards"), facts.column("step_ends")
    if credit.steps == "off" or rewards is None:
        return outcome, nobody, nobody
    where, counts = (None, None) if ends is None else (ends.values, ends.lengths)
    steps, odd = Steps.sound(rewards.values, rewards.lengths, where, counts, facts.cu_seqlens)
    process = process_advantages(
        steps,
        facts.group_index,
        trained,
        reach=credit.steps,
        over=credit.step_over,
        discount=credit.step_discount,
        scale="none" if credit.estimator in ("dr_grpo", "rloo") else "std",
    )
    has = steps.counts > 0
    return mixed(outcome, process, has, facts.cu_seqlens, weight=credit.step_weight), has, odd


def _with_token_rewards(
    facts: BatchFacts, before: FloatArray, trained: Bools, credit: Credit, reduce: Reduce
) -> tuple[FloatArray, Bools]:
    """Returns the advantages mixed with token rewards, and which rows have them."""
    if credit.token_rewards == "off":
        return before, np.zeros(len(facts.meta), bool)
    rewards, has = facts.column("token_rewards"), facts.has("token_rewards")
    if rewards is None:  # other ranks may have some, and all must call `reduce` equally often
        rewards = np.zeros(trained.size, np.float32)
    placed = token_reward_advantages(
        rewards,
        facts.group_index,
        facts.cu_seqlens,
        trained,
        has_rewards=has,
        discount=credit.token_discount,
        over=credit.token_rewards,
        reduce=reduce,
    )
    return mixed(before, placed, has, facts.cu_seqlens, weight=credit.token_weight), has
