"""The rollout name `shmbridge`: verl starts no inference engine, because environments sample elsewhere."""

from __future__ import annotations

from typing import Any

from verl.workers.rollout.replica import RolloutReplica

__all__ = ["NoReplicas"]


class NoReplicas(RolloutReplica):
    """Refuses to be made: rollouts come from a bridge, so the trainer has no engine of its own."""

    def __init__(self, *_: Any, **__: Any) -> None:
        raise ValueError(
            "actor_rollout_ref.rollout.name=shmbridge has no engines to start -> set "
            "trainer.v1.trainer_mode=shmbridge, or name the engine that verl is to start"
        )

    def rollout_worker_use_gpu(self) -> bool:
        """Never called."""
        return False

    async def launch_servers(self) -> None:
        """Never called."""
