"""What a `ShmEnvManager` reads from its `env_config` in ROLL's YAML: `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shmbridge import BadArgument
from shmbridge.config import check_bridge_name
from shmbridge.consumers.trainer_settings import Refused, ReleaseAt, check_words, setting
from shmbridge.consumers.trajectories import Credit

WORD = "shmbridge"  # in the `trace_meta` of an environment manager: what `ShmAgenticPipeline` tells
_WORKER = "shmbridge.consumers.roll.actor_worker.ShmActorWorker"


def _by_worker(value: Any, config: Any) -> bool:
    return bool(value) and setting(config, "actor_train.worker_cls") == _WORKER


_KL = Refused("add_token_level_kl",
              "ROLL would subtract it from rewards, and what is trained are the bridge's advantages",
              "add_token_level_kl: false, use_kl_loss: true")  # fmt: skip
# What ROLL's own settings would do wrongly to rows of a bridge: with any of the ways to train,
REFUSED = (
    Refused("train_env_manager.group_size_redundancy", "ROLL would drop as many groups, uncounted",
            "train_env_manager.group_size_redundancy: 0"),
    Refused("critic_warmup",
            "no critic is trained, and these first steps would release their groups untrained",
            "critic_warmup: 0",
            lambda value, config: bool(value) and setting(config, "adv_estimator") != "gae"),
    replace(_KL, when=_by_worker),
    *(Refused(key, "ROLL would apply it to advantages of its own, which ShmActorWorker replaces",
              "pipeline_cls: shmbridge.consumers.roll.pipeline.ShmAgenticPipeline, without that worker_cls",
              _by_worker)
      for key in ("whiten_advantages", "advantage_clip", "use_opd", "is_pure_opd")),
)  # fmt: skip
# and with ShmAgenticPipeline.
REFUSED_BY_PIPELINE = (
    Refused("adv_estimator", "its critic would learn from returns that are not rewards",
            "adv_estimator: grpo", lambda value, config: value == "gae"),
    _KL,
)  # fmt: skip


_OWN: dict[str, Any] = {
    "rows": ("trajectory", "step"),
    "infer_logprobs": (True, False),
    "unfit": ("cut", "refuse", "leave_out"),
    "weights": (None, True, False),
    "start": (None, "from-scratch"),  # the adapter loads no weights
}


def env_configs_of(config: Any) -> dict[str, Mapping[str, Any]]:
    """Returns the `env_config` of each bridge that environments of an EnvManagerConfig read. Never blocks."""
    every = [each.get("config") or {} for one in (config.env_configs or {}).values() for each in one.values()]
    return {each["bridge"]: each for each in every if each.get("bridge")}


def workers_of(config: Any, bridge: str | None = None) -> list[int]:
    """Returns the ranks of the workers whose environments read a bridge; None: any. Never blocks.

    Args:
        config: ROLL's EnvManagerConfig.
        bridge: its name.
    """
    named = {
        rank: {(each.get("config") or {}).get("bridge") for each in configs.values()} - {None}
        for rank, configs in (config.env_configs or {}).items()
    }
    return [rank for rank, bridges in named.items() if (bridge in bridges if bridge else bridges)]


@dataclass(frozen=True)
class Settings:
    """The keys of `custom_envs.<tag>.env_config`.

    Args:
        bridge: the bridge to read.
        rows: "trajectory" makes a row of ROLL of each row of a group; "step" one of each step that has a
            step reward, for `adv_estimator` gigpo and step_reinforce.
        infer_logprobs: whether rows carry the sampler's log-probabilities. ROLL concatenates rows with equal
            columns only, so it is all rows or none; a row without them is refused if True.
        max_staleness: most steps between a group's policy version and the step that takes it; None: the
            pipeline's `async_generation_ratio`.
        unfit: what becomes of rows longer than the pipeline's `sequence_length`: "cut" trains the tokens that
            fit, "refuse" ends the run with the row's name, "leave_out" trains the others.
        set_aside_after: failures of a step after which its groups are tried apart until the one at fault is
            found and set aside, as Feed; 0: never.
        release_at: "step", or "checkpoint" if `ShmAgenticPipeline` saves some; None: "checkpoint" if it does
            so before the last step.
        weights: whether a version of the weights goes into the bridge with each step; None: where they can be
            gathered (`strategy_name: fsdp2_train`, no low-rank adapters), else a warning.
        start: "from-scratch" gives up what a bridge was trained to before; None refuses such a bridge, unless
            the run's own checkpoint is loaded.
        credit: fields of `Credit`, which says how advantages are made where a group has none.

    Raises:
        BadArgument, BadBridgeName: an unknown key, or a value that nothing can be done with.
    """

    bridge: str
    rows: Literal["trajectory", "step"] = "trajectory"
    infer_logprobs: bool = True
    max_staleness: int | None = None
    unfit: Literal["cut", "refuse", "leave_out"] = "cut"
    set_aside_after: int = 2
    release_at: ReleaseAt | None = None
    weights: bool | None = None
    start: Literal["from-scratch"] | None = None
    credit: Credit = field(default_factory=Credit)

    @classmethod
    def of(cls, given: Mapping[str, Any]) -> Settings:
        """Returns the settings of a mapping. Never blocks."""
        known = [each.name for each in fields(cls)]
        if unknown := sorted(set(given) - set(known)):
            raise BadArgument(
                f"env_config has {', '.join(unknown)}", hint=f"these keys are known: {', '.join(known)}"
            )
        if "bridge" not in given:
            raise BadArgument(
                "env_config names no bridge", hint="custom_envs.<tag>.env_config: {bridge: run1}"
            )
        values = dict(given)
        check_bridge_name(values["bridge"])
        check_words(values, "env_config.", BadArgument, **_OWN)
        try:
            values["credit"] = Credit(**(values.get("credit") or {}))
        except TypeError as wrong:
            raise BadArgument(
                f"env_config.credit: {wrong}", hint="docs/reference/advantages.md has its fields"
            ) from None
        return cls(**values)
