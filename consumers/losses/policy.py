"""The loss of each trained token: the clipped surrogate, and CISPO. Lower is better.

`ratio.py` computes the ratio, `aggregation.py` sums the tokens.

Letters: n trained tokens (of any number of trajectories, in any order), V vocabulary. All floats are float32,
logarithms are natural (nats).
"""

from __future__ import annotations

import torch
from torch import Tensor


def clipped_policy_loss(
    ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float, clip_dual: float | None = None
) -> Tensor:
    """Returns the clipped surrogate loss of each trained token: (n,) float32, lower is better.

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A), and where A < 0 at most -clip_dual * A.
    Without clip_dual the loss of a token with a tiny sampler probability and a negative advantage is
    unbounded.

    Args:
        ratio: (n,) float32, from `importance_ratio`.
        advantages: (n,) float32, dimensionless.
        clip_low: how far the ratio may fall before a negative advantage has no gradient.
        clip_high: how far it may rise before a positive one does; larger than clip_low it leaves unlikely
            tokens room to grow.
        clip_dual: the ratio above which a negative advantage has no gradient, above 1; None: no bound.

    Source: GRPO, arXiv 2402.03300; the two separate bounds: DAPO, arXiv 2503.14476 (clip-higher); clip_dual:
    dual-clip PPO, arXiv 1912.09729, equation 5 (verl's `clip_ratio_c`).
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = -torch.minimum(ratio * advantages, bounded * advantages)
    if clip_dual is None:
        return loss
    return torch.where(advantages < 0, torch.minimum(loss, -clip_dual * advantages), loss)


def clip_sides(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> tuple[Tensor, Tensor]:
    """Returns bool (n,) twice: tokens that `clipped_policy_loss` clips low, and high; same arguments."""
    return (ratio < 1.0 - clip_low) & (advantages < 0), (ratio > 1.0 + clip_high) & (advantages > 0)


def dual_clipped(ratio: Tensor, advantages: Tensor, clip_dual: float | None) -> Tensor:
    """Returns bool (n,): the tokens that `clipped_policy_loss` clips at `clip_dual`; same arguments."""
    return (
        torch.zeros_like(ratio, dtype=torch.bool)
        if clip_dual is None
        else (ratio > clip_dual) & (advantages < 0)
    )


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Returns bool (n,): the tokens that get no gradient from `clipped_policy_loss`; same arguments."""
    low, high = clip_sides(ratio, advantages, clip_low, clip_high)
    return low | high


def cispo_policy_loss(
    logprobs: Tensor, ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    """Returns the CISPO loss of each token; the clipped ratio is only a weight, so every gradient stays.

    -stop_gradient(clip(ratio, 1 - clip_low, 1 + clip_high)) * A * log pi

    Args:
        logprobs: (n,) float32, nats, under the policy being trained, with gradient.
        ratio: (n,) float32, from `importance_ratio`; its gradient is not used.
        advantages: (n,) float32, dimensionless.
        clip_low: how far below 1 the weight may fall; 1 or more: no lower bound, as in the paper's runs.
        clip_high: how far above 1 it may rise.

    Returns:
        (n,) float32, nats times advantage. Only its gradient is meaningful.

    Source: MiniMax-M1, arXiv 2506.13585 (CISPO). TRL's `epsilon_high` is the bound
    itself, so its 5.0 is a `clip_high` of 4.0 here.
    """
    weight = ratio.detach().clamp(1.0 - clip_low, 1.0 + clip_high)
    return -weight * advantages * logprobs
