"""The GRPO objective as pure functions of tensors: log-probabilities, ratio, clipped loss, entropy.

Knows nothing of models, batches or the bridge. Called by `grpo_update.py`.

Letters: n trained tokens (of any number of trajectories, in any order), V vocabulary. All floats are float32,
logarithms are natural (nats).
"""

from __future__ import annotations

import torch
from torch import Tensor

# exp(20) is already 5e8: far outside any clip range, far inside float32. Without the bound one absurd
# log-probability makes the ratio infinite and the gradient of the whole batch NaN.
MAX_LOG_RATIO = 20.0


def log_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Return the log-probabilities of the distribution that was sampled from.

    Args:
        logits: (n, V), the model's logits at the positions *before* the trained tokens, any float type.
        temperature: (n,) float32, sampling temperature, > 0; it divides the logits, as the sampler did.

    Returns:
        (n, V) float32, nats.
    """
    return torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)


def chosen_logprobs(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Return the log-probability of each trained token.

    Args:
        log_probabilities: (n, V) float32, from `log_distribution`.
        targets: (n,) int64, the trained tokens.

    Returns:
        (n,) float32, nats.
    """
    return log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Return the entropy of each distribution, in nats: (n, V) float32 -> (n,) float32."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)


def importance_ratio(logprobs: Tensor, sampled_logprobs: Tensor) -> Tensor:
    """Return pi(token) / pi_sampler(token) for each trained token.

    Where the sampler's log-probability is unknown (marked by a positive one, or not finite) the policy stands
    in for its own sampler: the ratio is exactly 1 and its gradient that of the plain policy gradient.

    Args:
        logprobs: (n,) float32, under the policy being trained, with gradient.
        sampled_logprobs: (n,) float32, recorded when the token was sampled.

    Returns:
        (n,) float32, > 0, dimensionless, with the gradient of `logprobs`.

    Source: PPO, arXiv 1707.06347, equation 6; GRPO, arXiv 2402.03300, equation 3.
    """
    known = (sampled_logprobs <= 0.0) & sampled_logprobs.isfinite()
    reference = torch.where(known, sampled_logprobs, logprobs.detach())
    return (logprobs - reference).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def clipped_policy_loss(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return the clipped surrogate loss of each trained token: lower is better.

    -min(ratio * A, clip(ratio, 1 - clip_low, 1 + clip_high) * A)

    Args:
        ratio: (n,) float32, from `importance_ratio`.
        advantages: (n,) float32, dimensionless.
        clip_low: how far the ratio may fall before a negative advantage stops pushing.
        clip_high: how far it may rise before a positive one does; larger than clip_low it leaves unlikely
            tokens room to grow.

    Returns:
        (n,) float32.

    Source: GRPO, arXiv 2402.03300, equation 3; the two separate bounds: DAPO, arXiv 2503.14476, section 3.1
    (clip-higher).
    """
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return -torch.minimum(ratio * advantages, bounded * advantages)


def clipped(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """Return bool (n,): the tokens that `clipped_policy_loss` gives no gradient; arguments as there."""
    too_high = (ratio > 1.0 + clip_high) & (advantages > 0)
    too_low = (ratio < 1.0 - clip_low) & (advantages < 0)
    return too_high | too_low


def token_mean(values: Tensor, token_count: int) -> Tensor:
    """Return this micro-batch's share of the mean over all trained tokens of the batch.

    Every token weighs the same, however long its trajectory, and the shares of all micro-batches add up to
    the mean over the batch, so the token budget of a forward pass does not change the gradient.

    Args:
        values: (n,) float32, one per trained token of this micro-batch.
        token_count: trained tokens of the whole batch; 0 counts as 1.

    Returns:
        () float32.

    Source: DAPO, arXiv 2503.14476, section 3.3 (token-level policy gradient loss).
    """
    return values.sum() / max(token_count, 1)
