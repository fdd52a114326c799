"""The random numbers after a restore are those that would have come."""

from __future__ import annotations

import random

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from shmbridge.consumers.learner.checkpoint import rng_state, set_rng_state


def draw():
    return [
        *torch.rand(5).tolist(),
        *np.random.rand(5),
        *np.random.randn(3),
        *(random.random() for _ in range(5)),
        random.gauss(0, 1),
    ]


def test_every_generator_goes_on_through_a_file_where_it_was(tmp_path):
    torch.manual_seed(3)
    np.random.seed(4)
    random.seed(5)
    draw()  # an odd number of normal ones: both numpy and Python keep one back
    save_file(rng_state(), tmp_path / "rng.safetensors")
    expected = draw()
    assert draw() != expected
    set_rng_state(load_file(tmp_path / "rng.safetensors"))
    assert draw() == expected
