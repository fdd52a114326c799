"""Rewards on the way of an environment's groups into its lane: what is applied, and to which of their fields.

Used by `shmbridge.producers.atropos.lane`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeAlias

from shmbridge.producers.atropos.fields import WIRE
from shmbridge.producers.rewards import RewardBridge, RewardConfig, Stage, read_config

Rewards: TypeAlias = RewardConfig | Stage


def checked_rewards(given: Rewards | Mapping[str, Any] | str | Path | None) -> Rewards | None:
    """Returns what `attach(rewards=)` was given, a file read. Raises BadConfig."""
    return given if given is None or callable(given) else read_config(given)


def stage_for(rewards: Rewards | None, tokenizer: Any) -> Stage | None:
    """Returns the stage of one environment; None if nothing is to be done."""
    if isinstance(rewards, RewardConfig):
        return None if rewards.is_off else RewardBridge(rewards, tokenizer=tokenizer)
    return rewards


async def rewarded(stage: Stage, group: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns a new group with the upstream fields that the stage made, and the columns it added.

    The stage sees upstream's fields alone: what an environment means by other keys is its own affair.
    """
    made = await stage({name: value for name, value in group.items() if name in WIRE})
    fields = {name: value for name, value in made.items() if name in WIRE}
    return {**group, **fields}, {name: value for name, value in made.items() if name not in WIRE}
