"""Importance ratios per token and per sequence, and truncated importance weights.

Letters: n or N tokens, of B sequences one after the other. All floats are float32, logarithms natural (nats).
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shmbridge.consumers.losses.aggregation import sequence_counts, sequence_sums, spread
from shmbridge.schema import is_logprob

# exp(20) is 5e8: far outside any clip range, well within float32. Without the bound one extreme
# log-probability makes the ratio infinite and the gradient of the whole batch NaN.
MAX_LOG_RATIO = 20.0


def known(logprobs: Tensor) -> Tensor:
    """Returns bool: where a log-probability was recorded. NaN, infinities, -9998 and below (vLLM's mark) and
    what is above 1e-3 (Atropos' 1.0) say that none was.
    """
    found: Tensor = is_logprob(logprobs)
    return found


def importance_ratio(logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Returns pi(token) / pi_sampler(token) for each trained token.

    Where the sampler's log-probability is unknown (see `known`) the policy itself replaces the sampler: the
    ratio is exactly 1 and its gradient that of the plain policy gradient.

    Args:
        logprobs: (n,) float32, under the policy being trained, with gradient.
        sampled_logprobs: (n,) float32, recorded when the token was sampled.

    Returns:
        (n,) float32, > 0, dimensionless, with the gradient of `logprobs`.

    Source: PPO, arXiv 1707.06347; GRPO, arXiv 2402.03300.
    """
    reference = torch.where(known(sampled_logprobs), sampled_logprobs.clamp(max=0.0), logprobs.detach())
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def sequence_ratio(logprobs: Tensor, sampled_logprobs: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the length-normalised ratio of each token's whole sequence, with the gradient of that token.

    (prod_t pi(y_t) / pi_old(y_t)) ^ (1 / trained tokens of the sequence), times pi(y_t) /
    stop_gradient(pi(y_t)), which is 1. With one advantage per sequence the gradient is that of the sequence's
    ratio itself; with an advantage per token each token's gradient uses its own. A token whose old
    log-probability is unknown has ratio 1.

    Args:
        logprobs: (N,) float32, nats, under the policy being trained, with gradient.
        sampled_logprobs: (N,) float32, nats, under the policy that the ratio is against.
        mask, cu_seqlens: as in `sequence_sums`.

    Returns:
        (N,) float32, > 0, dimensionless; the same for all tokens of a sequence, trained or not.

    Source: GSPO, arXiv 2507.18071, in the form of GSPO-token.
    """
    change = _log_ratio(logprobs, sampled_logprobs).detach()
    mean = sequence_sums(change, mask, cu_seqlens) / sequence_counts(mask, cu_seqlens).clamp(min=1.0)
    moving = spread(mean, cu_seqlens) + (logprobs - logprobs.detach())
    return moving.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def truncated_weights(
    train_logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    cap: float,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Returns min(pi_train / pi_sampler, cap), the weight that corrects for the sampler's difference.

    An inference engine computes other log-probabilities than the trainer with the same parameters; a token's
    loss times this weight corrects for it. No gradient. Unknown sampler log-probabilities count as equal.

    Args:
        train_logprobs: (N,) float32, nats, by the trainer with the parameters that sampled.
        sampled_logprobs: (N,) float32, nats, by the sampler (`inference_logprobs`).
        mask, cu_seqlens: as in `sequence_sums`.
        cap: the largest weight, > 0.
        level: `token`, each its own ratio (biased, little variance), or `sequence`, the product over the
            sequence's trained tokens (unbiased but for the cap, much variance).

    Returns:
        (N,) float32, in [0, cap], dimensionless; 0 where not trained.

    Raises:
        ValueError: cap is not above 0; an unknown level.

    Source: IMPALA, arXiv 1802.01561 (truncated importance weights); between sampler and trainer:
    verl's rollout correction (`rollout_is`) and TRL's `vllm_importance_sampling_mode` (`*_truncate`).
    """
    if not cap > 0.0:
        raise ValueError(f"cap {cap} is not above 0: every weight would be 0")
    ratio = _ratio_at(level, train_logprobs, sampled_logprobs, mask, cu_seqlens, mean=False)
    return torch.where(mask.bool(), ratio.clamp(max=cap), 0.0)


def outside(
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    mask: Tensor,
    cu_seqlens: Tensor,
    low: float,
    high: float,
    level: Literal["token", "sequence"] = "token",
) -> Tensor:
    """Returns the trained tokens whose ratio pi / pi_sampler is below `low` or above `high`.

    Args:
        logprobs: (N,) float32, nats, under the policy being trained; no gradient is taken.
        sampled_logprobs: (N,) float32, nats, recorded when the token was sampled; an unknown one counts as
            equal.
        mask, cu_seqlens: as in `sequence_sums`.
        low, high: the bounds, 0 <= low <= 1 <= high.
        level: `token`, each its own ratio, or `sequence`, all trained tokens of a sequence by their geometric
            mean.

    Returns:
        (N,) bool; False where not trained.

    Raises:
        ValueError: the bounds do not contain 1; an unknown level.

    Source: prime-rl's token and geometric masks; verl's rollout correction (`rollout_rs`); TRL's
    `vllm_importance_sampling_mode` (`*_mask`).
    """
    if not 0.0 <= low <= 1.0 <= high:
        raise ValueError(f"bounds {low} and {high} do not hold 1, the ratio of a sampler that is the policy")
    ratio = _ratio_at(level, logprobs, sampled_logprobs, mask, cu_seqlens, mean=True)
    return mask.bool() & ((ratio < low) | (ratio > high))


def _ratio_at(
    level: str, logprobs: Tensor, others: Tensor, mask: Tensor, cu_seqlens: Tensor, *, mean: bool
) -> Tensor:
    """Returns (N,), without gradient: the ratio of each token, or of its sequence, as product or mean."""
    if level not in ("token", "sequence"):
        raise ValueError(f"level {level!r} is neither 'token' nor 'sequence'")
    change = _log_ratio(logprobs, others).detach()
    if level == "sequence":
        total = sequence_sums(change, mask, cu_seqlens)
        counts = sequence_counts(mask, cu_seqlens).clamp(min=1.0)
        change = spread(total / counts if mean else total, cu_seqlens)
    return change.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _log_ratio(logprobs: Tensor, others: Tensor) -> Tensor:
    """Returns logprobs - others, 0 without gradient where the others are unknown."""
    return torch.where(known(others), logprobs - others.clamp(max=0.0), 0.0)
