"""How many policy versions ago each token of a batch was sampled, and which tokens say that the trained version sampled them.

Pure numpy. Knows the column `token_versions` and the versions stamped on records; does not know what is done about it.
Called by `training_rows.py`.

Letter: N tokens of the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

UNKNOWN = -1


def token_staleness(batch: Any, policy_version: int) -> npt.NDArray[np.int32]:
    """Return int32 (N,): versions from the one that sampled the token to the current one; UNKNOWN if nothing says it. Never blocks.

    The token's own version if its record has it, else the one under which generation of its record began.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        policy_version: the current one.
    """
    stamped = [meta.min_policy_version for meta in batch.meta]
    versions = np.array([UNKNOWN if version is None else version for version in stamped], np.int64)
    staleness = np.repeat(_behind(versions, policy_version), batch.lengths)
    own = getattr(batch, "token_versions", None)
    if own is None:
        return staleness
    said = np.repeat(batch.has("token_versions"), batch.lengths) & (own >= 0)
    return np.where(said, _behind(own, policy_version), staleness)


def says_version(batch: Any, policy_version: int) -> npt.NDArray[np.bool_]:
    """Return bool (N,): tokens that `token_versions` says this very version sampled. Never blocks.

    The version stamped on a record does not count. It is the one that was published when generation began, and an engine that is
    brought to it after that still samples with the one before.

    Args:
        batch: a packed `shmbridge.Batch`, or anything with its attributes.
        policy_version: the version.
    """
    own = getattr(batch, "token_versions", None)
    if own is None:
        return np.zeros(len(batch.tokens), bool)
    said: npt.NDArray[np.bool_] = np.repeat(batch.has("token_versions"), batch.lengths) & (own >= 0) & (own == policy_version)
    return said


def _behind(versions: npt.NDArray[Any], policy_version: int) -> npt.NDArray[np.int32]:
    return np.where(versions >= 0, np.maximum(policy_version - versions, 0), UNKNOWN).astype(np.int32)
