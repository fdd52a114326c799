"""verl trains a tiny model on a CPU from a bridge, with an environment in a process of its own.

    make .venvs/verl/.installed && .venvs/verl/bin/python examples/verl_grpo.py --steps 12

The trainer is verl's own command with `examples/verl_grpo.yaml`. The environment samples with the weights
that verl has sent through the bridge, and rewards one letter: an advantage per token, made here. Its mean
reward rises. Two to three minutes, most of which verl needs to start.
"""

import argparse
import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

import shmbridge
from shmbridge.weights import WeightsReader

HERE = Path(__file__).parent
WANTED, PROMPT, ANSWER, ROWS = 7, [3, 10, 11, 4], 6, 8  # token ids; tokens of an answer; rows of a group
ON_CPU = {
    "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu",
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}


def overrides(bridge: str, model: str, steps: int) -> list[str]:
    """What a CPU and a tiny model need beside verl_grpo.yaml."""
    return [
        f"trainer.atropos.bridge={bridge}",
        "+trainer.atropos.max_off_policy_steps=1",
        "trainer.v1.shmbridge.num_warmup_batches=0",
        f"actor_rollout_ref.model.path={model}",
        "+actor_rollout_ref.model.override_config.attn_implementation=eager",
        "actor_rollout_ref.model.use_remove_padding=False",
        "actor_rollout_ref.model.enable_gradient_checkpointing=False",
        "actor_rollout_ref.actor.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile=False",
        "actor_rollout_ref.actor.fsdp_config.model_dtype=fp32",
        "actor_rollout_ref.actor.fsdp_config.dtype=float32",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=16",
        f"actor_rollout_ref.rollout.n={ROWS}",
        "data.train_batch_size=2",
        "data.dataloader_num_workers=0",
        "trainer.device=cpu",
        "trainer.n_gpus_per_node=1",
        f"trainer.total_training_steps={steps}",
        "trainer.save_freq=-1",
        "trainer.resume_mode=disable",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units=1",
        "ray_kwargs.ray_init.num_cpus=12",
        "+ray_kwargs.ray_init.num_gpus=1",
        "+ray_kwargs.ray_init.include_dashboard=False",
    ]


def play(bridge: str, model: str) -> None:
    """The environment: samples answers with verl's weights, rewards the wanted token, until it is ended."""
    import torch
    from transformers import AutoModelForCausalLM

    from shmbridge.consumers.engines.published_tensors import as_tensor

    policy, random = AutoModelForCausalLM.from_pretrained(model).eval(), torch.Generator().manual_seed(1)
    reader, places = WeightsReader(bridge), dict(policy.named_parameters())
    reader.wait(None, timeout_s=600.0)

    def load() -> int:
        with reader.lease() as lease, torch.no_grad():
            for name, array in lease.tensors.items():
                if name in places:
                    places[name].copy_(as_tensor(array, lease.dtypes[name]))
            return lease.version

    @torch.no_grad()
    def sample() -> dict[str, list[Any]]:
        tokens, logprobs = torch.tensor([PROMPT] * ROWS), []
        for _ in range(ANSWER):
            choices = policy(tokens).logits[:, -1].float().log_softmax(-1)
            sampled = torch.multinomial(choices.exp(), 1, generator=random)
            logprobs.append(choices.gather(1, sampled))
            tokens = torch.cat([tokens, sampled], 1)
        hits = (tokens[:, len(PROMPT) :].numpy() == WANTED).astype(np.float32)
        prompt = np.zeros((ROWS, len(PROMPT)), np.float32)
        return {
            "tokens": list(tokens.numpy().astype(np.int32)),
            "prompt_length": [len(PROMPT)] * ROWS,
            "loss_mask": list(np.hstack([prompt, np.ones_like(hits)]).astype(np.uint8)),
            "advantages": list(np.hstack([prompt, hits - hits.mean()])),
            "inference_logprobs": list(np.hstack([prompt, torch.cat(logprobs, 1).numpy()])),
            "score": hits.mean(1).astype(float).tolist(),
        }

    with shmbridge.Producer(bridge, env_name="wanted_token", lane_bytes="4M") as producer:
        while True:
            with producer.begin_group():  # waits where the group would be too old when it is trained
                version = load()
                producer.put(sample(), policy_version=version)


def train(bridge: str, steps: int) -> list[float]:
    """Runs environment and trainer; returns the mean reward of each step."""
    with tempfile.TemporaryDirectory() as folder:
        runpy.run_path(str(HERE / "tiny_model.py"))["build"](Path(folder), seed=3)
        variables = os.environ | ON_CPU | {"PYTHONPATH": os.pathsep.join([str(HERE), *sys.path])}
        words = [sys.executable, __file__, "--bridge", bridge, "--play", folder]
        environment = subprocess.Popen(words, env=variables)
        try:
            command = [sys.executable, "-m", "verl.trainer.main_ppo", f"--config-path={HERE.resolve()}"]
            command += ["--config-name=verl_grpo", *overrides(bridge, folder, steps)]
            command += [f"hydra.run.dir={folder}/hydra"]
            trainer = subprocess.Popen(
                command,
                env=variables,
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            assert trainer.stdout is not None
            rewards, lines = [], []
            for line in trainer.stdout:
                lines.append(line)
                if "atropos/mean_score:" in line:
                    rewards.append(float(line.split("atropos/mean_score:")[1].split(" ")[0]))
                    print(f"step {len(rewards):3}  mean reward {rewards[-1]:.3f}", flush=True)
            if trainer.wait():
                raise SystemExit("".join(lines[-100:]))
            return rewards
        finally:
            environment.terminate()
            environment.wait()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bridge", default=f"verl-{os.getpid()}")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--play", metavar="MODEL", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.play:
        play(options.bridge, options.play)
    else:
        rewards = train(options.bridge, options.steps)
        shmbridge.clean(options.bridge, dry_run=False)
        print(f"mean reward {rewards[0]:.3f} in the first step, {rewards[-1]:.3f} in the last")


if __name__ == "__main__":
    main()
