"""Everything together: four kinds of environments on one bridge, three attached and one that posts to a
gateway, and the real learner.

One environment and the gateway are killed in the middle and started again. The count is the learner's own, of
the lanes' own words.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import shmbridge

# Its parts have tests in every run: kills in tests/faults/crash, the gateway's restart in
# tests/adapters/gateway, the kinds in test_four_kinds.py.
pytestmark = [pytest.mark.timeout(400), pytest.mark.long]

pytest.importorskip("atroposlib")
pytest.importorskip("uvicorn")
pytest.importorskip("torch")

ROOT = Path(__file__).parents[3]
ENVS = Path(__file__).parent / "envs"
GROUPS = 4  # of a batch
VOCABULARY = 4096  # seeded_env.py writes any token below 1000, and its items' numbers


class Child:
    """A process with its output in a file."""

    def __init__(self, log: Path, *command: str, **more: Any) -> None:
        self.log = log
        paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        settings = {
            "HF_HUB_OFFLINE": "1",
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "WANDB_MODE": "disabled",
        }
        env = os.environ | {"PYTHONPATH": paths} | settings
        with log.open("ab") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=output, env=env, **more)

    @property
    def output(self) -> str:
        return self.log.read_text()

    def end(self, how: signal.Signals) -> int:
        self.process.send_signal(how)
        return self.process.wait(60)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Child]]:
    started: list[Child] = []

    def begin(name: str, *command: str, **more: Any) -> Child:
        started.append(Child(tmp_path / f"{name}.log", *command, **more))
        return started[-1]

    yield begin
    for child in started:
        if child.process.poll() is None:
            child.process.send_signal(signal.SIGCONT)
            child.end(signal.SIGKILL)


@pytest.fixture(scope="module")
def large_vocabulary(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows every token the environments write."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    folder = tmp_path_factory.mktemp("large") / "model"
    sizes = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
    }
    Qwen2ForCausalLM(
        Qwen2Config(vocab_size=VOCABULARY, max_position_embeddings=512, **sizes)
    ).save_pretrained(folder)
    return folder


def lines_of(metrics: Path) -> list[dict[str, Any]]:
    return (
        [json.loads(line) for line in metrics.read_text().splitlines() if line.endswith("}")]
        if metrics.exists()
        else []
    )


def until(holds: Callable[[], object], *children: Child, timeout_s: float = 150.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not holds():
        for child in children:
            assert child.process.poll() is None, child.output[-3000:]
        assert time.monotonic() < deadline, [child.output[-1500:] for child in children]
        time.sleep(0.05)


def lanes_of(bridge: str) -> list[Any]:
    return [lane for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes]


def left_over(bridge: str) -> int:
    """Un-released groups, which the next consumer gets."""
    with shmbridge.Consumer(bridge) as consumer:
        records = consumer.poll(10_000)
        for record in records:
            record.release()
    return len(records)


def test_groups_of_four_kinds_are_not_lost_while_the_learner_trains(
    bridge: str,
    start: Callable[..., Child],
    start_env: Callable[..., Any],
    groups_file: ModuleType,
    model: Path,
    policy_url: str,
    large_vocabulary: Path,
    tmp_path: Path,
    tokenizer: str,
) -> None:
    truth = {name: tmp_path / f"{name}.jsonl" for name in ("single", "multi", "stepwise", "posted")}
    metrics, unsent = tmp_path / "run" / "metrics.jsonl", tmp_path / "unsent"

    def saving(name: str) -> tuple[str, str]:
        return "--env.data_path_to_save_groups", str(truth[name])

    learner = start(
        "learner",
        sys.executable,
        "-m",
        "shmbridge.consumers.grpo",
        "--bridge",
        bridge,
        "--model",
        str(large_vocabulary),
        "--run-dir",
        str(tmp_path / "run"),
        "--steps",
        "100000",
        "--groups",
        str(GROUPS),
        "--group-size",
        "4",
        "--max-token-len",
        "512",
        "--device",
        "cpu",
        "--threads",
        "1",
        "--no-weights",
        "--save-every",
        "100000",
        "--ignore-images",
    )
    # as systemd's: clients that connect while the gateway is away wait
    with socket.create_server(("127.0.0.1", 0), backlog=100) as listener:

        def start_gateway() -> Child:
            handed = f'exec 3<&{listener.fileno()}; LISTEN_PID=$$ LISTEN_FDS=1 exec "$@"'
            serve = (
                sys.executable,
                "-m",
                "shmbridge.cli",
                "gateway",
                "--bridge",
                bridge,
                "--lane-bytes",
                "1M",
            )
            return start("gateway", "bash", "-c", handed, "-", *serve, pass_fds=(listener.fileno(),))

        gateway = start_gateway()
        server = ("--openai.base_url", policy_url)
        attached = [
            start_env(
                *server,
                "--openai.tokenizer_name",
                str(model),
                *saving("single"),
                script="single_turn.py",
                tokenizer=str(model),
            ),
            start_env(*server, *saving("multi"), script="multi_turn.py", tokenizer=str(model)),
            start_env(*saving("stepwise"), script="stepwise.py", options=("--step-rewards",)),
        ]
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        poster = start(
            "poster",
            sys.executable,
            str(ENVS / "seeded_env.py"),
            "serve",
            "--env.rollout_server_url",
            url,
            "--env.tokenizer_name",
            tokenizer,
            "--env.wandb_name",
            "posted",
            "--env.collect_s",
            "0.4",
            "--env.cancelled",
            str(unsent),
            *saving("posted"),
            # else BaseEnv cancels workers as they send whenever the queue grows
            "--env.max_batches_offpolicy",
            "1000",
        )
        killed = start_env("--env.collect_s", "0.4", script="seeded_env.py")

        def seen(*names: str) -> bool:
            """Every environment has been trained on."""
            text = metrics.read_text() if metrics.exists() else ""
            return all(f'"atropos/{name}/mean_score"' in text for name in names)

        everyone = ("single", "multi", "stepwise", "posted", "seeded")
        until(lambda: seen(*everyone), learner, gateway, poster)

        killed.send(signal.SIGSTOP)  # so that its committed records stay while they are read
        committed = sum(lane.records for lane in lanes_of(bridge) if lane.env_name == "seeded")
        assert killed.end(signal.SIGKILL) == -signal.SIGKILL
        gateway.end(signal.SIGKILL)
        gateway = start_gateway()
        again = start_env("--env.collect_s", "0.4", "--env.items", "15", script="seeded_env.py")
        posted = len(groups_file.recorded(truth["posted"]))
        until(lambda: len(groups_file.recorded(truth["posted"])) > posted + 10, learner, gateway, poster)
        until(
            lambda: any(
                lane.records == 17 for lane in lanes_of(bridge) if lane.alive and lane.env_name == "seeded"
            ),
            learner,
        )

        # alive, and the last to move: a step of its comes after all that is put
        learner.process.send_signal(signal.SIGSTOP)
        poster.end(signal.SIGINT)
        for env in (*attached, again):
            env.send(signal.SIGTERM)
        for env in (*attached, again):
            assert env.wait() == 143, env.output[-3000:]
            assert "not delivered: none" in env.output
        assert gateway.end(signal.SIGTERM) == 0
        steps = len(lines_of(metrics))
        learner.process.send_signal(signal.SIGCONT)
        until(
            lambda: len(lines_of(metrics)) > steps and lines_of(metrics)[-1]["bridge/queue_groups"] < GROUPS,
            learner,
        )
        last = lines_of(metrics)[-1]
        learner.end(signal.SIGTERM)

    assert "Failed to send" not in poster.output
    assert last["bridge/drops_total"] == last["bridge/discards_total"] == 0
    left = left_over(bridge)
    assert last["bridge/records_total"] == last["bridge/released_total"] + left
    recorded = {name: len(groups_file.recorded(path)) for name, path in truth.items()}
    again_put = 15 + 2  # two of the items are lists of two groups
    certain = sum(recorded.values()) + committed + again_put
    # BaseEnv writes a group down before it posts it: workers interrupted in between have it in the file, and
    # perhaps nowhere else.
    cut_off = len(unsent.read_text().splitlines()) if unsent.exists() else 0
    twice = last["bridge/records_total"] - certain
    assert cut_off <= 8, "BaseEnv has no more workers that the interrupt could cut off"
    assert -cut_off <= twice <= 8, (
        f"{recorded}, {committed}: only what 8 workers posted as the gateway died can come again"
    )
