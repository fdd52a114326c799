"""A trainer that is killed between a batch and its step, or in a save: no group is lost, or trained twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import shmbridge
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from tests.trainers.trl.target_groups import group

SYNC = """
import sys
from trl import GRPOConfig
import shmbridge
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
import shmbridge
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
                again.extend(
                    (meta.group_id, meta.redelivered) for meta in {*rollouts._held[-1][1].batch.meta}
                )
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


POINTS = ["loss", "optimizer", "model saved", "optimizer saved", "state half written", "saved", "released"]
STEPS = 5
SAVING = """
import json, os, random, signal, sys
from pathlib import Path
import shmbridge
from transformers import TrainerCallback, TrainerState
from trl import GRPOConfig
from shmbridge.consumers.trl import ShmGRPOTrainer, Unsupported, shm_rollout_func
from tests.trainers.trl.target_groups import group
from tests.trainers.trl.test_kill import POINTS, STEPS

prefix, tiny, root, *seeds = sys.argv[1:]
seen = []

class Killed(ShmGRPOTrainer):
    number = 0
    def reach(self, point):
        step = self.state.global_step + (point in ("loss", "optimizer"))
        if self.number == 1 and point == at and step >= at_step:  # a save may be later than asked
            os.kill(os.getpid(), signal.SIGKILL)
    def _compute_loss(self, model, inputs):
        self.reach("loss")
        seen.append(self.rollouts._held[-1][1].batch.meta[0].group_id)
        return super()._compute_loss(model, inputs)
    def save_model(self, *args, **more):
        super().save_model(*args, **more)
        self.reach("model saved")
    def _save_rng_state(self, folder):
        super()._save_rng_state(folder)
        self.reach("optimizer saved")

class Steps(TrainerCallback):
    def __init__(self, trainer):
        self.trainer = trainer
    def on_pre_optimizer_step(self, *_, **__):
        self.trainer.reach("optimizer")
    def on_step_end(self, args, state, control, **_):
        with open(f"{folder}/trained", "a") as file:
            print(json.dumps([self.trainer.number, state.global_step, seen.pop()]), file=file)

def train(number, start=None):
    with shm_rollout_func(bridge, timeout_s=15, start=start) as rollouts:
        trainer = Killed(tiny, args=args, rollout_func=rollouts)
        trainer.number = number
        trainer.add_callback(Steps(trainer))
        whole, saved = TrainerState.save_to_json, rollouts.feed.checkpointed
        def half(state, path):
            whole(state, path)
            text = Path(path).read_text()
            Path(path).write_text(text[:len(text) // 2])
            trainer.reach("state half written")
            Path(path).write_text(text)
        def release():
            trainer.reach("saved")
            saved()
            trainer.reach("released")
        TrainerState.save_to_json, rollouts.feed.checkpointed = half, release
        try:
            trainer.train(resume_from_checkpoint=number == 2 and start is None)
        finally:
            TrainerState.save_to_json = whole

for seed in seeds:
    chosen, folder, bridge = random.Random(int(seed)), f"{root}/{seed}", f"{prefix}-{seed}"
    os.mkdir(folder)
    at_step, at = chosen.randint(1, STEPS - 1), POINTS[int(seed) % len(POINTS)]
    saves = {"save_steps": chosen.choice([1, 1, 2]), "save_total_limit": chosen.choice([None, 1]),
        "save_only_model": chosen.random() < 0.3}
    args = GRPOConfig(f"{folder}/out", use_cpu=True, bf16=False, report_to=[], max_steps=STEPS,
        per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=1, disable_tqdm=True,
        **saves)
    print(json.dumps({"seed": seed, "at": at, "step": at_step} | saves), flush=True)
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for number in range(STEPS):
            producer.put(group(number), group_id=f"group-{number}")
        for number in (1, 2):
            if (child := os.fork()) == 0:
                try:
                    try:
                        train(number)
                    except Unsupported as nothing:
                        assert "was saved to its end" in str(nothing)
                        train(number, "from-scratch")
                    os._exit(0)
                except BaseException:
                    import traceback
                    traceback.print_exc()
                finally:
                    os._exit(1)
            ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            assert ended == (-signal.SIGKILL if number == 1 else 0), ended
    with shmbridge.Consumer(bridge) as consumer:
        assert consumer.poll() == []
"""


@pytest.mark.timeout(500)
@pytest.mark.parametrize(
    "seeds",
    [range(3, 6), pytest.param([0, 1, 2, 6, 7, 8, 9], marks=pytest.mark.long)],
    ids=["three seeds", "seven"],
)
def test_a_kill_at_any_point_of_a_step_and_its_save_loses_no_group_and_trains_none_twice(
    bridge, tiny, tmp_path, seeds
):
    run = [sys.executable, "-c", SAVING, bridge, tiny, str(tmp_path), *map(str, seeds)]
    paths = {"PYTHONPATH": str(Path(__file__).parents[3]), "OMP_NUM_THREADS": "1"}
    try:
        ended = subprocess.run(run, capture_output=True, text=True, timeout=450, env=os.environ | paths)
    finally:
        for seed in seeds:
            shmbridge.clean(f"{bridge}-{seed}", dry_run=False)
    assert ended.returncode == 0, ended.stderr[-3000:]
    print(ended.stdout)
    for seed in seeds:
        trained = [json.loads(line) for line in (tmp_path / f"{seed}/trained").read_text().splitlines()]
        resumed_at = min((step for number, step, _ in trained if number == 2), default=STEPS + 1)
        model = [name for number, step, name in trained if number == 2 or step < resumed_at]
        assert sorted(model) == [f"group-{number}" for number in range(STEPS)], (seed, trained)
