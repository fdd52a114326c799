"""Random generator states of a process as tensors, so that they are saved without pickle."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_CUDA = "cuda."
_NO_GAUSS = float("nan")


def seed_all(seed: int) -> None:
    """Seeds torch's, CUDA's, numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Returns the states of torch's, CUDA's, numpy's and Python's global generators. Never blocks."""
    version, words, gauss = random.getstate()
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    found = {
        "torch": torch.get_rng_state(),
        "numpy.keys": torch.from_numpy(np.asarray(keys, np.int64)),
        "numpy.rest": torch.tensor([position, has_gauss, cached], dtype=torch.float64),
        "python.words": torch.tensor([version, *words], dtype=torch.int64),
        "python.gauss": torch.tensor([_NO_GAUSS if gauss is None else gauss], dtype=torch.float64),
    }
    if torch.cuda.is_available():
        found |= {f"{_CUDA}{index}": state for index, state in enumerate(torch.cuda.get_rng_state_all())}
    return found


def set_rng_state(state: Mapping[str, Tensor]) -> None:
    """Restores the result of `rng_state`; skips CUDA devices that do not exist here."""
    torch.set_rng_state(state["torch"])
    position, has_gauss, cached = state["numpy.rest"].tolist()
    keys = state["numpy.keys"].numpy().astype(np.uint32)
    np.random.set_state(("MT19937", keys, int(position), int(has_gauss), cached))
    version, *words = state["python.words"].tolist()
    gauss = state["python.gauss"].item()
    random.setstate((version, tuple(words), None if gauss != gauss else gauss))
    devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(devices):
        if (cuda := state.get(f"{_CUDA}{index}")) is not None:
            torch.cuda.set_rng_state(cuda, index)
