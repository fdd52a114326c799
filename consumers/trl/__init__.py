"""Feeds the GRPO trainers of TRL from a bridge: the sync `GRPOTrainer`, and the experimental async one.

    with shm_rollout_func("run1", max_staleness=2) as rollouts:
        ShmGRPOTrainer("model", args=GRPOConfig(max_steps=100, ...), rollout_func=rollouts).train()

`grpo.py` and `async_worker.py` say when records are released. Importing this room imports no TRL.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from shmbridge.consumers.trajectories import NoLogprobs
from shmbridge.consumers.trl.rollouts import NotJoined, ShmRollouts, UnevenGroups, shm_rollout_func

if TYPE_CHECKING:
    from shmbridge.consumers.trl.async_worker import (
        NoProducers,
        PerTokenAdvantages,
        ShmRolloutWorker,
        ShmWeightTransfer,
    )
    from shmbridge.consumers.trl.grpo import (
        ShmGRPOTrainer,
        Unsupported,
        environment_scores,
        placeholder_prompts,
    )

# what needs TRL or torch, by module
_ASYNC = ("NoProducers", "PerTokenAdvantages", "ShmRolloutWorker", "ShmWeightTransfer")
_LATER = dict.fromkeys(_ASYNC, "async_worker") | dict.fromkeys(
    ("ShmGRPOTrainer", "Unsupported", "environment_scores", "placeholder_prompts"), "grpo"
)
__all__ = [
    "NoLogprobs",
    "NoProducers",
    "NotJoined",
    "PerTokenAdvantages",
    "ShmGRPOTrainer",
    "ShmRolloutWorker",
    "ShmRollouts",
    "ShmWeightTransfer",
    "UnevenGroups",
    "Unsupported",
    "environment_scores",
    "placeholder_prompts",
    "shm_rollout_func",
]


def __getattr__(name: str) -> Any:
    """Returns a name whose module imports TRL or torch."""
    if name in _LATER:
        return getattr(importlib.import_module(f"{__name__}.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
