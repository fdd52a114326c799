"""How many policy versions ago each token of a batch was sampled.

Pure numpy. Knows the column `token_versions` and the versions stamped on records; does not know what is done about age.
Called by `training_rows.py`.

Letter: N tokens of the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UNKNOWN = -1


def token_ages(batch: Any, policy_version: int) -> npt.NDArray[np.int64]:
    """Return int64 (N,): versions from the one that sampled the token to the current one; UNKNOWN if nothing says it. Never blocks.

    The token's own version if its record has it, else the one under which generation of its record began.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        policy_version: the current one.
    """
    stamped = [meta.min_policy_version for meta in batch.meta]
    of_rows = np.array([UNKNOWN if version is None else version for version in stamped], np.int64)
    versions = np.repeat(of_rows, batch.lengths)
    own = getattr(batch, "token_versions", None)
    if own is not None:
        versions = np.where(np.repeat(batch.has("token_versions"), batch.lengths) & (own >= 0), own, versions)
    return np.where(versions >= 0, np.maximum(policy_version - versions, 0), UNKNOWN)
