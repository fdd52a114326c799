"""What rows say of themselves: how they were sampled, why they ended, and whether they may be trained.

Pure numpy.

Letter: B rows (trajectories).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

import shmbridge
from shmbridge.schema import FINISH_REASONS

_STOP = FINISH_REASONS.index("stop")
_GREEDY = 1e-5  # below this temperature samplers take the likeliest token
_LARGEST = float(np.finfo(np.float32).max)
Bools = npt.NDArray[np.bool_]


def silenced_rows(batch: shmbridge.Batch) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows whose overrides set their advantage to zero. Never blocks."""
    silenced = np.zeros(len(batch.meta), bool)
    for row, wanted in _settings(batch.overrides, "set_advantage_to_zero"):
        silenced[row] = bool(wanted)
    return silenced


def truncated_rows(batch: shmbridge.Batch) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Returns bool (B,) twice: rows whose `finish_reason` is not "stop", rows without a known one.

    Never blocks.
    """
    said = getattr(batch, "finish_reason", None)
    if said is None:
        nothing = np.zeros(len(batch.meta), bool)
        return nothing, ~nothing
    known: npt.NDArray[np.bool_] = batch.has("finish_reason") & (np.asarray(said) < len(FINISH_REASONS))
    return known & (np.asarray(said) != _STOP), ~known


@dataclass(frozen=True)
class Heat:
    """The temperatures of a batch's rows, and which rows had no usable one."""

    values: npt.NDArray[np.float32]  # (B,) > 0
    odd: npt.NDArray[np.bool_]  # (B,) the value is not a finite number
    greedy: npt.NDArray[np.bool_]  # (B,) below 1e-5: greedy sampling has no distribution to scale


def temperatures(batch: shmbridge.Batch, default: float) -> Heat:
    """Returns each row's temperature: from the record's column, else from Atropos' field, else the default.

    Rows whose value is not a number, or so small that sampling is greedy, get the default too: one bad value
    must not end the run, and the runs that get the record redelivered. Never blocks.
    """
    heat = np.full(len(batch.meta), default, np.float32)
    odd = np.zeros(len(batch.meta), bool)
    for row, value in _narrowest(batch, "temperature"):
        if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < _LARGEST:
            heat[row] = value
        else:
            odd[row] = True
    if batch.temperature is not None:
        heat = np.where(batch.has("temperature"), batch.temperature, heat)
    finite = np.isfinite(heat)
    greedy = finite & (heat < _GREEDY)  # 1 / temperature would scale the row's gradient
    return Heat(np.where(finite & ~greedy, heat, np.float32(default)), odd | ~finite, greedy)


_CUTS: dict[str, Callable[[float], bool]] = {
    "top_p": lambda p: p < 1.0,
    "top_k": lambda k: k > 0,
    "min_p": lambda p: p > 0.0,
}


def cut_sampling(batch: shmbridge.Batch) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows sampled with top_p, top_k or min_p. Never blocks."""
    cut = np.zeros(len(batch.meta), bool)
    for key, cuts in _CUTS.items():
        by_key = np.zeros(len(batch.meta), bool)
        for row, value in _narrowest(batch, key):
            by_key[row] = isinstance(value, (int, float)) and cuts(value)
        cut |= by_key
    return cut


def _narrowest(batch: shmbridge.Batch, key: str) -> Iterator[tuple[int, Any]]:
    """Yields (row, value), the widest settings first; later ones win, as in Atropos' reference trainer."""
    for texts in (batch.group_overrides, batch.generation_params, batch.overrides):
        yield from _settings(texts, key)


def _settings(texts: list[str | None] | None, key: str) -> Iterator[tuple[int, Any]]:
    """Yields (row, value) for the rows whose JSON object has the key."""
    for row, text in enumerate(texts or ()):
        # parse only what may matter
        if text is not None and key in text and (value := _parsed(text).get(key)) is not None:
            yield row, value


@lru_cache(1024)  # rows of one record share a text, and several keys are read from it
def _parsed(text: str) -> dict[str, Any]:
    """Returns the parsed JSON object; empty for anything else."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}


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
