"""Advantages from scores: over groups, over the whole batch; spread over tokens, with a record's own on top.

Pure numpy over the flat arrays of one packed batch. Step and token rewards are in `process_rewards.py`.

Letters: B rows (trajectories), G groups, N tokens of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt

from shmbridge.metrics import usable_scores

FloatArray = npt.NDArray[np.float32]
Reduce = Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]]
# Two float32 that differ do so by more than 1e-8 of their size; the mean of equal ones is off by some 1e-15.
_NOISE = 1e-12


def group_normalised(
    scores: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    usable: npt.ArrayLike | None = None,
    eps: float = 1e-4,
) -> FloatArray:
    """Returns every row's advantage over its own group: (score - mean) / (std + eps). Never blocks.

    The deviation is that of the population, as in the reference trainer of Atropos. Arguments, result and
    errors as `group_advantages`, without its floor.

    Source: GRPO, arXiv 2402.03300 (outcome supervision).
    """
    return group_advantages(scores, group_index, usable=usable, eps=eps, floor=0.0)


def group_advantages(
    scores: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    usable: npt.ArrayLike | None = None,
    scale: Literal["std", "none"] = "std",
    eps: float = 1e-4,
    floor: float = 1e-4,
    ddof: Literal[0, 1] = 0,
) -> FloatArray:
    """Returns every value's advantage over its own group, with or without the group's deviation.

    Never blocks.

    scale="std":  (score - mean) / (max(std, floor * |mean|) + eps)
    scale="none":  score - mean

    A group whose scores are all equal, and so a group of one, gets exactly 0. Differences below the floor are
    noise relative to the scores' size, and are not scaled up to 1. In exchange, adding a constant to all
    scores changes the result where the floor applies. A value that is not usable, not finite, or beyond 1e37,
    gets 0 and is excluded from its group.

    Args:
        scores: float64 (B,), one value per row, in the environment's unit; or per step, or per token.
        group_index: int (B,), ordinal of each value's group, 0 .. G-1 in any order.
        usable: bool (B,), rows that carry a score at all; None means all of them.
        scale: whether to divide by the deviation.
        eps: added to the deviation, in the unit of the scores.
        floor: smallest deviation, dimensionless: a fraction of the group's absolute mean; 0: no floor.
        ddof: 0 for the deviation of the population, 1 for that of a sample, as verl and TRL have it.

    Returns:
        float32 (B,), dimensionless; with scale="none" in the unit of the scores.

    Raises:
        ValueError: the arrays disagree in length, a group index is negative, or scale is none of the two.

    Source: GRPO, arXiv 2402.03300; without the deviation: Dr. GRPO, arXiv 2503.20783.
    """
    if scale not in ("std", "none"):
        raise ValueError(f'scale is {scale!r}: "std" or "none"')
    groups = _Groups.of(scores, group_index, usable)
    if scale == "none":
        return groups.signal(groups.centred)
    squares = np.bincount(groups.index, weights=groups.centred**2, minlength=groups.means.size)
    deviations = np.sqrt(squares / np.maximum(groups.sizes - ddof, 1.0))
    deviations = np.maximum(deviations, floor * np.abs(groups.means))
    return groups.signal(groups.centred / np.where(groups.flat, 1.0, deviations + eps)[groups.index])


def leave_one_out(
    scores: npt.ArrayLike, group_index: npt.ArrayLike, *, usable: npt.ArrayLike | None = None
) -> FloatArray:
    """Returns every row's score minus the mean score of the others of its group. Never blocks.

    That is n / (n - 1) * (score - mean) in a group of n, and exactly 0 in a group of one, or of equal scores.
    Arguments, excluded rows and errors as `group_advantages`; the result has the unit of the scores.

    Source: RLOO, arXiv 2402.14740.
    """
    groups = _Groups.of(scores, group_index, usable)
    factors = groups.sizes / np.maximum(groups.sizes - 1.0, 1.0)
    return groups.signal(groups.centred * factors[groups.index])


@dataclass(frozen=True)
class _Groups:
    """Scores minus the mean of their group; excluded scores are 0 and not summed."""

    index: npt.NDArray[np.int64]  # (B,)
    centred: npt.NDArray[np.float64]  # (B,)
    means: npt.NDArray[np.float64]  # (G,)
    sizes: npt.NDArray[np.float64]  # (G,) counted scores, at least 1
    flat: npt.NDArray[np.bool_]  # (G,) all counted scores are the same number

    @classmethod
    def of(cls, scores: npt.ArrayLike, group_index: npt.ArrayLike, usable: npt.ArrayLike | None) -> _Groups:
        score = np.asarray(scores, dtype=np.float64)
        group = np.asarray(group_index, dtype=np.int64)
        if score.ndim != 1 or score.shape != group.shape:
            raise ValueError(
                f"scores have shape {score.shape}, group_index {group.shape}: one of each per row"
            )
        counted = usable_scores(score)
        if usable is not None:
            counted &= np.asarray(usable, dtype=bool)

        group_count = int(group.max(initial=-1)) + 1
        sizes = np.maximum(np.bincount(group, weights=counted, minlength=group_count), 1.0)
        score = np.where(counted, score, 0.0)
        means = np.bincount(group, weights=score, minlength=group_count) / sizes
        centred = np.where(counted, score - means[group], 0.0)
        return cls(group, centred, means, sizes, _equal_scores(score, group, counted, group_count))

    def signal(self, values: npt.NDArray[np.float64]) -> FloatArray:
        """Returns float32 (B,): the values, and exactly 0 where all scores of the group are equal."""
        return np.where(self.flat[self.index], 0.0, values).astype(np.float32)


def _equal_scores(
    score: npt.NDArray[np.float64],
    group: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    group_count: int,
) -> npt.NDArray[np.bool_]:
    """Returns bool (G,): the groups whose counted scores are all the same number.

    Compares the scores themselves: the mean of eight times 0.1 is not 0.1, and a deviation of 1e-17 is not 0.
    """
    lowest = np.full(group_count, np.inf)
    highest = np.full(group_count, -np.inf)
    np.minimum.at(lowest, group[counted], score[counted])
    np.maximum.at(highest, group[counted], score[counted])
    return lowest >= highest


def spread_to_tokens(
    row_values: npt.ArrayLike, cu_seqlens: npt.ArrayLike, loss_mask: npt.ArrayLike
) -> FloatArray:
    """Returns float32 (N,): every trained token has the value of its row, every other 0. Never blocks.

    Args:
        row_values: float (B,), one value per row.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
    """
    lengths = _lengths(cu_seqlens)
    per_token = np.repeat(np.asarray(row_values, dtype=np.float32), lengths)
    return np.where(np.asarray(loss_mask) != 0, per_token, np.float32(0.0))


def _lengths(cu_seqlens: npt.ArrayLike) -> npt.NDArray[np.int64]:
    starts = np.asarray(cu_seqlens, dtype=np.int64)
    return starts[1:] - starts[:-1]


def override_rows(
    advantages: npt.ArrayLike,
    own: npt.ArrayLike,
    has_own: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
) -> FloatArray:
    """Returns float32 (N,), new: the advantages, replaced in rows whose record has its own. Never blocks.

    An environment's own token advantages (process rewards, turn credit) take precedence; rows without the
    column keep the advantages from the scores. Untrained tokens stay 0 either way.

    Args:
        advantages: float32 (N,), the advantages from the scores, dimensionless.
        own: float32 (N,), the records' own, zero-filled in rows that carried none.
        has_own: bool (B,), which rows carried their own.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
    """
    lengths = _lengths(cu_seqlens)
    from_record = np.repeat(np.asarray(has_own, dtype=bool), lengths)
    chosen = np.where(from_record, np.asarray(own, np.float32), np.asarray(advantages, np.float32))
    return np.where(np.asarray(loss_mask) != 0, chosen, np.float32(0.0))


def override_tokens(
    advantages: npt.ArrayLike, own: npt.ArrayLike, own_mask: npt.ArrayLike, loss_mask: npt.ArrayLike
) -> FloatArray:
    """Returns float32 (N,), new: the advantages, replaced where a record has a token's own. Never blocks.

    As `override_rows`, for records with advantages for only some of their tokens. A record's advantages are
    always numbers (a producer refuses NaN), so a mask says which of them count.

    Args:
        advantages: float32 (N,), the advantages from the scores, dimensionless.
        own: float32 (N,), the records' own; anything where the mask is zero.
        own_mask: uint8 or bool (N,), non-zero where the record's own value counts; 0 is a valid value.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained; all others get 0.

    Raises:
        ValueError: the arrays disagree in length.
    """
    base, from_record = np.asarray(advantages, np.float32), np.asarray(own, np.float32)
    counts, trained = np.asarray(own_mask) != 0, np.asarray(loss_mask) != 0
    if not base.shape == from_record.shape == counts.shape == trained.shape:
        raise ValueError(
            f"advantages have shape {base.shape}, own {from_record.shape}, own_mask {counts.shape}, "
            f"loss_mask {trained.shape}: one of each per token"
        )
    return np.where(trained, np.where(counts, from_record, base), np.float32(0.0))


def silence_rows(advantages: npt.ArrayLike, silenced: npt.ArrayLike, cu_seqlens: npt.ArrayLike) -> FloatArray:
    """Returns float32 (N,), new: the advantages, 0 in rows whose overrides say `set_advantage_to_zero`.

    Never blocks. Apply it last: it overrides all others. The rows' scores still count in their group's mean.

    Args:
        advantages: float32 (N,), dimensionless.
        silenced: bool (B,), the rows to set to 0.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
    """
    quiet = np.repeat(np.asarray(silenced, dtype=bool), _lengths(cu_seqlens))
    return np.where(quiet, np.float32(0.0), np.asarray(advantages, np.float32))


def clip_to_range(advantages: npt.ArrayLike, low: float, high: float) -> FloatArray:
    """Returns the advantages limited to low .. high: float32 of the same shape, new. Never blocks.

    Args:
        advantages: float32 (N,) or (B,), dimensionless.
        low: smallest value, at most 0, else untrained tokens would get an advantage; -inf: no bound.
        high: largest value, at least 0; inf: no bound.

    Raises:
        ValueError: 0 is not in the range.
    """
    if not low <= 0.0 <= high:
        raise ValueError(f"the range {low} .. {high} does not hold 0, the advantage of an untrained token")
    return np.clip(np.asarray(advantages, np.float32), np.float32(low), np.float32(high))


def alone(sums: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Returns its argument: the sum over all ranks if there is one rank. Never blocks."""
    return sums


def batch_normalised(
    advantages: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    reduce: Reduce = alone,
    centre: bool = True,
    eps: float = 1e-8,
    ddof: Literal[0, 1] = 0,
) -> npt.NDArray[np.float32]:
    """Returns (advantage - mean) / (std + eps), over the trained tokens of all ranks.

    Blocks as long as `reduce` does.

    Mean 0 and deviation 1 over the tokens of the mask, however many each rank has; all other tokens get 0 and
    are not counted. Equal advantages become exactly 0, as does a single one: without differences there is
    nothing to learn (with centre=False they are divided by their size plus eps instead). Every rank must call
    this, also one without trained tokens: `reduce` is called twice, with two numbers and then with one.

    Of token rewards summed to-go this is REINFORCE++, of `group_advantages(scale="none")` spread over tokens
    its variant with a baseline. Of (B,) values with a mask of rows it is the same over rows.

    Args:
        advantages: float32 (N,), dimensionless.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
        reduce: returns the sum of a float64 array over all ranks; by default there is one rank.
        centre: whether to subtract the mean; else the advantages are divided by their root mean square, signs
            kept.
        eps: added to the deviation, dimensionless.
        ddof: 0 for the deviation of the population, 1 for that of a sample, as verl has it.

    Returns:
        float32 (N,), a new array, dimensionless.

    Raises:
        ValueError: the arrays disagree in length.

    Source: REINFORCE++, arXiv 2501.03262 (advantage normalisation over the global batch).
    """
    values = np.asarray(advantages, dtype=np.float64)
    trained = np.asarray(loss_mask) != 0
    if values.shape != trained.shape:
        raise ValueError(
            f"advantages have shape {values.shape}, loss_mask {trained.shape}: one of each per token"
        )
    counted = values[trained]
    count, total = reduce(np.array([counted.size, counted.sum()]))
    mean = float(total / max(count, 1.0)) if centre else 0.0
    # In a second pass, because the mean of squares minus the square of the mean loses precision for large
    # means.
    (squares,) = reduce(np.array([np.square(counted - mean).sum()]))
    deviation = float(np.sqrt(squares / max(count - ddof, 1.0)))
    if deviation <= _NOISE * abs(mean):
        return np.zeros(values.shape, np.float32)
    return np.where(trained, (values - mean) / (deviation + eps), 0.0).astype(np.float32)


def overlong_penalty(lengths: npt.ArrayLike, max_length: int, buffer: int) -> npt.NDArray[np.float32]:
    """Returns what to add to each completion's reward: 0, then down to -1 over the last `buffer` tokens.

    Never blocks.

    Args:
        lengths: int (B,), tokens of each completion.
        max_length: tokens; longer completions, possible under another limit, get -1 too.
        buffer: tokens before `max_length` over which the penalty grows; 0: a step at `max_length`.

    Returns:
        float32 (B,), in [-1, 0], in units of the reward of a correct completion.

    Raises:
        ValueError: buffer is negative or larger than max_length.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer {buffer} is not within 0 and max_length {max_length}")
    over = (np.asarray(lengths, np.int64) - (max_length - buffer)).astype(np.float32)
    penalty: npt.NDArray[np.float32] = -np.clip(
        over / np.float32(max(buffer, 1)), np.float32(0.0), np.float32(1.0)
    )
    return penalty


def answer_lengths(cu_seqlens: npt.ArrayLike, places: npt.NDArray[np.intp]) -> npt.NDArray[np.int64]:
    """Returns int64 (B,): tokens from a row's first trained one to its end, 0 without any. Never blocks.

    Args:
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        places: int (n,), the places of the trained tokens, rising.
    """
    starts = np.asarray(cu_seqlens, np.int64)
    at = np.searchsorted(places, starts)
    lengths = np.zeros(starts.size - 1, np.int64)
    trains = at[1:] > at[:-1]
    lengths[trains] = starts[1:][trains] - places[at[:-1][trains]]
    return lengths
