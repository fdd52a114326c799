"""Estimates of the KL divergence to a reference policy, one per token, from single samples.

Letter: N tokens.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from shmbridge.consumers.losses.ratio import MAX_LOG_RATIO, known

Estimator = Literal["k1", "k2", "k3"]


def kl_estimate(logprobs: Tensor, reference_logprobs: Tensor, estimator: Estimator) -> Tensor:
    """Returns an estimate of KL(policy || reference) at each token sampled from the policy.

    With d = log reference - log policy: `k1` = -d, unbiased, of any sign, much variance; `k2` = d^2 / 2,
    biased, little variance; `k3` = exp(d) - 1 - d, unbiased, never negative, little variance. As a term of a
    loss they differ more: the expected gradient of k1 is 0, that of k2 is the divergence's own, and that of
    k3 is that of the reverse divergence. Use k1 inside a reward, k2 or k3 inside a loss.

    Args:
        logprobs: (N,) floating, nats, under the policy, with or without gradient.
        reference_logprobs: (N,) floating, nats, under the reference (`ref_logprobs`).
        estimator: as above.

    Returns:
        (N,), type of `logprobs`, nats; 0 without gradient where the reference is unknown (`known`).

    Raises:
        ValueError: an unknown estimator.

    Source: J. Schulman, "Approximating KL Divergence", 2020, joschu.net/blog/kl-approx.html; k3 in a loss:
    GRPO, arXiv 2402.03300.
    """
    d = torch.where(known(reference_logprobs), reference_logprobs.clamp(max=0.0) - logprobs, 0.0)
    if estimator == "k1":
        return -d
    if estimator == "k2":
        return 0.5 * d.square()
    if estimator == "k3":
        bounded = d.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        return bounded.expm1() - bounded
    raise ValueError(f"estimator {estimator!r} is none of 'k1', 'k2', 'k3'")
