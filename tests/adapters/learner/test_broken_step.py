"""The error report of a step that fails, also if the device does not work any more."""

from __future__ import annotations

import torch

from shmbridge.consumers.learner.config.options import ComputeConfig
from shmbridge.consumers.learner.train.grpo_update import Learner
from shmbridge.consumers.learner.train.objective import Objective
from shmbridge.consumers.learner.train.training_step import broken_step


def test_a_device_that_fails_again_while_memory_is_freed_hides_nothing(tiny_model, monkeypatch):
    freed = []

    def fails(name):
        def free(*_args, **_more):
            freed.append(name)
            raise RuntimeError(f"CUDA error: {name}")

        return free

    learner = Learner(tiny_model(0), Objective(), lambda step: 1e-3)
    monkeypatch.setattr(learner, "drop_gradient", fails("gradient"))
    monkeypatch.setattr(torch.cuda, "empty_cache", fails("cache"))
    said = str(
        broken_step(
            RuntimeError("CUDA error: device-side assert triggered"),
            ComputeConfig(),
            learner,
            lambda: "step 0 is saved",
        )
    )
    assert said.startswith(
        "step 1 broke off: RuntimeError: CUDA error: device-side assert triggered; step 0 is saved"
    )
    assert freed == ["gradient", "cache"]
