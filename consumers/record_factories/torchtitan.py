"""Rows as torchtitan's RL experiment takes them: `torchtitan_training_sample`.

Fields of `torchtitan.experiments.rl.types` at commit b5bcd76c.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbridge.consumers.record_factories.group_number import group_number
from shmbridge.consumers.trajectories import Trajectory
from shmbridge.schema import recorded_logprobs


def torchtitan_training_sample(row: Trajectory) -> dict[str, Any]:
    """Returns the fields of a `TrainingSample`. Never blocks; the values are copies.

    `rollout_id` has the fields of a `RolloutTurnID`: build that first. A trained token without a recorded
    log-probability has NaN, which torchtitan leaves out of its loss.

    Args:
        row: of a packed batch.
    """
    oldest, newest = _versions(row)
    recorded = row.value("inference_logprobs")
    logprobs = np.where(row.trained, np.nan if recorded is None else recorded_logprobs(recorded), 0)
    return {
        "min_policy_version": oldest,
        "max_policy_version": newest,
        "rollout_id": {
            "group_id": group_number(row),
            "rollout_id": row.repetition_id,
            "turn_id": int(row.value("row_index") or 0),
        },
        "token_ids": row.tokens.tolist(),
        "loss_mask": row.trained.tolist(),
        "logprobs": logprobs.tolist(),
        "advantage": row.advantages.tolist(),
    }


def _versions(row: Trajectory) -> tuple[int, int]:
    """Returns the oldest and newest version of the trained tokens; the record's where tokens have none."""
    stamped = row.value("token_versions")
    if stamped is not None and (own := stamped[row.trained & (stamped >= 0)]).size:
        return int(own.min()), int(own.max())
    return int(row.meta.min_policy_version), int(row.meta.max_policy_version)
