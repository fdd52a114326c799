"""The advantage estimator `shmbridge`: passes on the advantages that a bridge's rows carry in `rm_scores`.

Also registered as `grpo_atropos`, the name in the seed recipe's configuration.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["NAMES", "passed_through"]

NAMES = ("shmbridge", "grpo_atropos")


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
