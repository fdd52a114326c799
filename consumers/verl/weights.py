"""The way back: the checkpoint engine `shmbridge`, over the weights segment of a bridge.

    actor_rollout_ref.rollout.checkpoint_engine:
      backend: shmbridge
      engine_kwargs: {shmbridge: {bridge: run1}}

The actor of rank 0 writes; all ranks gather, because gathering is collective. Inference engines of verl's own
read in the second half, others follow the segment by themselves (vLLM with this package's plugin).
Versions are verl's steps; after a restart from an older checkpoint they go on above the last version that the
bridge had. `AtroposShardingManager` is the seed recipe's context manager: inside it the inference engine has
the trained model's weights.

    sharding_manager = AtroposShardingManager("run1", model, llm)
    with sharding_manager:
        responses = sharding_manager.inference_engine.generate(prompts)
    ...                                     # its memory is free here; train
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import ExitStack
from typing import Any, Self

import torch
from verl.checkpoint_engine.base import CheckpointEngine, CheckpointEngineRegistry

from shmbridge.consumers.engines.published_tensors import as_tensor
from shmbridge.consumers.verl.settings import VERSION
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks
from shmbridge.weights import WeightsReader


@CheckpointEngineRegistry.register("shmbridge")
class ShmCheckpointEngine(CheckpointEngine):
    """One end of the weights segment, in an actor or beside an inference engine. For one thread.

    Args:
        bucket_size: of verl, bytes; not used, since each tensor is copied by itself.
        is_master: whether this end writes.
        bridge: whose weights segment it is; `engine_kwargs.shmbridge.bridge` in verl's configuration.
        timeout_s: seconds to wait for a slot that is still read, or for a version.

    Raises:
        ValueError: no bridge is named.
    """

    def __init__(
        self, bucket_size: int, is_master: bool = False, bridge: str = "", timeout_s: float = 300.0
    ) -> None:
        if not bridge:
            raise ValueError(
                "the checkpoint engine needs a bridge -> "
                "++actor_rollout_ref.rollout.checkpoint_engine.engine_kwargs.shmbridge.bridge=run1"
            )
        self.bridge, self._is_master, self._timeout_s = bridge, is_master, timeout_s
        self._sync: WeightSync | None = None
        self._reader: WeightsReader | None = None
        self._seen: int | None = None  # the version there was before the actors began to send

    def prepare(self) -> dict[str, Any]:
        """Notes the newest version, so that `receive_weights` waits for the next one. Never blocks."""
        if not self._is_master:
            self._seen = self._reading().version
        return {}

    @classmethod
    def build_topology(
        cls, actor_wg_world_size: int, rollout_world_size: int, metadata: list[dict[str, Any]]
    ) -> tuple[dict[str, list[Any]], dict[str, list[Any]]]:
        """Returns nothing to connect: the segment's name is known to all. Never blocks."""
        return {"rank": list(range(actor_wg_world_size))}, {"rank": [-1] * rollout_world_size}

    def init_process_group(self, **_: Any) -> None:
        """Does nothing: there is no process group."""

    def finalize(self) -> None:
        """Does nothing: the segment stays for engines that follow it."""

    async def send_weights(
        self, weights: Iterator[tuple[str, torch.Tensor]], global_steps: int | None = None
    ) -> dict[str, float]:
        """Writes a version on rank 0; other ranks only take part in gathering.

        Blocks the event loop for the copy, and while a reader holds the slot: gathering shards must stay in
        the thread that has the device, and verl's actor does nothing else meanwhile.

        Returns: the version, and the seconds it took; empty on other ranks.

        Raises:
            ConsumerTaken: another process writes the bridge's weights. WeightsMismatch, WeightsBusy: as
                `WeightSync.push`.
        """
        began = time.monotonic()
        if self._is_master and self._sync is None:
            self._sync = WeightSync(self.bridge, [], timeout_s=self._timeout_s)
        version = push_from_ranks(self._sync, weights, at_least=global_steps or 0)
        if version is None:
            return {}
        return {VERSION: version, "shmbridge/weights_seconds": time.monotonic() - began}

    async def receive_weights(
        self, global_steps: int | None = None
    ) -> AsyncGenerator[tuple[str, torch.Tensor], None]:
        """Yields the tensors of the version that is being sent: copies of the segment's.

        Raises NotReady if no new version comes within `timeout_s` seconds, WeightsMismatch if its values are
        not finite. Blocks the event loop while it waits: verl runs it in a worker that does nothing else.
        """
        reader = self._reading()
        version = reader.wait(self._seen, self._timeout_s)
        with reader.lease(version=version, timeout_s=self._timeout_s) as lease:
            lease.require_finite()
            for name, array in lease.tensors.items():
                yield name, as_tensor(array, lease.dtypes[name]).clone()
        self._seen = version

    def _reading(self) -> WeightsReader:
        if self._reader is None:
            self._reader = WeightsReader(self.bridge)
        return self._reader


class AtroposShardingManager:
    """`WeightSync.updated` under the seed recipe's name; enter it before each rollout. Not reentrant.

    Args:
        bridge: whose weights segment is used.
        training_model: a torch module, as `WeightSync.push` takes it.
        inference_engine: a vLLM `LLM`, an address, or what else `WeightSync` takes.
        options: of `WeightSync`.

    Raises: as `WeightSync`.
    """

    def __init__(self, bridge: str, training_model: Any, inference_engine: Any, **options: Any) -> None:
        self.training_model, self.inference_engine = training_model, inference_engine
        self._sync = WeightSync(bridge, inference_engine, **options)
        self._entered = ExitStack()

    def __enter__(self) -> Self:
        """Wakes the engine and loads the model's weights; blocks until it samples with them."""
        self._entered.enter_context(self._sync.updated(self.training_model))
        return self

    def __exit__(self, *error: Any) -> None:
        """Makes the engine free its memory, also after an error in the block."""
        self._entered.__exit__(*error)

    def close(self) -> None:
        """Closes engine and segment; idempotent."""
        self._sync.close()
