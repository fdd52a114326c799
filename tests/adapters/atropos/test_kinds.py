"""Kinds of environment processes beyond the four of test_four_kinds.py: tools, a teacher, a YAML config;
`process` and `evaluate`.
"""

from __future__ import annotations

import json
import signal
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shmbridge

pytestmark = pytest.mark.timeout(300)

pytest.importorskip("atroposlib")

RUN = shmbridge.Run(batch_size=16, max_token_len=4096, num_steps=100000)


def test_tools_and_a_teacher_deliver_what_they_record(
    bridge: str,
    start_env: Callable[..., Any],
    groups_file: ModuleType,
    model: Path,
    policy_url: str,
    tmp_path: Path,
) -> None:
    truth = {name: tmp_path / f"{name}.jsonl" for name in ("multi", "teacher")}
    config = tmp_path / "multi.yaml"
    settings = {"tokenizer_name": str(model), "tools": True, "data_path_to_save_groups": str(truth["multi"])}
    config.write_text(json.dumps({"env": settings, "openai": {"base_url": policy_url}}))  # JSON is YAML
    # which ends an env upstream
    teacher = ("--env.data_path_to_save_groups", str(truth["teacher"]), "--env.inference_weight", "-1")
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    with shmbridge.Consumer(bridge, run=RUN) as consumer:

        def take() -> bool:
            for record in consumer.poll():
                with record:
                    groups[record.meta.env_name].append(record.to_scored_data())
            return all(len(groups[name]) >= 4 for name in truth)

        envs = [
            start_env("--config", str(config), script="multi_turn.py", tokenizer=str(model)),
            start_env(*teacher, script="teacher.py"),
        ]
        envs[0].until(take, timeout_s=120)
        for env in envs:
            env.send(signal.SIGTERM)
        for env in envs:
            assert env.wait() == 143, env.output[-3000:]
            assert "not delivered: none" in env.output
        take()
        stats = consumer.stats()
        assert stats["dropped_total"] == stats["held"] == 0
    for name, path in truth.items():
        assert sorted(map(groups_file.as_text, groups[name])) == groups_file.recorded(path)
    for group in groups["multi"]:
        assert [[message["role"] for message in row] for row in group["messages"]] == [
            ["user", "assistant", "tool", "assistant"]
        ] * 4
        assert group["messages"][0][1]["tool_calls"][0]["function"]["name"] == "larger"
    for group in groups["teacher"]:
        assert [[len(position) for position in row] for row in group["distill_token_ids"]] == [
            [3] * len(row) for row in group["tokens"]
        ]


def test_process_and_evaluate_are_upstreams_own(
    bridge: str, start_env: Callable[..., Any], model: Path, policy_url: str, tmp_path: Path
) -> None:
    """Neither speaks to a rollout server; tokens are ids, the address given is the one used, and no segment
    is made.
    """
    server = (
        "--openai.base_url",
        policy_url,
        "--openai.tokenizer_name",
        str(model),
        "--env.use_wandb",
        "false",
    )
    processed = tmp_path / "processed.jsonl"
    process = ("--env.total_steps", "2", "--env.data_path_to_save_groups", str(processed))
    evaluate = ("--env.data_dir_to_save_evals", str(tmp_path))
    envs = [
        start_env(*server, *process, script="single_turn.py", command="process", tokenizer=str(model)),
        start_env(*server, *evaluate, script="single_turn.py", command="evaluate", tokenizer=str(model)),
    ]
    for env in envs:
        assert env.wait() == 0, env.output[-3000:]
    groups = [json.loads(line) for line in processed.read_text().splitlines()]
    assert [len(group["tokens"]) for group in groups] == [4, 4]
    assert json.loads((tmp_path / "metrics.json").read_text())["results"]["all"]["eval/length"] >= 0
    assert bridge not in [info.name for info in shmbridge.list_bridges()]
