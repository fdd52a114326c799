"""The Atropos API server's queue as a program that speaks its protocol uses it: the strict gateway.

Forming batches is compiled (_ext/atropos_queue.pxi); policy "atropos" of a consumer uses that directly. Not
thread-safe.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Generic, TypeVar

from shmbridge._ext import groups
from shmbridge.atropos.env_status import EnvWeight, Queued, steer, total_weight
from shmbridge.errors import NoWeight, UnknownEnvironment

T = TypeVar("T")


class AtroposQueue(groups.SizedQueue, Generic[T]):
    """Queue, buffers and formed batches of one training run; an item is of any type."""

    def __iter__(self) -> Iterator[T]:
        """Iterates over all items: formed, queued, buffered."""
        return super().__iter__()

    def disconnect(self, env_id: int) -> None:
        """Stops counting its weight and its allocation; its queued groups stay.

        Raises UnknownEnvironment.
        """
        self._known(env_id)
        super().disconnect(env_id)

    def _known(self, env_id: int) -> EnvWeight:
        env = self.envs.get(env_id)
        if env is None:
            raise UnknownEnvironment(
                f"no environment {env_id} among {len(self.envs)}", hint="register it first"
            )
        return env  # type: ignore[no-any-return]

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Returns the answer of upstream's /status-env, and has its effect: the environment's group size
        grows to its largest group in the queue.

        Raises:
            UnknownEnvironment: it is not registered.
            NoWeight: no connected environment has a weight above 0.
        """
        me, connected = self._known(env_id), self.connected
        if total_weight(connected) == 0:
            raise NoWeight(
                f"environment {env_id} asks for its part of a weight of 0; {len(connected)} are connected",
                hint="give one a weight above 0",
            )
        told = steer(me, connected, as_queued(self.by_env()), self.batch_size)
        self.replace(replace(me, group_size=told.group_size))
        return {
            "current_step": self.step,
            "queue_size": told.queue_size,
            "unallocated_fraction": told.unallocated_fraction,
            "self_queue_size": told.self_queue_size,
            "max_group_size": told.max_group_size,
            "env_weight": told.env_weight,
        }


def as_queued(by_env: dict[int | None, tuple[int, int, int]]) -> dict[int | None, Queued]:
    """Returns the queue of each environment, of what the compiled queue counts."""
    return {env_id: Queued(*counts) for env_id, counts in by_env.items()}
