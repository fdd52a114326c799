"""Truncated completions, from the column `finish_reason` of a batch. Pure numpy.

Letter: B rows (trajectories).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.schema import FINISH_REASONS

STOP = FINISH_REASONS.index("stop")


def truncated_rows(batch: shmbridge.Batch) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Returns bool (B,) twice: rows whose finish reason is not "stop", rows without a known one."""
    said = getattr(batch, "finish_reason", None)
    if said is None:
        nothing = np.zeros(len(batch.meta), bool)
        return nothing, ~nothing
    known: npt.NDArray[np.bool_] = batch.has("finish_reason") & (np.asarray(said) < len(FINISH_REASONS))
    return known & (np.asarray(said) != STOP), ~known
