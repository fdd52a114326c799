"""ROLL's advantages replaced by a record's own: `with_precomputed`, and `installed`, which puts it in place.

ROLL has no registry of advantage estimators, so this wraps one function where `agentic_pipeline` imported it,
for the time of a run. `check_signature` guards it: another signature is refused before anything is built.
Imports neither ROLL nor torch. `actor_worker.py` does the same by a hook of ROLL's, after its advantages.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

from shmbridge import BadArgument
from shmbridge.consumers.roll.rows import ADVANTAGES, STEP
from shmbridge.consumers.trainer_settings import setting

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
