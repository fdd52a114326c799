"""verl's v1 loop with checkpoints: saving_loop.py BRIDGE MODEL STEPS OVERRIDE ...

It notes each step's groups, and halts at the n-th time that it comes by HALT_AT=PLACE:n, until it is killed.
With ACTOR=none verl's workers are left out: loop, replay buffer, checkpoints and TransferQueue are verl's.
"""

import asyncio
import json
import os
import time
from collections import Counter
from pathlib import Path
from typing import Any

import ray
import torch
import transfer_queue as tq
import verl_loop
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback
from verl.trainer.ppo.v1.trainer_base import PPOTrainer

from shmbridge.consumers.verl.trainer import BridgePPOTrainer
from shmbridge.consumers.verl.weights import ShmCheckpointEngine

came: Counter[str] = Counter()


def come_by(place: str) -> None:
    came[place] += 1
    if os.environ["HALT_AT"] == f"{place}:{came[place]}":
        Path(os.environ["RECORD_TO"], "halted").touch()
        while True:
            time.sleep(1.0)


def note(trainer: Any, **what: Any) -> None:
    with Path(trainer.config.trainer.default_local_dir, "steps.jsonl").open("a") as file:
        file.write(json.dumps(what) + "\n")


def note_groups(trainer: Any, batch: Any) -> None:
    keys = [key for key, tag in zip(batch.keys, batch.tags, strict=True) if not tag.get("is_padding")]
    rows = tq.kv_batch_get(keys=keys, partition_id="train", select_fields=["extra_fields"])
    groups = sorted({row["origin"]["group_id"] for row in rows["extra_fields"]})
    note(trainer, step=trainer.global_steps, groups=groups)


def watch() -> None:
    load, save, queue = PPOTrainer._load_checkpoint, PPOTrainer._save_checkpoint, tq.save_checkpoint
    update = PPOTrainer._update_actor

    def load_and_note(self: Any) -> None:
        load(self)
        note(self, resumed=self.global_steps)

    def updated(self: Any, batch: Any, metrics: Any) -> Any:
        note_groups(self, batch)
        come_by("update")
        return update(self, batch, metrics)

    PPOTrainer._load_checkpoint, PPOTrainer._update_actor = load_and_note, updated
    PPOTrainer._save_checkpoint = lambda self: (come_by("save"), save(self))
    tq.save_checkpoint = lambda *places, **more: (come_by("queue"), queue(*places, **more))
    CheckpointCallback.on_save = lambda self, **_: come_by("saved")


class NoActor:
    """Has no model; its weights are one number."""

    def __init__(self, bridge: str) -> None:
        self._engine = ShmCheckpointEngine(bucket_size=1, is_master=True, bridge=bridge)

    def save_checkpoint(self, folder: str, *_: Any, **__: Any) -> None:
        Path(folder).mkdir(parents=True, exist_ok=True)

    def load_checkpoint(self, local_path: str, **_: Any) -> None:
        assert Path(local_path).is_dir()

    def update_weights(self, global_steps: int, mode: str) -> list[Any]:
        weights = iter([("a", torch.full((3,), float(global_steps)))])
        return [ray.put(asyncio.run(self._engine.send_weights(weights, global_steps)))]


def without_actors() -> None:
    def setup(self: Any) -> None:
        self._init_tokenizer()
        self._init_dataloader()
        self._init_dump_executor()
        self.actor_rollout_wg = NoActor(self.config.trainer.atropos.bridge)
        self._load_checkpoint()

    def step(self: Any, metrics: Any, timing: Any, size: int) -> Any:
        batch, _ = self.replay_buffer.sample(self.global_steps, "train", size)
        return self._update_actor(batch, metrics)

    BridgePPOTrainer._setup, BridgePPOTrainer._step_once = setup, step
    PPOTrainer._update_actor = lambda self, batch, metrics: batch
    BridgePPOTrainer._compute_metrics = lambda self, *_, **__: None
    for name in ("get_llm_client", "get_teacher_client", "get_reward_handles"):
        setattr(BridgePPOTrainer, name, lambda self: None)


if __name__ == "__main__":
    if os.environ["ACTOR"] == "none":
        without_actors()
    watch()
    verl_loop.main()
