"""SkyRLAdapter under `serve`: an Atropos environment whose groups arrive with rewards of steps and traces."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from skyrl_rows import task
from skyrl_scripted import Scripted

import shmbridge
from shmbridge.schema import FINISH_REASONS
from shmbridge.testing import wait_until

pytestmark = pytest.mark.timeout(600)

HERE = Path(__file__).parent
RUN = shmbridge.Run(batch_size=16, max_token_len=120, num_steps=1000)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [
        task(uid=str(number), prompt=[{"role": "user", "content": f">{number}"}], log=str(tmp_path / "log"))
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def serve(
    tmp_path: Path, bridge: str, tiny: Path, data: str, policy_server: str, child_environment: dict[str, str]
) -> Iterator[Start]:
    """Starts the adapter under `serve`; its output goes into tmp_path/env.log."""
    started = []

    def run(*flags: str, **env: str) -> subprocess.Popen[str]:
        settings = {
            "tokenizer_name": str(tiny),
            "skyrl_repo_id": data,
            "group_size": "4",
            "max_token_length": "6",
            "use_wandb": "false",
            "ensure_scores_are_not_same": "false",
            "total_steps": "1000",
        } | env
        command = [
            sys.executable,
            "-m",
            "shmbridge.producers.atropos",
            "--bridge",
            bridge,
            "--lane-bytes",
            "1M",
        ]
        command += [*flags, str(HERE / "envs" / "counting_adapter.py"), "serve"]
        for name, value in settings.items():
            command += [f"--env.{name}", value]
        command += ["--openai.base_url", f"{policy_server}/v1", "--openai.tokenizer_name", str(tiny)]
        with (tmp_path / "env.log").open("wb") as log:
            started.append(
                subprocess.Popen(command, stdout=log, stderr=log, text=True, env=child_environment)
            )
        return started[-1]

    yield run
    for each in started:
        if each.poll() is None:
            each.kill()
        each.wait(30)


def first(consumer: shmbridge.Consumer, process: subprocess.Popen[str], log: Path) -> Any:
    """The first record; a process that ends before fails the test with its log."""
    give_up = time.monotonic() + 120
    while time.monotonic() < give_up:
        assert process.poll() is None, log.read_text()[-4000:]
        try:
            return consumer.get(1)
        except shmbridge.ConsumerEmpty:
            continue
    raise AssertionError(log.read_text()[-4000:])


def whole(serve: Start, consumer: shmbridge.Consumer, tmp_path: Path, **settings: str) -> Any:
    """Checks three groups; returns the adapter's process and those in which its environments ran."""
    process = serve("--step-rewards", thought_start_tag="1", thought_end_tag="?", **settings)
    records = 0
    while records < 3:
        with first(consumer, process, tmp_path / "env.log") as record:
            records += 1
            noted = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
            group = record.to_scored_data()
            metrics = record.json("extra")["env_metrics"]
            assert group["env_metrics"] == metrics
            assert metrics["prm_supported"] is True
            assert len(metrics["reasoning_traces"]) == len(record) == 4
            for row in range(4):
                check(record, group, row, noted)
                said = "".join(
                    each["content"] for each in group["messages"][row] if each["role"] == "assistant"
                )
                assert (metrics["reasoning_traces"][row] is not None) <= ("1" in said)
    return process, pids_in(tmp_path)


def pids_in(folder: Path) -> set[int]:
    return {json.loads(line)["pid"] for line in (folder / "log").read_text().splitlines()}


def test_groups_arrive_whole_and_errors_of_environments_are_no_rows(
    serve: Start, make_consumer: Callable[..., shmbridge.Consumer], data: str, tmp_path: Path
) -> None:
    with Path(data).open("a") as rows:
        rows.write(json.dumps(task(uid="bad", breaks_at=2)) + "\n")
    consumer, log = make_consumer(run=RUN), tmp_path / "env.log"
    process, pids = whole(serve, consumer, tmp_path)
    assert pids == {process.pid}
    give_up = time.monotonic() + 90
    while "an episode was lost, further ones" not in log.read_text() and time.monotonic() < give_up:
        with first(consumer, process, log) as record:
            assert record["instance_id"][0] != "4"
    assert "an episode was lost, further ones" in log.read_text()
    assert "ZeroDivisionError: as the task wants" in log.read_text()
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143


def test_the_adapter_goes_on_after_the_end_of_the_environments_process(
    serve: Start, make_consumer: Callable[..., shmbridge.Consumer], tmp_path: Path
) -> None:
    """Groups from another process arrive as whole, and it ends with the adapter."""
    consumer = make_consumer(run=RUN)
    process, pids = whole(serve, consumer, tmp_path, separate_process="true", env_imports="counting_env")
    (pid,) = pids
    assert pid != process.pid
    os.kill(pid, signal.SIGKILL)
    give_up = time.monotonic() + 90
    while pids_in(tmp_path) == {pid} and time.monotonic() < give_up:
        with first(consumer, process, tmp_path / "env.log"):
            pass
    pids = pids_in(tmp_path)
    assert len(pids) == 2
    assert (
        "it is started again, 1 of 5: [SB514] the environments' process" in (tmp_path / "env.log").read_text()
    )
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 143
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), timeout_s=10)


def check(record: Any, group: dict[str, Any], row: int, noted: list[dict[str, Any]]) -> None:
    """One row against what its environment noted, and against itself."""
    uid = group["instance_id"][row]
    assert (record["instance_id"][row], record["repetition_id"][row]) == (uid, row)
    answers = [each["content"] for each in group["messages"][row] if each["role"] == "assistant"]
    rewards = record["step_rewards"][row].tolist()
    assert any(
        each["uid"] == uid
        and each["actions"] == answers
        and np.float32(each["rewards"]).tolist() == rewards
        and sum(each["rewards"]) == pytest.approx(group["scores"][row])
        for each in noted
    )
    tokens, masks, logprobs = (group[name][row] for name in ("tokens", "masks", "inference_logprobs"))
    trained = [mask != -100 for mask in masks]
    assert [mask for mask in masks if mask != -100] == [
        t for t, each in zip(tokens, trained, strict=True) if each
    ]
    assert all(
        (value <= 0.0) if each else (value == 1.0) for value, each in zip(logprobs, trained, strict=True)
    )
    ends = [
        at + 1 for at, each in enumerate(trained) if each and (at + 1 == len(trained) or not trained[at + 1])
    ]
    assert record["step_ends"][row].tolist() == record["turn_ends"][row].tolist() == ends
    assert FINISH_REASONS[record["finish_reason"][row]] in ("stop", "length")
    spans = record["trace_spans"][row].tolist() if "trace_spans" in record else []
    said = record.json("extra")["env_metrics"]["reasoning_traces"][row] is not None
    assert bool(spans) == said
    assert spans == group.get("trace_spans", [[]] * 4)[row]
    assert len(tokens) < RUN.max_token_len
    assert (record["token_versions"][row] >= 0).tolist() == trained  # stamped from the server's responses


async def test_only_errors_end_it(tiny: Path, tmp_path: Path) -> None:
    """By an error of get_next_item: under `serve` it ends the adapter with exit code 2, as the test above."""
    from shmbridge.producers.rollout import EpisodesLost, TooManyFailures
    from shmbridge.producers.skyrl_gym.adapter import SkyRLAdapter
    from shmbridge.producers.skyrl_gym.environments import EnvironmentFailed

    path = tmp_path / "bad.jsonl"
    path.write_text(json.dumps(task(breaks_at=1)) + "\n")
    config, servers = SkyRLAdapter.config_init()
    settings = {"skyrl_repo_id": str(path), "stop_after_failures": 3, "use_wandb": False, "group_size": 2}
    settings |= {"stop": '["?"]', "env_config": '{"bonus": 1}', "tokenizer_name": str(tiny)}
    env = SkyRLAdapter(config.model_copy(update=settings), servers, testing=True)
    env._sampler = Scripted(env.tokenizer, lambda prompt, number: "1")
    await env.setup()
    for number in range(3):
        assert await env.get_next_item() == 0
        with pytest.raises(EpisodesLost) as lost:
            await env.collect_trajectories(0)
        assert isinstance(lost.value.__cause__, EnvironmentFailed)
        assert env.losses.groups == {"EnvironmentFailed": number + 1}
        assert env.losses.episodes == {"EnvironmentFailed": 2 * number + 2}
    with pytest.raises(TooManyFailures, match="groups failed 3 times in a row"):
        await env.get_next_item()


async def test_a_group_that_lost_episodes_is_sent_by_baseenv(tiny: Path, tmp_path: Path) -> None:
    """Atropos skips a group of another size, unless the group says that this is its size."""
    from shmbridge.producers.skyrl_gym.adapter import SkyRLAdapter

    path, sent, failed = tmp_path / "rows.jsonl", [], []
    path.write_text(json.dumps(task(max_turns=1)) + "\n")
    config, servers = SkyRLAdapter.config_init()
    settings = {"skyrl_repo_id": str(path), "use_wandb": False, "group_size": 4, "episode_s": 5.0}
    settings |= {"enable_process_rewards": False}
    settings |= {"tokenizer_name": str(tiny), "ensure_scores_are_not_same": False}
    env = SkyRLAdapter(config.model_copy(update=settings), servers, testing=True)
    env.max_token_len = -1

    def answer(prompt: Any, number: int) -> str:
        if not failed:
            failed.append(number)
            raise ConnectionError("the server ended")
        return "1"

    async def send(group: Any) -> None:
        sent.append(group)

    env._sampler, env._send_scored_data_to_api = Scripted(env.tokenizer, answer), send
    await env.setup()
    group, _ = await env.collect_trajectories(0)
    await env.handle_send_to_api(group)
    assert [len(each["tokens"]) for each in sent] == [3]
    assert "step_rewards" not in sent[0]
    assert sent[0]["env_metrics"]["prm_supported"] is False
    assert env.losses.episodes == {"ConnectionError": 1}


async def test_a_server_without_token_ids_is_refused() -> None:
    from atroposlib.envs.base import APIServerConfig
    from atroposlib.envs.server_handling.server_manager import APIServer, ServerManager

    from shmbridge.producers.rollout import NoTokens, Sampling
    from shmbridge.producers.skyrl_gym.adapter import AtroposServer

    config = APIServerConfig(
        model_name="m", base_url="http://127.0.0.1:9/v1", api_key="x", health_check=False
    )
    server = AtroposServer(ServerManager([config], server_class=APIServer))
    with pytest.raises(NoTokens, match="not supported"):
        await server.sample([1, 2], Sampling(max_tokens=4))


async def test_an_answer_that_ended_with_an_error_is_refused() -> None:
    from shmbridge.producers.rollout import Sampling, ServerFailed
    from shmbridge.producers.skyrl_gym.adapter import AtroposServer

    class Manager:
        async def tokens_and_logprobs_completion(self, **asked: Any) -> Any:
            return asked["input_ids"], [[5]], [[-0.5]], ["error"]

    with pytest.raises(ServerFailed, match="ended the answer with an error"):
        await AtroposServer(Manager()).sample([1, 2], Sampling(max_tokens=4))
