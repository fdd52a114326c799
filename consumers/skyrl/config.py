"""SkyRL's config with a section `bridge`, and what else in it a bridge does not go with.

Importing this module registers the advantage estimator `shmbridge`: token-level rewards are the advantages,
and stay what they are. Select it by `trainer.algorithm.advantage_estimator=shmbridge`.
"""

# SkyRL reads the types of these dataclasses, so annotations are evaluated.

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch
from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
from skyrl.backends.skyrl_train.utils.ppo_utils import (
    LOSSES_WITHOUT_OLD_LOGPROBS,
    register_advantage_estimator,
)
from skyrl.train.config.config import BaseConfig, SkyRLTrainConfig

from shmbridge.config import check_bridge_name, check_timeout
from shmbridge.consumers.feed import Refused, check_words, refuse
from shmbridge.errors import BadArgument, BadBridgeName

NAME = "shmbridge"  # of the advantage estimator
LongGroups = Literal["refuse", "trim"]
Match = Literal["arrival", "instance"]
# the words and least numbers of the adapter's own keys
OWN: dict[str, Any] = {
    "match": get_args(Match),
    "long_groups": get_args(LongGroups),
    "steps": 1,
    "max_token_len": 0,
}


class ConfigDoesNotFit(ValueError):
    """A setting of SkyRL that would train something else than what the bridge carries."""


@dataclass
class BridgeConfig(BaseConfig):
    """The section `bridge`; the words are those of ShmGenerator and of Feed."""

    name: str = "run1"
    max_staleness: int | None = None  # versions; None: the limit of fully_async there, else none
    long_groups: str = "refuse"
    match: str = "arrival"
    steps: int = 1000  # per epoch, where prompts are empty: data.train_data=[]
    max_token_len: int = 0  # tokens of a trajectory that environments may send; 0: any number
    timeout_s: float | None = None
    release_at: str | None = None  # None: "checkpoint" if SkyRL saves checkpoints, else "step"
    unfit: str = "refuse"
    set_aside_after: int = 2
    start: str | None = None
    # URLs of engines to which each version is pushed; those that follow the bridge need no mention
    engines: list[str] = field(default_factory=list)


@dataclass
class ShmTrainConfig(SkyRLTrainConfig):  # type: ignore[misc, unused-ignore]
    """SkyRL's config and the section `bridge`."""

    bridge: BridgeConfig = field(default_factory=BridgeConfig)


_BY_SUM = "SkyRL would judge groups by the sum of their advantages"
_ALGORITHM = "trainer.algorithm"
REFUSED = (
    Refused(f"{_ALGORITHM}.advantage_estimator",
            "it makes advantages of the sum of what it takes for rewards",
            f"{_ALGORITHM}.advantage_estimator={NAME}", lambda value, cfg: value != NAME),
    Refused(f"{_ALGORITHM}.advantage_batch_normalize",
            "it would shift and scale the bridge's advantages, by a mean that counts padding",
            f"{_ALGORITHM}.advantage_batch_normalize=false"),
    Refused(f"{_ALGORITHM}.dynamic_sampling.type", _BY_SUM,
            f"{_ALGORITHM}.dynamic_sampling.type=null; environments drop such groups"),
    Refused("trainer.fully_async.sample_full_batch", _BY_SUM, "trainer.fully_async.sample_full_batch=false"),
    Refused(f"{_ALGORITHM}.zero_variance_filter",
            "SkyRL leaves it out where rewards are per token, as the bridge's are",
            f"{_ALGORITHM}.zero_variance_filter=false; environments drop such groups"),
    Refused(f"{_ALGORITHM}.use_kl_in_reward", "it subtracts from rewards, which are advantages here",
            f"{_ALGORITHM}.use_kl_in_reward=false {_ALGORITHM}.use_kl_loss=true"),
    Refused(f"{_ALGORITHM}.enable_sample_support_replay",
            "it wants the tokens that the sampler chose among, which a bridge does not carry",
            f"{_ALGORITHM}.enable_sample_support_replay=false"),
    Refused("trainer.placement.colocate_all",
            "it shares the GPUs with engines of SkyRL's own; there are none",
            "trainer.placement.colocate_all=false"),
    Refused("trainer.eval_interval", "an evaluation needs engines of SkyRL's own", "trainer.eval_interval=-1",
            lambda value, cfg: value > 0),
    Refused("trainer.policy.model.lora.rank", "with fsdp SkyRL sends adapters to engines of its own",
            "trainer.policy.model.lora.rank=0",
            lambda value, cfg: value > 0 and cfg.trainer.strategy == "fsdp"),
    Refused("generator.merge_stepwise_output", "it joins rows after they were counted",
            "generator.merge_stepwise_output=false"),
    Refused("generator.zero_reward_on_non_stop", "it is for SkyRL's own generator, which is not asked here",
            "generator.zero_reward_on_non_stop=false; environments score"),
)  # fmt: skip


def check(cfg: Any) -> None:
    """Raises ConfigDoesNotFit, with one setting to change, if SkyRL would train on other advantages, or if
    the section `bridge` has a value that means nothing.

    Never blocks.
    """
    _check_bridge(cfg.bridge)
    if cfg.bridge.release_at == "checkpoint" and cfg.trainer.ckpt_interval <= 0:
        _refuse(
            f"bridge.release_at=checkpoint, and trainer.ckpt_interval={cfg.trainer.ckpt_interval} saves none",
            "trainer.ckpt_interval=1, or bridge.release_at=step",
        )
    refuse(REFUSED, cfg, ConfigDoesNotFit)


def max_staleness(cfg: Any) -> int | None:
    """Returns the most versions that a group may be behind; None: any number."""
    if cfg.bridge.max_staleness is None and cfg.trainer.fully_async.enabled:
        return int(cfg.trainer.fully_async.max_staleness_steps)
    return None if cfg.bridge.max_staleness is None else int(cfg.bridge.max_staleness)


def compares_with_sampler(cfg: Any) -> bool:
    """Returns whether the loss compares the weights with those that sampled."""
    algorithm = cfg.trainer.algorithm
    return bool(
        algorithm.policy_loss_type in LOSSES_WITHOUT_OLD_LOGPROBS
        or (
            algorithm.policy_loss_type == "cispo"
            and getattr(algorithm.cispo, "cispo_anchor", "") == "rollout"
        )
        or off_policy_correction_enabled(algorithm.off_policy_correction)
    )


def needs_logprobs(cfg: Any) -> bool:
    """Returns whether a row without the sampler's log-probabilities is an error."""
    return bool(cfg.trainer.fully_async.enabled) or compares_with_sampler(cfg)


def _check_bridge(bridge: Any) -> None:
    try:
        check_bridge_name(bridge.name)
        check_timeout(bridge.timeout_s)
    except (BadBridgeName, BadArgument) as wrong:
        _refuse(f"bridge.name={bridge.name} bridge.timeout_s={bridge.timeout_s}: {wrong.message}", wrong.hint)
    check_words(vars(bridge), "bridge.", ConfigDoesNotFit, **OWN)
    if isinstance(bridge.engines, str):
        _refuse(f"bridge.engines={bridge.engines} is no list", f"bridge.engines=[{bridge.engines}]")


def _refuse(what: str, action: str) -> None:
    raise ConfigDoesNotFit(f"{what} -> {action}")


def token_level_values(
    token_level_rewards: torch.Tensor, response_mask: torch.Tensor, **_: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns the token-level rewards as advantages and as returns. Never blocks.

    Args:
        token_level_rewards: float32 (B, A), dimensionless: the bridge's advantages, A response positions.
        response_mask: (B, A), 1 at response tokens; the others get 0.

    Returns:
        Two float32 tensors (B, A) of their own.
    """
    values = token_level_rewards * response_mask
    return values, values.clone()


register_advantage_estimator(NAME)(token_level_values)
