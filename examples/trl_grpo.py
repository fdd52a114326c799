"""TRL's GRPOTrainer learns from a live environment on one CPU: digits, then letters.

    pip install 'shmbridge[trl,rollout]'
    python examples/trl_grpo.py --steps 40

The environment is trl_env.py, with a reward for each of two answers; a policy server samples for it, and
follows the weights that the trainer writes after each step. The trainer credits each token with the reward of
its own answer: advantages differ within a row. Nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tiny_model import build
from trl import GRPOConfig

import shmbridge
from shmbridge.consumers.trajectories import Credit
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from shmbridge.consumers.weight_sync import WeightSync

HERE = Path(__file__).parent


@contextlib.contextmanager
def running(log: Path, *words: str) -> Iterator[subprocess.Popen[str]]:
    """Runs a Python program beside this one; yields it with its output as a pipe, and ends it."""
    with log.open("w") as errors:
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.PIPE, stderr=errors, text=True)
    try:
        yield process
    finally:
        process.terminate()
        process.communicate(timeout=60)


@contextlib.contextmanager
def environment(bridge: str, model: str, folder: Path, group_size: int) -> Iterator[None]:
    """The policy server and the environment."""
    server = ("-m", "shmbridge.consumers.policy_server", "--bridge", bridge, "--model", model, "--port", "0")
    with running(folder / "server.log", *server) as serving:
        assert serving.stdout is not None
        line = serving.stdout.readline()
        assert "http://" in line, (folder / "server.log").read_text()
        url = "http://" + line.split("http://")[1].split()[0]
        words = ("--bridge", bridge, "--server", url, "--tokenizer", model, "--max-tokens", "4")
        played = (str(HERE / "trl_env.py"), *words, "--group-size", str(group_size))
        with running(folder / "environment.log", *played):
            yield


def train(bridge: str, model: str, folder: Path, steps: int, seed: int) -> list[float]:
    """Returns the mean score of each step's groups."""
    args = GRPOConfig(
        output_dir=str(folder / "out"),
        max_steps=steps,
        per_device_train_batch_size=32,
        num_generations=8,
        gradient_accumulation_steps=1,
        learning_rate=3e-3,
        lr_scheduler_type="constant",
        beta=0.0,
        use_cpu=True,
        bf16=False,
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        disable_tqdm=True,
    )
    credit = Credit(steps="step", step_over="place", step_weight=1.0)  # the reward of a token's own answer
    rollouts = shm_rollout_func(bridge, max_staleness=4, credit=credit, timeout_s=120)
    with rollouts, WeightSync(bridge, []) as weights:
        trainer = ShmGRPOTrainer(model, args=args, rollout_func=rollouts, weights=weights)
        with environment(bridge, model, folder, args.num_generations):
            trainer.train()
        stats = rollouts.stats()
    print(
        f"{stats['trl_rows_total']:.0f} rows of {stats['trl_groups_total']:.0f} groups trained, "
        f"{stats['discarded_total']:.0f} records discarded as stale, staleness at most "
        f"{stats['staleness_max']:.0f}"
    )
    return [line["reward"] for line in trainer.state.log_history if "reward" in line]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps [40]")
    parser.add_argument("--seed", type=int, default=1, help="of the model and the trainer [1]")
    options = parser.parse_args()
    bridge = f"trl-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        build(model, seed=options.seed)
        try:
            rewards = train(bridge, str(model), Path(folder), options.steps, options.seed)
        finally:
            shmbridge.clean(bridge, dry_run=False)
    tenth = max(len(rewards) // 10, 1)
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    print(f"mean score of the first tenth of the steps {first:.2f}, of the last {last:.2f}")


if __name__ == "__main__":
    main()
