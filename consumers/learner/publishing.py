"""Policy weights on their way out: which version they get, and how they come into the weights segment.

Knows a model's parameters and the segment; knows nothing of batches and of losses. Called by the GRPO learner
(`grpo.py`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from shmbridge.consumers.learner.lora import published_parameters
from shmbridge.consumers.learner.sharding import whole
from shmbridge.consumers.learner.world import World
from shmbridge.weights import WeightsWriter

PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can see the weights


def first_version(*seen: int | None) -> int:
    """Return a version above all seen: a version names one set of weights, whoever published before."""
    return max((version for version in seen if version is not None), default=-1) + 1


@contextmanager
def weights_segment(
    options: argparse.Namespace, model: Any, world: World
) -> Iterator[tuple[PublishWeights, int | None]]:
    """Yield a function that publishes the model's weights, and the last version in the segment so far.

    Every rank calls it, since a sharded model takes all of them; rank 0 has the segment.
    """
    if options.no_weights:
        yield (lambda version: None), None
        return
    dtype = getattr(torch, options.precision)
    with world.together():
        writer = WeightsWriter(options.bridge) if world.is_main else None

    def publish(version: int) -> None:
        tensors = []
        for name, parameter in published_parameters(model):
            tensor = whole(parameter.to(dtype))
            if writer is not None:
                tensors.append((name, tensor.to("cpu").contiguous()))
        if writer is not None:
            writer.publish(version, tensors)

    try:
        yield publish, None if writer is None else writer.last_version
    finally:
        if writer is not None:
            writer.close()
