"""The named losses, each put together from a ratio, a loss per token and an aggregation.

Knows which parts make which paper; the parts are in `ratio.py`, `policy.py` and `aggregation.py`.

All take flat packed tensors, value i belongs to token i:
    logprobs: (N,) float32, nats, under the policy being trained, with gradient.
    old_logprobs: (N,) float32, nats, under the policy that the ratio is against; positive or not finite where
        unknown, and the token then counts as unchanged.
    advantages: (N,) float32, dimensionless.
    mask: (N,) bool or 0/1, the trained tokens; nothing else is looked at.
    cu_seqlens: (B + 1,) integer, where each sequence begins, then N.
    clip_low, clip_high: how far the ratio may fall below and rise above 1.
    weights: (N,) float32 factors of the tokens' losses, as from `truncated_weights`; None is all 1.
    divisor: as in `aggregate`: for a micro-batch the whole batch's number of what is averaged over.
All return () float32, dimensionless, lower is better; never block, divide by zero nowhere.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmbridge.consumers.losses.aggregation import Mode, aggregate
from shmbridge.consumers.losses.policy import cispo_policy_loss, clipped_policy_loss
from shmbridge.consumers.losses.ratio import importance_ratio, sequence_ratio


def grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the GRPO loss: clipped surrogate, mean over each answer, then over answers (divisor: answers).

    Source: arXiv 2402.03300, equation 3, without its KL term (`kl_estimate`).
    """
    values = _surrogate(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return _reduced(values, weights, mask, cu_seqlens, "sequence_mean", divisor)


def dr_grpo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    max_tokens: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    weights: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the Dr. GRPO loss: clipped surrogate, sum over all tokens / (answers x max_tokens).

    Dividing by a constant instead of each answer's length takes away the reward for long wrong answers. The
    other half of the paper is in the advantages: score - mean, without the division by the deviation.

    Args:
        max_tokens: the longest answer allowed, tokens; the same for the whole run.
        divisor: answers of the whole batch; None counts all sequences given here. Below 1 counts as 1.

    Raises:
        ValueError: max_tokens is not above 0.

    Source: arXiv 2503.20783, section 3.2.
    """
    answers = cu_seqlens.numel() - 1 if divisor is None else divisor
    values = _surrogate(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return _reduced(values, weights, mask, cu_seqlens, "constant", max(answers, 1) * max_tokens)


def dapo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    weights: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the DAPO loss: clipped surrogate with the higher upper bound, mean over all tokens (divisor: tokens).

    Source: arXiv 2503.14476, sections 3.1 and 3.3; its overlong punishment is `soft_overlong_penalty`.
    """
    values = _surrogate(logprobs, old_logprobs, advantages, mask, clip_low, clip_high)
    return _reduced(values, weights, mask, cu_seqlens, "token_mean", divisor)


def gspo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    weights: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the GSPO loss: the clipped surrogate of whole answers, mean over answers (divisor: answers).

    The ratio is a geometric mean over an answer, hence the narrow bounds.

    Source: arXiv 2507.18071, equations 5, 7 and 13; the bounds are those of its section 5.1.
    """
    logprobs = _inside(mask, logprobs)
    ratio = sequence_ratio(logprobs, old_logprobs, mask, cu_seqlens)
    values = clipped_policy_loss(ratio, advantages, clip_low, clip_high)
    return _reduced(values, weights, mask, cu_seqlens, "sequence_mean", divisor)


def cispo_loss(
    logprobs: Tensor,
    old_logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
    weights: Tensor | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Return the CISPO loss: clipped ratio x advantage x log-probability, mean over all tokens (divisor: tokens).

    Source: MiniMax-M1, arXiv 2506.13585, equations 4 and 5. The paper names no upper bound; 1 + 4 is what the
    documentation of TRL recommends.
    """
    logprobs = _inside(mask, logprobs)
    ratio = importance_ratio(logprobs, old_logprobs)
    values = cispo_policy_loss(logprobs, ratio, advantages, clip_low, clip_high)
    return _reduced(values, weights, mask, cu_seqlens, "token_mean", divisor)


def _surrogate(
    logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor, clip_low: float, clip_high: float
) -> Tensor:
    ratio = importance_ratio(_inside(mask, logprobs), old_logprobs)
    return clipped_policy_loss(ratio, advantages, clip_low, clip_high)


def _reduced(
    values: Tensor, weights: Tensor | None, mask: Tensor, cu_seqlens: Tensor, mode: Mode, divisor: float | None
) -> Tensor:
    weighed = values if weights is None else values * weights
    return aggregate(weighed, mask, cu_seqlens, mode, divisor)


def _inside(mask: Tensor, logprobs: Tensor) -> Tensor:
    """Return the trained log-probabilities, 0 elsewhere; no gradient, be it NaN, passes to what is elsewhere."""
    return torch.where(mask.bool(), logprobs, 0.0)
