"""The advantage estimator `shmbridge`: token-level rewards are the advantages, and stay what they are.

Importing this module registers it; select it by `trainer.algorithm.advantage_estimator=shmbridge`.
"""

from __future__ import annotations

from typing import Any

import torch
from skyrl.backends.skyrl_train.utils.ppo_utils import register_advantage_estimator

NAME = "shmbridge"


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
