"""Publishes policy weights, and loads each version into the learner's engines.

Every rank writes its part into the weights segment, and nothing is gathered: its shard of each tensor or, if
every rank has the whole model, its share of the tensors. A thread loads the version into the engines while
the learner waits for its next batch. At most one push is in flight, and it ends before the segment changes
again. So versions never go back, and an engine finds the version it is asked to load.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shmbridge.consumers.engines.engine import Engine, EngineFailed, Pause, Update
from shmbridge.consumers.engines.fleet import AtUrl, Fleet
from shmbridge.consumers.learner import Metrics
from shmbridge.consumers.learner.config.options import Dtype, WeightsConfig
from shmbridge.consumers.learner.model.lora import adapted_names, published_parameters
from shmbridge.consumers.learner.model.sharding import Index, own_part
from shmbridge.consumers.learner.world import World, say
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.weights import WeightsPart, WeightsWriter

_AT_LEAST = 2  # consecutive failures before training ends
_SHORTEST_S, _LONGEST_S = 10.0, 300.0  # timeout of one push
_GOODBYE_S = 1.0  # wait for a push in flight when the learner is stopped
PublishWeights = Callable[[int], None]  # takes a version; returns once samplers can read the weights


@dataclass
class _Trouble:
    """Consecutive failures of one engine."""

    since: float
    count: int = 0
    said: str = ""


class EnginePushes:
    """Pushes versions one after the other. One thread calls it, and it owns its engines.

    Args:
        engines: may be empty; then every method does nothing.
        bridge: whose weights segment they read.
        pause: how to treat requests in flight.
        patience_s: how long an engine may fail, over consecutive pushes.
        say: prints a line for the user.
    """

    def __init__(
        self,
        engines: Sequence[Engine] = (),
        bridge: str = "",
        pause: Pause = "keep",
        patience_s: float = 600.0,
        say: Callable[[str], None] = say,
    ) -> None:
        self._fleet = Fleet(engines)
        self._bridge, self._pause, self._patience_s, self._say = bridge, pause, patience_s, say
        self._at: dict[str, int] = {}  # the last version each engine loaded
        self._trouble: dict[str, _Trouble] = {}
        self._failures_total = 0
        self._push_s = self._waited_s = 0.0
        self._thread: threading.Thread | None = None

    def begin(self, version: int) -> None:
        """Starts loading a version into the engines. Never blocks; call `settled` between two calls."""
        if self._fleet.engines:
            assert self._thread is None, "the push before is not settled"
            update = Update(
                self._bridge,
                version,
                self._pause,
                timeout_s=min(max(self._patience_s, _SHORTEST_S), _LONGEST_S),
            )
            self._thread = threading.Thread(
                target=self._push, args=(update,), name="engine-push", daemon=True
            )
            self._thread.start()

    def settled(self) -> None:
        """Waits for the push in flight. Raises `EngineFailed` if an engine has failed for too long."""
        if self._thread is None:
            return
        begun = time.monotonic()
        self._thread.join()
        self._thread = None
        self._waited_s += time.monotonic() - begun
        for address, trouble in self._trouble.items():
            lasted = time.monotonic() - trouble.since
            if trouble.count >= _AT_LEAST and lasted >= self._patience_s:
                raise EngineFailed(
                    f"{address} has taken none of the last {trouble.count} versions, in {lasted:.0f} s: "
                    f"{trouble.said}",
                    hint="start it again, then --resume; or raise --engine-patience",
                )

    def metrics(self) -> Metrics:
        """Returns metrics of the finished pushes; empty without engines. Never blocks."""
        if not self._fleet.engines:
            return {}
        waited, self._waited_s = self._waited_s, 0.0
        reached = [self._at.get(engine.address, -1) for engine in self._fleet.engines]
        return {
            "engines/version": min(reached),
            "engines/push_s": self._push_s,
            "engines/wait_s": waited,
            "engines/failures_total": self._failures_total,
        }

    def close(self, *, at_once: bool = False) -> None:
        """Closes the engines after the push in flight; `at_once` leaves it to other processes. Idempotent."""
        if self._thread is not None:
            self._thread.join(_GOODBYE_S if at_once else None)
            if self._thread.is_alive():
                return  # a daemon thread: it ends with the process
        self._fleet.close()

    def _push(self, update: Update) -> None:
        begun = time.monotonic()
        failed = self._fleet.update(update)
        self._push_s = time.monotonic() - begun
        for engine in self._fleet.engines:
            if (error := failed.get(engine.address)) is not None:
                self._note(engine.address, error, begun)
                continue
            self._at[engine.address] = update.version
            if (trouble := self._trouble.pop(engine.address, None)) is not None:
                self._say(
                    f"{engine.address} is at version {update.version}, after {trouble.count} that it did "
                    "not take"
                )

    def _note(self, address: str, error: EngineFailed, since: float) -> None:
        self._failures_total += 1
        trouble = self._trouble.setdefault(address, _Trouble(since))
        trouble.count += 1
        if (words := str(error)) != trouble.said:
            trouble.said = words
            self._say(f"an engine has old weights, training goes on: {words}")


@contextmanager
def engine_pushes(bridge: str, weights: WeightsConfig, world: World) -> Iterator[EnginePushes]:
    """Yields the pushes to the configured engines; only rank 0 has any."""
    engines = [AtUrl(url) for url in dict.fromkeys(weights.engine)] if world.is_main else []
    pushes = EnginePushes(engines, bridge, weights.pause, weights.engine_patience)
    try:
        yield pushes
    except BaseException:
        pushes.close(at_once=True)
        raise
    pushes.close()


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
