"""ROLL's actor on a bridge, by configuration alone; nothing of ROLL is replaced.

    actor_train:
      worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker

`PublishingActorWorker` writes the weights of each step into the bridge; `ShmAgenticPipeline` takes it by
itself. `ShmActorWorker` also trains with the advantages of the bridge. ROLL then still computes advantages of
its own, and shows those as `critic/advantages/*`.
"""

from __future__ import annotations

import logging
from itertools import chain
from types import SimpleNamespace
from typing import Any

from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

from shmbridge import BadArgument
from shmbridge.consumers.roll.precomputed import samplers_logprobs
from shmbridge.consumers.roll.rows import ADVANTAGES
from shmbridge.consumers.roll.settings import env_configs_of
from shmbridge.consumers.weight_sync import WeightSync, push_from_ranks

log = logging.getLogger(__name__)


class PublishingActorWorker(ActorWorker):
    """ROLL's agentic actor, whose weights also go into the bridges that environments of training read.

    Whenever ROLL copies them to its engines, at the beginning of a step, as the next free version: the one
    that `BridgeReader` then publishes for the step.
    """

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """Prepares ROLL's copying of weights, and ours behind it. Every rank calls it; blocks for ROLL's.

        Raises BadArgument: `env_config.weights` is true, and the weights cannot be gathered here.
        ConsumerTaken: another process writes a bridge's weights.
        """
        super().setup_model_update(infer_cluster=infer_cluster, model_update_name=model_update_name)
        given = env_configs_of(self.pipeline_config.train_env_manager)
        wanted = [name for name, each in given.items() if each.get("weights") is not False]
        strategy = self.worker_config.strategy_args.strategy_name
        if not wanted:
            return
        if "fsdp2" not in strategy or self.worker_config.model_args.lora_target is not None:
            refused = BadArgument(
                f"no weights of {strategy} go into {', '.join(wanted)}: those of fsdp2_train are gathered, "
                "without low-rank adapters",
                hint="env_config.weights: false, if environments sample with other weights",
            )
            if any(given[name].get("weights") for name in wanted):
                raise refused
            log.warning("%s", refused)
            return
        from roll.third_party.fsdp2.model_update import gather_fsdp2_weights

        updaters = self.strategy.weight_updaters
        rolls = updaters[model_update_name]
        syncs = [WeightSync(name, []) if self.rank == 0 else None for name in wanted]

        def model_update() -> dict[str, Any]:
            metrics: dict[str, Any] = rolls.model_update()
            for sync in syncs:
                parts = gather_fsdp2_weights(rolls.model, rolls._model_update_buffer_size)
                push_from_ranks(sync, chain.from_iterable(parts))
            return metrics

        updaters[model_update_name] = SimpleNamespace(model_update=model_update)


class ShmActorWorker(PublishingActorWorker):
    """It trains with the bridge's advantages; rows without the column `shm_advantages` are ROLL's own."""

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
