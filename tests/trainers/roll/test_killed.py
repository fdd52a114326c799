"""ROLL SIGKILLed, or failing, in a step and around its checkpoints: no group is lost, none trained twice."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import shmbridge
from shmbridge.archive.folder import read_archive

ROOT = Path(__file__).parents[3]


def next_consumer(bridge: str, timeout_s: float = 60.0) -> shmbridge.Consumer:
    """Returns the next hub, once the kernel has ended the one before."""
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return shmbridge.Consumer(bridge)
        except shmbridge.ConsumerTaken:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)


@pytest.mark.timeout(120)
def test_groups_not_trained_come_again_and_trained_ones_do_not(known, bridge):
    groups, producer = known
    command = [sys.executable, "-m", "tests.trainers.roll.worker_to_kill", bridge]
    worker = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    try:
        steps = []
        for line in worker.stdout:
            if line.startswith("PUT"):
                steps.append(line.split()[2:])
            if len(steps) == 2:
                break
        assert steps == [["known-3-0", "known-3-1"], ["known-3-2", "known-3-3"]]
        os.kill(worker.pid, signal.SIGKILL)
    finally:
        worker.kill()
        worker.wait(30)
        worker.stdout.close()
    with next_consumer(bridge) as again:
        left = again.poll()
        assert [(record.meta.group_id, record.meta.redelivered) for record in left] == [
            ("known-3-2", True), ("known-3-3", True), ("known-3-3", True), ("known-3-4", False)
        ]  # fmt: skip
        for record in left:
            record.release()
        stats = again.stats()
    assert producer.stats()["records_total"] == sum(len(group.fragments) for group in groups) == 6
    assert stats["held"] == 0


def put(producer, numbers) -> None:
    for number in numbers:
        rows = {"tokens": [[number, 1]] * 2, "loss_mask": [[0, 1]] * 2, "score": [0.0, 1.0]}
        producer.put(rows, group_id=str(number))


def train(bridge: str, folder: Path, **plan) -> int:
    """Runs pipeline_to_kill; returns its exit status."""
    command = [sys.executable, "-m", "tests.trainers.roll.pipeline_to_kill", bridge, str(folder)]
    ended = subprocess.run(
        [*command, json.dumps(plan)], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert ended.returncode in (0, 1, -signal.SIGKILL), ended.stderr
    assert "Traceback" not in ended.stderr, ended.stderr
    return ended.returncode


def weights(folder: Path, step: int) -> list[int]:
    return json.loads((folder / f"checkpoint-{step}/weights").read_text())


WHERE = ("train", "trained", "earlier", "save", "saved", "told")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "seed", [*range(3), *(pytest.param(n, marks=pytest.mark.long) for n in range(3, 10))]
)
def test_kills_around_checkpoints_lose_no_group_and_repeat_none(bridge, tmp_path, seed):
    """Six steps of two groups, a checkpoint after steps 2, 4 and 5, and two kills.

    A run from which a group was lost waits for it until its time is up.
    """
    draw, lag = random.Random(seed), seed // 2 % 2
    plan = {"steps": 6, "background": bool(seed % 2), "lag": lag}
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        put(producer, range(12 + 2 * lag))
        for where in draw.sample(WHERE, 2):
            steps = (3, 4) if where in ("train", "trained") else (2, 4)  # those save
            train(bridge, tmp_path, **plan, die=where, at=draw.choice(steps))
        assert train(bridge, tmp_path, **plan) == 0
    trained = weights(tmp_path, 5)
    with next_consumer(bridge) as left:
        again = [int(record.meta.group_id) for record in left.poll()]
    assert sorted([*trained, *again]) == list(range(12 + 2 * lag)), (trained, again)
    assert len(trained) == 12


@pytest.mark.timeout(300)
def test_a_group_at_which_every_run_fails_is_set_aside(bridge, tmp_path):
    with shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        put(producer, range(9))
        ends = []
        while not ends or ends[-1]:
            ends.append(train(bridge, tmp_path, steps=4, poison=5))
            assert len(ends) < 8
    assert set(ends[:-1]) == {1}
    assert sorted(weights(tmp_path, 3)) == [0, 1, 2, 3, 4, 6, 7, 8]
    assert [record.group_id for record in read_archive(tmp_path / "set_aside")] == ["5"]
    with next_consumer(bridge) as left:
        assert not left.poll()
