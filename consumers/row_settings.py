"""What an environment says of single rows in JSON: their sampling temperature, and which of them shall train nothing.

Pure numpy. Knows the text columns of a batch; knows nothing of tokens. Called by `training_rows.py` and `credit.py`.

Letter: B rows (trajectories).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import numpy.typing as npt

_GREEDY = 1e-5  # below it samplers take the likeliest token
_LARGEST = float(np.finfo(np.float32).max)


def silenced_rows(batch: Any) -> npt.NDArray[np.bool_]:
    """Return bool (B,): rows whose overrides set their advantage to zero. Never blocks."""
    silenced = np.zeros(len(batch.meta), bool)
    for row, wanted in _settings(batch.overrides, "set_advantage_to_zero"):
        silenced[row] = bool(wanted)
    return silenced


def temperatures(batch: Any, default: float) -> tuple[npt.NDArray[np.float32], int]:
    """Return float32 (B,): the record's own column, else where Atropos keeps it, else the default; and how many rows say no number.

    Those get the default too: one odd word in a record must not end a run, and the next one that is given the record.
    Never blocks.
    """
    heat = np.full(len(batch.meta), default, np.float32)
    odd = np.zeros(len(batch.meta), bool)
    # The narrowest has the last word, as in the reference trainer of Atropos.
    for texts in (batch.group_overrides, batch.generation_params, batch.overrides):
        for row, value in _settings(texts, "temperature"):
            if isinstance(value, (int, float)) and math.isfinite(value) and abs(value) < _LARGEST:
                heat[row] = value
            else:
                odd[row] = True
    if batch.temperature is not None:
        heat = np.where(batch.has("temperature"), batch.temperature, heat)
    usable = np.isfinite(heat) & (heat >= _GREEDY)  # greedy has no distribution to divide, and 1 / this in the row's gradient
    return np.where(usable, heat, np.float32(default)), int(np.count_nonzero(odd | ~np.isfinite(heat)))


def _settings(texts: list[str | None] | None, key: str) -> Iterator[tuple[int, Any]]:
    """Yield (row, value) for the rows whose JSON object has the key."""
    for row, text in enumerate(texts or ()):
        if text is not None and key in text:  # parse only what may matter
            try:
                settings = json.loads(text)
            except ValueError:  # no settings then, whatever it is
                continue
            if isinstance(settings, dict) and settings.get(key) is not None:
                yield row, settings[key]
