"""Every kind of environment process on one bridge: token-exact, chat, tools, a list of groups, a teacher; by flags and by YAML.

What each writes with BaseEnv's own `data_path_to_save_groups` is what has to arrive.
"""

from __future__ import annotations

import importlib.util
import json
import signal
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

ENVS = Path(__file__).parent / "envs"
RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=100000)
FLOAT32 = ("advantages", "ref_logprobs", "inference_logprobs", "distill_logprobs")


def stepwise() -> Any:
    spec = importlib.util.spec_from_file_location("stepwise", ENVS / "stepwise.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [rounded(each) for each in value]
    return float(np.float32(value)) if isinstance(value, float) else value


def comparable(group: dict[str, Any]) -> str:
    """A group without what depends on when it was delivered; floats per token as float32."""
    kept = {key: rounded(value) if key in FLOAT32 else value for key, value in group.items() if key not in ("env_id", "step_rewards", "step_ends")}
    return json.dumps({key: value for key, value in kept.items() if value is not None}, sort_keys=True)


def recorded(*paths: Path) -> list[str]:
    return sorted(comparable(json.loads(line)) for path in paths for line in path.read_text().splitlines())


class Delivered:
    """Takes what comes and sorts it by environment."""

    def __init__(self, consumer: shmbridge.Consumer) -> None:
        self._consumer = consumer
        self.groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
        self.steps: list[tuple[Any, Any]] = []

    def take(self) -> bool:
        for record in self._consumer.poll():
            with record:
                self.groups[record.meta.env_name].append(record.to_scored_data())
                if record.meta.env_name == "stepwise":
                    ends = [row.tolist() for row in record["step_ends"]] if "step_ends" in record else None
                    rewards = [row.tolist() for row in record["step_rewards"]] if "step_rewards" in record else None
                    self.steps.append((rewards, ends))
        return True

    def comparable(self, *names: str) -> list[str]:
        return sorted(comparable(group) for name in names for group in self.groups[name])


def test_every_kind_delivers_what_it_records(
    bridge: str, start_env: Callable[..., Any], model: Path, policy_url: str, tmp_path: Path
) -> None:
    truth = {name: tmp_path / f"{name}.jsonl" for name in ("single", "multi", "tools", "stepwise", "teacher")}
    config = tmp_path / "multi.yaml"
    settings = {"tokenizer_name": str(model), "data_path_to_save_groups": str(truth["multi"])}
    config.write_text(json.dumps({"env": settings, "openai": {"base_url": policy_url}}))  # JSON is YAML

    def saving(name: str) -> tuple[str, str]:
        return "--env.data_path_to_save_groups", str(truth[name])

    with shmbridge.Consumer(bridge, run=RUN) as consumer:
        tiny = {"tokenizer": str(model)}
        envs = [
            start_env("--openai.base_url", policy_url, "--openai.tokenizer_name", str(model), *saving("single"), script="single_turn.py", **tiny),
            start_env("--config", str(config), script="multi_turn.py", **tiny),
            start_env("--openai.base_url", policy_url, "--env.tools", "true", *saving("tools"), script="multi_turn.py", **tiny),
            start_env(*saving("stepwise"), script="stepwise.py", options=("--step-rewards",)),
            start_env(*saving("teacher"), "--env.inference_weight", "-1", script="teacher.py"),  # "-1 to ignore it": ends an env upstream
        ]
        got = Delivered(consumer)

        def enough() -> bool:
            got.take()
            return all(len(got.groups[name]) >= 12 for name in ("single", "multi", "stepwise", "teacher")) and len(
                [group for group in got.groups["multi"] if "tool_calls" in str(group["messages"])]
            ) >= 6

        envs[0].until(enough, timeout_s=120)
        for env in envs:
            assert env.running, env.output[-3000:]
        for env in envs:
            env.send(signal.SIGTERM)
        for env in envs:
            assert env.wait() == 143, env.output[-3000:]
            assert "not delivered: none" in env.output
        got.take()
        stats = consumer.stats()
        assert stats["dropped_total"] == stats["held"] == 0
        assert sum(map(len, got.groups.values())) == stats["records_total"]
        assert "lone server config" in envs[0].output

    assert got.comparable("single") == recorded(truth["single"])
    assert got.comparable("multi") == recorded(truth["multi"], truth["tools"])
    assert got.comparable("teacher") == recorded(truth["teacher"])
    for group in got.groups["single"]:
        assert all(len(row) == len(logprobs) for row, logprobs in zip(group["tokens"], group["inference_logprobs"], strict=True))
    for group in got.groups["teacher"]:
        assert [[len(row) for row in rows] for rows in group["distill_token_ids"]] == [[3] * len(row) for row in group["tokens"]]

    # The record on disk has the unknown key, the wire of upstream would not; and the list comes step by step, in order.
    assert got.comparable("stepwise") == recorded(truth["stepwise"])
    module = stepwise()
    expected = [group for item in range(len(got.steps) // module.STEPS) for group in module.episode(item, 4)]
    assert [group["tokens"] for group in expected] == [group["tokens"] for group in got.groups["stepwise"]][: len(expected)]
    for group, (rewards, ends) in zip(expected, got.steps, strict=False):
        turns = len(group["messages"][0]) // 2
        assert rewards == [[turn + row / 4 for turn in range(turns)] for row in range(4)]
        assert ends == [[3 * (turn + 2) for turn in range(turns)]] * 4


def test_process_and_evaluate_are_upstreams_own(
    bridge: str, start_env: Callable[..., Any], model: Path, policy_url: str, tmp_path: Path
) -> None:
    """Neither speaks to a rollout server; tokens are ids, the address given is the one used, and no segment is made."""
    server = ("--openai.base_url", policy_url, "--openai.tokenizer_name", str(model))
    processed = tmp_path / "processed.jsonl"
    envs = [
        start_env(*server, "--env.total_steps", "2", "--env.use_wandb", "false", "--env.data_path_to_save_groups", str(processed),
                  script="single_turn.py", command="process", tokenizer=str(model)),
        start_env(*server, "--env.use_wandb", "false", "--env.data_dir_to_save_evals", str(tmp_path), script="single_turn.py",
                  command="evaluate", tokenizer=str(model)),
    ]  # fmt: skip
    for env in envs:
        assert env.wait() == 0, env.output[-3000:]
    groups = [json.loads(line) for line in processed.read_text().splitlines()]
    assert [len(group["tokens"]) for group in groups] == [4, 4]
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]["eval/length"] >= 0
    assert bridge not in [info.name for info in shmbridge.list_bridges()]
