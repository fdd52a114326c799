"""ROLL's own agentic pipeline on a CPU, fed from a bridge: a process of its own.

    python tests/trainers/roll/train_on_cpu.py BRIDGE MODEL --steps 3 --seen FILE

ROLL's classes run as they are: AgenticPipeline.__init__ and run, RolloutScheduler, GroupQueueManager,
EnvironmentWorker, ActorWorker.train_step and loss_func, FSDP2TrainStrategy on gloo. What is missing is the
engine that ROLL would generate with: its workers do nothing here, and weights go into the bridge alone.
"""

from __future__ import annotations

import argparse
import os
import pickle
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, os.environ["SHMBRIDGE_ROLL_CHECKOUT"])
ROOT = str(Path(__file__).parents[3])

import cpu_platform  # noqa: E402
import ray  # noqa: E402
from dacite import from_dict  # noqa: E402
from roll.distributed.executor.model_update_group import ModelUpdateGroup  # noqa: E402
from roll.distributed.executor.worker import Worker  # noqa: E402
from roll.distributed.scheduler.decorator import Dispatch, register  # noqa: E402
from roll.pipeline.agentic.agentic_actor_worker import ActorWorker  # noqa: E402
from roll.pipeline.agentic.agentic_config import AgenticConfig  # noqa: E402
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline  # noqa: E402
from roll.utils.constants import RAY_NAMESPACE  # noqa: E402

from shmbridge.consumers.roll.actor_worker import ShmActorWorker  # noqa: E402
from shmbridge.consumers.roll.pipeline import ShmAgenticPipeline  # noqa: E402

cpu_platform.complete()


class NoEngine(Worker):
    """ROLL's worker of an inference engine that nobody asks."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def initialize(self, pipeline_config: Any) -> None:
        super().initialize(pipeline_config)

    async def generate(self) -> None:
        """ROLL lets engines be asked by several callers at once; so it wants something awaitable."""


class SeenInLoss(ShmActorWorker):
    """Writes what ROLL's loss gets of each micro-batch into the file SEEN, then computes ROLL's loss."""

    def setup_model_update(self, infer_cluster: Any, model_update_name: str) -> None:
        """As ROLL's, without the engine that its updater would connect to."""
        strategy = self.strategy

        def updater(infer_cluster: Any, model_update_name: str) -> None:
            strategy.weight_updaters[model_update_name] = SimpleNamespace(
                model=strategy.unwrap_model(), _model_update_buffer_size=4096, model_update=dict
            )

        strategy.setup_model_update = updater
        super().setup_model_update(infer_cluster, model_update_name)

    def loss_func(self, data: Any, output_tensor: Any) -> tuple[Any, dict[str, Any]]:
        if os.environ["BY"] == "worker":
            loss = super().loss_func(data, output_tensor)
        else:  # the pipeline has put the advantages in place: ROLL's own worker
            loss = ActorWorker.loss_func(self, data, output_tensor)
        columns = ("input_ids", "attention_mask", "response_mask", "advantages", "infer_logprobs")
        seen = {name: data.batch[name].numpy().copy() for name in columns if name in data.batch}
        labels = data.batch["input_ids"][:, 1:, None]
        picked = output_tensor[:, :-1].float().log_softmax(-1).gather(-1, labels)
        seen["log_probs"] = picked[..., 0].detach().numpy()
        if "infer_logprobs" in seen:
            old = self.get_old_log_probs_with_cache(data, picked[..., 0])
            seen["old_log_probs"] = old.detach().float().numpy()
        with Path(os.environ["SEEN"]).open("ab") as file:
            pickle.dump({"step": data.meta_info["global_step"], **seen}, file)
        return loss


class OnCpu(AgenticPipeline):
    """Without an engine that weights would be copied to.

    Says when a batch is there, and waits if it is told to.
    """

    def set_model_update_pair(self, src_cluster: Any, tgt_cluster: Any, frequency: int = 1) -> None:
        """As ROLL's, which counts devices first."""
        group = object.__new__(ModelUpdateGroup)
        group.src_cluster, group.tgt_cluster, group.frequency = src_cluster, tgt_cluster, frequency
        group.model_update_name = "no engine"
        ray.get(
            [
                each.setup_model_update.remote(infer_cluster=None, model_update_name=group.model_update_name)
                for each in src_cluster.workers
            ]
        )
        self.model_update_groups = [group]

    def adjust_batch(self, data: Any, mode: str = "copy") -> Any:
        print("BATCH", data.meta_info["global_step"], *data.non_tensor_batch["shm_group"], flush=True)
        if os.environ.get("WAIT_IN_STEP") == str(data.meta_info["global_step"]):
            sys.stdin.readline()
        return super().adjust_batch(data, mode)


class ShmOnCpu(ShmAgenticPipeline, OnCpu):
    """The same, with the advantages put in place by the pipeline."""


def config(options: argparse.Namespace) -> AgenticConfig:
    """Returns ROLL's configuration of the run."""
    here = "train_on_cpu"
    managers = {
        "num_env_groups": 1, "group_size": 1, "max_env_num_per_worker": 1, "tags": ["known"],
        "num_groups_partition": [1],
    }  # fmt: skip
    return from_dict(
        AgenticConfig,
        {
            "exp_name": "cpu",
            "seed": 3,
            "max_steps": options.steps,
            "eval_steps": 0,
            "save_steps": options.save,
            "resume_from_checkpoint": options.resume or False,
            "logging_steps": 1,
            "num_gpus_per_node": 0,
            "num_nodes": 1,
            "logging_dir": str(options.seen.parent / "logs"),
            "output_dir": str(options.seen.parent / "output"),
            "track_with": "stdout",
            "pretrain": options.model,
            "sequence_length": 48,
            "rollout_batch_size": options.groups,
            "val_batch_size": 1,
            "adv_estimator": "grpo",
            "gamma": 1.0,
            "whiten_advantages": False,
            "partial_gpu_mode": False,
            "async_generation_ratio": options.lag,
            "generate_opt_level": 1,
            "force_disable_old_logprobs_recompute": True,  # ROLL would count devices to decide
            "enable_reference": False,
            "use_kl_loss": False,
            "init_kl_coef": 0.0,
            "max_grad_norm": 1.0,
            "reward_normalization": {"grouping": "traj_group_id", "norm_mean_type": "group"},
            "actor_train": {
                "worker_cls": f"{here}.SeenInLoss",
                "world_size": 1,
                "training_args": {
                    "learning_rate": options.rate,
                    "per_device_train_batch_size": 4,
                    "gradient_accumulation_steps": options.groups,
                    "warmup_steps": 0,
                    "lr_scheduler_type": "constant",
                },
                "infer_batch_size": 4,
                "strategy_args": {
                    "strategy_name": "fsdp2_train",
                    "strategy_config": {"fsdp_size": 1, "param_dtype": "float32"},
                },
                "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
                "system_envs": {"SEEN": str(options.seen), "BY": options.by},
            },
            "actor_infer": {
                "worker_cls": f"{here}.NoEngine",
                "world_size": 1,
                "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
                "generating_args": {"max_new_tokens": 8},
            },
            "custom_envs": {
                "known": {
                    "env_type": "shmbridge",
                    "max_steps": 1,
                    "env_manager_cls": "shmbridge.consumers.roll.env_manager.ShmEnvManager",
                    "env_config": {
                        "bridge": options.bridge,
                        "infer_logprobs": options.logprobs,
                        "max_staleness": 9,
                    },
                }
            },
            "train_env_manager": managers,
            "val_env_manager": managers,
        },
    )


def main() -> None:
    """Trains, and says DONE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("bridge")
    parser.add_argument("model")
    parser.add_argument("--seen", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=1)
    parser.add_argument("--groups", type=int, default=5)
    parser.add_argument("--rate", type=float, default=1e-2)
    parser.add_argument("--lag", type=int, default=0)
    parser.add_argument("--save", type=int, default=10_000)
    parser.add_argument("--resume", default="")
    parser.add_argument("--logprobs", action="store_true")
    parser.add_argument("--by", choices=("pipeline", "worker"), default="pipeline")
    options = parser.parse_args()
    folders = [ROOT, str(Path(__file__).parent), os.environ["SHMBRIDGE_ROLL_CHECKOUT"]]
    folders.append(os.environ.get("PYTHONPATH", ""))
    ray.init(
        num_cpus=16,
        namespace=RAY_NAMESPACE,
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=100_000_000,
        _node_ip_address="127.0.0.1",
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(folders),
                "HF_HUB_OFFLINE": "1",
                "OMP_NUM_THREADS": "1",
            }
        },
    )
    made = config(options)
    made.num_gpus_per_node, made.num_nodes = 0, 1  # ROLL counts a CPU as one
    (ShmOnCpu if options.by == "pipeline" else OnCpu)(made).run()
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
