"""ROLL's modules as far as interface.json records them, for machines without a checkout: `install`."""

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import torch


class DataProto:
    """Columns of equal length; `batch` for tensors, `non_tensor_batch` for the rest."""

    def __init__(self, batch=None, non_tensor_batch=None, meta_info=None) -> None:
        self.batch = {} if batch is None else batch
        self.non_tensor_batch = {} if non_tensor_batch is None else non_tensor_batch
        self.meta_info = {} if meta_info is None else meta_info

    @classmethod
    def from_dict(cls, tensors, non_tensors=None, meta_info=None, num_batch_dims=1) -> "DataProto":
        return cls(dict(tensors), dict(non_tensors or {}), meta_info)

    @classmethod
    def concat(cls, data) -> "DataProto":
        import numpy as np

        tensors = {key: torch.cat([each.batch[key] for each in data]) for key in data[0].batch}
        objects = {
            key: np.concatenate([each.non_tensor_batch[key] for each in data])
            for key in data[0].non_tensor_batch
        }
        return cls(tensors, objects, dict(data[0].meta_info))

    def __len__(self) -> int:
        return len(next(iter(self.batch.values())))


class BaseEnvManager:
    """The part of ROLL's that an environment manager inherits."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.current_step, self.running, self.trace_meta = -1, False, None

    def run_rollout_loop(self, data) -> None: ...

    def formulate_rollouts(self, rollout_cache) -> None: ...

    def update_step(self, global_step, trace_meta=None) -> None:
        self.current_step, self.trace_meta = global_step, trace_meta

    def stop(self) -> None:
        self.running = False


class ActorWorker:
    """An actor whose loss is -mean(advantage * log-probability) over the trained tokens."""

    pipeline_config: Any = None

    def setup_model_update(self, *args, **kwargs) -> None:
        self.strategy.setup_model_update(*args, **kwargs)

    def get_old_log_probs_with_cache(self, data, log_probs):
        return log_probs.detach()

    def loss_func(self, data, output_tensor):
        mask = data.batch["response_mask"][:, 1:]
        labels = data.batch["input_ids"][:, 1:, None]
        picked = output_tensor[:, :-1].log_softmax(-1).gather(-1, labels)[..., 0]
        return -(data.batch["advantages"] * picked * mask).sum() / mask.sum(), {}


def gather_fsdp2_weights(model, buffer_size, is_lora=False):
    """Yields lists of (name, whole tensor); every rank takes part."""
    for name, parameter in model.named_parameters():
        yield [(name, getattr(parameter.data, "full_tensor", lambda value=parameter.data: value)())]


class AgenticPipeline:
    """The part of ROLL's that `ShmAgenticPipeline` inherits; steps and checkpoints are a test's own."""

    def __init__(self, pipeline_config) -> None:
        self.pipeline_config = pipeline_config
        self.state = SimpleNamespace(step=-1, log_history=[], kv={})

    def run(self) -> None: ...

    def adjust_batch(self, data, mode="copy"):
        return data

    def do_checkpoint(self, global_step, is_last_step=None) -> None: ...


def agentic_compute_advantage(
    data,
    gamma,
    lambd,
    adv_estimator,
    advantage_clip=None,
    whiten_advantages=False,
    whiten_rewards=False,
    response_mask=None,
    pipeline_config=None,
):
    """Returns the batch with discounted rewards to go as its advantages; clips them if asked."""
    mask = data.batch["response_mask"][:, 1:]
    rewards = data.batch["token_level_rewards"] * mask
    to_go, columns = torch.zeros(len(data)), []
    for column in reversed(range(rewards.shape[1])):
        to_go = rewards[:, column] + gamma * to_go
        columns.append(to_go)
    advantages = torch.stack(columns[::-1], 1) * mask
    if advantage_clip is not None:
        advantages = advantages.clamp(-advantage_clip, advantage_clip)
    data.batch.update(token_level_rewards=rewards, advantages=advantages, returns=advantages)
    return data


def install() -> None:
    """Puts the stand-ins where the adapter imports ROLL from."""
    pipeline = module("roll.pipeline.agentic.agentic_pipeline")
    pipeline.AgenticPipeline, pipeline.agentic_compute_advantage = AgenticPipeline, agentic_compute_advantage
    sys.modules[__name__ + ".pipeline"] = pipeline
    module("roll.utils.constants").RAY_NAMESPACE = "roll"
    module("roll.distributed.scheduler.protocol").DataProto = DataProto
    module("roll.pipeline.agentic.env_manager.base_env_manager").BaseEnvManager = BaseEnvManager
    module("roll.pipeline.agentic.agentic_actor_worker").ActorWorker = ActorWorker
    module("roll.third_party.fsdp2.model_update").gather_fsdp2_weights = gather_fsdp2_weights


def module(path: str) -> ModuleType:
    """Makes a module and the packages above it."""
    parts = path.split(".")
    for end in range(1, len(parts) + 1):
        name = ".".join(parts[:end])
        if name not in sys.modules:
            sys.modules[name] = ModuleType(name)
            sys.modules[name].__path__ = []
            if end > 1:
                setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], sys.modules[name])
    return sys.modules[path]
