"""The staleness of tokens in policy versions, and which the trained version sampled. Pure numpy.

Letter: N tokens of the whole batch.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import shmbridge

UNKNOWN = -1


def token_staleness(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.int32]:
    """Returns int32 (N,): the current version minus the token's; UNKNOWN if not recorded. Never blocks.

    Uses the token's own version if recorded, else the version under which generation of its record began. A
    version below -1 or above the current one is invalid and ignored.
    """
    stamped = [meta.min_policy_version for meta in batch.meta]
    versions = np.array([UNKNOWN if version is None else version for version in stamped], np.int64)
    staleness = np.repeat(_behind(versions, policy_version), batch.lengths)
    own = getattr(batch, "token_versions", None)
    if own is None:
        return staleness
    said = np.repeat(batch.has("token_versions"), batch.lengths) & (own != UNKNOWN)
    return np.where(said, _behind(own, policy_version), staleness)


def says_version(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (N,): tokens that this version sampled, according to `token_versions`. Never blocks.

    The version stamped on a record does not count: it was the published one when generation began, and an
    engine that loads it later still samples with the one before.
    """
    own = getattr(batch, "token_versions", None)
    if own is None:
        return np.zeros(len(batch.tokens), bool)
    said: npt.NDArray[np.bool_] = (
        np.repeat(batch.has("token_versions"), batch.lengths) & (own >= 0) & (own == policy_version)
    )
    return said


def odd_versions(batch: shmbridge.Batch, policy_version: int) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows with a version above the current one, or a token version below -1."""
    stamped = [meta.min_policy_version for meta in batch.meta]
    odd = np.array([version is not None and version > policy_version for version in stamped], bool)
    own = getattr(batch, "token_versions", None)
    if own is not None:
        places = np.flatnonzero((own < UNKNOWN) | (own > policy_version))
        rows = np.searchsorted(batch.cu_seqlens, places, side="right") - 1
        odd[rows[batch.has("token_versions")[rows]]] = True
    return odd


def _behind(versions: npt.NDArray[Any], policy_version: int) -> npt.NDArray[np.int32]:
    known = (versions >= 0) & (versions <= policy_version)
    return np.where(known, policy_version - versions, UNKNOWN).astype(np.int32)
