"""The examples of SkyRL-Gym and gem, as a user runs them."""

from __future__ import annotations

import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]


def trained(run: Path, steps: int, demo: Sequence[str] = (), learner: Sequence[str] = ()) -> list[Any]:
    """The metrics of each step of the demo with SkyRL-Gym's example, after it ran; further flags of both."""
    words = ["--run-dir", str(run), "--env", str(ROOT / "examples/skyrl_digits_env.py"), "--step-rewards"]
    words += [
        "--steps",
        str(steps),
        *demo,
        "--",
        "--process-rewards",
        "to_go",
        "--process-weight",
        "1.0",
        *learner,
    ]
    done = subprocess.run(
        [sys.executable, "-m", "shmbridge", "demo", *words],
        cwd=run.parent,
        capture_output=True,
        text=True,
        timeout=590,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
    )
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert len(lines) == steps, done.stdout + done.stderr
    assert sum(line["trajectories_without_steps"] for line in lines) == 0
    return lines


@pytest.mark.timeout(600)
def test_skyrl_example_trains_in_the_demos_loop_on_rewards_of_steps(tmp_path, tiny):
    """Three small steps: too few to learn, but each is on groups with rewards of steps."""
    lines = trained(tmp_path / "run", 3, ["--model", str(tiny)], ["--groups", "4"])
    assert [line["groups"] for line in lines] == [4] * 3


@pytest.mark.long
@pytest.mark.timeout(600)
def test_skyrl_example_learns_from_rewards_of_steps(tmp_path):
    run = tmp_path / "run"
    trained(run, 120)
    rewards = [json.loads(line)["mean"] for line in (run / "rewards-skyrl_digits.jsonl").open()]
    tenth = len(rewards) // 10
    first, last = sum(rewards[:tenth]) / tenth, sum(rewards[-tenth:]) / tenth
    assert last > first + 0.1, (first, last)


def test_gem_example_steps_an_atropos_environment(
    bridge, make_consumer, tiny, policy_server, monkeypatch, capsys
):
    """In this process, which has imported gem and Atropos already."""
    consumer = make_consumer()
    words = ["--bridge", bridge, "--server", policy_server, "--tokenizer", str(tiny), "--max-tokens", "4"]
    example = str(ROOT / "examples/gem_env.py")
    monkeypatch.setattr(sys, "argv", [example, *words, "--max-groups", "2", "--group-size", "4"])
    runpy.run_path(example, run_name="__main__")
    assert capsys.readouterr().out == "2 groups\n"
    for _ in range(2):
        with consumer.get(timeout_s=5) as record:
            assert len(record) == 4
            assert all(len(row) == 1 for row in record["step_rewards"])
            steps = [float(row[0]) for row in record["step_rewards"]]  # float32; scores are float64
            assert record["score"].tolist() == pytest.approx(steps)


@pytest.mark.long
@pytest.mark.timeout(400)
def test_own_env_example_learns_and_all_but_the_server_end(bridge, tmp_path):
    """As docs/how-to/own-environment.md says, in fewer steps."""
    ran = {
        "cwd": tmp_path,
        "env": os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        "text": True,
    }
    tiny = [sys.executable, str(ROOT / "examples/tiny_model.py"), "tiny", "--seed", "1"]
    subprocess.run(tiny, check=True, timeout=100, **ran)
    follow = ["--bridge", bridge, "--model", "tiny"]
    server = subprocess.Popen(
        [sys.executable, "-m", "shmbridge.consumers.policy_server", *follow, "--port", "0"],
        stdout=subprocess.PIPE, **ran,
    )  # fmt: skip
    learn = ["--run-dir", "run", "--steps", "100", "--groups", "16", "--lr", "2e-3", "--entropy", "0.1"]
    learner = subprocess.Popen(
        [sys.executable, "-m", "shmbridge.consumers.grpo", *follow, *learn, "--max-off-policy-steps", "2"],
        **ran,
    )
    try:
        url = "http://" + server.stdout.readline().split("http://")[1].split()[0]
        words = ["--bridge", bridge, "--server", url, "--tokenizer", "tiny", "--max-tokens", "4"]
        words += ["--tickets", "--max-groups", "1600"]
        played = [sys.executable, str(ROOT / "examples/own_env.py"), *words]
        done = subprocess.run(played, capture_output=True, timeout=300, **ran)
        assert (done.returncode, done.stdout) == (0, "1600 groups\n"), done.stderr
        assert learner.wait(60) == 0
    finally:
        for process in (learner, server):
            process.kill()
            process.communicate()
    rewards = [
        json.loads(line)["reward_mean"] for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()
    ]
    assert len(rewards) == 100
    assert sum(rewards[-10:]) / 10 > sum(rewards[:10]) / 10 + 0.3
