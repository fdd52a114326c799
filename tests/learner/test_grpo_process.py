"""The learner as a process on a real bridge: killed and started again, stopped while it waits."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
import uuid

import numpy as np
import pytest
from safetensors.numpy import load_file

import shmbridge
from shmbridge.weights import WeightsReader

GROUPS = 2  # per step


@pytest.fixture
def bridge():
    name = f"grpo-{os.getpid()}-{uuid.uuid4().hex[:8]}"
    yield name
    shmbridge.clean(name, dry_run=False)


@pytest.fixture
def start_learner(bridge, tiny_model, tmp_path):
    """Return a starter of learner processes that are gone when the test is."""
    tiny_model(5).save_pretrained(tmp_path / "model")
    started = []

    def start(*flags):
        command = [sys.executable, "-u", "-m", "shmbridge.consumers.grpo", "--bridge", bridge]
        command += ["--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / "run")]
        command += ["--device", "cpu", "--threads", "1"]
        command += ["--groups", str(GROUPS), "--group-size", "4", "--lr", "1e-3", *flags]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def put_groups(producer, count):
    for first in range(count):
        tokens = [[1, 2 + first % 8, 10 + row, 11] for row in range(4)]
        group = {"tokens": tokens, "loss_mask": [[0, 0, 1, 1]] * 4, "score": [1.0, 0.0, 0.0, 1.0]}
        producer.put(group, policy_version=0, timeout_s=10.0)


def read_until(process, text):
    """Return the first line of the learner's output that holds the text."""
    for line in process.stdout:
        if text in line:
            return line
    raise AssertionError(f"the learner ended without {text!r}: {process.stderr.read()}")


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def left_over(bridge):
    """Return the sequences that a next consumer gets."""
    with shmbridge.Consumer(bridge) as consumer:
        records = consumer.poll(max_records=10_000)
        found = [record.meta.sequence for record in records]
        for record in records:
            record.release()
    return found


def published(bridge, folder):
    """Return the version in the weights segment, after comparing its tensors with those of a checkpoint."""
    saved = load_file(folder / "model.safetensors")
    with WeightsReader(bridge) as reader, reader.lease() as lease:
        assert lease.tensors.keys() == saved.keys()
        for name, tensor in saved.items():
            np.testing.assert_array_equal(lease.tensors[name], tensor, err_msg=name)
        return lease.version


@pytest.mark.timeout(180)
def test_killed_and_resumed_it_goes_on_and_no_version_comes_back(bridge, start_learner, tmp_path):
    steps, produced = 12, 200
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, produced)
        first = start_learner("--steps", "5000", "--save-every", "3")
        read_until(first, "step    7/")
        first.send_signal(signal.SIGKILL)
        first.wait()
        before = metrics(tmp_path)

        second = start_learner("--steps", str(steps), "--save-every", "3", "--resume")
        begun = read_until(second, "step ")
        out, err = second.communicate(timeout=120)
        trained = produced - len(left_over(bridge))

    assert second.returncode == 0, err
    resumed_at = int(begun.split("step ")[1].split()[0])
    assert resumed_at % 3 == 0
    assert resumed_at >= 6
    assert f"done: {steps} of {steps}" in out
    every = metrics(tmp_path)
    assert [line["step"] for line in every[len(before) :]] == list(range(resumed_at + 1, steps + 1))
    versions = [line["policy_version"] for line in every]
    assert all(earlier < later for earlier, later in itertools.pairwise(versions))
    saved = sorted(path.name for path in (tmp_path / "run" / "checkpoints").iterdir())
    assert saved[-1] == f"step-{steps:08d}"
    # Every group was trained or is still there; the kill may have hit between a release and its line.
    assert trained in (GROUPS * len(every), GROUPS * (len(every) + 1))


@pytest.mark.timeout(120)
def test_stopped_while_waiting_it_saves_and_leaves_the_rest(bridge, start_learner, tmp_path):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3 + 1)  # three steps, and half a batch
        learner = start_learner("--steps", "50")
        read_until(learner, "step  3/")
        learner.send_signal(signal.SIGTERM)
        out, err = learner.communicate(timeout=60)

        assert learner.returncode == 128 + signal.SIGTERM, err
        assert "Traceback" not in err
        assert "stopped by SIGTERM" in out
        assert [line["step"] for line in metrics(tmp_path)] == [1, 2, 3]
        assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step-00000003"]
        assert len(left_over(bridge)) == 1
        assert published(bridge, tmp_path / "run" / "checkpoints" / "step-00000003") == 3
