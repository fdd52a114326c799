"""The policy worker's half of the way back: SkyRL's weights go into the bridge's weights segment.

SkyRL picks its transfer strategy in `Worker.init_weight_sync_state`, between two that it has. `BridgeWeights`
stands in front of that method in the order of bases, behind the worker of FSDP or Megatron: the worker's own
code runs unchanged, and its `super()` call arrives here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from skyrl.backends.skyrl_train.weight_sync import WeightChunk, WeightTransferSender, WeightTransferStrategy
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase

from shmbridge.consumers.weight_sync import WeightSync

if TYPE_CHECKING:
    from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient


class BridgeSender(WeightTransferSender):
    """Writes each version of the policy into the weights segment; rank 0 writes, the others take part in
    gathering.

    Args:
        bridge: whose segment.
        engines: URLs to which each version is pushed, also none.
        least_version: the first version is at least this.
    """

    def __init__(self, bridge: str, engines: Sequence[str] = (), least_version: int = 0) -> None:
        self._least, self._rank = least_version, torch.distributed.get_rank()
        self._sync = WeightSync(bridge, list(engines)) if self._rank == 0 else None

    async def send_chunks(
        self, chunks: Iterable[WeightChunk], weight_metadata: dict[str, list[Any]] | None = None
    ) -> None:
        """Writes the tensors as a new version, and brings the engines to it. All ranks call it.

        Blocks the worker's event loop until the version is in the segment and the named engines sample with
        it: gathering belongs to the thread whose device is set. A first version is held in host memory whole.

        Raises:
            ConsumerTaken, WeightsMismatch, WeightsBusy, EngineFailed: as `WeightSync.push`.
        """
        if self._sync is None:
            for _ in _tensors(chunks):
                pass
        else:
            last = self._sync.version
            version = self._least if last is None else max(self._least, last + 1)
            self._sync.push(_tensors(chunks), version)
        torch.distributed.barrier()

    def teardown(self) -> None:
        """Closes the segment; the last version stays readable. Idempotent."""
        if self._sync is not None:
            self._sync.close()


class BridgeTransfer(WeightTransferStrategy):
    """SkyRL's name for this way of transfer; makes the sender."""

    @staticmethod
    def create_init_info(ie_cfg: Any, inference_world_size: int | None = None) -> None:
        """Returns None: the segment's own table says everything."""

    @staticmethod
    def get_vllm_transfer_engine() -> type:
        """Raises NotImplementedError: vLLM finds its half by its own entry point."""
        raise NotImplementedError("vLLM follows the bridge by itself: docs/how-to/vllm.md")

    @staticmethod
    def create_sender(init_info: None, inference_client: ShmInferenceClient) -> BridgeSender:
        """Returns this rank's sender."""
        client = inference_client
        return BridgeSender(client.bridge, client.engines, client.least_version)


class BridgeWeights(PolicyWorkerBase):
    """Before `Worker` in a worker's order of bases, behind its own class."""

    async def init_weight_sync_state(
        self, inference_engine_client: ShmInferenceClient, inference_engine_cfg: Any
    ) -> None:
        """Makes the sender of this rank. All ranks call it."""
        self._transfer_strategy_cls = BridgeTransfer
        self._weight_transfer_sender = BridgeTransfer.create_sender(None, inference_engine_client)
        torch.distributed.barrier()


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


def _tensors(chunks: Iterable[WeightChunk]) -> Iterator[tuple[str, torch.Tensor]]:
    for chunk in chunks:
        yield from zip(chunk.names, chunk.tensors, strict=True)
