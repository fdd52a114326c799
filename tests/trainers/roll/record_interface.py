"""Writes interface.json, what the adapter builds on in ROLL, from a checkout.

SHMBRIDGE_ROLL_CHECKOUT=../ROLL .venvs/roll/bin/python tests/trainers/roll/record_interface.py
"""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

HERE = Path(__file__).parent
# What is called, subclassed or wrapped, as module:name.
FUNCTIONS = (
    "roll.distributed.scheduler.protocol:DataProto.from_dict",
    "roll.distributed.executor.model_update_group:ModelUpdateGroup.__init__",
    "roll.distributed.executor.worker:Worker.setup_model_update",
    "roll.distributed.scheduler.rollout_scheduler:GroupQueue.get_episode_id",
    "roll.distributed.scheduler.rollout_scheduler:GroupQueue.put",
    "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.get_old_log_probs_with_cache",
    "roll.pipeline.agentic.agentic_actor_worker:ActorWorker.loss_func",
    "roll.pipeline.agentic.agentic_pipeline:AgenticPipeline.__init__",
    "roll.pipeline.agentic.agentic_pipeline:AgenticPipeline.adjust_batch",
    "roll.pipeline.agentic.agentic_pipeline:AgenticPipeline.do_checkpoint",
    "roll.pipeline.agentic.agentic_pipeline:AgenticPipeline.run",
    "roll.pipeline.agentic.agentic_pipeline:agentic_compute_advantage",
    "roll.pipeline.agentic.env_manager.base_env_manager:BaseEnvManager.formulate_rollouts",
    "roll.pipeline.agentic.env_manager.base_env_manager:BaseEnvManager.run_rollout_loop",
    "roll.pipeline.agentic.env_manager.base_env_manager:BaseEnvManager.stop",
    "roll.pipeline.agentic.env_manager.base_env_manager:BaseEnvManager.update_step",
    "roll.pipeline.agentic.env_manager.traj_env_manager:TrajEnvManager.__init__",
    "roll.pipeline.agentic.environment_worker:EnvironmentWorker.update_step",
    "roll.third_party.fsdp2.model_update:FSDP2WeightUpdater.model_update",
    "roll.third_party.fsdp2.model_update:gather_fsdp2_weights",
    "roll.utils.worker_state:WorkerState.__init__",
)
# Where the options of a run are, as module:name, each with the class whose fields are left out.
OPTIONS = {
    "": ("roll.pipeline.agentic.agentic_config:AgenticConfig", "roll.configs.base_config:BaseConfig"),
    "train_env_manager.": (
        "roll.pipeline.agentic.agentic_config:EnvManagerConfig",
        "roll.configs.worker_config:WorkerConfig",
    ),
    "reward_normalization.": ("roll.pipeline.agentic.agentic_config:RewardNormalizationConfig", ""),
    "train_infer_correction.": ("roll.configs.base_config:TrainInferCorrectionConfig", ""),
    "train_infer_correction.is_weight.": ("roll.configs.base_config:TrainInferISWeightConfig", ""),
}
QUEUE = "roll.distributed.scheduler.rollout_scheduler:GroupQueueManager"
LENGTH = 8


def parameters(function) -> list[str]:
    """Returns the names of a function's parameters."""
    return [name for name in inspect.signature(function).parameters if not name.startswith("_ray")]


def named(path: str):
    """Returns what a path of FUNCTIONS names."""
    module, name = path.split(":")
    found = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    return found


def fields(manager: str) -> dict[str, list]:
    """Returns name -> [dtype, length] of the columns that one of ROLL's own environment managers makes."""
    module, name = manager.split(":")
    turn = {"prompt_ids": [1, 2], "response_ids": [3, 4], "infer_logprobs": [-0.5, -0.25], "reward": 1.0}
    cache = SimpleNamespace(
        history=[{**turn, "state_hash": "h"}], env_id=0, group_id=0, tag="t", step=1, terminated=True
    )
    me = SimpleNamespace(
        rollout_cache=cache,
        pipeline_config=SimpleNamespace(sequence_length=LENGTH),
        tokenizer=SimpleNamespace(pad_token_id=0),
    )
    made = getattr(import_module(module), name).formulate_rollouts(me, cache)
    tensors = {
        key: [str(made.batch[key].dtype).removeprefix("torch."), made.batch[key].shape[1] - LENGTH]
        for key in made.batch.keys()  # noqa: SIM118
    }
    objects = {
        key: [type(made.non_tensor_batch[key][0]).__name__, None]
        for key in made.non_tensor_batch.keys()  # noqa: SIM118
    }
    return dict(sorted({**tensors, **objects}.items()))


def options() -> list[str]:
    """Returns the keys of a run's configuration that are ROLL's own for reinforcement learning."""
    found = []
    for above, (own, base) in OPTIONS.items():
        inherited = {each.name for each in dataclasses.fields(named(base))} if base else set()
        found += [
            f"{above}{each.name}" for each in dataclasses.fields(named(own)) if each.name not in inherited
        ]
    return sorted(found)


def interface() -> dict:
    """Returns what interface.json holds, of the ROLL that is importable."""
    queue = named(QUEUE).__ray_metadata__.modified_class
    return {
        "signatures": {
            **{path: parameters(named(path)) for path in FUNCTIONS},
            f"{QUEUE}.get_episode_id": parameters(queue.get_episode_id),
            f"{QUEUE}.put": parameters(queue.put),
        },
        "rows of a trajectory": fields("roll.pipeline.agentic.env_manager.traj_env_manager:TrajEnvManager"),
        "rows of a step": fields("roll.pipeline.agentic.env_manager.step_env_manager:StepEnvManager"),
        "options": options(),
    }


def main() -> None:
    """Writes the file, with the checkout's commit."""
    checkout = os.environ["SHMBRIDGE_ROLL_CHECKOUT"]
    sys.path.insert(0, checkout)
    commit = (
        os.environ.get("SHMBRIDGE_ROLL_COMMIT")
        or subprocess.check_output(["git", "-C", checkout, "rev-parse", "HEAD"], text=True).strip()
    )
    (HERE / "interface.json").write_text(json.dumps({"commit": commit, **interface()}, indent=1) + "\n")


if __name__ == "__main__":
    main()
