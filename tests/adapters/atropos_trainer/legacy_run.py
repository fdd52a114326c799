"""Runs upstream's `train_legacy` from a bridge; the vLLM server that it would restart is left out.

    python legacy_run.py BRIDGE MODEL FOLDER STEPS ROWS [kill]

With `kill` this process kills itself in the loss of its second step.
"""

import os
import signal
import sys

from example_trainer import trainers, training
from example_trainer.config import TrainingConfig

from shmbridge.consumers.atropos_trainer import BridgeData


def without_vllm() -> None:
    """Takes out the server: its weights are files, which nobody here reads."""
    trainers.launch_vllm_server = lambda config, path: None
    trainers.set_vllm_process = lambda process: None
    trainers.terminate_vllm_process = trainers.check_vllm_process_health = lambda: None


def config_of(model: str, folder: str, steps: int, rows: int, size: int = 1) -> TrainingConfig:
    return TrainingConfig(
        model_name=model,
        training_steps=steps,
        batch_size=size,
        gradient_accumulation_steps=rows // size,
        seq_len=128,
        lr=5e-3,
        warmup_steps=0,
        device="cpu",
        save_path=folder,
        vllm_restart_interval=steps,
        use_wandb=False,
        optimizer="adamw",
    )


def kill_in_step(number: int) -> None:
    """SIGKILL in the middle of that step: its batch is there, and its weights are not updated."""
    inner, calls = trainers.run_training_step, []

    def run(*arguments, **named):
        calls.append(1)
        if len(calls) == number:
            os.kill(os.getpid(), signal.SIGKILL)
        return inner(*arguments, **named)

    trainers.run_training_step = run


if __name__ == "__main__":
    bridge, model, folder, steps, rows = sys.argv[1:6]
    assert training.run_training_step is trainers.run_training_step
    without_vllm()
    if "kill" in sys.argv:
        kill_in_step(2)
    with BridgeData(bridge, timeout_s=60) as data, data.installed_in(trainers):
        trainers.train_legacy(config_of(model, folder, int(steps), int(rows)))
