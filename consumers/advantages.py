"""Group-normalised advantages, spread over tokens, with each record's own advantages on top.

Pure numpy over the flat arrays of one packed batch. Knows nothing of torch, of models, of the bridge.
Called by `training_rows.py`, and by anything else that trains on scores.

Letters: B rows (trajectories), G groups, N tokens of the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]


def group_normalised(
    scores: npt.ArrayLike,
    group_index: npt.ArrayLike,
    *,
    usable: npt.ArrayLike | None = None,
    eps: float = 1e-4,
) -> FloatArray:
    """Return every row's advantage over its own group: (score - mean) / (std + eps). Never blocks.

    The standard deviation is the population one, as in the reference trainer of Atropos. A group whose
    scores are all equal, and so a group of one, gets exactly 0. A row that is not usable, or whose score is
    not finite, gets 0 and takes no part in its group's mean and deviation: one broken score must not spoil
    seven good ones.

    Args:
        scores: float64 (B,), outcome reward of each row, in the environment's unit.
        group_index: int (B,), ordinal of each row's group, 0 .. G-1 in any order.
        usable: bool (B,), rows that carry a score at all; None means all of them.
        eps: added to the deviation, in the unit of the scores.

    Returns:
        float32 (B,), dimensionless.

    Raises:
        ValueError: the arrays disagree in length, or a group index is negative.

    Source: GRPO, arXiv 2402.03300, section 4.1.2 (outcome supervision).
    """
    score = np.asarray(scores, dtype=np.float64)
    group = np.asarray(group_index, dtype=np.int64)
    if score.ndim != 1 or score.shape != group.shape:
        raise ValueError(f"scores have shape {score.shape}, group_index {group.shape}: one of each per row")
    counted = np.isfinite(score)
    if usable is not None:
        counted &= np.asarray(usable, dtype=bool)

    group_count = int(group.max(initial=-1)) + 1
    sizes = np.maximum(np.bincount(group, weights=counted, minlength=group_count), 1.0)
    score = np.where(counted, score, 0.0)
    means = np.bincount(group, weights=score, minlength=group_count) / sizes
    centred = np.where(counted, score - means[group], 0.0)
    deviations = np.sqrt(np.bincount(group, weights=centred**2, minlength=group_count) / sizes)
    flat = _equal_scores(score, group, counted, group_count)
    return np.where(flat[group], 0.0, centred / np.where(flat, 1.0, deviations + eps)[group]).astype(
        np.float32
    )


def _equal_scores(
    score: npt.NDArray[np.float64],
    group: npt.NDArray[np.int64],
    counted: npt.NDArray[np.bool_],
    group_count: int,
) -> npt.NDArray[np.bool_]:
    """Return bool (G,): the groups whose counted scores are all the same number.

    Asked of the scores themselves: the mean of eight times 0.1 is not 0.1, and a deviation of 1e-17 is not 0.
    """
    lowest = np.full(group_count, np.inf)
    highest = np.full(group_count, -np.inf)
    np.minimum.at(lowest, group[counted], score[counted])
    np.maximum.at(highest, group[counted], score[counted])
    return lowest >= highest


def spread_to_tokens(
    row_values: npt.ArrayLike, cu_seqlens: npt.ArrayLike, loss_mask: npt.ArrayLike
) -> FloatArray:
    """Give every trained token the value of its row, every other token 0. Never blocks.

    Args:
        row_values: float (B,), one value per row.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.

    Returns:
        float32 (N,).
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
    """Replace the advantages of the rows whose record carried its own, token by token. Never blocks.

    An environment that knows what each token was worth (process rewards, turn credit) has the last word; rows
    without such a column keep what the scores gave them. Untrained tokens stay 0 either way.

    Args:
        advantages: float32 (N,), the advantages from the scores, dimensionless.
        own: float32 (N,), the records' own, zero-filled in rows that carried none.
        has_own: bool (B,), which rows carried their own.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.

    Returns:
        float32 (N,), a new array.
    """
    lengths = _lengths(cu_seqlens)
    from_record = np.repeat(np.asarray(has_own, dtype=bool), lengths)
    chosen = np.where(from_record, np.asarray(own, np.float32), np.asarray(advantages, np.float32))
    return np.where(np.asarray(loss_mask) != 0, chosen, np.float32(0.0))
