"""SkyRL's config with a section `bridge`, and what else in it a bridge does not go with."""

from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from skyrl.backends.skyrl_train.utils.off_policy_correction_utils import off_policy_correction_enabled
from skyrl.backends.skyrl_train.utils.ppo_utils import LOSSES_WITHOUT_OLD_LOGPROBS
from skyrl.train.config.config import BaseConfig, SkyRLTrainConfig

from shmbridge.config import check_bridge_name, check_timeout
from shmbridge.consumers.skyrl.arrange import LongGroups
from shmbridge.consumers.skyrl.estimator import NAME
from shmbridge.errors import BadArgument, BadBridgeName

Match = Literal["arrival", "instance"]
MATCHES: tuple[str, ...] = get_args(Match)
LONG_GROUPS: tuple[str, ...] = get_args(LongGroups)


class ConfigDoesNotFit(ValueError):
    """A setting of SkyRL that would train something else than what the bridge carries."""


@dataclass
class BridgeConfig(BaseConfig):
    """The section `bridge`; the words are those of ShmGenerator."""

    name: str = "run1"
    max_staleness: int | None = None  # versions; None: the limit of fully_async there, else none
    long_groups: str = "refuse"
    match: str = "arrival"
    steps: int = 1000  # per epoch, where prompts are empty: data.train_data=[]
    max_token_len: int = 0  # tokens of a trajectory that environments may send; 0: any number
    timeout_s: float | None = None
    # URLs of engines to which each version is pushed; those that follow the bridge need no mention
    engines: list[str] = field(default_factory=list)


@dataclass
class ShmTrainConfig(SkyRLTrainConfig):  # type: ignore[misc, unused-ignore]
    """SkyRL's config and the section `bridge`."""

    bridge: BridgeConfig = field(default_factory=BridgeConfig)


def check(cfg: Any) -> None:
    """Raises ConfigDoesNotFit, with one setting to change, if SkyRL would train on other advantages, or if
    the section `bridge` has a value that means nothing.

    Never blocks.
    """
    trainer, generator = cfg.trainer, cfg.generator
    algorithm = trainer.algorithm
    _check_bridge(cfg.bridge)
    if algorithm.advantage_estimator != NAME:
        _refuse(
            f"trainer.algorithm.advantage_estimator={algorithm.advantage_estimator} makes advantages "
            "of the sum of what it takes for rewards",
            f"trainer.algorithm.advantage_estimator={NAME}",
        )
    if algorithm.dynamic_sampling.type is not None:
        _refuse(
            "trainer.algorithm.dynamic_sampling judges groups by the sum of their advantages",
            "trainer.algorithm.dynamic_sampling.type=null; environments drop such groups",
        )
    if trainer.fully_async.sample_full_batch:
        _refuse(
            "trainer.fully_async.sample_full_batch judges groups by the sum of their advantages",
            "trainer.fully_async.sample_full_batch=false",
        )
    if algorithm.use_kl_in_reward:
        _refuse(
            "trainer.algorithm.use_kl_in_reward subtracts from rewards, which are advantages here",
            "trainer.algorithm.use_kl_loss=true",
        )
    if trainer.placement.colocate_all:
        _refuse(
            "trainer.placement.colocate_all shares the GPUs with engines of SkyRL's own, and there are none",
            "trainer.placement.colocate_all=false",
        )
    if trainer.eval_interval > 0:
        _refuse("trainer.eval_interval > 0 needs engines of SkyRL's own", "trainer.eval_interval=-1")
    if trainer.policy.model.lora.rank > 0 and trainer.strategy == "fsdp":
        _refuse(
            "trainer.policy.model.lora.rank > 0: with fsdp SkyRL sends adapters to engines of its own",
            "trainer.policy.model.lora.rank=0",
        )
    if generator.merge_stepwise_output:
        _refuse(
            "generator.merge_stepwise_output joins rows after they were counted",
            "generator.merge_stepwise_output=false",
        )


def max_staleness(cfg: Any) -> int | None:
    """Returns the most versions that a group may be behind; None: any number."""
    if cfg.bridge.max_staleness is None and cfg.trainer.fully_async.enabled:
        return int(cfg.trainer.fully_async.max_staleness_steps)
    return None if cfg.bridge.max_staleness is None else int(cfg.bridge.max_staleness)


def needs_logprobs(cfg: Any) -> bool:
    """Returns whether the loss compares with the sampler's log-probabilities."""
    algorithm = cfg.trainer.algorithm
    return bool(
        cfg.trainer.fully_async.enabled
        or algorithm.policy_loss_type in LOSSES_WITHOUT_OLD_LOGPROBS
        or (
            algorithm.policy_loss_type == "cispo"
            and getattr(algorithm.cispo, "cispo_anchor", "") == "rollout"
        )
        or off_policy_correction_enabled(algorithm.off_policy_correction)
    )


def _check_bridge(bridge: Any) -> None:
    try:
        check_bridge_name(bridge.name)
        check_timeout(bridge.timeout_s)
    except (BadBridgeName, BadArgument) as wrong:
        _refuse(f"bridge.name={bridge.name} bridge.timeout_s={bridge.timeout_s}: {wrong.message}", wrong.hint)
    for name, allowed in (("match", MATCHES), ("long_groups", LONG_GROUPS)):
        if (given := getattr(bridge, name)) not in allowed:
            _refuse(f"bridge.{name}={given} is none of {', '.join(allowed)}", f"bridge.{name}={allowed[0]}")
    for name, least in (("max_staleness", 0), ("steps", 1), ("max_token_len", 0)):
        given = getattr(bridge, name)
        if not (given is None and name == "max_staleness") and (not isinstance(given, int) or given < least):
            _refuse(f"bridge.{name}={given} is no whole number of at least {least}", f"bridge.{name}={least}")
    if isinstance(bridge.engines, str):
        _refuse(f"bridge.engines={bridge.engines} is no list", f"bridge.engines=[{bridge.engines}]")


def _refuse(what: str, action: str) -> None:
    raise ConfigDoesNotFit(f"{what} -> {action}")
