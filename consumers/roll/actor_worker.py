"""How ROLL trains with the advantages of a bridge: by an actor of configuration alone, or by one function.

    actor_train:
      worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker

`PublishingActorWorker` writes the weights of each step into the bridge; `ShmAgenticPipeline` takes it by
itself. `ShmActorWorker` also trains with the advantages of the bridge. ROLL then still computes advantages of
its own, and shows those as `critic/advantages/*`.

`with_precomputed` is for `ShmAgenticPipeline`: ROLL has no registry of advantage estimators, so it wraps one
function where `agentic_pipeline` imported it, for the time of a run. Another signature than the tested one is
refused before anything is built.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain
from types import ModuleType, SimpleNamespace
from typing import Any

from roll.pipeline.agentic.agentic_actor_worker import ActorWorker

from shmbridge import BadArgument
from shmbridge.consumers.feed import setting
from shmbridge.consumers.roll.env_manager import ADVANTAGES, STEP, env_configs_of
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


NAME = "agentic_compute_advantage"
PARAMETERS = (
    "data",
    "gamma",
    "lambd",
    "adv_estimator",
    "advantage_clip",
    "whiten_advantages",
    "whiten_rewards",
    "response_mask",
    "pipeline_config",
)

Compute = Callable[..., Any]


def check_signature(compute: Compute) -> None:
    """Raises BadArgument unless ROLL's function has the parameters that were tested. Never blocks."""
    found = tuple(inspect.signature(compute).parameters)
    if found != PARAMETERS:
        raise BadArgument(
            f"ROLL's {NAME} takes {', '.join(found)}, and was tested with {', '.join(PARAMETERS)}",
            hint="use actor_train.worker_cls: shmbridge.consumers.roll.actor_worker.ShmActorWorker instead",
        )


def with_precomputed(compute: Compute) -> Compute:
    """Returns ROLL's function, which uses the column `shm_advantages` where a batch has it. Never blocks.

    The column goes through ROLL's own code as token rewards of estimator "grpo" without discount, which
    returns them unchanged; so its whitening, clipping and distillation terms apply to them as configured.
    `token_level_rewards` stay ROLL's; `old_log_probs` become what `samplers_logprobs` returns. A batch
    without the column is ROLL's alone.

    Raises:
        BadArgument: the signature is another.
    """
    check_signature(compute)
    signature = inspect.signature(compute)

    @functools.wraps(compute)
    def computed(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind(*args, **kwargs)
        data = call.arguments["data"]
        if ADVANTAGES not in data.batch:
            return compute(*args, **kwargs)
        rewards = data.batch["token_level_rewards"]
        data.batch["token_level_rewards"] = data.batch[ADVANTAGES].clone()
        call.arguments.update(adv_estimator="grpo", gamma=0.0, whiten_rewards=False)
        done = compute(**call.arguments)
        done.batch["token_level_rewards"] = rewards * done.batch["response_mask"][:, 1:]
        config = call.arguments.get("pipeline_config")
        if (sampled := samplers_logprobs(done.batch, config)) is not None:
            done.batch["old_log_probs"] = sampled.clone()
            done.non_tensor_batch.pop("sample_uuid", None)  # by it ROLL's actor would take its own first ones
        done.meta_info.setdefault("metrics", {}).update(_metrics(done))
        return done

    return computed


def samplers_logprobs(batch: Any, config: Any) -> Any:
    """Returns what the ratio's old log-probabilities are to be, of a batch of the bridge. Never blocks.

    Args:
        batch: its tensors.
        config: ROLL's AgenticConfig; None: its defaults.

    Returns:
        `infer_logprobs`, (B, S - 1) nats. None if the batch has none, or is not of a bridge, or if ROLL's own
        `train_infer_correction` compares with them.
    """
    weighted = setting(config, "train_infer_correction.is_weight.enabled")
    filters = setting(config, "train_infer_correction.filters") or ()
    if ADVANTAGES not in batch or weighted or any(each.enabled for each in filters):
        return None
    return batch.get("infer_logprobs", None)


@contextmanager
def installed(module: ModuleType) -> Iterator[None]:
    """For its time, `module` calls ROLL's function through `with_precomputed`. Never blocks.

    Args:
        module: `roll.pipeline.agentic.agentic_pipeline`, or one that imported the function as it does.
    """
    before = getattr(module, NAME)
    setattr(module, NAME, with_precomputed(before))
    try:
        yield
    finally:
        setattr(module, NAME, before)


def _metrics(data: Any) -> dict[str, float]:
    metrics = {"shm/rows_trained": float(len(data))}
    steps = data.non_tensor_batch.get(STEP)
    now = data.meta_info.get("global_step")
    if steps is not None and now is not None:
        late = [now - step for step in steps]
        metrics.update({"shm/steps_late/mean": sum(late) / len(late), "shm/steps_late/max": float(max(late))})
    return metrics
