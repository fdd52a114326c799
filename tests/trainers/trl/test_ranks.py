"""Two processes over gloo: rank 0 is the hub, each reads its own groups, and the model stays one."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.trainers.trl.target_groups import group

RANKS = """
import json, os, sys
import torch
from trl import GRPOConfig
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func

bridge, tiny, folder = sys.argv[1:]
ShmGRPOTrainer  # imported once, for both ranks
rank = int(os.fork() == 0)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
args = GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_steps=3, seed=3,
    per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=1, disable_tqdm=True,
    learning_rate=1e-2, logging_steps=1)
seen = []

class Seen(ShmGRPOTrainer):
    def _compute_loss(self, model, inputs):
        seen.extend(sorted({*(meta.group_id for meta in self.rollouts._held[-1][1].meta)}))
        return super()._compute_loss(model, inputs)

with shm_rollout_func(bridge, timeout_s=100) as rollouts:
    trainer = Seen(tiny, args=args, rollout_func=rollouts)
    trainer.train()
    weights = sum(float(value.detach().double().sum()) for value in trainer.model.parameters())
    stats = rollouts.stats() if rollouts.is_hub else {}
    said = {"rank": trainer.accelerator.process_index, "hub": rollouts.is_hub, "groups": seen,
        "weights": weights, "released": stats.get("released_total"), "held": stats.get("held")}
with open(f"{folder}/said-{rank}", "w") as file:
    json.dump(said, file)
if rank == 0:
    os.wait()
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


@pytest.mark.timeout(300)
def test_two_processes_train_one_model_on_groups_of_their_own(bridge, tiny, make_producer, tmp_path):
    producer = make_producer(lane_bytes="1M")
    for number in range(6):
        producer.put(group(number), group_id=f"group-{number}")
    together = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]),
    }  # fmt: skip
    with (tmp_path / "log").open("w+") as log:
        words = [sys.executable, "-c", RANKS, bridge, tiny, str(tmp_path)]
        process = subprocess.Popen(
            words, stdout=log, stderr=log, env=os.environ | together, start_new_session=True
        )
        try:
            process.wait(250)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # both ranks; the group is their own
            process.wait(30)
        log.seek(0)
        text = log.read()[-3000:]
    assert process.returncode == 0, text
    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    assert [each["hub"] for each in said] == [True, False], text
    first, second = said
    assert len(first["groups"]) == len(second["groups"]) == 3
    assert sorted(first["groups"] + second["groups"]) == [f"group-{n}" for n in range(6)]
    assert first["weights"] == second["weights"]  # gradients of both reached both
    assert (first["released"], first["held"]) == (6, 0)
    assert producer.policy_version == 3
