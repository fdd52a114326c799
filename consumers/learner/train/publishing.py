"""Publishes policy weights: every rank writes its part into the weights segment, and nothing is gathered.

That is its shard of each tensor or, if every rank has the whole model, its share of the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from shmbridge.consumers.learner.config.options import Dtype, WeightsConfig
from shmbridge.consumers.learner.model.lora import adapted_names, published_parameters
from shmbridge.consumers.learner.model.sharding import Index, own_part
from shmbridge.consumers.learner.world import World
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.weights import WeightsPart, WeightsWriter

PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can read the weights


def first_version(*seen: int | None) -> int:
    """Returns a version above all seen: a version names one set of weights, across all publishers."""
    return max((version for version in seen if version is not None), default=-1) + 1


@contextmanager
def weights_segment(
    bridge: str, weights: WeightsConfig, precision: Dtype, model: Any, world: World
) -> Iterator[tuple[PublishWeights, int | None]]:
    """Yields a function that publishes the weights, and the last published version. Every rank calls it."""
    if weights.no_weights:
        yield (lambda version: None), None
        return
    with ExitStack() as stack:
        with world.together():
            writer = stack.enter_context(WeightsWriter(bridge)) if world.is_main else None
            part = None if writer is not None else stack.enter_context(WeightsPart(bridge))
        publisher = WeightsPublisher(model, getattr(torch, precision), world, writer, part)
        stack.callback(publisher.close)
        yield publisher.publish, None if writer is None else writer.last_version


class WeightsPublisher:
    """Publishes a model's weights, adapters merged, by the writer on rank 0 and a part on each other rank."""

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        world: World,
        writer: WeightsWriter | None,
        part: WeightsPart | None,
    ) -> None:
        self._model, self._dtype, self._world, self._writer, self._part = model, dtype, world, writer, part
        end = writer or part
        self._pinned = None if end is None else PinnedWeights(end)
        self._adapted = adapted_names(model)
        self._wrote_all = False

    def publish(self, version: int) -> None:
        """Writes the weights as a version, on all ranks together.

        Blocks for the copy. An error is raised on all ranks, and nothing changes then.

        A model with adapters is written whole once, then only the tensors that adapters change. From a GPU
        the first version is copied as to pageable memory, later ones as to pinned memory.
        """
        self._write(version)
        if self._pinned is not None:
            self._pinned.pin(next(self._model.parameters()).device)

    def close(self) -> None:
        """Lets go of the segment's memory. Never blocks; idempotent."""
        if self._pinned is not None:
            self._pinned.close()

    def _write(self, version: int) -> None:
        if self._adapted and self._wrote_all:
            with self._world.together():
                if self._writer is not None:
                    merged = published_parameters(self._model, only=self._adapted)
                    self._writer.publish(
                        version,
                        ((name, tensor.to(self._dtype)) for name, tensor in merged),
                        changed_only=True,
                    )
            return
        with ExitStack() as stack:
            with self._world.together():
                filling = (
                    None
                    if self._writer is None
                    else stack.enter_context(self._writer.fill(version, self._specs()))
                )
            ticket = self._world.broadcast(None if filling is None else filling.ticket)
            with self._world.together():
                for name, tensor, index in self._own_parts():
                    if filling is not None:
                        filling.write(name, tensor, index)
                    elif self._part is not None:
                        self._part.write(ticket, name, tensor, index)
            with self._world.together():
                stack.close()  # commits
        self._wrote_all = True

    def _specs(self) -> list[tuple[str, str, tuple[int, ...]]]:
        word = str(self._dtype).removeprefix("torch.")
        return [
            (name, word, tuple(parameter.shape))
            for name, parameter in published_parameters(self._model, merged=False)
        ]

    def _own_parts(self) -> Iterator[tuple[str, Tensor, Index | None]]:
        """Yields the tensors that this rank writes; at most one converted copy exists at a time."""
        share = _dealt(
            [parameter.numel() for _, parameter in published_parameters(self._model, merged=False)],
            self._world.size,
        )
        for number, (name, parameter) in enumerate(published_parameters(self._model)):
            tensor, index = own_part(parameter)
            if index is not None or share[number] == self._world.rank:
                yield name, tensor.to(self._dtype), index


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """Returns the rank that writes each tensor, balanced by elements; the same on every rank."""
    written = [0] * ranks
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        dealt[number] = written.index(min(written))
        written[dealt[number]] += sizes[number]
    return dealt
