"""The named losses, each composed of a ratio, a loss per token and an aggregation.

The parts are in `ratio.py`, `policy.py` and `aggregation.py`. Call a named loss for the loss of a batch; or
call `terms`, change them, and add them up with `share`.

Letters: N tokens of B sequences (completions), one after the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shmbridge.consumers.losses.aggregation import Mode, aggregate, predicted
from shmbridge.consumers.losses.policy import cispo_policy_loss, clip_sides, clipped_policy_loss, dual_clipped
from shmbridge.consumers.losses.ratio import importance_ratio, sequence_ratio

Name = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"]


@dataclass(frozen=True)
class Terms:
    """The loss of each token before aggregation."""

    values: Tensor  # (N,) float32, the token's loss, with gradient
    clipped_low: Tensor  # (N,) bool, clipped at the lower bound of the ratio
    clipped_high: Tensor  # (N,) bool, clipped at the upper bound
    held_dual: Tensor  # (N,) bool, clipped at the dual bound of negative advantages


@dataclass(frozen=True)
class PolicyLoss:
    """A named loss: its loss per token, its aggregation, and its default clip bounds."""

    # the clipped surrogate; the clipped ratio as a weight; no ratio at all
    form: Literal["clipped", "weighted", "plain"]
    mode: Mode
    clip_low: float = 0.0
    clip_high: float = 0.0
    whole_answers: bool = False  # the ratio is per completion, not per token

    def __call__(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
        *,
        clip_low: float | None = None,
        clip_high: float | None = None,
        clip_dual: float | None = None,
        weights: Tensor | None = None,
        divisor: float | None = None,
        max_tokens: int | None = None,
        answers_only: bool = False,
    ) -> Tensor:
        """Returns the loss of a batch, or a micro-batch's share of it: () float32, lower is better.

        Never blocks; never divides by zero. Raises ValueError as `share`.

        Args:
            logprobs: (N,) float32, nats, under the policy being trained, with gradient.
            old_logprobs: (N,) float32, nats, under the ratio's reference policy; where unknown (`known`) the
                ratio is 1.
            advantages: (N,) float32, dimensionless.
            mask: (N,) bool or 0/1, the trained tokens; all others are ignored. The first token of a sequence
                is never trained, whatever its mask is: the prediction at its position comes from the end of
                the row before.
            cu_seqlens: (B + 1,) integer, where each sequence begins, then N.
            clip_low, clip_high: how far the ratio may fall below and rise above 1; None: the loss's own
                bound.
            clip_dual: for the clipped losses: the ratio above which a negative advantage has no gradient;
                None: no bound.
            weights: (N,) float32 factors of the tokens' losses, as from `truncated_weights`; None: all 1.
            divisor: as in `share`.
            max_tokens: as in `share`.
            answers_only: sequences contain only trained tokens, taken out of their rows; then the first token
                counts, too.
        """
        values = self.terms(
            logprobs,
            old_logprobs,
            advantages,
            mask,
            cu_seqlens,
            clip_low=clip_low,
            clip_high=clip_high,
            clip_dual=clip_dual,
            answers_only=answers_only,
        ).values
        weighed = values if weights is None else values * weights
        return self.share(
            weighed, mask, cu_seqlens, divisor=divisor, max_tokens=max_tokens, answers_only=answers_only
        )

    def terms(
        self,
        logprobs: Tensor,
        old_logprobs: Tensor,
        advantages: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
        *,
        clip_low: float | None = None,
        clip_high: float | None = None,
        clip_dual: float | None = None,
        answers_only: bool = False,
    ) -> Terms:
        """Returns the loss of each token, and which tokens are clipped; arguments as `__call__`.

        Never blocks.
        """
        mask = mask if answers_only else predicted(mask, cu_seqlens)
        low = self.clip_low if clip_low is None else clip_low
        high = self.clip_high if clip_high is None else clip_high
        # Untrained values, even NaN, do not count and get no gradient.
        inside = torch.where(mask.bool(), logprobs, 0.0)
        if self.form == "plain":
            nowhere = torch.zeros_like(inside, dtype=torch.bool)
            return Terms(-advantages * inside, nowhere, nowhere, nowhere)
        ratio = (
            sequence_ratio(inside, old_logprobs, mask, cu_seqlens)
            if self.whole_answers
            else importance_ratio(inside, old_logprobs)
        )
        if self.form == "weighted":
            values = cispo_policy_loss(inside, ratio, advantages, low, high)
            return Terms(
                values, ratio < 1.0 - low, ratio > 1.0 + high, torch.zeros_like(ratio, dtype=torch.bool)
            )
        values = clipped_policy_loss(ratio, advantages, low, high, clip_dual)
        return Terms(
            values, *clip_sides(ratio, advantages, low, high), dual_clipped(ratio, advantages, clip_dual)
        )

    def share(
        self,
        values: Tensor,
        mask: Tensor,
        cu_seqlens: Tensor,
        *,
        divisor: float | None = None,
        max_tokens: int | None = None,
        answers_only: bool = False,
    ) -> Tensor:
        """Returns the aggregate of all trained tokens' values: () float32, dimensionless. Never blocks.

        Args:
            values: (N,) float32, one per token.
            mask: (N,) bool or 0/1, the trained tokens; as in the call.
            cu_seqlens: (B + 1,) integer, where each sequence begins, then N.
            divisor: for a micro-batch the whole batch's count: trained tokens (`dapo`, `cispo`, `sft`) or
                completions (`grpo`, `gspo`, `dr_grpo`). None counts the values given here. Below 1 counts as
                1.
            max_tokens: for `dr_grpo`: the longest completion allowed, tokens; the same for the whole run.
            answers_only: as in the call.

        Raises:
            ValueError: `dr_grpo` without max_tokens above 0.
        """
        mask = mask if answers_only else predicted(mask, cu_seqlens)
        if self.mode == "constant":
            answers = cu_seqlens.numel() - 1 if divisor is None else divisor
            divisor = max(answers, 1) * (max_tokens or 0)
        return aggregate(values, mask, cu_seqlens, self.mode, divisor)


# GRPO, arXiv 2402.03300: mean over each completion, then over completions. Its KL term is `kl_estimate`.
grpo_loss = PolicyLoss("clipped", "sequence_mean", 0.2, 0.2)

# Dr. GRPO, arXiv 2503.20783: the same terms / (completions x max_tokens). Dividing by a constant instead of
# each completion's length removes the incentive for long wrong completions. Its other half is in the
# advantages: score - mean, without the deviation.
dr_grpo_loss = PolicyLoss("clipped", "constant", 0.2, 0.2)

# DAPO, arXiv 2503.14476: clip-higher, mean over all tokens. Its overlong punishment is
# `soft_overlong_penalty`.
dapo_loss = PolicyLoss("clipped", "token_mean", 0.2, 0.28)

# GSPO, arXiv 2507.18071: the ratio is a geometric mean over the completion, hence the narrow bounds; these
# are from the paper's runs (section 5.1).
gspo_loss = PolicyLoss("clipped", "sequence_mean", 3e-4, 4e-4, whole_answers=True)

# CISPO, MiniMax-M1, arXiv 2506.13585: clipped ratio x advantage x log-probability, mean over all tokens, no
# lower bound. The paper names no upper bound; 1 + 4 is what the documentation of TRL recommends.
cispo_loss = PolicyLoss("weighted", "token_mean", 1.0, 4.0)

# Advantage-weighted fine-tuning, from log-probabilities; from logits it is
# `compute_advantage_weighted_sft_loss`.
sft_loss = PolicyLoss("plain", "token_mean")

NAMED: dict[Name, PolicyLoss] = {
    "grpo": grpo_loss,
    "dr_grpo": dr_grpo_loss,
    "dapo": dapo_loss,
    "gspo": gspo_loss,
    "cispo": cispo_loss,
    "sft": sft_loss,
}
