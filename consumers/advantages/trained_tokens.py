"""Which tokens of a batch are trained: what its masks and prompt lengths say.

Pure numpy. Letters: B rows (trajectories), N tokens of the whole batch.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

import shmbridge

Bools = npt.NDArray[np.bool_]


def trained_tokens(batch: shmbridge.Batch, whole_rows: bool = False) -> Bools:
    """Returns bool (N,): the loss mask. Never blocks.

    Rows without a mask train everything after the prompt. If `prompt_length` is absent too, they train
    nothing, or with `whole_rows` everything. Rows whose mask does not fit their tokens train nothing.
    """
    prompt = np.zeros(len(batch.meta), np.int32) if batch.prompt_length is None else batch.prompt_length
    trained: Bools = batch.position_ids >= np.repeat(prompt, batch.lengths)
    trained &= ~np.repeat(without_mask(batch, whole_rows), batch.lengths)
    masked = batch.has("loss_mask")
    if masked.any():
        trained = np.where(np.repeat(masked, batch.lengths), batch.loss_mask != 0, trained)
    predicted: Bools = batch.position_ids > 0
    return trained & predicted


def without_mask(batch: shmbridge.Batch, whole_rows: bool = False) -> Bools:
    """Returns bool (B,): rows that do not say which of their tokens to train. Never blocks.

    If a mask does not fit its tokens, some tokens must not be trained, but which ones is unknown. So neither
    `prompt_length` nor `whole_rows` replaces it.
    """
    masked, uneven = batch.has("loss_mask"), getattr(batch, "uneven", {})
    without = np.full(len(masked), not whole_rows)
    if batch.prompt_length is not None:
        without &= ~(batch.has("prompt_length") & (batch.prompt_length >= 0))
    for name in ("loss_mask", "masks"):
        without |= uneven.get(name, False)
    rows: Bools = without & ~masked
    return rows
