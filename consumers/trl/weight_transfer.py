"""`ShmWeightTransfer`: the weights segment of a bridge in place of NCCL in TRL's `AsyncGRPOTrainer`.

Imports no TRL.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from shmbridge.consumers.engines.engine import Pause
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

if TYPE_CHECKING:
    from shmbridge.consumers.trl.async_worker import ShmRolloutWorker


class ShmWeightTransfer:
    """TRL's `WeightTransferProtocol`. Made in every process, opened in the main one only.

    Weights and rollouts have the same version numbers: those that `worker` publishes.

    Args:
        worker: the rollout worker of the same trainer; its bridge carries the weights.
        engine: what `WeightSync` takes: a URL, a vLLM engine, or a list; empty: engines that follow the
            segment by themselves, such as the policy server.
        pause: how an engine treats requests in flight while it loads.
        timeout_s: limit for the engines' part of a version.
    """

    def __init__(
        self, worker: ShmRolloutWorker, engine: Any = (), *, pause: Pause = "keep", timeout_s: float = 300.0
    ) -> None:
        self._worker, self._engine, self._pause, self._timeout_s = worker, engine, pause, timeout_s
        self._sync: WeightSync | None = None

    def init_weight_transfer(self) -> None:
        """Becomes the writer of the bridge's weights. Does not block.

        Raises ConsumerTaken: another process writes them. EngineFailed: `engine` is not an engine.
        """
        if self._sync is None:
            self._sync = WeightSync(
                self._worker.bridge, self._engine, pause=self._pause, timeout_s=self._timeout_s
            )

    def pause(self) -> None:
        """Does nothing: engines sample on while the segment is written, and pause only to load it."""

    def send_weights(self, iterator: Iterator[tuple[str, Any]]) -> None:
        """Writes a version into the segment and loads it into the engines. Blocks for both.

        Raises EngineFailed, WeightsMismatch, WeightsBusy: as `WeightSync.push`. TRL's other processes gather
        with it, also the rest after an error.
        """
        assert self._sync is not None, "init_weight_transfer comes first"
        version = self._worker.next_policy_version(self._sync.next_version())
        push_from_ranks(self._sync, iterator, version)

    def resume(self) -> None:
        """Does nothing: engines sample again when `send_weights` returns."""

    def destroy(self) -> None:
        """Closes the segment; the last version stays readable. Idempotent."""
        if self._sync is not None:
            self._sync.close()
            self._sync = None
