"""The sections that say what is learnt and how; `run_options.py` has the others and the whole."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from shmbridge.consumers.learner.config.option import (
    AboveZero,
    Finite,
    Fraction,
    NotNegative,
    Positive,
    Rate,
    ZeroOrAbove,
)

Bounds = tuple[ZeroOrAbove, ZeroOrAbove]
# Schedules of the learning rate: those of transformers.SchedulerType that are functions of the step.
_Constant = Literal["constant", "constant_with_warmup"]
_Cosine = Literal["cosine", "cosine_with_restarts", "cosine_with_min_lr", "cosine_warmup_with_min_lr"]
Schedule = Literal["linear", _Constant, _Cosine, "polynomial", "inverse_sqrt", "warmup_stable_decay"]


@dataclass(frozen=True)
class ObjectiveConfig:
    """The loss, its corrections, and what is not trained.

    loss: the loss of a token, and how losses are averaged over tokens: docs/reference/losses.md
    clip_low: clip the ratio below 1 - X [the loss's own; dapo: 0.2]
    clip_high: clip the ratio above 1 + X [the loss's own; dapo: 0.28]
    clip_dual: dual clip, of the clipped losses: a negative advantage gives no gradient where the ratio is
        above X; 0: no dual clip
    mask_ratio (LOW HIGH): do not train tokens whose ratio policy / sampler is outside [all are trained]
    mask_ratio_sequence (LOW HIGH): do not train completions whose ratio is outside, the geometric mean over
        their trained tokens [all are trained]
    mismatch_warn (NATS): warn when log-probabilities of sampler and policy differ by more than this, in the
        mean over tokens whose token_versions is the version being trained; 0: never
    max_answer_tokens: longest completion, by which dr_grpo divides [--max-token-len]
    tis_cap: truncated importance sampling: weight by min(policy / sampler, X) instead of a clipped ratio
        [off]
    tis_level: one weight of truncated importance sampling per token, or per sequence
    max_token_staleness (VERSIONS): do not train tokens that were sampled more policy versions ago than this
        [the ratio corrects for any]
    truncated: completions whose finish_reason is not stop: train them (keep); do not (mask); or also leave
        their scores out of their groups (drop)
    kl_coef: weight of the KL divergence from the reference
    kl_estimator: estimator of that divergence; the reference is ref_logprobs of the record, or else the model
        as it began
    entropy: weight of the entropy bonus, constant
    temperature: sampling temperature where the record does not say; recorded log-probabilities are taken to
        be those of the tempered distribution
    train_whole_rows: train all tokens, the prompt too, of trajectories with neither a mask nor prompt_length
        [they train nothing]
    ignore_images: train trajectories with images as text alone, instead of ending with an error
    leave_out_unknown_tokens: train nothing of trajectories with a token id that the model does not have,
        instead of ending with an error
    leave_out_long_rows: train nothing of trajectories that are longer than the model's positions or
        --max-token-len, instead of ending with an error
    sft_normalization: with --loss sft: normalise advantages over the trained tokens of this rank's batch, or
        of all ranks [batch]
    """

    loss: Literal["grpo", "dr_grpo", "dapo", "gspo", "cispo", "sft"] = "dapo"
    clip_low: ZeroOrAbove | None = None
    clip_high: ZeroOrAbove | None = None
    clip_dual: ZeroOrAbove = 3.0
    mask_ratio: Bounds | None = None
    mask_ratio_sequence: Bounds | None = None
    mismatch_warn: ZeroOrAbove = 0.05
    max_answer_tokens: Positive | None = None
    tis_cap: AboveZero | None = None
    tis_level: Literal["token", "sequence"] = "token"
    max_token_staleness: NotNegative | None = None
    truncated: Literal["keep", "mask", "drop"] = "keep"
    kl_coef: Rate = 0.0
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    entropy: Finite = 0.0
    temperature: AboveZero = 1.0
    train_whole_rows: bool = False
    ignore_images: bool = False
    leave_out_unknown_tokens: bool = False
    leave_out_long_rows: bool = False
    sft_normalization: Literal["none", "batch", "global"] | None = None


@dataclass(frozen=True)
class AdvantageConfig:
    """Where advantages come from.

    advantages: from the scores: less the group's mean and divided by its deviation (grpo); not divided
        (dr_grpo); less the mean of the group's others (rloo); or less the group's mean, then normalised over
        all trained tokens of all ranks (batch)
    use_advantages: on, advantages of environments are used; this flag takes all from the scores instead
    fallback_to_grpo: on, a group without advantages of its own gets them from its scores; this flag ends with
        an error instead
    clip_advantages (LOW HIGH): smallest and largest advantage [no bounds]
    process_rewards: step_rewards: a token gets those of its own step and all later ones, or of its own step
        alone
    process_over: normalise all step rewards of a group together, or the first of each row, the second of each
        row, ...
    process_discount: discount per step, for to_go
    process_weight: weight of step rewards; 1 - X goes to the outcome
    token_rewards: token_rewards: summed to-go, then normalised over the group's tokens, or over those of all
        ranks
    token_discount: discount per trained token
    token_weight: weight of token rewards; 1 - X goes to the advantages without them
    overlong_length: completions of this many tokens lose 1 of their score; takes --overlong-buffer [no limit]
    overlong_buffer: number of tokens before that length over which the loss of score grows from 0 to 1
    """

    advantages: Literal["grpo", "dr_grpo", "rloo", "batch"] = "grpo"
    use_advantages: bool = True
    fallback_to_grpo: bool = True
    clip_advantages: tuple[float, float] | None = None
    process_rewards: Literal["off", "to_go", "step"] = "off"
    process_over: Literal["group", "place"] = "group"
    process_discount: Fraction = 1.0
    process_weight: Fraction = 0.5
    token_rewards: Literal["off", "group", "batch"] = "off"
    token_discount: Fraction = 1.0
    token_weight: Fraction = 0.5
    overlong_length: Positive | None = None
    overlong_buffer: NotNegative = 0


@dataclass(frozen=True)
class OptimizerConfig:
    """The learning rate, its schedule, and AdamW.

    lr: peak learning rate of AdamW [1e-6]
    warmup: warm-up steps
    schedule: learning rate after the warm-up: linear to 0, or a schedule of transformers
    schedule_option (NAME=X): keyword of that schedule in transformers, such as min_lr_rate=0.1 for
        cosine_with_min_lr; may be repeated
    weight_decay: decoupled weight decay
    max_grad_norm: gradients are clipped to this norm
    """

    lr: Rate = 1e-6
    warmup: NotNegative = 10
    schedule: Schedule = "linear"
    schedule_option: Mapping[str, Finite] = field(default_factory=dict)
    weight_decay: Rate = 0.0
    max_grad_norm: AboveZero = 1.0


@dataclass(frozen=True)
class AdapterConfig:
    """Low-rank adapters (LoRA, by peft).

    lora_rank: train adapters of this rank only; weights are published merged [no adapters]
    lora_alpha: adapters are scaled by X / rank [twice the rank]
    lora_dropout: dropout in front of the adapters
    lora_targets (NAME,...): modules that get an adapter, by the ends of their names, such as q_proj,v_proj
        [every linear layer but the head]
    """

    lora_rank: Positive | None = None
    lora_alpha: AboveZero | None = None
    lora_dropout: Fraction = 0.0
    lora_targets: tuple[str, ...] = ("all-linear",)
