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

from shmbridge.weights import WeightsWriter

PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can see the weights


def first_version(*seen: int | None) -> int:
    """Return a version above all seen: a version names one set of weights, whoever published before."""
    return max((version for version in seen if version is not None), default=-1) + 1


@contextmanager
def weights_segment(options: argparse.Namespace, model: Any) -> Iterator[tuple[PublishWeights, int | None]]:
    """Yield a function that publishes the model's weights, and the last version in the segment so far."""
    if options.no_weights:
        yield (lambda version: None), None
        return
    dtype = getattr(torch, options.precision)
    writer = WeightsWriter(options.bridge)

    def publish(version: int) -> None:
        parameters = model.named_parameters()
        writer.publish(version, [(name, p.detach().to("cpu", dtype).contiguous()) for name, p in parameters])

    try:
        yield publish, writer.last_version
    finally:
        writer.close()
