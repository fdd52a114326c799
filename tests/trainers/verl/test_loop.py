"""verl's v1 loop, real but for the accelerator: TransferQueue over shared memory, replay buffer, FSDP2 actor,
policy loss.
"""

from __future__ import annotations

import json
import random
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from verl_process import Trainer

import shmbridge
from shmbridge.testing.fixtures import KnownGroup, loss_matrix
from shmbridge.weights import WeightsReader
from tests.trainers.contract import Seen, assert_contract, fully_recorded

pytestmark = pytest.mark.timeout(600)

STEPS, TARGET_STEPS, ROWS, TARGET = 4, 3, 4, 9


@dataclass
class Run:
    """What one run of verl left behind, killed in the middle of a step."""

    trainer: Trainer
    log: str
    groups: list[KnownGroup]  # two a step, and one of an evaluation
    weights: tuple[int | None, dict[str, np.ndarray]]
    again: list[tuple[str, bool]]  # group ids that the next consumer got, and whether as redelivered
    policy_version: int


def target_group() -> dict[str, Any]:
    """Rows whose every answer is the target token, advantage 1."""
    prompt, answer = [3, 10, 11, 4], [TARGET] * 6
    return {
        "tokens": [np.array(prompt + answer, np.int32)] * ROWS,
        "prompt_length": [4] * ROWS,
        "loss_mask": [np.array([0] * 4 + [1] * 6, np.uint8)] * ROWS,
        "advantages": [np.array([0] * 4 + [1] * 6, np.float32)] * ROWS,
        "inference_logprobs": [np.array([1] * 4 + [-1] * 6, np.float32)] * ROWS,
        "score": [1.0] * ROWS,
    }


@pytest.fixture(scope="module")
def run(start_trainer) -> Iterator[Run]:
    bridge = f"verl-{uuid.uuid4().hex[:12]}"
    groups = fully_recorded(loss_matrix(vocabulary=28, version=2))
    groups.append(loss_matrix(4, vocabulary=28, version=2)[0])
    try:
        with shmbridge.Producer(bridge, env_name="known", lane_bytes="1M") as producer:
            for group in groups:
                group.put(producer)
            for number in range(2 * TARGET_STEPS + 4):
                producer.put(target_group(), group_id=f"target-{number}", policy_version=0)
            halt_at = STEPS + TARGET_STEPS + 1
            trainer = start_trainer(
                bridge, 20, "actor_rollout_ref.actor.policy_loss.loss_mode=recorded",
                f"actor_rollout_ref.rollout.n={ROWS}",
                "trainer.atropos.max_off_policy_steps=null",
                "transfer_queue.backend.storage_backend=shmbridge",
                f"+transfer_queue.backend.shmbridge.bridge={bridge}",
                "actor_rollout_ref.actor.optim.lr=0.003",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", halt_at=halt_at,
            )  # fmt: skip
            trainer.wait_for_loss(halt_at)
            reader = WeightsReader(bridge)
            weights = reader.copy()
            reader.close()
            trainer.kill()
        with shmbridge.Consumer(bridge) as consumer:
            records = [consumer.get(timeout_s=5) for _ in range(4)]
            again = [(record.meta.group_id, record.meta.redelivered) for record in records]
            with pytest.raises(shmbridge.ConsumerEmpty):
                consumer.get(timeout_s=0.0)
            for record in records:
                record.release()
            del records, record
            version = consumer.policy_version
        yield Run(trainer, trainer.log(), groups, weights, again, version)
    finally:
        shmbridge.clean(bridge, dry_run=False)


def seen(loss: dict[str, np.ndarray]) -> Iterator[Seen]:
    """The rows of one call of the loss."""
    for row, (prompt, response) in enumerate(zip(loss["prompts"], loss["responses"], strict=True)):
        prompt, response = prompt[prompt >= 0], response[response >= 0]
        arrays = [loss[name][row][: len(response)] for name in ("mask", "advantages", "old_log_probs")]
        before = np.zeros(len(prompt))
        yield Seen(np.append(prompt, response), *(np.append(before, each) for each in arrays))


def test_the_loss_gets_what_was_put(run):
    losses = [run.trainer.loss(step + 1) for step in range(STEPS)]
    assert_contract("verl", version("verl"), "", run.groups, [row for loss in losses for row in seen(loss)])
    for loss in losses:
        assert np.abs(loss["advantages"] * (1 - loss["mask"])).max() == 0.0


def test_weights_of_every_step_came_out_and_the_engines_side_sees_them(run, tiny):
    from safetensors.numpy import load_file

    version, tensors = run.weights
    assert (version, run.policy_version) == (STEPS + TARGET_STEPS,) * 2
    before = load_file(tiny / "model.safetensors")
    changed = [name for name in before if not np.array_equal(before[name], tensors[name])]
    assert len(changed) == len(before)


def test_the_target_tokens_become_likelier(run):
    first, last = STEPS + 1, STEPS + TARGET_STEPS + 1
    means = []
    for step in range(first, last + 1):
        loss = run.trainer.loss(step)
        means.append(float((loss["log_probs"] * loss["mask"]).sum() / loss["mask"].sum()))
    assert means == sorted(means), means
    assert means[-1] > means[0] + 0.1, means


def test_a_killed_trainers_step_comes_again_and_nothing_else(run):
    """verl was killed inside the loss of the step: its two groups come again, two more come first."""
    trained = 2 * TARGET_STEPS
    of_the_step = [(f"target-{trained + number}", True) for number in range(2)]
    not_yet_taken = [(f"target-{trained + number}", False) for number in (2, 3)]
    assert run.again == of_the_step + not_yet_taken


def test_the_recipes_metrics_are_in_verls_log(run):
    line = next(line for line in run.log.splitlines() if "step:1 -" in line)
    metrics = dict(each.rsplit(":", 1) for each in line.split(" - ") if ":" in each)
    rows = run.groups[0].rows + run.groups[1].rows
    scores = [row.score for row in rows]
    assert float(metrics["atropos/mean_score"]) == pytest.approx(np.mean(scores))
    assert float(metrics["atropos/num_environments"]) == 1
    advantages = np.concatenate([row.advantages[row.trained] for row in rows])
    assert float(metrics["atropos/known/mean_advantage"]) == pytest.approx(advantages.mean(), abs=1e-6)
    assert float(metrics["shmbridge/rows_without_response_total"]) == 1
    assert float(metrics["shmbridge/feed_groups_total"]) == 2
    assert float(metrics["shmbridge/weights_version"]) == 1


def in_the_model(folder: Path) -> list[str]:
    """The groups of the last process's model: those of the checkpoint it resumed, and of its own steps."""
    steps: dict[int, list[str]] = {}
    for line in map(json.loads, (folder / "steps.jsonl").read_text().splitlines()):
        if "resumed" in line:
            steps = {step: groups for step, groups in steps.items() if step <= line["resumed"]}
        else:
            steps[line["step"]] = line["groups"]
    return [group for groups in steps.values() for group in groups]


@pytest.mark.parametrize(
    ("seeds", "actor"),
    [
        (range(1), "none"),
        pytest.param(range(1, 10), "none", marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
        pytest.param(range(3), "fsdp2", marks=[pytest.mark.long, pytest.mark.timeout(3000)]),
    ],
)
def test_kills_around_a_save_lose_no_group_and_repeat_none(start_trainer, bridge, tmp_path, seeds, actor):
    """One process after the other resumes what verl saved, and is killed in a save, or before the release."""
    steps = 4 * len(seeds) + 3
    options = [
        f"trainer.default_local_dir={tmp_path}",
        "trainer.resume_mode=auto",
        "trainer.save_freq=2",
        "trainer.atropos.max_off_policy_steps=null",
        "trainer.v1.shmbridge.num_warmup_batches=1",
    ]
    with shmbridge.Producer(bridge, env_name="known", lane_bytes="1M") as producer:
        put = [f"g{number}" for number in range(2 * steps + 6)]
        for group in put:
            producer.put(target_group(), group_id=group)
        for seed in seeds:
            place = f"{('saved', 'save', 'queue')[seed % 3]}:{random.Random(seed).choice([1, 2])}"
            run = start_trainer(bridge, steps, *options, halt_at=place, loop="saving_loop.py", actor=actor)
            run.wait_for("halted", 600)
            run.kill()
        run = start_trainer(bridge, steps, *options, halt_at="", loop="saving_loop.py", actor=actor)
        assert run.process.wait(600) == 0, run.log()[-3000:]
        trained = in_the_model(tmp_path)
        with shmbridge.Consumer(bridge) as consumer:
            left = [record.meta.group_id for record in consumer.poll(1000)]
    assert len(trained) == len(set(trained)) == 2 * steps
    assert sorted([*trained, *left], key=put.index) == put


@pytest.mark.long
def test_stale_rows_that_count_as_fresh_are_named_once(start_trainer):
    """Without the `bypass_mode` of the example. Groups of version 0 are fresh in the first step only."""
    bridge = f"verl-{uuid.uuid4().hex[:12]}"
    try:
        with shmbridge.Producer(bridge, env_name="known", lane_bytes="1M") as producer:
            for number in range(8):
                producer.put(target_group(), group_id=f"target-{number}", policy_version=0)
            trainer = start_trainer(
                bridge, 20, "actor_rollout_ref.actor.policy_loss.loss_mode=recorded",
                "algorithm.rollout_correction.bypass_mode=False", f"actor_rollout_ref.rollout.n={ROWS}",
                "trainer.atropos.max_off_policy_steps=null",
                "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
                "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8", halt_at=4,
            )  # fmt: skip
            trainer.wait_for_loss(4)
            recomputed = trainer.loss(2)["old_log_probs"] * trainer.loss(2)["mask"]
            trainer.kill()
        assert trainer.log().count("8 rows of a step were sampled by older weights") == 1
        assert "-> algorithm.rollout_correction.bypass_mode=True" in trainer.log()
        assert np.abs(recomputed + 1.0)[recomputed != 0].max() > 0.1, "not the sampler's, which are -1"
    finally:
        shmbridge.clean(bridge, dry_run=False)
