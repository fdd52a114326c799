"""What a `ShmEnvManager` reads from its `env_config` in ROLL's YAML: `Settings`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from shmbridge import BadArgument
from shmbridge.config import check_bridge_name
from shmbridge.consumers.trainer_settings import Refused, setting
from shmbridge.consumers.trajectories import Credit

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
        credit: fields of `Credit`, which says how advantages are made where a group has none.

    Raises:
        BadArgument, BadBridgeName: an unknown key, or a value that nothing can be done with.
    """

    bridge: str
    rows: Literal["trajectory", "step"] = "trajectory"
    infer_logprobs: bool = True
    max_staleness: int | None = None
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
        if values.get("rows", "trajectory") not in ("trajectory", "step"):
            raise BadArgument(f"env_config.rows is {values['rows']!r}", hint="rows: trajectory, or step")
        if not isinstance(wanted := values.get("infer_logprobs", True), bool):
            raise BadArgument(f"env_config.infer_logprobs is {wanted!r}", hint="true, or false")
        most = values.get("max_staleness")
        if most is not None and (type(most) is not int or most < 0):
            raise BadArgument(
                f"env_config.max_staleness is {most!r}", hint="steps: 0, 1, ...; or leave it out"
            )
        try:
            values["credit"] = Credit(**(values.get("credit") or {}))
        except TypeError as wrong:
            raise BadArgument(
                f"env_config.credit: {wrong}", hint="docs/reference/advantages.md has its fields"
            ) from None
        return cls(**values)
