"""The worker half of the backend: one call loads one version from the weights segment, all or nothing.
`loading.py` updates the model. Importing this module imports vLLM, and registers the backend.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

import torch
from vllm.distributed.parallel_state import get_pp_group, get_tp_group
from vllm.distributed.weight_transfer.base import (
    TrainerInitInfo,
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from shmbridge.consumers.engines.engine import HALF_LOADED, UNKNOWN, doubt_hint
from shmbridge.consumers.engines.vllm import begin_update
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.consumers.vllm.loading import (
    ModelWeights,
    WeightsNotLoaded,
    as_tensors,
    require,
    say_no_update_is_open,
    with_their_layers,
)
from shmbridge.consumers.vllm.plugin import BACKEND, register
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks
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


_SAID_BYTES = 1024


def first_refusal(mine: str) -> str:
    """Returns the first objection of this engine's workers to continuing; empty if there is none.

    Blocks until each worker has reported.

    Args:
        mine: this worker's objection; empty if it can continue.
    """
    for group in (get_tp_group(), get_pp_group()):
        if group.world_size > 1:
            said = [torch.zeros(_SAID_BYTES, dtype=torch.uint8) for _ in range(group.world_size)]
            torch.distributed.all_gather(said, _padded(mine), group=group.cpu_group)
            mine = next((text for text in map(_text, said) if text), "")
    return mine


def _padded(text: str) -> torch.Tensor:
    raw = text.encode()[:_SAID_BYTES]
    return torch.tensor([*raw, *bytes(_SAID_BYTES - len(raw))], dtype=torch.uint8)


def _text(said: torch.Tensor) -> str:
    return bytes(said.tolist()).rstrip(b"\0").decode(errors="replace")


def ends_quietly(engine: Any) -> bool:
    """Whether this worker must not raise, so that the answers of vLLM's multiprocess executor stay in step.

    Then its update is ended here.

    That executor reads the workers' responses in order and stops at the first error, so later ones would be
    taken for responses to its next call. So the last worker raises for all, and the others close the update
    that vLLM considers open.
    """
    parallel = engine.parallel_config
    if parallel.distributed_executor_backend != "mp" or parallel.rank == parallel.world_size - 1:
        return False
    frame: Any = inspect.currentframe()
    while frame is not None:
        worker = frame.f_locals.get("self")
        calls_us = getattr(worker, "weight_transfer_engine", None) is engine
        if calls_us:
            say_no_update_is_open(worker, engine)
            return True
        frame = frame.f_back
    return False


@dataclass
class ShmBridgeTrainerInitInfo(TrainerInitInfo):
    """The bridge that carries the weights.

    Args:
        bridge: its name.
        rank: this trainer process; rank 0 writes, the others only take part in gathering.
    """

    backend: ClassVar[str] = BACKEND
    bridge: str


class ShmBridgeTrainerWeightTransferEngine(TrainerWeightTransferEngine[ShmBridgeTrainerInitInfo]):
    """Writes versions and makes vLLM load them. `trainer_init` makes one on every rank of the trainer; for
    one thread.
    """

    init_info_cls = ShmBridgeTrainerInitInfo

    def __init__(self, *, client: Any, source: Any, bridge: str, is_sender: bool) -> None:
        super().__init__(client=client, source=source, is_sender=is_sender)
        self._bridge, self._sync = bridge, WeightSync(bridge, []) if is_sender else None

    @classmethod
    def trainer_init(cls, init_info: ShmBridgeTrainerInitInfo, *, client: Any, source: Any = None) -> Self:
        """Opens the bridge for writing and makes the workers open it for reading. Blocks for the call to
        vLLM.

        Args:
            init_info: the bridge, and this process's rank.
            client: how vLLM is called, for example vLLM's HTTPVLLMWeightSyncClient.
            source: a vLLM WeightSource of (name, tensor), iterated again for each version on every rank.

        Raises:
            ValueError: `source` is missing.
            ConsumerTaken: the bridge's weights have a living writer.
        """
        if source is None:
            raise ValueError(
                "weights are sent from a source, such as vLLM's ModuleSource(model): none was given"
            )
        made = cls(client=client, source=source, bridge=init_info.bridge, is_sender=init_info.is_sender)
        if made.is_sender:
            client.init_weight_transfer_engine({"bridge": init_info.bridge})
        return made

    def send_weights(self, version: int | None = None) -> None:
        """Writes one version and makes vLLM load it. Blocks for both; call it on every rank.

        After an error samples are stamped with an unknown version until the next load, because vLLM's client
        does not report whether all, some or no workers loaded the version.

        Args:
            version: policy version, above the segment's newest; None: the next free one, from 1 on.
        """
        version = push_from_ranks(self._sync, self.source, version, at_least=1)
        if version is None:
            return
        begin_update(self.client.start_weight_update, self.client.finish_weight_update)
        try:
            self.client.update_weights({"bridge": self._bridge, "version": version})
            self.client.finish_weight_update(str(version))
        except BaseException as error:  # also a signal's exception: vLLM continues its running call
            error.add_note(self._disown())
            raise

    def _disown(self) -> str:
        """Stamps samples with no version, by an update that loads nothing; returns a note for the error."""
        # engines that loaded the version have their update open; this begins it on the others
        with suppress(Exception):
            self.client.start_weight_update()
        try:
            self.client.finish_weight_update(UNKNOWN)
        except Exception as also:
            return f"the version of its samples is unknown: {also}"
        return doubt_hint("vLLM may have taken it, whole or in part")

    def shutdown(self) -> None:
        """Closes the bridge; the last version stays in the segment. Idempotent."""
        if self._sync is not None:
            self._sync.close()


register()  # a trainer's process without an engine loads no plugins of vLLM's
