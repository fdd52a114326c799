"""Policy weights on their way out: which version they get, and how every rank's part of them comes into the
weights segment.

Nothing is gathered: a rank writes the part of each tensor that it has, or, where all have all, its share of
the tensors. Knows a model's parameters and the segment; knows nothing of batches, of losses and of engines.
Called by the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from shmbridge.consumers.learner.config.run_options import Dtype, WeightsConfig
from shmbridge.consumers.learner.model.lora import adapted_names, published_parameters
from shmbridge.consumers.learner.model.sharding import Index, own_part
from shmbridge.consumers.learner.world import World
from shmbridge.weights import WeightsPart, WeightsWriter

PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can see the weights


def first_version(*seen: int | None) -> int:
    """Returns a version above all seen: a version names one set of weights, whoever published before."""
    return max((version for version in seen if version is not None), default=-1) + 1


@contextmanager
def weights_segment(
    bridge: str, weights: WeightsConfig, precision: Dtype, model: Any, world: World
) -> Iterator[tuple[PublishWeights, int | None]]:
    """Yields a function that publishes the model's weights, and the last version of the bridge's weights so
    far.

    Every rank calls it, since each writes its part; rank 0 has the segment.
    """
    if weights.no_weights:
        yield (lambda version: None), None
        return
    with ExitStack() as stack:
        with world.together():
            writer = stack.enter_context(WeightsWriter(bridge)) if world.is_main else None
            part = None if writer is not None else stack.enter_context(WeightsPart(bridge))
        publisher = WeightsPublisher(model, getattr(torch, precision), world, writer, part)
        yield publisher.publish, None if writer is None else writer.last_version


class WeightsPublisher:
    """Publishes one model's weights, again and again. Every rank has one.

    Args:
        model: whole, in parts (FSDP2), or with adapters, which are published merged.
        dtype: of what is published.
        world: the ranks.
        writer: on rank 0.
        part: on the others.
    """

    def __init__(
        self,
        model: Any,
        dtype: torch.dtype,
        world: World,
        writer: WeightsWriter | None,
        part: WeightsPart | None,
    ) -> None:
        self._model, self._dtype, self._world, self._writer, self._part = model, dtype, world, writer, part
        self._adapted = adapted_names(model)
        self._wrote_all = False

    def publish(self, version: int) -> None:
        """Writes the weights as a version, on all ranks together.

        Blocks for the copy; raises on all ranks, and nothing changes then.

        Once all is there, of a model with adapters only the tensors that they are merged into are written.
        """
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
        """What this rank writes; one tensor of another dtype lives at a time."""
        share = _dealt(
            [parameter.numel() for _, parameter in published_parameters(self._model, merged=False)],
            self._world.size,
        )
        for number, (name, parameter) in enumerate(published_parameters(self._model)):
            tensor, index = own_part(parameter)
            if index is not None or share[number] == self._world.rank:
                yield name, tensor.to(self._dtype), index


def _dealt(sizes: list[int], ranks: int) -> list[int]:
    """The rank that writes each of these tensors, so that all write about as much; the same answer
    everywhere.
    """
    written = [0] * ranks
    dealt = [0] * len(sizes)
    for number in sorted(range(len(sizes)), key=lambda number: -sizes[number]):
        dealt[number] = written.index(min(written))
        written[dealt[number]] += sizes[number]
    return dealt
