"""The way back: the policy worker writes SkyRL's weights into the bridge, the trainer publishes versions.

SkyRL picks its way of transfer in `Worker.init_weight_sync_state`, between those that it has. `BridgeWeights`
stands in front of that method in the order of bases, behind the worker of FSDP or Megatron: the worker's own
code runs unchanged, and its `super()` call arrives here. Then SkyRL 0.3 sends chunks of tensors to a sender;
0.4 calls `_sync_weights_to_inference_engines`, which builds a source of gathered tensors.

Generation is external: environments ask their own engines, so `ShmInferenceClient` answers no prompt. Of a
weight sync it hears the end, and publishes the policy version.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partialmethod
from typing import Any, NoReturn

import ray
import torch
from skyrl.backends.skyrl_train.inference_servers.base import InferenceEngineInterface
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.utils.utils import str_to_torch_dtype

from shmbridge.consumers.feed import Feed
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks
from shmbridge.weights import WeightsReader


class BridgeSender:
    """Writes each version of the policy into the weights segment; rank 0 writes, the others take part in
    gathering.

    Args:
        bridge: whose segment.
        engines: URLs to which each version is pushed, also none.
    """

    def __init__(self, bridge: str, engines: Sequence[str] = ()) -> None:
        self._sync = WeightSync(bridge, list(engines)) if torch.distributed.get_rank() == 0 else None

    def send(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Writes the tensors as a new version, and brings the engines to it. All ranks call it.

        Blocks until the version is in the segment and the named engines sample with it: gathering belongs to
        the thread whose device is set. A first version is held in host memory whole.

        Raises:
            ConsumerTaken, WeightsMismatch, WeightsBusy, EngineFailed: as `WeightSync.push`.
        """
        try:
            push_from_ranks(self._sync, tensors)
        finally:  # the other ranks wait here
            torch.distributed.barrier()

    async def send_chunks(
        self, chunks: Iterable[Any], weight_metadata: dict[str, list[Any]] | None = None
    ) -> None:
        """Does the same with SkyRL 0.3's chunks of tensors. Blocks the worker's event loop."""
        self.send(pair for chunk in chunks for pair in zip(chunk.names, chunk.tensors, strict=True))

    def teardown(self) -> None:
        """Closes the segment; the last version stays readable. Idempotent."""
        if self._sync is not None:
            self._sync.close()


class BridgeWeights(PolicyWorkerBase):
    """Before `Worker` in a worker's order of bases, behind its own class."""

    async def init_weight_sync_state(
        self, inference_engine_client: ShmInferenceClient, inference_engine_cfg: Any
    ) -> None:
        """Makes the sender of this rank. All ranks call it."""
        client = self._weight_sync_inference_client = (
            inference_engine_client  # SkyRL 0.4 hands it on from here
        )
        self._weight_transfer_sender = BridgeSender(client.bridge, client.engines)
        torch.distributed.barrier()

    async def _sync_weights_to_inference_engines(
        self, inference_engine_client: ShmInferenceClient, inference_engine_cfg: Any
    ) -> None:
        """Sends this rank's part of a version (SkyRL 0.4). Blocks the worker's event loop."""
        dtype = str_to_torch_dtype(inference_engine_cfg.model_dtype)
        self._weight_transfer_sender.send(self._build_weight_source(dtype, "shmbridge"))


def with_bridge_weights(worker: type) -> type:
    """Returns a subclass of SkyRL's worker of a policy, whose weights go into a bridge."""
    return type(f"Bridge{worker.__name__}", (worker, BridgeWeights), {})


def policy_worker(strategy: str) -> Any:
    """Returns the Ray actor class for a strategy of SkyRL, "fsdp" or "megatron". Imports its packages."""
    if strategy == "megatron":
        from skyrl.backends.skyrl_train.workers.megatron.megatron_worker import (
            MegatronPolicyWorkerBase as Worker,
        )
    else:
        from skyrl.backends.skyrl_train.workers.fsdp.fsdp_worker import FSDPPolicyWorkerBase as Worker
    return ray.remote(num_gpus=1)(with_bridge_weights(Worker))


class SampledElsewhere(RuntimeError):
    """SkyRL asked this client to sample, or for something that only engines of its own have."""


class ShmInferenceClient(InferenceEngineInterface):
    """SkyRL's inference client over a bridge; lives in the trainer's process, beside the feed.

    Ray copies it into the policy's workers: there it has no feed, and only says what the sender of weights
    needs.

    Args:
        feed: of the bridge; None in a worker. Stays open.
        bridge: its bridge.
        model_name: what SkyRL calls the model.
        engines: URLs of engines to which each version is pushed; engines that follow the bridge by
            themselves need no mention.
    """

    def __init__(
        self, feed: Feed | None, bridge: str, model_name: str = "", engines: Sequence[str] = ()
    ) -> None:
        self._feed, self.bridge, self._model_name = feed, bridge, model_name
        self.engines = tuple(engines)
        self._reader: WeightsReader | None = None
        self._begun = False

    def __reduce__(self) -> tuple[Any, ...]:
        return ShmInferenceClient, (None, self.bridge, self._model_name, self.engines)

    # -- what SkyRL's dispatch calls in the trainer's process

    def increment_weight_version(self) -> None:
        """Publishes the policy version: that of the newest weights in the bridge, or else the next number.

        Called by SkyRL at the end of each weight sync; the first begins the run. Never blocks.
        """
        if self._feed is None:
            return
        if self._reader is None:
            self._reader = WeightsReader(self.bridge)
        weights = self._reader.version
        following = self.weight_version + 1
        publish, self._begun = self._feed.publish if self._begun else self._feed.begin_run, True
        publish(following if weights is None else max(weights, following))

    @property
    def weight_version(self) -> int:
        """The published policy version; -1 before the first."""
        return -1 if self._feed is None else self._feed.consumer.policy_version

    @property
    def model_name(self) -> str:
        """What SkyRL calls the model."""
        return self._model_name

    async def teardown(self) -> None:
        """Closes the reader of weights; the feed stays open."""
        if self._reader is not None:
            self._reader.close()
            self._reader = None

    async def get_world_size(self) -> tuple[int, int]:
        """Returns (0, 0): no engine is a rank of a process group."""
        return 0, 0

    async def _nothing(self, *_: Any, **__: Any) -> None:
        """Does nothing: engines elsewhere pause and empty their caches themselves when they load a version,
        share no memory with the trainer, and are in no process group of its; environments end sessions.
        """

    pause_generation = resume_generation = reset_prefix_cache = finish_session = _nothing
    wake_up = sleep = wake_for_weight_sync = sleep_for_weight_sync = _nothing
    init_weight_update_communicator = _nothing

    def get_endpoint_url(self) -> NoReturn:
        """Raises SampledElsewhere."""
        raise self._elsewhere("get_endpoint_url")

    async def _refuse(self, call: str, *_: Any, **__: Any) -> NoReturn:
        raise self._elsewhere(call)

    generate = partialmethod(_refuse, "generate")
    chat_completion = partialmethod(_refuse, "chat_completion")
    completion = partialmethod(_refuse, "completion")
    render_chat_completion = partialmethod(_refuse, "render_chat_completion")
    update_named_weights = partialmethod(_refuse, "update_named_weights")
    load_lora_adapter = partialmethod(_refuse, "load_lora_adapter")

    def _elsewhere(self, call: str) -> SampledElsewhere:
        return SampledElsewhere(
            f"{call}() of bridge {self.bridge!r}: environments sample with engines of theirs -> use SkyRL's "
            "own client for this, or leave it out"
        )
