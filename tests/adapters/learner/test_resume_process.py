"""Stopped or killed and resumed, a learner ends with the very bits of one that was never interrupted."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import numpy as np
import pytest
from safetensors.numpy import load_file

import shmbridge
from shmbridge.consumers import grpo
from shmbridge.consumers.learner.checkpoint import load_progress

STEPS = 8
GROUPS = 2

# A learner that is killed right after a save, before anything is released.
KILLED_AFTER_SAVE = """
import os, signal, sys
from shmbridge.consumers import grpo
from shmbridge.consumers.learner import checkpoint
save = checkpoint.save
def saved(folder, progress, *args, **more):
    save(folder, progress, *args, **more)
    if progress.step == {step}:
        os.kill(os.getpid(), signal.SIGKILL)
checkpoint.save = saved
sys.exit(grpo.main(sys.argv[1:]))
"""


@pytest.fixture
def command(tiny_model, tmp_path, bridge):
    """Return a maker of the learner's arguments: name of the run, flags."""
    tiny_model(5).save_pretrained(tmp_path / "model")

    def make(name, *flags):
        fixed = ["--bridge", bridge, "--model", str(tmp_path / "model"), "--run-dir", str(tmp_path / name)]
        fixed += [
            "--device",
            "cpu",
            "--threads",
            "1",
            "--steps",
            str(STEPS),
            "--groups",
            str(GROUPS),
            "--group-size",
            "4",
        ]
        return [*fixed, "--lr", "1e-3", "--warmup", "2", "--schedule", "cosine", "--entropy", "0.01", *flags]

    return make


def process(arguments, code=None):
    start = ["-c", code] if code else ["-m", "shmbridge.consumers.grpo"]
    return subprocess.Popen(
        [sys.executable, "-u", *start, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def put_groups(producer, count, first=0):
    for number in range(first, first + count):
        rng = np.random.default_rng(number)
        tokens = [[1, 2 + number % 8, *rng.integers(3, 28, 3 + row).tolist()] for row in range(4)]
        masks = [[0, 0, *[1] * (3 + row)] for row in range(4)]
        producer.put(
            {"tokens": tokens, "loss_mask": masks, "score": rng.random(4).tolist()}, policy_version=0
        )


def until_step(learner, step):
    for line in learner.stdout:
        if line.startswith(f"step {step}/"):
            return
    raise AssertionError(learner.stderr.read())


def assert_same_bits(one, other):
    """Compares weights, optimizer, random generators, and the record of consumed groups."""
    files = {path.name for path in one.iterdir() if path.suffix == ".safetensors"}
    assert {"optimizer.safetensors", "rng.safetensors"} < files
    for name in files:
        tensors, others = load_file(one / name), load_file(other / name)
        assert tensors.keys() == others.keys()
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(tensor, others[key], err_msg=f"{name} {key}")
    progress, expected = load_progress(one), load_progress(other)
    for what in ("step", "groups", "trajectories", "tokens"):
        assert getattr(progress, what) == getattr(expected, what), what
    assert sorted(progress.last_sequences.values()) == sorted(expected.last_sequences.values())


def last(tmp_path, name):
    path = tmp_path / name / "checkpoints" / f"step-{STEPS:08d}"
    assert path.exists()
    return path


@pytest.fixture
def through(command, bridge, tmp_path):
    """Return a maker of the uninterrupted run's last checkpoint: flags -> path."""

    def make(*flags):
        with shmbridge.Producer(bridge, lane_bytes="4M") as producer:
            put_groups(producer, 3 * STEPS * GROUPS)
            assert grpo.main(command("through", *flags)) == 0
        with shmbridge.Consumer(bridge, resume="discard"):
            pass
        return last(tmp_path, "through")

    return make


FLAGS = {
    "plain": (),
    "every comfort": (
        "--accumulate",
        "2",
        "--lora-rank",
        "4",
        "--lora-dropout",
        "0.2",
        "--param-dtype",
        "bfloat16",
    ),
}


@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", FLAGS)
def test_a_learner_killed_between_save_and_release_trains_no_group_twice(
    command, through, bridge, tmp_path, kind
):
    flags = (*FLAGS[kind], "--save-every", "3", "--hold-until-saved")
    expected = through(*FLAGS[kind])
    with shmbridge.Producer(bridge, lane_bytes="4M") as producer:
        put_groups(producer, 3 * STEPS * GROUPS)
        killed = process(command("killed", *flags), KILLED_AFTER_SAVE.format(step=3))
        _, err = killed.communicate(timeout=100)
        assert killed.returncode == -signal.SIGKILL, err
        assert load_progress(tmp_path / "killed" / "checkpoints" / "step-00000003").held
        assert grpo.main(command("killed", *flags, "--resume")) == 0
    assert_same_bits(last(tmp_path, "killed"), expected)
    lines = [json.loads(line) for line in (tmp_path / "killed" / "metrics.jsonl").read_text().splitlines()]
    accumulated = 2 if "--accumulate" in flags else 1
    assert lines[-1]["resume/known_groups_total"] == 3 * GROUPS * accumulated
    assert [line["step"] for line in lines] == [1, 2, *range(4, STEPS + 1)]


@pytest.mark.timeout(120)
def test_a_learner_killed_anywhere_between_saves_loses_no_group(command, through, bridge, tmp_path):
    flags = ("--save-every", "3", "--hold-until-saved")
    expected = through()
    with shmbridge.Producer(bridge, lane_bytes="4M") as producer:
        put_groups(producer, 5 * GROUPS)  # one checkpoint, and two steps more
        killed = process(command("killed", *flags))
        until_step(killed, 5)
        killed.kill()
        killed.communicate()
        put_groups(producer, 3 * STEPS * GROUPS, first=5 * GROUPS)
        assert grpo.main(command("killed", *flags, "--resume")) == 0
    assert_same_bits(last(tmp_path, "killed"), expected)


@pytest.mark.timeout(120)
def test_a_learner_stopped_in_order_goes_on_from_where_it_was(command, through, bridge, tmp_path):
    expected = through()
    with shmbridge.Producer(bridge, lane_bytes="4M") as producer:
        put_groups(producer, 5 * GROUPS + 1)  # it waits in the middle of its sixth batch
        stopped = process(command("stopped"))
        until_step(stopped, 5)
        stopped.send_signal(signal.SIGTERM)
        _, err = stopped.communicate(timeout=100)
        assert stopped.returncode == 128 + signal.SIGTERM, err
        put_groups(producer, 3 * STEPS * GROUPS, first=5 * GROUPS + 1)
        assert grpo.main(command("stopped", "--resume")) == 0
    assert_same_bits(last(tmp_path, "stopped"), expected)


def test_options_of_another_kind_of_run_are_refused_in_words(command, through, tmp_path, capsys):
    through()
    for flags, words in (
        (("--lora-rank", "2"), "--lora-rank none -> 2 -> leave --lora-rank out"),
        (("--param-dtype", "bfloat16"), "--param-dtype float32 -> bfloat16"),
        (("--schedule-option", "moons=3"), "moons"),
    ):
        assert grpo.main(command("through", "--resume", *flags)) == 1
        assert words in capsys.readouterr().err
    (tmp_path / "through" / "config.yaml").unlink()  # then the checkpoint itself tells
    assert grpo.main(command("through", "--resume", "--lora-rank", "2")) == 1
    assert "has no adapters, and the options ask for a model with" in capsys.readouterr().err
