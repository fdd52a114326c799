"""The trainer half of the backend, for vLLM's trainer interface: writes a version into the segment, then
sends vLLM its number. Needs vLLM in the learner's process; otherwise use `shmbridge.consumers.weight_sync`.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, ClassVar, Self

from vllm.distributed.weight_transfer.base import TrainerInitInfo, TrainerWeightTransferEngine

from shmbridge.consumers.engines.engine import UNKNOWN, doubt_hint
from shmbridge.consumers.engines.vllm_steps import begin_update
from shmbridge.consumers.vllm.plugin import BACKEND
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks


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
