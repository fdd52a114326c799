"""A trainer that is killed between a batch and its step: the next one gets the same groups."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from tests.trainers.trl.target_groups import group

SYNC = """
import sys
from trl import GRPOConfig
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func

class Stuck(ShmGRPOTrainer):
    def _compute_loss(self, model, inputs):
        loss = super()._compute_loss(model, inputs)
        if self.state.global_step == 1:  # of the second batch: between its arrival and its step
            print("computing", flush=True)
            sys.stdin.read()
        return loss

bridge, tiny, folder = sys.argv[1:]
args = GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_steps=3,
    per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=1, disable_tqdm=True)
Stuck(tiny, args=args, rollout_func=shm_rollout_func(bridge, timeout_s=60)).train()
"""


ASYNC = """
import sys
import pytest
from datasets import Dataset
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer
from shmbridge.consumers.trl import ShmRolloutWorker
from tests.trainers.trl.cpu_attention import on_cpu

class NoTransfer:
    def init_weight_transfer(self): ...
    pause = resume = destroy = init_weight_transfer
    def send_weights(self, iterator): ...

class Stuck(AsyncGRPOTrainer):
    def compute_loss(self, *inputs, **more):
        loss = super().compute_loss(*inputs, **more)
        if self.state.global_step == 5:  # of the sixth batch: between its arrival and its step
            print("computing", flush=True)
            sys.stdin.read()
        return loss

bridge, tiny, folder = sys.argv[1:]
on_cpu(pytest.MonkeyPatch())
args = AsyncGRPOConfig(folder, use_cpu=True, bf16=False, dtype="float32", report_to=[], save_strategy="no",
    max_steps=7, per_device_train_batch_size=4, gradient_accumulation_steps=1, token_budget=0,
    num_generations=4, disable_tqdm=True, max_staleness=99)
Stuck(tiny, args=args, train_dataset=Dataset.from_dict({"prompt": [""]}), weight_transfer=NoTransfer(),
    rollout_worker=ShmRolloutWorker(bridge, per_token="mean")).train()
"""


def killed_while_computing(code: str, bridge: str, tiny: str, tmp_path: Path) -> None:
    """Runs a trainer until it computes the loss of a batch, and kills it."""
    with (tmp_path / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", code, bridge, tiny, str(tmp_path)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True,
            env=os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])},
        )  # fmt: skip
        try:
            assert any("computing" in line for line in process.stdout), (log.seek(0), log.read())
            os.kill(process.pid, signal.SIGKILL)
        finally:
            process.kill()
            process.wait(30)
            process.stdin.close()
            process.stdout.close()


@pytest.mark.timeout(300)
def test_untrained_groups_come_again_after_a_kill(bridge, tiny, settings, make_producer, tmp_path):
    producer = make_producer(lane_bytes="1M")
    for number in range(3):
        producer.put(group(number), group_id=f"group-{number}")
    killed_while_computing(SYNC, bridge, tiny, tmp_path)
    with shm_rollout_func(bridge, timeout_s=30, start="from-scratch") as rollouts:
        again = []

        class Next(ShmGRPOTrainer):
            def _compute_loss(self, model, inputs):
                again.extend((meta.group_id, meta.redelivered) for meta in {*rollouts._held[-1][1].batch.meta})
                return super()._compute_loss(model, inputs)

        Next(tiny, args=settings(max_steps=2), rollout_func=rollouts).train()
        stats = rollouts.stats()
    # group-0 was trained before the kill; group-2 may have been gathered ahead, which nobody saw
    assert [name for name, _ in again] == ["group-1", "group-2"]
    assert again[0][1]
    assert (stats["released_total"], stats["held"]) == (3, 0)


@pytest.mark.timeout(300)
def test_groups_of_the_async_trainer_come_again_after_a_kill(
    bridge, tiny, make_producer, make_consumer, tmp_path
):
    producer = make_producer(lane_bytes="1M")
    logprobs = [[1.0] * 3 + [-1.0] * 4] * 4
    for number in range(9):
        producer.put(group(number, inference_logprobs=logprobs), group_id=f"group-{number}")
    killed_while_computing(ASYNC, bridge, tiny, tmp_path)
    again = [(record.meta.group_id, record.meta.redelivered) for record in make_consumer().poll()]
    # five steps had ended: groups 0 to 4 were trained, and 0 to 3 released; the sixth was under way
    assert [name for name, _ in again] == [f"group-{number}" for number in range(4, 9)]
    assert [redelivered for _, redelivered in again[:3]] == [True] * 3  # 5 computed, 6 fetched ahead
