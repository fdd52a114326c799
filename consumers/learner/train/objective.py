"""The learner's objective, and the loss of one micro-batch from arrays of its trained tokens.

Checks which options are compatible, and sets what each number is divided by; the formulas are in `losses`.

Letters: n trained tokens of a micro-batch, row after row; b rows of it.
"""

from __future__ import annotations

import operator
from dataclasses import astuple, dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from shmbridge.consumers import losses
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.advantages.from_scores import Reduce, alone
from shmbridge.consumers.learner import Refusal
from shmbridge.consumers.learner.config.options import LearnerConfig
from shmbridge.consumers.learner.data.microbatch import Layout
from shmbridge.consumers.learner.data.training_rows import TrainingRows, known_count

# The metrics of a micro-batch from `micro_loss`, in this order: its share of the whole batch's.
SHARES = (
    *("loss", "policy_loss", "entropy", "ratio_mean", "clip_frac", "clip_frac_low", "clip_frac_high"),
    *("kl", "tis_weight_mean", "tis_frac", "clip_frac_dual", "mask_frac", "mask_frac_sequence"),
)
LOSS_SHARES = 2  # the first so many are divided like the loss, the others by trained tokens


class BadObjective(Refusal, ValueError):
    """Incompatible options; the message says which, and what to do."""


@dataclass(frozen=True)
class Objective:
    """What to optimise, and how many tokens one forward pass takes.

    Fields are the options of `ObjectiveConfig` and `ComputeConfig`; None: no bound, no limit, no correction,
    or the loss's own. Raises `BadObjective` for options that do not go together.
    """

    loss: losses.Name = "dapo"
    clip_low: float | None = None
    clip_high: float | None = None
    clip_dual: float | None = 3.0
    mask_ratio: tuple[float, float] | None = None
    mask_ratio_sequence: tuple[float, float] | None = None
    max_tokens: int | None = None  # the longest completion allowed: dr_grpo's divisor
    entropy: float = 0.0  # weight of the mean token entropy
    kl: float = 0.0  # weight of the divergence from the reference
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    tis_cap: float | None = None
    tis_level: Literal["token", "sequence"] = "token"
    max_token_staleness: int | None = None
    truncated: Literal["keep", "mask", "drop"] = "keep"
    temperature: float = 1.0  # of rows without a recorded temperature
    whole_rows: bool = False  # those with neither a mask nor prompt_length
    ignore_images: bool = False
    leave_out_unknown_tokens: bool = False
    leave_out_long_rows: bool = False
    longest_row: int | None = None  # tokens; None: as many as the model has positions
    micro_tokens: int = 8192  # of one forward pass, padding included
    layout: Layout = "padded"  # "packed" needs a model that keeps rows apart: see attention.py
    chunk_tokens: int | None = None  # tokens whose logits exist at a time; None: all of a forward pass
    precision: torch.dtype = torch.float32  # of the forward pass; parameters are float32
    credit: Credit = Credit()  # noqa: RUF009  # frozen

    def __post_init__(self) -> None:
        clipped = self.clip_low is not None or self.clip_high is not None
        if self.loss not in losses.NAMED:
            raise BadObjective(f"loss {self.loss!r} is none of {', '.join(losses.NAMED)}")
        masked = self.mask_ratio is not None or self.mask_ratio_sequence is not None
        if self.loss == "sft" and (clipped or masked or self.tis_cap is not None):
            raise BadObjective(
                "--loss sft has no ratio: leave --clip-low, --clip-high, --tis-cap, --mask-ratio and "
                "--mask-ratio-sequence out"
            )
        if self.clip_dual is not None and not self.clip_dual > 1.0:
            raise BadObjective(
                f"--clip-dual {self.clip_dual} is not above 1, the ratio of a token that did not change -> "
                "3, or 0 for none"
            )
        for flag, bounds in (
            ("--mask-ratio", self.mask_ratio),
            ("--mask-ratio-sequence", self.mask_ratio_sequence),
        ):
            if bounds is not None and not 0.0 <= bounds[0] <= 1.0 <= bounds[1]:
                raise BadObjective(
                    f"{flag} {bounds[0]} {bounds[1]} does not hold 1, the ratio of a sampler that is the "
                    "policy"
                )
        if self.loss in ("gspo", "cispo") and self.tis_cap is not None:
            raise BadObjective(
                f"--tis-cap beside --loss {self.loss}: its own ratio corrects for the sampler already -> "
                "--loss grpo, dr_grpo or dapo"
            )
        if self.tis_cap is not None and clipped:
            raise BadObjective(
                "--clip-low and --clip-high beside --tis-cap: one update per batch leaves the ratio at 1, "
                "which no bound holds -> leave them or --tis-cap out"
            )
        if self.tis_cap is not None and not self.tis_cap > 0.0:
            raise BadObjective(f"--tis-cap {self.tis_cap} is not above 0: every weight would be 0")
        if self.loss == "dr_grpo" and not (self.max_tokens and self.max_tokens > 0):
            raise BadObjective(
                "--loss dr_grpo divides by the longest answer allowed: give --max-answer-tokens"
            )
        if self.loss != "sft" and self.credit.normalise != "none":
            raise BadObjective(
                f"--sft-normalization is for --loss sft alone, not for {self.loss} -> --advantages batch"
            )
        credit = self.credit
        if credit.clip is not None and not credit.clip[0] <= 0.0 <= credit.clip[1]:
            raise BadObjective(
                f"--clip-advantages {credit.clip[0]} .. {credit.clip[1]} does not hold 0, as untrained "
                "tokens have"
            )
        if credit.overlong_buffer > (credit.overlong_length or 0):
            raise BadObjective(
                f"--overlong-buffer {credit.overlong_buffer} is longer than --overlong-length "
                f"{credit.overlong_length}"
            )
        if credit.overlong_length is not None and not credit.overlong_buffer:
            raise BadObjective(
                f"--overlong-length {credit.overlong_length} without --overlong-buffer: an answer that was "
                f"cut at {credit.overlong_length} tokens would lose nothing -> give --overlong-buffer, or "
                "--truncated mask"
            )
        if self.kl < 0.0:
            raise BadObjective(
                f"--kl-coef {self.kl} is negative: it would drive the policy away from the reference"
            )

    @classmethod
    def of(cls, config: LearnerConfig) -> Objective:
        """Returns the objective of a configuration, without layout and chunks. Raises `BadObjective`."""
        goal, advantages = config.objective, config.advantages
        return cls(
            loss=goal.loss,
            clip_low=goal.clip_low,
            clip_high=goal.clip_high,
            clip_dual=goal.clip_dual or None,
            mask_ratio=goal.mask_ratio,
            mask_ratio_sequence=goal.mask_ratio_sequence,
            max_tokens=goal.max_answer_tokens or config.registration.max_token_len,
            entropy=goal.entropy,
            kl=goal.kl_coef,
            kl_estimator=goal.kl_estimator,
            tis_cap=goal.tis_cap,
            tis_level=goal.tis_level,
            max_token_staleness=goal.max_token_staleness,
            truncated=goal.truncated,
            temperature=goal.temperature,
            whole_rows=goal.train_whole_rows,
            ignore_images=goal.ignore_images,
            leave_out_unknown_tokens=goal.leave_out_unknown_tokens,
            leave_out_long_rows=goal.leave_out_long_rows,
            longest_row=config.registration.max_token_len,
            micro_tokens=config.compute.micro_tokens,
            precision=getattr(torch, config.compute.precision),
            credit=Credit(
                estimator=advantages.advantages,
                use_own=advantages.use_advantages,
                fallback=advantages.fallback_to_grpo,
                steps=advantages.process_rewards,
                step_over=advantages.process_over,
                step_discount=advantages.process_discount,
                step_weight=advantages.process_weight,
                token_rewards=advantages.token_rewards,
                token_discount=advantages.token_discount,
                token_weight=advantages.token_weight,
                overlong_length=advantages.overlong_length,
                overlong_buffer=advantages.overlong_buffer,
                normalise=goal.sft_normalization or ("batch" if goal.loss == "sft" else "none"),
                clip=advantages.clip_advantages,
            ),
        )


@dataclass(frozen=True)
class Counts:
    """Counts of the whole batch over all ranks: the divisors of losses and metrics."""

    tokens: float  # trained
    answers: float  # completions with a trained token
    rows: float
    with_reference: float  # trained tokens with a recorded reference log-probability

    @classmethod
    def of(cls, rows: TrainingRows, reduce: Reduce = alone) -> Counts:
        """Returns the counts of all ranks' rows; calls `reduce` once, and blocks as long as it does."""
        reference = rows.reference_logprobs
        with_reference = 0 if reference is None else known_count(reference, rows.places)
        own = [rows.trained_count, rows.answer_count, len(rows.cu_seqlens) - 1, with_reference]
        return cls(*reduce(np.array(own, np.float64)).tolist())

    def __add__(self, other: Counts) -> Counts:
        """Returns the counts of two batches together."""
        return Counts(*map(operator.add, astuple(self), astuple(other)))

    def divisor(self, loss: losses.Name) -> float:
        """Returns the number that the loss is divided by."""
        return {"token_mean": self.tokens, "sequence_mean": self.answers, "constant": self.rows}[
            losses.NAMED[loss].mode
        ]


def micro_loss(
    goal: Objective,
    counts: Counts,
    trained_lengths: Tensor,
    logprobs: Tensor,
    sampled_logprobs: Tensor,
    advantages: Tensor,
    *,
    entropy: Tensor | None = None,
    reference_logprobs: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns a micro-batch's share of the loss and of its metrics. Never blocks.

    The shares of all micro-batches of all ranks add up to the whole batch's value, however the batch is
    split, and so do their gradients. A row must not be split.

    Args:
        goal: the objective.
        counts: of the whole batch, over all ranks.
        trained_lengths: (b,) int64, trained tokens of each row.
        logprobs: (n,) float32, nats, under the policy being trained, with gradient.
        sampled_logprobs: (n,) float32, nats, recorded when the token was sampled; NaN where unknown.
        advantages: (n,) float32, dimensionless.
        entropy: (n,) float32, nats, with gradient if the objective has an entropy term; None counts as 0.
        reference_logprobs: (n,) float32, nats, under the reference, unknown as above; None: all unknown.

    Returns:
        () float32 with gradient, and (len(SHARES),) float32 without.
    """
    loss = losses.NAMED[goal.loss]
    mask = torch.ones_like(logprobs, dtype=torch.bool)
    cuts = torch.nn.functional.pad(trained_lengths.cumsum(0), (1, 0))

    def whole(values: Tensor) -> Tensor:
        return loss.share(
            values,
            mask,
            cuts,
            divisor=counts.divisor(goal.loss),
            max_tokens=goal.max_tokens,
            answers_only=True,
        )

    known = losses.known(sampled_logprobs)
    weights = torch.ones_like(logprobs.detach())
    old = sampled_logprobs
    if goal.tis_cap is not None:
        # One update per batch: the trainer's old log-probabilities equal the current ones.
        old = logprobs.detach()
        weights = losses.truncated_weights(old, sampled_logprobs, mask, cuts, goal.tis_cap, goal.tis_level)
    terms = loss.terms(
        logprobs,
        old,
        advantages,
        mask,
        cuts,
        clip_low=goal.clip_low,
        clip_high=goal.clip_high,
        clip_dual=goal.clip_dual,
        answers_only=True,
    )
    policy = terms.values if goal.tis_cap is None else terms.values * weights
    kl = torch.zeros_like(weights)
    if reference_logprobs is not None:
        kl = losses.kl_estimate(logprobs, reference_logprobs, goal.kl_estimator)
    values = policy
    if goal.kl:
        values = values + goal.kl * kl
    if goal.entropy and entropy is not None:
        values = values - goal.entropy * entropy
    far = far_answers = torch.zeros_like(mask)
    if goal.mask_ratio is not None:
        far = losses.outside(logprobs, sampled_logprobs, mask, cuts, *goal.mask_ratio, "token")
    if goal.mask_ratio_sequence is not None:
        far_answers = losses.outside(
            logprobs, sampled_logprobs, mask, cuts, *goal.mask_ratio_sequence, "sequence"
        )
    left_out = far | far_answers  # excluded from the loss, but counted in its divisor
    policy, values = (torch.where(left_out, 0.0, each) for each in (policy, values))
    share = whole(values)

    ratio = losses.importance_ratio(logprobs.detach(), sampled_logprobs)
    capped = known & (weights >= goal.tis_cap) if goal.tis_cap is not None else torch.zeros_like(mask)
    means = (
        torch.zeros_like(weights) if entropy is None else entropy.detach(),
        ratio,
        terms.clipped_low | terms.clipped_high | terms.held_dual,
        terms.clipped_low,
        terms.clipped_high,
        kl.detach(),
        weights,
        capped,
        terms.held_dual,
        left_out,
        far_answers,
    )
    per_token = torch.stack([each.float() for each in means]).sum(dim=1) / max(counts.tokens, 1.0)
    return share, torch.cat([torch.stack([share.detach(), whole(policy.detach())]).float(), per_token])
