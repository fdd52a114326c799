"""Rows as slime takes them: `slime_sample`.

Fields of `slime.utils.types.Sample` at commit 624b824a. slime computes advantages itself; the row's own are
in `train_metadata`, for a `--custom-advantage-function-path`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from shmbridge.consumers.record_factories.group_number import group_number
from shmbridge.consumers.trajectories import Trajectory

_STATUS = {"length": "truncated", "abort": "aborted", "error": "failed"}


def slime_sample(row: Trajectory, index: int, rollout_id: int | None = None) -> dict[str, Any]:
    """Returns what `Sample.from_dict` makes a sample of. Never blocks; the values are copies.

    Response arrays have R values, from `prompt_length` on; `rollout_log_probs` is None if one is unknown.

    Args:
        row: of a packed batch.
        index: the sample's number in the rollout.
        rollout_id: equal for rows of one episode; None: every row is an episode.
    """
    response = row.response
    versions = row.value("token_versions")
    known = [] if versions is None else np.unique(versions[versions >= 0]).tolist()
    ends = sorted({int(row.meta.min_policy_version), int(row.meta.max_policy_version)})
    return {
        "group_index": group_number(row),
        "index": index,
        "rollout_id": rollout_id,
        "tokens": row.tokens.tolist(),
        "response_length": len(row.tokens) - row.prompt_length,
        "reward": row.score,
        "loss_mask": row.trained[response].astype(int).tolist(),
        "weight_versions": [str(version) for version in known or ends if version >= 0],
        "rollout_log_probs": None if row.logprobs is None else row.logprobs[response].tolist(),
        "status": _STATUS.get(row.finish_reason or "stop", "completed"),
        "remove_sample": not row.trained.any(),
        "metadata": {"group_id": row.meta.group_id, "instance_id": row.instance_id},
        "train_metadata": {"advantages": row.advantages[response].tolist()},
    }
