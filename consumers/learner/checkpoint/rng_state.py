"""The states of all random generators of a process as tensors, so that they can be saved without pickle.

Knows torch's, numpy's and Python's generators; nothing of files or of learners. Called by the learner's
checkpoints.
"""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch
from torch import Tensor

_CUDA = "cuda."
_NO_GAUSS = float("nan")


def seed_all(seed: int) -> None:
    """Seed torch's, CUDA's, numpy's and Python's global generators."""
    torch.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)


def rng_state() -> dict[str, Tensor]:
    """Returns the states of torch's, CUDA's, numpy's and Python's global generators. Waits for no device."""
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
    """Puts back what `rng_state` returned; states of CUDA devices that are not here are left out.

    Raises:
        KeyError: one of the other generators is missing in it.
    """
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
