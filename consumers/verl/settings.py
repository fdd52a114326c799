"""The configuration of a bridge in verl: the seed recipe's keys under `trainer.atropos`, and the name.

    trainer:
      atropos: {bridge: run1, use_advantages: true, fallback_to_grpo: true}

Also the advantage estimator `shmbridge`, which passes on the advantages that rows carry in `rm_scores`. The
recipe's keys mean what they mean for the learner and in `shmbridge launch`: docs/how-to/launch.md.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass, fields
from typing import Any, Literal, get_args

import torch

from shmbridge.config import check_bridge_name
from shmbridge.consumers.feed import Refused, ReleaseAt, Start, Unfit, check_words, refuse, setting
from shmbridge.consumers.learner.data.sources import Patience
from shmbridge.consumers.trajectories import Credit

log = logging.getLogger(__name__)

NAMES = ("shmbridge", "grpo_atropos")  # of the advantage estimator; the latter is the seed recipe's
VERSION = "shmbridge/weights_version"  # of the version that the checkpoint engine has written
MODE = "shmbridge"  # verl's name of the trainer that releases groups with checkpoints
VALIDATES = (
    "verl validates with prompts of its own, and environments own them here -> "
    "trainer.val_before_train=False trainer.test_freq=-1; environments evaluate with split='eval'"
)

Normalise = Literal["none", "batch", "global"]

_REFUSED = {
    "use_advantage_weighting": "a loss of verl's is -> actor_rollout_ref.actor.policy_loss.loss_mode=gpg"
}


def _passes_advantages(config: Any) -> bool:
    return str(config.algorithm.adv_estimator) in NAMES


def _bypassed(value: Any, config: Any) -> bool:
    return bool(value and setting(config, "algorithm.rollout_correction.bypass_mode"))


def _sums_advantages(metric: Any, config: Any) -> bool:
    filters = setting(config, "algorithm.filter_groups.enable")
    return bool(filters and metric == "reward" and _passes_advantages(config))


_OURS = "shmbridge's rewards score groups before they are put"
# What verl's own settings would do wrongly to rows of a bridge.
REFUSED = (
    Refused("algorithm.use_kl_in_reward", "it changes the advantages that rm_scores carry",
            "algorithm.use_kl_in_reward=False actor_rollout_ref.actor.use_kl_loss=True",
            lambda value, config: value and _passes_advantages(config)),
    Refused("algorithm.filter_groups.metric",
            "verl would judge groups by the sums of their advantages, which rm_scores carry",
            "algorithm.filter_groups.metric=score, or a name of reward_components", _sums_advantages),
    *(Refused(f"algorithm.rollout_correction.{key}",
              "verl's v1 trainer leaves it out where bypass_mode takes the sampler's log-probabilities",
              "algorithm.rollout_correction.bypass_mode=False", _bypassed)
      for key in ("rollout_is", "rollout_rs")),
    Refused("reward.reward_model.enable", "verl's reward model would overwrite what environments scored",
            f"reward.reward_model.enable=False; {_OURS}"),
    *(Refused(f"reward.{key}.path", "verl would never call it, as environments score",
              f"reward.{key}.path=null; {_OURS}")
      for key in ("custom_reward_function", "reward_manager.module")),
    Refused("trainer.critic_warmup",
            "no critic is trained, and these first steps would release their groups untrained",
            "trainer.critic_warmup=0", lambda value, config: value and _passes_advantages(config)),
    Refused("distillation.enabled", "verl's teachers score what verl sampled, and environments sample here",
            "distillation.enabled=False"),
)  # fmt: skip


@dataclass(frozen=True)
class Form:
    """What verl's configuration asks of a row."""

    per_token: bool  # rm_scores carry advantages; else the score, on the last trained token
    scored: bool  # a score is needed beside advantages
    logprobs: bool  # rollout_log_probs are needed
    temperature: float  # that verl divides logits by


@dataclass(frozen=True)
class Settings:
    """What is read under `trainer.atropos`; times in seconds."""

    bridge: str = ""
    api_url: str = ""  # not used: nothing is between the environments and the trainer
    timeout: float | None = None  # of one try to get a step's groups
    retry_attempts: int | None = None
    retry_delay: float | None = None  # before the second try; grows
    max_wait_time: float | None = None  # all tries together
    use_advantages: bool = True  # of the records, where they have some; False: always from scores
    fallback_to_grpo: bool = True  # rows without advantages get theirs from the group's scores
    advantage_normalization: Normalise = "none"
    advantage_clipping: tuple[float, float] | None = None
    whole_rows: bool = False  # rows with neither mask nor prompt_length are trained whole
    max_off_policy_steps: int | None = None  # environments that ask begin no group that gets older than this
    lanes: int | Literal["auto"] = "auto"
    release_at: ReleaseAt | None = None  # None: see the function of that name
    set_aside_after: int = 2  # failures of a step after which the group at fault is found and set aside
    unfit: Unfit = "refuse"  # rows that are too long, or are left out and counted
    longest_row: int | None = None  # tokens; None: see the function of that name
    start: Start | None = None  # on a bridge that was trained before, without a checkpoint; None: refused

    def __post_init__(self) -> None:
        """Raises ValueError for what cannot be."""
        if not self.bridge:
            raise ValueError("trainer.atropos.bridge is not set -> ++trainer.atropos.bridge=run1")
        check_bridge_name(self.bridge)
        words = get_args(Normalise)
        check_words(vars(self), "trainer.atropos.", max_off_policy_steps=0, advantage_normalization=words)
        for name in ("timeout", "retry_attempts", "retry_delay", "max_wait_time"):
            given = getattr(self, name)
            if given is not None and not (isinstance(given, (int, float)) and given >= 0):
                raise ValueError(
                    f"trainer.atropos.{name}={given!r} is no number of at least 0 -> trainer.atropos.{name}=0"
                )
        if not self.use_advantages and not self.fallback_to_grpo:
            raise ValueError(
                "trainer.atropos.use_advantages=false needs fallback_to_grpo, as nothing else gives "
                "advantages -> set one of them to true"
            )

    @classmethod
    def of(cls, config: Any) -> Settings:
        """Returns the settings in verl's whole configuration. Never blocks.

        Raises:
            ValueError: no bridge is named, or a key or value is not one of the allowed; names it.
        """
        from omegaconf import OmegaConf

        found = OmegaConf.select(config, "trainer.atropos")
        given: dict[str, Any] = {} if found is None else OmegaConf.to_container(found, resolve=True)
        known = [field.name for field in fields(cls)]
        for key in given:
            if key in _REFUSED:
                raise ValueError(f"trainer.atropos.{key}: {_REFUSED[key]}; remove the key")
            if key not in known:
                raise ValueError(f"trainer.atropos.{key} is no key -> use one of {', '.join(known)}")
        if (limits := given.get("advantage_clipping")) is not None:
            low, high = limits
            given["advantage_clipping"] = (float(low), float(high))
        if given.get("api_url"):
            log.info("trainer.atropos.api_url is not used: the trainer reads bridge %s", given.get("bridge"))
        return cls(**given)

    @property
    def credit(self) -> Credit:
        """How advantages are made of the records."""
        return Credit(
            use_own=self.use_advantages,
            fallback=self.fallback_to_grpo,
            normalise=self.advantage_normalization,
            clip=self.advantage_clipping,
        )

    @property
    def patience_s(self) -> float | None:
        """Seconds that a step waits for its groups, all tries and delays together; None: for ever."""
        tries = {
            "timeout_s": self.timeout,
            "attempts": self.retry_attempts,
            "retry_delay_s": self.retry_delay,
        }
        given: dict[str, Any] = {name: value for name, value in tries.items() if value is not None}
        if not given:
            return self.max_wait_time
        most_s = math.inf if self.max_wait_time is None else self.max_wait_time
        return sum(wait_s + delay_s for wait_s, delay_s in Patience(**given, max_wait_s=most_s).waits())


def release_at(config: Any, settings: Settings) -> ReleaseAt | None:
    """Returns when groups are released; None: with checkpoints if verl saves some, as lanes have room.

    Never blocks. Raises ValueError for "checkpoint" where no checkpoint would ever release them.
    """
    mode, every = config.trainer.v1.trainer_mode, config.trainer.save_freq
    if settings.release_at == "checkpoint" and (mode != MODE or every <= 0):
        raise ValueError(
            f"trainer.atropos.release_at=checkpoint with trainer_mode={mode} and save_freq={every}: no "
            f"checkpoint would release a group -> trainer.v1.trainer_mode={MODE} trainer.save_freq=20, or "
            "trainer.atropos.release_at=step"
        )
    return settings.release_at or (None if mode == MODE else "step")


def longest_row(config: Any, settings: Settings) -> int | None:
    """Returns the most tokens of a row: those asked for, or else of a dynamic batch. Never blocks.

    None: any number, as verl cuts none.
    """
    actor = config.actor_rollout_ref.actor
    if settings.longest_row is not None or not (actor.use_dynamic_bsz and "fsdp" in str(actor.strategy)):
        return settings.longest_row
    most = [actor.ppo_max_token_len_per_gpu]
    if not setting(config, "algorithm.rollout_correction.bypass_mode"):
        most.append(config.actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu)
    return int(min(most) * actor.ulysses_sequence_parallel_size)


def steps_until_taken(config: Any, settings: Settings) -> int | None:
    """Returns how many steps later a group may be taken: the limit, less the batches that are written ahead.

    None without a limit. Raises ValueError if more are written ahead than the limit allows.
    """
    limit, mode = settings.max_off_policy_steps, config.trainer.v1.trainer_mode
    ahead = math.ceil((config.trainer.v1.get(mode, None) or {}).get("num_warmup_batches", None) or 0)
    if limit is None or limit >= ahead:
        return None if limit is None else limit - ahead
    raise ValueError(
        f"trainer.atropos.max_off_policy_steps={limit}, and num_warmup_batches={ahead} writes {ahead} steps "
        f"ahead -> trainer.v1.{mode}.num_warmup_batches={limit}, or "
        f"trainer.atropos.max_off_policy_steps={ahead}"
    )


def compares_with_sampler(config: Any) -> bool:
    """Returns whether verl's loss compares its weights with those that sampled. Never blocks."""
    correction = config.algorithm.get("rollout_correction", None) or {}
    return any(correction.get(key) for key in ("bypass_mode", "rollout_is", "rollout_rs"))


def form_of(config: Any) -> Form:
    """Returns what verl's whole configuration asks of rows. Never blocks.

    Raises ValueError for a setting of `REFUSED`.
    """
    refuse(REFUSED, config, ValueError)
    rollout, filtered = config.actor_rollout_ref.rollout, config.algorithm.get("filter_groups", None) or {}
    return Form(
        per_token=_passes_advantages(config),
        scored=bool(filtered.get("enable") and filtered.get("metric") == "score"),
        logprobs=bool(compares_with_sampler(config) or rollout.calculate_log_probs),
        temperature=float(rollout.temperature),
    )


def passed_through(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, config: Any = None, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token-level rewards where the mask is 1, as advantages and as returns. Never blocks.

    Args:
        token_level_rewards: float (B, R), dimensionless; the advantages, when they come from a bridge.
        response_mask: (B, R), 1 where a token is trained.
        config: verl's `algorithm` section; None is a plain call.

    Raises:
        ValueError: `algorithm.use_kl_in_reward` is on, which would have changed the advantages before.
    """
    if config is not None and config.get("use_kl_in_reward", False):
        raise ValueError(
            "algorithm.use_kl_in_reward adds a penalty to rm_scores, which carry advantages -> set it to "
            "False and use actor_rollout_ref.actor.use_kl_loss"
        )
    advantages = token_level_rewards * response_mask
    return advantages, advantages
