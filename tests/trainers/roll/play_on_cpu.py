"""ROLL's agentic pipeline on a CPU, which plays upstream's GSM8K of Atropos: a process of its own.

    python tests/trainers/roll/play_on_cpu.py SCRIPT.py:CLASS FOLDER --steps 5

Runs in FOLDER, which has the data set `gsm8k/` and the model `model/`. Leaves there the batches, as ROLL
itself dumps them (`rollouts/train/step_*.pkl`), and the metrics of its steps (`metrics.json`).

ROLL's classes run as they are, under Ray: AgenticPipeline, RolloutScheduler, GroupQueueManager, RouterManager
with EnvAffinityRouter, EnvironmentWorker with TrajEnvManager and PolicyProxy, InferWorker, ActorWorker,
ModelUpdateGroup, FSDP2TrainStrategy and its weights updater on gloo. Instead of vLLM's strategy: `Answers`.
"""

from __future__ import annotations

import argparse
import enum
import importlib
import json
import os
import random
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[3]
# ROLL has a package `tests` of its own, so ours is not found by that name here.
FOLDERS = [str(ROOT), str(ROOT / "tests/environments/gem"), os.environ["SHMBRIDGE_ROLL_CHECKOUT"]]
sys.path[1:1] = FOLDERS

import cpu_platform  # noqa: E402
import ray  # noqa: E402
import stand_in  # noqa: E402
import torch  # noqa: E402
from dacite import from_dict  # noqa: E402
from roll.distributed.strategy.hf_strategy import HfInferStrategy  # noqa: E402
from roll.pipeline.agentic.agentic_config import AgenticConfig  # noqa: E402
from roll.pipeline.agentic.agentic_pipeline import AgenticPipeline  # noqa: E402
from roll.utils.collective import collective  # noqa: E402
from roll.utils.constants import RAY_NAMESPACE  # noqa: E402
from upstream import SCRIPTS  # noqa: E402

from shmbridge.producers.gem import register  # noqa: E402

GROUP, GROUPS, LONGEST = 4, 5, 2048  # environments of a group, groups, tokens of a trajectory in Atropos
DEVICES = 2  # that Ray is told of: places for the worker of the trainer and of the engine


class Answers(HfInferStrategy):
    """Replaces ROLL's VllmStrategy: says what is written here, with the model's log-probabilities of it.

    ROLL's agentic pipeline takes vLLM or SGLang alone (agentic_config.py:368), and asks its platform for an
    allocator of device memory before it makes vLLM (third_party/vllm/__init__.py:67), which a CPU platform
    lacks. ROLL's `HfInferStrategy` answers no requests. This one takes from it the model, which gets the
    trainer's weights before each step by ROLL's own updater.

    To one half of the problems all answers are right, to the other some; an answer is at length now and then.
    """

    device = "cpu"

    async def initialize(self, model_provider: Any) -> None:
        super().initialize(model_provider)
        self.chance = random.Random(11)

    async def generate_request(self, payload: dict[str, Any]) -> dict[str, Any]:
        """Returns one answer to the token ids of a prompt, in the form of vLLM's strategy."""
        script, prompt, chance = SCRIPTS["gsm8k"], list(payload["input_ids"]), self.chance
        right = script.right(self.tokenizer.decode(prompt))
        known = int(re.findall(r"\d+", right)[-1]) % 2 == 0
        text = right if known or chance.random() < 0.5 else script.wrong
        thought = "hm " * (200 + chance.randrange(50)) * (chance.random() < 0.3)
        text = f"<think>{thought}</think>{text.rpartition('</think>')[2]}"
        answer = [*self.tokenizer.encode(text, add_special_tokens=False), self.tokenizer.eos_token_id]
        assert len(answer) <= payload["sampling_params"]["max_tokens"]
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + answer])).logits[0, len(prompt) - 1 : -1].float()
        logprobs = logits.log_softmax(-1).gather(-1, torch.tensor(answer)[:, None])[:, 0].tolist()
        return {"output_token_ids": [answer], "finish_reasons": ["stop"], "output_logprobs": [logprobs]}

    async def abort_requests(self, request_ids: list[str]) -> None:
        """Nothing: an answer is given at once."""

    async def load_states(self, *_: Any, **__: Any) -> None:
        """Nothing: there is one memory."""

    offload_states = process_weights_after_loading = load_states

    async def setup_collective_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str
    ) -> None:
        """Joins the group over which ROLL's trainer broadcasts, as ROLL's workers inside of vLLM do."""
        collective.init_collective_group(
            world_size, rank_offset, master_address, master_port, group_name=group_name
        )

    async def broadcast_parameter(self, *given: Any, **named: Any) -> None:
        super().broadcast_parameter(*given, **named)


class RequestOutputKind(enum.Enum):
    """vLLM's, which ROLL's router writes into the sampling parameters."""

    CUMULATIVE, DELTA, FINAL_ONLY = range(3)


def prepare() -> None:
    """Run by each of Ray's workers as it starts: makes it find what a machine with GPUs and vLLM has."""
    cpu_platform.complete()
    cpu_platform.declare_devices(DEVICES)
    register()
    names = {
        "vllm": ("RequestOutput", "SamplingParams"),
        "vllm.lora.request": ("LoRARequest",),
        "vllm.sampling_params": ("BeamSearchParams",),
        "vllm.inputs": ("TokensPrompt",),
        "vllm.utils": ("random_uuid",),
        "roll.third_party.vllm": ("create_async_llm",),
    }
    importlib.import_module("roll.third_party")
    for path, wanted in names.items():
        module = stand_in.module(path)
        for name in wanted:
            setattr(module, name, None)
    sys.modules["vllm.sampling_params"].RequestOutputKind = RequestOutputKind
    from roll.distributed.strategy import vllm_strategy

    vllm_strategy.VllmStrategy = Answers


def config(environment: str, steps: int) -> AgenticConfig:
    """Returns ROLL's configuration of the run; three groups live in one worker, two in another."""
    group = {"group_size": GROUP, "tags": ["gsm8k"]}
    train = {"num_env_groups": GROUPS, "num_groups_partition": [GROUPS], "max_env_num_per_worker": 3 * GROUP}
    evaluation = {"num_env_groups": 1, "num_groups_partition": [1], "max_env_num_per_worker": GROUP}
    return from_dict(
        AgenticConfig,
        {
            "exp_name": "gsm8k",
            "seed": 3,
            "max_steps": steps,
            "eval_steps": 0,
            "save_steps": 10_000,
            "logging_steps": 1,
            "logging_dir": "logs",
            "output_dir": "output",
            "track_with": "stdout",
            "rollout_mock": {"enable": True, "mode": "dump", "dump_dir": "rollouts"},
            "pretrain": str(Path("model").resolve()),
            "sequence_length": 1792,
            "rollout_batch_size": GROUP * GROUPS,
            "val_batch_size": GROUP,
            "adv_estimator": "grpo",
            "gamma": 1.0,
            "whiten_advantages": False,
            "enable_reference": False,
            "use_kl_loss": False,
            "init_kl_coef": 0.0,
            "reward_normalization": {"grouping": "traj_group_id", "norm_mean_type": "group"},
            "actor_train": {
                "device_mapping": "[0]",
                "training_args": {
                    "learning_rate": 1e-3,
                    "per_device_train_batch_size": 4,
                    "gradient_accumulation_steps": GROUPS,
                    "warmup_steps": 0,
                    "lr_scheduler_type": "constant",
                },
                "infer_batch_size": 4,
                "strategy_args": {
                    "strategy_name": "fsdp2_train",
                    "strategy_config": {"fsdp_size": 1, "param_dtype": "float32"},
                },
                "model_args": {"dtype": "fp32", "disable_gradient_checkpointing": True},
            },
            "actor_infer": {
                "device_mapping": "[1]",
                "strategy_args": {"strategy_name": "vllm", "strategy_config": {}},
                "generating_args": {"max_new_tokens": 1024},
                "model_args": {"dtype": "fp32"},
            },
            "custom_envs": {
                "gsm8k": {
                    "env_type": "atropos",
                    "max_steps": 1,
                    "max_tokens_per_step": 1024,
                    "agent_system_template": "Solve it.",
                    "agent_template": "{observation}",
                    "env_config": {
                        "environment": environment,
                        "tokenizer": str(Path("model").resolve()),
                        "items": 200,
                        "group_size": GROUP,
                        "config": {"use_wandb": False, "max_token_length": LONGEST},
                        "timeout_s": 200.0,
                    },
                }
            },
            "train_env_manager": group | train,
            "val_env_manager": group | evaluation,
        },
    )


def main() -> None:
    """Plays and trains, and says DONE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("environment")
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, required=True)
    options = parser.parse_args()
    os.chdir(options.folder)
    folders = [*FOLDERS, str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")]
    prepare()
    ray.init(
        num_cpus=4,  # as many of Ray's workers begin at once, and each imports ROLL
        num_gpus=DEVICES,
        namespace=RAY_NAMESPACE,
        include_dashboard=False,
        log_to_driver=True,
        object_store_memory=200_000_000,
        _node_ip_address="127.0.0.1",
        runtime_env={
            "env_vars": {
                "PYTHONPATH": os.pathsep.join(folders),
                "HF_HUB_OFFLINE": "1",
                "WANDB_MODE": "disabled",
                "OMP_NUM_THREADS": "1",
            },
            "worker_process_setup_hook": "play_on_cpu.prepare",
        },
    )
    pipeline = AgenticPipeline(config(options.environment, options.steps))
    pipeline.run()
    Path("metrics.json").write_text(json.dumps(pipeline.state.log_history, default=float))
    ray.shutdown()
    print("DONE", flush=True)


if __name__ == "__main__":
    main()
