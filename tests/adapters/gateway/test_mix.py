"""Environments that post, environments in lanes, trainers that poll and learners that attach, in any mix on
one bridge.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gateway_clients import RUN, GatewayProcess, group, marks

import shmbridge

ROOT = Path(__file__).parents[3]
SEEDED = ROOT / "tests" / "adapters" / "atropos" / "envs" / "seeded_env.py"
MODES = pytest.mark.parametrize("mode", ["default", "strict"])


def test_posting_beside_a_native_consumer(
    gateway: GatewayProcess, make_consumer: Callable[..., shmbridge.Consumer]
):
    """The learner is the hub; remote environments get its run, its step and the numbers of its one table."""
    run = shmbridge.Run(**RUN)
    consumer = make_consumer(run=run)
    assert gateway.get("/info").json() == {"batch_size": 8, "max_token_len": 64}
    assert gateway.get("/wandb_info").json() == {"group": "group", "project": "project"}
    admitted = [gateway.register_env(name, weight=weight) for name, weight in (("a", 1.0), ("b", 3.0))]
    assert [each["wandb_name"] for each in admitted] == ["a_0", "b_0"]
    first, second = (each["env_id"] for each in admitted)
    assert (gateway.env_status(first)["env_weight"], gateway.env_status(second)["env_weight"]) == (0.25, 0.75)
    for mark in range(4):
        gateway.put(mark, env_id=first, note="kept")
    consumer.poll(0)
    assert gateway.env_status(first)["self_queue_size"] == 4
    for answer in (gateway.get("/batch"), gateway.post("/register", RUN), gateway.get("/reset_data")):
        assert answer.status_code == 409
        assert f"pid {os.getpid()}" in answer.json()["detail"]
    taken = consumer.take_groups(rows=8, timeout_s=5)
    assert [record.meta.env_name for each in taken for record in each.records] == ["a", "a"]
    assert [record.to_scored_data()["note"] for each in taken for record in each.records] == ["kept", "kept"]
    for each in taken:
        for record in each.records:
            record.release()
    assert gateway.get("/status").json()["current_step"] == 1
    assert gateway.env_status(second)["current_step"] == 1


def test_a_learner_that_ends_gives_way_to_a_trainer_that_polls(
    gateway: GatewayProcess, make_consumer: Callable[..., shmbridge.Consumer]
):
    """The records it has not released come to the next consumer; environments keep their numbers."""
    consumer = make_consumer(run=shmbridge.Run(**RUN))
    env_id = gateway.register_env()["env_id"]
    for mark in range(4):
        gateway.put(mark, env_id=env_id)
    consumer.get(timeout_s=5)._abandon()
    consumer.close()
    assert gateway.get("/batch").json()["status"] == "error"
    gateway.register()
    assert gateway.env_status(env_id)["env_weight"] == 1.0
    assert sorted(gateway.until_batch() + gateway.until_batch()) == [0, 1, 2, 3]


def test_a_learner_that_is_started_again_knows_all_environments(
    gateway: GatewayProcess, make_consumer: Callable[..., shmbridge.Consumer]
):
    """They go on asking, and have the same weights as before."""
    first = make_consumer(run=shmbridge.Run(**RUN))
    numbers = [
        gateway.register_env(name, weight=weight)["env_id"]
        for name, weight in (("a", 1.0), ("b", 3.0), ("c", 4.0))
    ]
    first.close()
    gateway.put(1, env_id=numbers[0])
    assert gateway.env_status(numbers[0])["env_weight"] == 1.0  # nobody knows better
    make_consumer(run=shmbridge.Run(**RUN | {"starting_step": 40}))
    deadline = time.monotonic() + 20
    while any(gateway.env_status(number)["current_step"] != 40 for number in numbers):
        assert time.monotonic() < deadline
    assert [gateway.env_status(number)["env_weight"] for number in numbers] == [0.125, 0.375, 0.5]


def test_strict_order_is_that_of_the_commits(strict: GatewayProcess, bridge: str):
    """Lanes that are looked at late keep the order, too."""
    strict.start(batch_size=24)
    with (
        shmbridge.Producer(bridge, lane_bytes="64K") as one,
        shmbridge.Producer(bridge, lane_bytes="64K") as other,
    ):
        for mark, lane in enumerate([one, one, other, one, other, other]):
            lane.put(group(mark), foreign=True)
        assert strict.batch_marks() == list(range(6))


@MODES
def test_a_producer_in_a_lane_beside_a_poster(
    start_gateway: Callable[..., GatewayProcess], bridge: str, mode: str
):
    """Groups that never went over HTTP come out of /batch, fragments made whole, columns of ours under their
    names in default mode.
    """
    gateway = start_gateway("--compat", mode)
    gateway.start()
    with shmbridge.Producer(bridge, lane_bytes="256K") as producer:
        rows = {
            "tokens": [np.array([1, 0, 3]), np.array([1, 1, 3])],
            "loss_mask": [[0, 1, 1]] * 2,
            "score": [0.0, 1.0],
            "step_rewards": [[0.5], [0.25, 1.0]],
            "messages": [json.dumps([{"role": "user", "content": "x"}])] * 2,
        }
        for _ in range(2):
            producer.put(rows, group_id="whole", group_size=4)
        gateway.put(2)
        batch = gateway.batch()
    assert sorted(marks(batch)) == [1, 2]
    native = next(each for each in batch if each["tokens"][0][0] == 1)
    assert native["masks"] == [[-100, 0, 3], [-100, 1, 3]] * 2
    assert native["scores"] == [0.0, 1.0] * 2
    assert native["messages"] == [[{"role": "user", "content": "x"}]] * 4
    assert native["advantages"] is None
    assert native.get("step_rewards") == (None if mode == "strict" else [[0.5], [0.25, 1.0]] * 2)


@pytest.mark.timeout(180)
def test_an_attached_environment_and_one_that_posts(
    gateway: GatewayProcess, bridge: str, tmp_path: Path, tokenizer: str
):
    """The same unedited file twice, in a lane and over HTTP: a trainer that polls gets everything both have
    recorded, byte for byte.
    """
    gateway.start(batch_size=4, num_steps=10_000, max_token_len=4096)
    common = [
        "--env.tokenizer_name",
        tokenizer,
        "--env.items",
        "20",
        "--env.max_num_workers",
        "4",
        "--env.max_batches_offpolicy",
        "20",
        "--env.ensure_scores_are_not_same",
        "false",
        "--env.wandb_name",
    ]
    commands = [
        [
            "-m",
            "shmbridge.producers.atropos",
            "--bridge",
            bridge,
            "--lane-bytes",
            "1M",
            str(SEEDED),
            "serve",
            *common,
            "attached",
        ],
        [str(SEEDED), "serve", "--env.rollout_server_url", gateway.url, *common, "posting"],
    ]
    logs = [tmp_path / f"env{number}.log" for number in range(2)]
    envs = [
        subprocess.Popen(
            [sys.executable, *command],
            stdout=log.open("wb"),
            stderr=subprocess.STDOUT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)},
        )
        for command, log in zip(commands, logs, strict=True)
    ]
    read: list[dict[str, Any]] = []
    deadline = time.monotonic() + 120
    try:
        while len(read) < 2 * 22:  # every tenth item is a list of two groups
            assert all(env.poll() is None for env in envs), [log.read_text()[-2000:] for log in logs]
            assert time.monotonic() < deadline, (len(read), gateway.stats())
            batch = gateway.batch()
            read += batch or []
            if batch is None:
                time.sleep(0.05)
    finally:
        for env in envs:
            env.kill()
            env.wait()
    by_env: dict[int, dict[tuple[int, int], dict[str, Any]]] = {}
    for each in read:
        number = each.pop("env_id")
        assert each["tokens"][0][0] % 10 != 7 or each["parsed_actions"]  # an unknown key
        by_env.setdefault(number, {})[tuple(each["tokens"][0][:2])] = each
    one, other = by_env.values()
    assert one == other


def test_step_rewards_that_were_posted_are_a_column(
    gateway: GatewayProcess, make_consumer: Callable[..., shmbridge.Consumer]
):
    consumer = make_consumer()
    gateway.put(1, step_rewards=[[0.5, 1.0]] * 4, step_ends=[[1, 3]] * 4)
    gateway.put(2, step_rewards="of another form")
    with consumer.get(timeout_s=5) as record:
        assert record["step_rewards"].values.tolist() == [0.5, 1.0] * 4
        assert record["step_ends"].values.tolist() == [1, 3] * 4
    with consumer.get(timeout_s=5) as record:
        assert record.to_scored_data()["step_rewards"] == "of another form"
    assert group(1)["scores"] == [0.0, 1.0, 2.0, 3.0]
