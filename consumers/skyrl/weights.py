"""The policy worker's half of the way back: SkyRL's weights go into the bridge's weights segment.

SkyRL picks its way of transfer in `Worker.init_weight_sync_state`, between those that it has. `BridgeWeights`
stands in front of that method in the order of bases, behind the worker of FSDP or Megatron: the worker's own
code runs unchanged, and its `super()` call arrives here. Then SkyRL 0.3 sends chunks of tensors to a sender;
0.4 calls `_sync_weights_to_inference_engines`, which builds a source of gathered tensors.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import ray
import torch
from skyrl.backends.skyrl_train.workers.worker import PolicyWorkerBase
from skyrl.train.utils.utils import str_to_torch_dtype

from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

if TYPE_CHECKING:
    from shmbridge.consumers.skyrl.inference_client import ShmInferenceClient


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
