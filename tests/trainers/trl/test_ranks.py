"""Two processes over gloo: rank 0 is the hub, each reads its own groups, and the model is one, or sharded."""

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import shmbridge
from shmbridge.archive.folder import read_archive
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
args = GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], save_steps=2, max_steps=2, seed=3,
    per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=1, disable_tqdm=True,
    learning_rate=1e-2, logging_steps=1)
seen = []

class Seen(ShmGRPOTrainer):
    def _compute_loss(self, model, inputs):
        seen.extend(sorted({*(meta.group_id for meta in self.rollouts._held[-1][2].meta)}))
        return super()._compute_loss(model, inputs)

with shm_rollout_func(bridge, timeout_s=100) as rollouts:
    trainer = Seen(tiny, args=args, rollout_func=rollouts)
    trainer.train()
    args.max_steps = 3
    trainer.train(resume_from_checkpoint=True)
    weights = sum(float(value.detach().double().sum()) for value in trainer.model.parameters())
    stats = rollouts.stats() if rollouts.is_hub else {}
    said = {"rank": trainer.accelerator.process_index, "hub": rollouts.is_hub, "groups": seen,
        "weights": weights, "released": stats.get("released_total"), "held": stats.get("held")}
with open(f"{folder}/said-{rank}", "w") as file:
    json.dump(said, file)
if rank == 0:
    os.wait()
"""


SHARDED = """
import os, sys
import numpy as np
import torch
from torch.distributed.fsdp import FullyShardedDataParallel as Wrapper, _init_utils
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from transformers import TrainerCallback
from trl import GRPOConfig
from shmbridge.consumers.trl import ShmGRPOTrainer, shm_rollout_func
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.weights import WeightsReader

bridge, tiny, folder, *lora = sys.argv[1:]
rank = int(os.fork() == 0)
os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
args = GRPOConfig(folder, use_cpu=True, bf16=False, report_to=[], save_strategy="no", max_steps=2, seed=3,
    per_device_train_batch_size=4, num_generations=4, gradient_accumulation_steps=1, disable_tqdm=True,
    learning_rate=1e-2, logging_steps=1)
args.device  # makes the process group
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU  # accelerate shards on no CPU
_init_utils._get_compute_device = lambda *_: torch.device("cpu")  # FSDP 1 compares it with cpu:0
more = {}
if lora:
    from peft import LoraConfig
    more["peft_config"] = LoraConfig(r=4, init_lora_weights=False, target_modules=["q_proj", "down_proj"])

class Versions(TrainerCallback):
    def on_step_begin(self, args, state, control, **_):
        if rank == 0 and state.global_step == 0:
            self.save("before")
    def save(self, when):
        with WeightsReader(bridge) as reader:
            version, tensors = reader.copy()
        np.savez(f"{folder}/{when}", version=version, **tensors)

with shm_rollout_func(bridge, timeout_s=100) as rollouts:
    weights = WeightSync(bridge, []) if rank == 0 else None
    versions = Versions()
    trainer = ShmGRPOTrainer(
        tiny, args=args, rollout_func=rollouts, weights=weights, publish_every=2, callbacks=[versions], **more
    )
    trainer.train()
    parts = sum(value.numel() for value in (each.to_local() if hasattr(each, "to_local") else each
        for each in trainer.model_wrapped.parameters()))
    model = trainer.model_wrapped
    if isinstance(model, Wrapper):  # accelerate's own gathering crashes on a CPU
        with Wrapper.summon_full_params(model, writeback=False):
            state = {name: value.detach().clone() for name, value in model.named_parameters()}
    else:
        state = trainer.accelerator.get_state_dict(model)
    if rank == 0:
        versions.save("after")
        state = {name: value.float().numpy() for name, value in state.items()}
        np.savez(f"{folder}/state", parts=parts, **state)
        weights.close()
if rank == 0:
    os.wait()
"""


AGAIN = """
import json, os, signal, sys, traceback
from pathlib import Path
import shmbridge
from transformers import TrainerCallback, TrainerState
from trl import GRPOConfig
from shmbridge.consumers.trl import ShmGRPOTrainer, Unsupported, shm_rollout_func
from tests.trainers.trl.test_ranks import free_port

bridge, tiny, folder, how, at_step, changed = sys.argv[1:]
seen = []

class Ending(ShmGRPOTrainer):
    is_first = False
    def reach(self, point):
        if self.is_first and self.rollouts.is_hub and point == how and self.state.global_step >= int(at_step):
            os.kill(os.getpid(), signal.SIGKILL)
    def _compute_loss(self, model, inputs):
        mine = {*(meta.group_id for meta in self.rollouts._held[-1][2].meta)}
        if "poison" in mine:
            if how == "abort":
                os.abort()
            raise FloatingPointError("nan loss")
        seen.extend(sorted(mine))
        return super()._compute_loss(model, inputs)
    def save_model(self, *args, **more):
        super().save_model(*args, **more)
        self.reach("model saved")

class Steps(TrainerCallback):
    def __init__(self, run, rank):
        self.run, self.rank = run, rank
    def on_step_end(self, args, state, control, **_):
        with open(f"{folder}/trained-{self.rank}", "a") as file:
            print(json.dumps([self.run, state.global_step, *seen]), file=file)
        seen.clear()

def train(run, rank, start=None):
    args = GRPOConfig(f"{folder}/out", use_cpu=True, bf16=False, report_to=[], num_generations=4,
        gradient_accumulation_steps=1, disable_tqdm=True, **json.loads(changed))
    with shm_rollout_func(bridge, timeout_s=30, start=start) as rollouts:
        trainer = Ending(tiny, args=args, rollout_func=rollouts)
        trainer.is_first = run == 1
        trainer.add_callback(Steps(run, rank))
        if rank == 0:
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
        trainer.train(resume_from_checkpoint=run > 1 and start is None)

for run in range(1, 10):
    port, children = str(free_port()), []
    for rank in range(2):
        if (child := os.fork()) == 0:
            os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "MASTER_PORT": port}
            try:
                try:
                    train(run, rank)
                except Unsupported:
                    train(run, rank, "from-scratch")
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                sys.stderr.flush()
            finally:
                os._exit(1)
        children.append(child)
    ends = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]
    with open(f"{folder}/ends", "a") as file:
        print(json.dumps(ends), file=file)
    aside = [*Path(f"{folder}/out/set_aside").glob("*.parquet")]
    if ends == [0, 0] and (how not in ("exception", "abort") or aside):
        break
"""


def free_port() -> int:
    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        return listening.getsockname()[1]


def run_ranks(script: str, *words: str, log_into: Path, **environment: str) -> str:
    """Runs a script that forks a second rank; returns what both logged."""
    together = {
        "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(free_port()), "ACCELERATE_USE_CPU": "true", "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).parents[3]), **environment,
    }  # fmt: skip
    with (log_into / "log").open("w+") as log:
        process = subprocess.Popen(
            [sys.executable, "-c", script, *words],
            stdout=log, stderr=log, env=os.environ | together, start_new_session=True,
        )  # fmt: skip
        try:
            process.wait(250)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # both ranks; the group is their own
            process.wait(30)
        log.seek(0)
        text = log.read()[-3000:]
    assert process.returncode == 0, text
    return text


@pytest.mark.timeout(300)
def test_two_processes_train_one_model_on_groups_of_their_own(bridge, tiny, make_producer, tmp_path):
    producer = make_producer(lane_bytes="1M")
    for number in range(6):
        producer.put(group(number), group_id=f"group-{number}")
    text = run_ranks(RANKS, bridge, tiny, str(tmp_path), log_into=tmp_path)
    said = [json.loads((tmp_path / f"said-{rank}").read_text()) for rank in range(2)]
    assert [each["hub"] for each in said] == [True, False], text
    first, second = said
    assert len(first["groups"]) == len(second["groups"]) == 3
    assert sorted(first["groups"] + second["groups"]) == [f"group-{n}" for n in range(6)]
    assert first["weights"] == second["weights"]  # gradients of both reached both
    assert (first["released"], first["held"]) == (6, 0)
    assert producer.policy_version == 4  # 2 again, lifted, and the step after it
    listed = json.loads((tmp_path / "checkpoint-2/shmbridge.json").read_text())["held"]
    assert [*listed.values()] == [[0, 1, 2, 3]]  # of both, held until this checkpoint


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("version", "lora"), [("2", ()), ("1", ()), pytest.param("2", ("lora",), marks=pytest.mark.long)]
)
def test_a_sharded_model_is_published_whole(bridge, tiny, make_producer, tmp_path, version, lora):
    producer = make_producer(lane_bytes="1M")
    for number in range(4):
        producer.put(group(number))
    run_ranks(
        SHARDED, bridge, tiny, str(tmp_path), *lora, log_into=tmp_path,
        ACCELERATE_USE_FSDP="true", FSDP_VERSION=version, FSDP_AUTO_WRAP_POLICY="TRANSFORMER_BASED_WRAP",
        FSDP_TRANSFORMER_CLS_TO_WRAP="Qwen2DecoderLayer", FSDP_USE_ORIG_PARAMS="true",
        FSDP_RESHARD_AFTER_FORWARD="true" if version == "2" else "FULL_SHARD",
    )  # fmt: skip
    before, after, state = (dict(np.load(tmp_path / f"{name}.npz")) for name in ("before", "after", "state"))
    assert (int(before.pop("version")), int(after.pop("version"))) == (0, 2)
    whole = load_file(f"{tiny}/model.safetensors")
    assert int(state.pop("parts")) < 0.6 * sum(value.size for value in whole.values()), "not sharded"
    if lora:
        state = merged(state)
    else:
        assert all(np.array_equal(before[name], whole[name]) for name in whole)
    assert set(before) == set(after) == set(state) == set(whole)
    for name, tensor in state.items():
        np.testing.assert_allclose(after[name], tensor, rtol=0, atol=1e-7 if lora else 0)
    assert any(not np.array_equal(after[name], before[name]) for name in whole)


def merged(state: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """What peft's state computes with, under the model's own names: base plus product."""
    found = {}
    for name, tensor in state.items():
        if "lora_" in name:
            continue
        if name.endswith(".base_layer.weight"):
            part = name.removesuffix("base_layer.weight")
            tensor = (
                tensor + 2.0 * state[part + "lora_B.default.weight"] @ state[part + "lora_A.default.weight"]
            )
        found[name.removeprefix("base_model.model.").replace(".base_layer", "")] = tensor
    return found


def run_again(bridge: str, tiny: str, tmp_path: Path, how: str, at_step: int = 0, **changed: object):
    """Runs two processes until both end in order; returns how each run ended, and [run, step, group] of all
    that was trained.
    """
    run_ranks(AGAIN, bridge, tiny, str(tmp_path), how, str(at_step), json.dumps(changed), log_into=tmp_path)
    ends = [json.loads(line) for line in (tmp_path / "ends").read_text().splitlines()]
    lines = [line for rank in range(2) for line in (tmp_path / f"trained-{rank}").read_text().splitlines()]
    return ends, [(run, step, name) for run, step, *names in map(json.loads, lines) for name in names]


POINTS = ["model saved", "state half written", "saved", "released"]


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [0, 1, 2, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(3, 10))]
)
def test_a_kill_of_the_hub_in_a_save_loses_no_group_and_trains_none_twice(
    bridge, tiny, make_producer, tmp_path, seed
):
    chosen, steps = random.Random(seed), 4
    producer = make_producer(lane_bytes="1M")
    for number in range(2 * steps):
        producer.put(group(number), group_id=f"group-{number}")
    ends, trained = run_again(
        bridge, tiny, tmp_path, POINTS[seed % len(POINTS)], chosen.randint(1, steps - 1),
        max_steps=steps, per_device_train_batch_size=4, save_steps=chosen.choice([1, 1, 2]),
    )  # fmt: skip
    assert (ends[0][0], ends[0][1] != 0, ends[1:]) == (-signal.SIGKILL, True, [[0, 0]])
    resumed_at = min((step for run, step, _ in trained if run == 2), default=steps + 1)
    model = [name for run, step, name in trained if run == 2 or step < resumed_at]
    assert sorted(model) == [f"group-{number}" for number in range(2 * steps)], trained
    with shmbridge.Consumer(bridge) as consumer:
        assert consumer.poll() == []


@pytest.mark.timeout(300)
@pytest.mark.parametrize("how", ["exception", pytest.param("abort", marks=pytest.mark.long)])
def test_a_group_that_ends_two_processes_is_set_aside_and_the_others_are_trained(
    bridge, tiny, make_producer, tmp_path, how
):
    producer = make_producer(lane_bytes="1M")
    for number in range(20):
        producer.put(group(number), group_id=f"group-{number}" if number != 2 else "poison")
    ends, trained = run_again(
        bridge, tiny, tmp_path, how, max_steps=1, per_device_train_batch_size=8, save_strategy="no"
    )
    assert ends[-1] == [0, 0]
    assert len(ends) < 8
    assert [record.group_id for record in read_archive(tmp_path / "out/set_aside")] == ["poison"]
    names = [name for _, _, name in trained]
    assert len(names) == len({*names} - {"poison"}) == 4 * ends.count([0, 0])
    with shmbridge.Consumer(bridge) as consumer:
        assert len(consumer.poll()) == 19 - len(names)
