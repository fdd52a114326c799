"""The losses of policy learners, as pure functions of tensors; this module exports every name.

A table of formulas and sources: docs/reference/losses.md.

`named` composes losses from `ratio`, `policy` and `aggregation`; `kl`, `overlong` and `sft` are independent;
`logprobs` and `chunked` compute the log-probabilities that all losses need.
"""

from shmbridge.consumers.losses.aggregation import (
    Mode,
    aggregate,
    predicted,
    sequence_counts,
    sequence_sums,
    spread,
    token_mean,
)
from shmbridge.consumers.losses.batch_logprobs import batch_logprobs
from shmbridge.consumers.losses.chunked import chosen_logprobs_chunked
from shmbridge.consumers.losses.kl import kl_estimate
from shmbridge.consumers.losses.logprobs import chosen_logprobs, entropy, log_distribution
from shmbridge.consumers.losses.named import (
    NAMED,
    Name,
    PolicyLoss,
    Terms,
    cispo_loss,
    dapo_loss,
    dr_grpo_loss,
    grpo_loss,
    gspo_loss,
    sft_loss,
)
from shmbridge.consumers.losses.overlong import soft_overlong_penalty
from shmbridge.consumers.losses.policy import (
    cispo_policy_loss,
    clip_sides,
    clipped,
    clipped_policy_loss,
    dual_clipped,
)
from shmbridge.consumers.losses.ratio import (
    MAX_LOG_RATIO,
    importance_ratio,
    known,
    outside,
    sequence_ratio,
    truncated_weights,
)
from shmbridge.consumers.losses.sft import compute_advantage_weighted_sft_loss, normalised

__all__ = [
    "MAX_LOG_RATIO",
    "NAMED",
    "Mode",
    "Name",
    "PolicyLoss",
    "Terms",
    "aggregate",
    "batch_logprobs",
    "chosen_logprobs",
    "chosen_logprobs_chunked",
    "cispo_loss",
    "cispo_policy_loss",
    "clip_sides",
    "clipped",
    "clipped_policy_loss",
    "compute_advantage_weighted_sft_loss",
    "dapo_loss",
    "dr_grpo_loss",
    "dual_clipped",
    "entropy",
    "grpo_loss",
    "gspo_loss",
    "importance_ratio",
    "kl_estimate",
    "known",
    "log_distribution",
    "normalised",
    "outside",
    "predicted",
    "sequence_counts",
    "sequence_ratio",
    "sequence_sums",
    "sft_loss",
    "soft_overlong_penalty",
    "spread",
    "token_mean",
    "truncated_weights",
]
