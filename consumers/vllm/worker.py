"""The worker half of the backend: one call loads one version from the weights segment, all or nothing.
`loading.py` updates the model, `worker_agreement.py` coordinates the workers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from shmbridge.consumers.engines.engine import HALF_LOADED
from shmbridge.consumers.pinned.weights import PinnedWeights
from shmbridge.consumers.vllm.loading import ModelWeights, WeightsNotLoaded, as_tensors, with_their_layers
from shmbridge.consumers.vllm.non_public_names import require
from shmbridge.consumers.vllm.worker_agreement import ends_quietly, first_refusal
from shmbridge.weights import WeightsReader

_LEASE_TIMEOUT_S = 5.0

log = logging.getLogger(__name__)


@dataclass
class ShmBridgeInitInfo(WeightTransferInitInfo):
    """The argument of `init_weight_transfer_engine`, an optional call.

    Args:
        bridge: whose segment is opened now instead of at the first update; empty: none, which also lets the
            one go that is open.
    """

    bridge: str = ""


@dataclass
class ShmBridgeUpdateInfo(WeightTransferUpdateInfo):
    """The argument of one `update_weights`: bridge and version. Plain JSON.

    Args:
        bridge: name of the bridge.
        version: a policy version that is in its weights segment now; a caller that updates several workers
            holds a lease of it, or is its writer.
    """

    bridge: str
    version: int


class ShmBridgeWeightTransferEngine(WeightTransferEngine[ShmBridgeInitInfo, ShmBridgeUpdateInfo]):
    """Loads versions from a bridge's weights segment into one worker's shard of the model. vLLM makes it and
    calls it, from one thread.

    `start_weight_update` and `finish_weight_update` do not touch the model, so a learner's death between the
    calls leaves it consistent.
    """

    init_info_cls = ShmBridgeInitInfo
    update_info_cls = ShmBridgeUpdateInfo
    supports_draft_weight_update = False  # a segment holds only the policy, not a draft model

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module) -> None:
        require()
        super().__init__(config, vllm_config, device, model)
        self._weights = ModelWeights(model, vllm_config)
        self._device = device
        self._reader: WeightsReader | None = None
        self._pinned: PinnedWeights | None = None  # the reader's memory, registered with the device
        self._holds: int | None = None  # the version in the model, from the reader's bridge

    def init_transfer_engine(self, init_info: ShmBridgeInitInfo) -> None:
        """Closes the open segment, opens the bridge's, and loads the next version whole.

        Never blocks.

        Call it after anything else changed the model, such as waking from level 2 of vLLM's sleep. Raises
        BadBridgeName.
        """
        self.shutdown()
        if init_info.bridge:
            self._pin(self._reader_of(init_info.bridge))

    def start_weight_update(self) -> None:
        """Does nothing: `receive_weights` begins and ends the update."""

    def finish_weight_update(self) -> None:
        """Does nothing: `receive_weights` begins and ends the update."""

    def receive_weights(self, update_info: ShmBridgeUpdateInfo) -> None:
        """Loads one version into the model. Blocks for the copy; every worker of the engine must be called.

        Loads only the tensors that changed since the model's version, if the segment can tell.

        Raises:
            WeightsMismatch: the segment holds another model, or values that are not finite; the message names
                the tensor; the old weights stay.
            NotReady: the version is not in the segment, or another worker could not load it; the old weights
                stay.
            WeightsNotLoaded: vLLM failed in the middle. On a CPU the old weights stay; on an accelerator the
                model is of two versions.

        After any of these the next version is loaded whole.
        """
        with ExitStack() as held:
            refused = self._attempt(lambda: self._stage(held, update_info)) or self._attempt(
                self._weights.commit
            )
            if refused is None:
                self._weights.keep()
                self._holds = update_info.version
                return
            if not self._weights.put_back():
                refused = WeightsNotLoaded(
                    f"{refused}; {HALF_LOADED}", hint="the next version is loaded whole"
                )
        self._holds = None
        if not ends_quietly(self):
            raise refused
        log.warning("%s", refused)

    def _attempt(self, step: Callable[[], None]) -> Exception | None:
        """Makes one step on every worker; blocks for all. Returns why the load must stop, if it must."""
        mine: Exception | None = None
        try:
            step()
        except Exception as error:  # any error must be reported: the other workers wait
            mine = error
        refusal = first_refusal("" if mine is None else str(mine) or type(mine).__name__)
        if mine is None and refusal:
            return WeightsNotLoaded(
                f"another worker of this engine said: {refusal}",
                hint="the workers load together or not at all",
            )
        return mine

    def _stage(self, held: ExitStack, wanted: ShmBridgeUpdateInfo) -> None:
        reader = self._reader_of(wanted.bridge)
        lease = held.enter_context(reader.lease(version=wanted.version, timeout_s=_LEASE_TIMEOUT_S))
        lease.require_finite()
        self._pin(reader)
        names = frozenset(lease.dtypes)
        if self._holds is not None:
            names = with_their_layers(lease.changed_since(self._holds), list(lease.dtypes))
        self._weights.stage(as_tensors(lease, names), whole=len(names) == len(lease.dtypes))

    def shutdown(self) -> None:
        """Closes the segment; the model keeps serving. Idempotent."""
        if self._pinned is not None:
            self._pinned.close()
            self._pinned = None
        if self._reader is not None:
            self._reader.close()
            self._reader = None
        self._holds = None

    def _reader_of(self, bridge: str) -> WeightsReader:
        if self._reader is not None and self._reader.bridge != bridge:
            self.shutdown()
        if self._reader is None:
            self._reader = WeightsReader(bridge)
        return self._reader

    def _pin(self, reader: WeightsReader) -> None:
        if self._pinned is None:
            self._pinned = PinnedWeights(reader)
        self._pinned.pin(self._device)
