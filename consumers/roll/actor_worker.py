"""`ShmActorWorker`: ROLL's actor, whose loss takes the advantages of the bridge. By configuration alone.

    actor_train:
      worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker

Nothing of ROLL is replaced. ROLL still computes advantages of its own, and shows those as
`critic/advantages/*`.
"""

from __future__ import annotations

from typing import Any

from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

from shmbridge.consumers.roll.precomputed import samplers_logprobs
from shmbridge.consumers.roll.rows import ADVANTAGES


class ShmActorWorker(ActorWorker):
    """ROLL's agentic actor; rows without the column `shm_advantages` are trained as ROLL's own."""

    def loss_func(self, data: Any, output_tensor: Any) -> tuple[Any, dict[str, Any]]:
        """Returns ROLL's loss and metrics of a micro-batch. Blocks as the loss does.

        Args:
            data: DataProto; `shm_advantages` float32 (B, S - 1).
            output_tensor: the model's output, as ROLL's own `loss_func` takes it.
        """
        if ADVANTAGES in data.batch:
            own = data.batch[ADVANTAGES]
            data.batch["advantages"] = own * data.batch["response_mask"][:, 1:]
        loss: tuple[Any, dict[str, Any]] = super().loss_func(data, output_tensor)
        return loss

    def get_old_log_probs_with_cache(self, data: Any, log_probs: Any) -> Any:
        """Returns the sampler's log-probabilities where a batch of the bridge has them, else ROLL's own."""
        if (sampled := samplers_logprobs(data.batch, self.pipeline_config)) is not None:
            return sampled
        return super().get_old_log_probs_with_cache(data, log_probs)
