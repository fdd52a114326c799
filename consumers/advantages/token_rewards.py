"""Token rewards as token advantages: summed to-go over the trained tokens, then normalised.

Pure numpy over the flat arrays of one packed batch.

Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from shmbridge.consumers.advantages.from_scores import group_advantages
from shmbridge.consumers.advantages.reward_to_go import to_go
from shmbridge.consumers.advantages.whole_batch import Reduce, alone, batch_normalised

FloatArray = npt.NDArray[np.float32]


def rewards_to_go(
    token_rewards: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    discount: float = 1.0,
) -> FloatArray:
    """Returns for every trained token its own reward and the later ones of its row, discounted. Never blocks.

    The discount is per trained token: an untrained span between two trained tokens costs nothing. A reward on
    an untrained token is ignored, as in verl; place a turn's reward on the last token that the policy wrote.

    Args:
        token_rewards: float32 (N,), in the environment's unit.
        cu_seqlens: int (B+1,), where each row begins in the packed batch, then N.
        loss_mask: uint8 or bool (N,), non-zero where a token is trained.
        discount: 0 .. 1 per trained token.

    Returns:
        float32 (N,), in the environment's unit; 0 where untrained.

    Raises:
        ValueError: the arrays disagree in length, or the discount is not in 0 .. 1.

    Source: REINFORCE++, arXiv 2501.03262, without its KL term.
    """
    rewards, trained, lengths = _checked(token_rewards, cu_seqlens, loss_mask)
    row_of_token = np.repeat(np.arange(lengths.size), lengths)
    returns = np.zeros(rewards.size, np.float32)
    returns[trained] = to_go(
        rewards[trained], np.bincount(row_of_token[trained], minlength=lengths.size), discount
    )
    return returns


def token_reward_advantages(
    token_rewards: npt.ArrayLike,
    group_index: npt.ArrayLike,
    cu_seqlens: npt.ArrayLike,
    loss_mask: npt.ArrayLike,
    *,
    has_rewards: npt.ArrayLike | None = None,
    discount: float = 1.0,
    over: Literal["group", "batch"] = "group",
    reduce: Reduce | None = None,
) -> FloatArray:
    """Returns `rewards_to_go`, normalised over the trained tokens of each group or of the batch.

    Blocks as long as `reduce` does.

    Rows without token rewards get 0 and are in no mean; `mixed` gives them the outcome.

    Args:
        token_rewards, cu_seqlens, loss_mask, discount: as in `rewards_to_go`; rows without rewards have 0.
        group_index: int (B,), ordinal of each row's group.
        has_rewards: bool (B,), rows that have token rewards; None means all.
        over: "group" as `group_advantages`, a token for a row; "batch" as `batch_normalised` (then it is
            REINFORCE++).
        reduce: for over="batch", as there; by default there is one rank.

    Returns:
        float32 (N,), dimensionless; 0 where untrained.

    Raises:
        ValueError: the arrays disagree in length, or an option is outside its range.
    """
    _, trained, lengths = _checked(token_rewards, cu_seqlens, loss_mask)
    group = np.asarray(group_index, dtype=np.int64)
    has = np.ones(lengths.shape, bool) if has_rewards is None else np.asarray(has_rewards, dtype=bool)
    if not group.shape == has.shape == lengths.shape:
        raise ValueError(
            f"group_index has shape {group.shape}, has_rewards {has.shape}, and cu_seqlens speaks of "
            f"{lengths.size} rows"
        )
    if over not in ("group", "batch"):
        raise ValueError(f'over is {over!r}: "group" or "batch"')
    counted = trained & np.repeat(has, lengths)
    returns = rewards_to_go(token_rewards, cu_seqlens, trained, discount=discount)
    if over == "group":
        return group_advantages(returns, np.repeat(group, lengths), usable=counted)
    return batch_normalised(returns, counted, reduce=reduce or alone)


def _checked(
    token_rewards: npt.ArrayLike, cu_seqlens: npt.ArrayLike, loss_mask: npt.ArrayLike
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_], npt.NDArray[np.int64]]:
    rewards, trained = np.asarray(token_rewards, dtype=np.float64), np.asarray(loss_mask) != 0
    starts = np.asarray(cu_seqlens, dtype=np.int64)
    lengths = starts[1:] - starts[:-1]
    if not rewards.shape == trained.shape == (lengths.sum(),):
        raise ValueError(
            f"token_rewards have shape {rewards.shape}, loss_mask {trained.shape}, and cu_seqlens ends at "
            f"{lengths.sum()}"
        )
    return rewards, trained, lengths
