"""A tiny model learns a taskset of verifiers: its mean reward rises by 0.3, in each of three seeds."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
STEPS = 40


@pytest.mark.long
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_reward_rises(bridge: str, program: Callable[..., Any], tmp_path: Path, seed: int) -> None:
    import runpy

    model, run = tmp_path / "model", tmp_path / "run"
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](model, seed=seed)
    learner = program(
        "shmbridge.consumers.grpo",
        *("--bridge", bridge, "--model", model, "--run-dir", run, "--steps", STEPS, "--seed", seed),
        *("--groups", 8, "--group-size", 8, "--lr", 2e-3, "--warmup", 10, "--entropy", 0.1),
        *("--max-token-len", 64, "--threads", 1),
    )
    server = program(
        "shmbridge.consumers.policy_server", "--bridge", bridge, "--model", model, "--port", 0, "--seed", seed
    )
    line = server.stdout.readline()
    url = "http://" + line.split("http://")[1].split()[0]
    environment = program(
        "shmbridge.producers.verifiers",
        *("--verifiers", "larger_digit", "--bridge", bridge, "--server", url, "--tokenizer", model),
        *("--env-config", "agent.runtime.type=subprocess", "taskset.tasks=9", "--shuffle", seed),
        *("--group-size", 8, "--concurrency", 8, "--max-tokens", 3, "--max-staleness", 4, "--tickets"),
        *("--eval-every", 20),
    )
    began = time.monotonic()
    while learner.poll() is None:
        assert environment.poll() is None or learner.wait(30) == 0
        assert time.monotonic() - began < 1000
        time.sleep(0.5)
    assert learner.returncode == 0
    lines = [json.loads(each) for each in (run / "metrics.jsonl").read_text().splitlines()]
    rewards = [each["reward_mean"] for each in lines if "reward_mean" in each]
    first, last = sum(rewards[:4]) / 4, sum(rewards[-4:]) / 4
    print(
        f"\nseed {seed}: {first:.3f} -> {last:.3f} in {len(rewards)} steps, {time.monotonic() - began:.0f} s"
    )
    evaluated = [each["eval/mean_score"] for each in lines if "eval/mean_score" in each]
    print(f"evaluations: {evaluated}")
    assert evaluated
    assert last - first >= 0.3
