"""What an environment says of single rows in JSON: how they were sampled, and which of them shall train
nothing.

Pure numpy. Knows the text columns of a batch; knows nothing of tokens. Called by `training_rows.py`,
`left_out.py` and `credit.py`.

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

_GREEDY = 1e-5  # below it samplers take the likeliest token
_LARGEST = float(np.finfo(np.float32).max)


def silenced_rows(batch: shmbridge.Batch) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows whose overrides set their advantage to zero. Never blocks."""
    silenced = np.zeros(len(batch.meta), bool)
    for row, wanted in _settings(batch.overrides, "set_advantage_to_zero"):
        silenced[row] = bool(wanted)
    return silenced


@dataclass(frozen=True)
class Heat:
    """The temperatures of a batch's rows, and which rows did not say a usable one."""

    values: npt.NDArray[np.float32]  # (B,) > 0
    odd: npt.NDArray[np.bool_]  # (B,) they say no finite number
    greedy: npt.NDArray[np.bool_]  # (B,) they say one below 1e-5: there is no distribution to divide


def temperatures(batch: shmbridge.Batch, default: float) -> Heat:
    """Returns the record's own column, else where Atropos keeps it, else the default.

    Rows that say no number, or one so small that samplers take the likeliest token, get the default too: one
    odd word in a record must not end a run, and the next one that is given the record. Never blocks.
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
    greedy = finite & (heat < _GREEDY)  # and 1 / this would stand in the row's gradient
    return Heat(np.where(finite & ~greedy, heat, np.float32(default)), odd | ~finite, greedy)


_CUTS: dict[str, Callable[[float], bool]] = {
    "top_p": lambda p: p < 1.0,
    "top_k": lambda k: k > 0,
    "min_p": lambda p: p > 0.0,
}


def cut_sampling(batch: shmbridge.Batch) -> npt.NDArray[np.bool_]:
    """Returns bool (B,): rows sampled from a part of the vocabulary, by top_p, top_k or min_p.

    Never blocks.
    """
    cut = np.zeros(len(batch.meta), bool)
    for key, cuts in _CUTS.items():
        by_key = np.zeros(len(batch.meta), bool)
        for row, value in _narrowest(batch, key):
            by_key[row] = isinstance(value, (int, float)) and cuts(value)
        cut |= by_key
    return cut


def _narrowest(batch: shmbridge.Batch, key: str) -> Iterator[tuple[int, Any]]:
    """Yields (row, value) from the widest settings to the narrowest, which has the last word, as in Atropos'
    reference trainer.
    """
    for texts in (batch.group_overrides, batch.generation_params, batch.overrides):
        yield from _settings(texts, key)


def _settings(texts: list[str | None] | None, key: str) -> Iterator[tuple[int, Any]]:
    """Yields (row, value) for the rows whose JSON object has the key."""
    for row, text in enumerate(texts or ()):
        # parse only what may matter
        if text is not None and key in text and (value := _parsed(text).get(key)) is not None:
            yield row, value


@lru_cache(1024)  # rows of one record share a text, and several keys are asked of it
def _parsed(text: str) -> dict[str, Any]:
    """A JSON object; empty for anything else, which has no settings."""
    try:
        settings = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return settings if isinstance(settings, dict) else {}
