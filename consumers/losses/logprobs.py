"""Log-probabilities of the trained tokens, and entropy, from full logits; `chunked.py` holds fewer.

Letters: n trained tokens (of any number of trajectories, in any order), V vocabulary. All floats are float32,
logarithms are natural (nats).
"""

from __future__ import annotations

import torch
from torch import Tensor


def log_distribution(logits: Tensor, temperature: Tensor) -> Tensor:
    """Returns the log-probabilities of the distribution that was sampled from: (n, V) float32, nats.

    Args:
        logits: (n, V), the model's logits at the positions *before* the trained tokens, any float type.
        temperature: (n,) float32, sampling temperature, > 0; it divides the logits, as the sampler did.
    """
    return torch.log_softmax(logits.float() / temperature.unsqueeze(-1), dim=-1)


def chosen_logprobs(log_probabilities: Tensor, targets: Tensor) -> Tensor:
    """Returns the log-probability of each trained token: (n,) float32, nats.

    Args:
        log_probabilities: (n, V) float32, from `log_distribution`.
        targets: (n,) int64, the trained tokens.
    """
    return log_probabilities.gather(-1, targets.unsqueeze(-1)).squeeze(-1)


def entropy(log_probabilities: Tensor) -> Tensor:
    """Returns the entropy of each distribution, in nats: (n, V) float32 -> (n,) float32."""
    return -(log_probabilities.exp() * log_probabilities).sum(dim=-1)
