"""The policy losses: ratios, KL estimates, the loss of each token, aggregation, and the named losses.

Call a named loss for the loss of a batch; or call its `terms`, change them, and add them up with `share`.

Letters: n trained tokens, or N tokens of B sequences (completions), one after the other: sequence b owns
cu_seqlens[b] .. cu_seqlens[b + 1]. All floats are float32, logarithms are natural (nats).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from shmbridge.consumers.advantages.from_scores import overlong_penalty
from shmbridge.schema import is_logprob

Mode = Literal["token_mean", "sequence_mean", "constant"]
# exp(20) is 5e8: far outside any clip range, well within float32. Without the bound one extreme
# log-probability makes the ratio infinite and the gradient of the whole batch NaN.
MAX_LOG_RATIO = 20.0
Estimator = Literal["k1", "k2", "k3"]
Name = Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"]


def token_mean(values: Tensor, token_count: int) -> Tensor:
    """Returns this micro-batch's share of the mean over all trained tokens of the batch, () float32.

    Every token has the same weight, whatever its trajectory's length, and the shares of all micro-batches add
    up to the mean over the batch, so the token budget of a forward pass does not change the gradient.

    Args:
        values: (n,) float32, one per trained token of this micro-batch.
        token_count: trained tokens of the whole batch; 0 counts as 1.

    Source: DAPO, arXiv 2503.14476 (token-level policy gradient loss).
    """
    return values.sum() / max(token_count, 1)


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the sum over each sequence's trained tokens.

    Args:
        values: (N,) floating; values outside the mask are ignored, even NaN.
        mask: (N,) bool or 0/1, the trained tokens.
        cu_seqlens: (B + 1,) integer, where each sequence begins, then N.

    Returns:
        (B,), type of `values`, 0 for a sequence without a trained token.
    """
    counted = torch.where(mask.bool(), values, 0.0)
    owner = _owner(cu_seqlens, values)
    return counted.new_zeros(cu_seqlens.numel() - 1).index_add(0, owner, counted)


def predicted(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns bool (N,): the mask without the first token of each sequence, which nothing predicts."""
    inside = mask.bool().clone()
    starts = cu_seqlens[:-1].to(inside.device, torch.int64)
    inside[starts[starts < inside.numel()]] = False
    return inside


def sequence_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns how many trained tokens each sequence has: (N,), (B + 1,) -> (B,) float32."""
    return sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, cu_seqlens)


def spread(per_sequence: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Gives every token the value of its sequence: (B,), (B + 1,) -> (N,), with gradient."""
    return per_sequence[_owner(cu_seqlens, per_sequence)]


def aggregate(
    values: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: Mode, divisor: float | None = None
) -> Tensor:
    """Returns one number from the values of all trained tokens.

    `token_mean`: their sum / trained tokens; every token weighs the same. `sequence_mean`: the sum of the
    sequences' own means / sequences; a token of a long completion weighs less. `constant`: their sum /
    divisor.

    Args:
        values: (N,) floating, any unit.
        mask: (N,) bool or 0/1, the trained tokens.
        cu_seqlens: (B + 1,) integer, where each sequence begins, then N.
        mode: as above.
        divisor: the number to divide by. For a micro-batch, that of the *whole* batch (its trained tokens,
            its sequences): then the shares of all micro-batches add up. None counts those given here that
            have a trained token; `constant` has no such default. Below 1 counts as 1, except under
            `constant`.

    Returns:
        (), type and unit of `values`; 0, with a gradient of 0, if no token is trained.

    Raises:
        ValueError: an unknown mode; `constant` without a divisor above 0.

    Source: GRPO, arXiv 2402.03300 (`sequence_mean`); DAPO, arXiv 2503.14476 (`token_mean`); Dr. GRPO, arXiv
    2503.20783 (`constant`).
    """
    if mode == "constant":
        if divisor is None or not divisor > 0.0:
            raise ValueError(
                f"mode 'constant' divides by {divisor}: give a divisor above 0, as sequences x longest answer"
            )
        return torch.where(mask.bool(), values, 0.0).sum() / divisor
    if mode == "token_mean":
        total, count = torch.where(mask.bool(), values, 0.0).sum(), mask.bool().sum()
    elif mode == "sequence_mean":
        counts = sequence_counts(mask, cu_seqlens)
        total = (sequence_sums(values, mask, cu_seqlens) / counts.clamp(min=1.0)).sum()
        count = (counts > 0).sum()
    else:
        raise ValueError(f"mode {mode!r} is none of 'token_mean', 'sequence_mean', 'constant'")
    return total / (count.clamp(min=1) if divisor is None else max(divisor, 1.0))


def _owner(cu_seqlens: Tensor, like: Tensor) -> Tensor:
    """Returns int64 (N,): the sequence of each token."""
    lengths = cu_seqlens.to(like.device, torch.int64).diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=like.device), lengths)


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


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns `overlong_penalty` of a tensor of lengths, (B,) float32 on its device; the same errors."""
    return torch.from_numpy(overlong_penalty(lengths.cpu().numpy(), max_length, buffer)).to(lengths.device)
