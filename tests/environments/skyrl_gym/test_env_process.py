"""Environments in a process of their own: the same episodes, its errors, its end, and its parent's."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from skyrl_rows import task
from skyrl_scripted import Scripted

import shmbridge
from shmbridge.producers.rollout import EpisodesLost, Rollout
from shmbridge.producers.skyrl_gym import (
    EnvironmentFailed,
    EnvProcess,
    EnvProcessEnded,
    SkyRLPlay,
    SkyRLTasks,
    server_command,
)
from shmbridge.testing import wait_until

HERE = Path(__file__).parent


@pytest.fixture
def data(tmp_path: Path) -> str:
    """A data set of two counting tasks."""
    path = tmp_path / "rows.jsonl"
    rows = [task(uid=str(number), max_turns=2, log=str(tmp_path / "log")) for number in range(2)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def process(
    data: str, child_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[EnvProcess]:
    monkeypatch.setenv("PYTHONPATH", child_environment["PYTHONPATH"])
    started = EnvProcess(server_command(data), modules=["counting_env"], env_config={"bonus": 1.0})
    yield started
    started.close()


@pytest.fixture(scope="module")
def shared(
    child_environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EnvProcess]:
    """One for the tests that leave it as it was."""
    path = tmp_path_factory.mktemp("shared") / "rows.jsonl"
    path.write_text(json.dumps(task()) + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", child_environment["PYTHONPATH"])
        started = EnvProcess(server_command(str(path)), modules=["counting_env"])
    with started:
        yield started


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


async def test_the_same_episodes_as_here_until_it_is_closed(
    bridge: str, consumer: shmbridge.Consumer, process: EnvProcess, pieces: Any, tmp_path: Path
) -> None:
    tasks = SkyRLTasks(process.rows())
    assert [tasks[number].data.extras["uid"] for number in range(len(tasks))] == ["0", "1"]
    server, play = Scripted(pieces, lambda prompt, number: "<think>é</think>12"), SkyRLPlay(process.make)
    async with Rollout(
        bridge, server, pieces, group_size=8, env_metrics=play.env_metrics, lane_bytes="1M"
    ) as rollout:
        assert await rollout.run(tasks.repeated(epochs=1), play) == 2
    for _ in range(2):
        with consumer.get(5) as record:
            assert [row.tolist() for row in record["step_rewards"]] == [pytest.approx([1.2, 1.2])] * 8
            assert record.json("extra")["env_metrics"]["reasoning_traces"] == ["é\n\né"] * 8
            assert record.json("messages")[0][0] == {"role": "system", "content": "c"}
            assert record.json("messages")[0][3] == {"role": "user", "content": "2?"}
    noted = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert len(noted) == 16  # each was closed
    assert {each["pid"] for each in noted} == {process.pid}
    process.close()
    assert gone(process.pid)
    process.close()


async def test_an_error_there_is_an_error_here(bridge: str, shared: EnvProcess, pieces: Any) -> None:
    server, play = Scripted(pieces, lambda prompt, number: "1"), SkyRLPlay(shared.make)
    async with Rollout(
        bridge, server, pieces, group_size=2, env_metrics=play.env_metrics, lane_bytes="1M"
    ) as rollout:
        for row, said in (
            (task(breaks_at=1), r"step of counting.*ZeroDivisionError: as the task wants"),
            (task(env_class="chess"), "No registered env with id: chess"),
        ):
            with pytest.raises(EpisodesLost) as lost:
                await rollout.group(SkyRLTasks([row])[0], play)
            assert isinstance(lost.value.__cause__, EnvironmentFailed)
            assert re.search(said, str(lost.value.__cause__))


async def test_what_is_no_json_is_the_environments_error(
    bridge: str, shared: EnvProcess, pieces: Any
) -> None:
    play = SkyRLPlay(shared.make)
    async with Rollout(bridge, Scripted(pieces, lambda prompt, number: "1"), pieces, group_size=2) as rollout:
        tasks = SkyRLTasks([task(odd_metrics=True)])
        assert await rollout.run(tasks.repeated(epochs=1), play) == 0
        assert rollout.failed == {"EnvironmentFailed": 1}
    shared.check()


@pytest.mark.parametrize("where", ["slow_init", "slow"])
def test_an_environment_that_answers_too_late_is_closed_once_it_has(
    data: str, child_environment: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, where: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", child_environment["PYTHONPATH"])
    with EnvProcess(server_command(data), modules=["counting_env"], timeout_s=20.0) as process:
        process.wait_ready()
        process._timeout_s = 0.5
        row = task(log=str(tmp_path / "log"), **{where: 2.0})
        env = process.make("counting", row)
        with pytest.raises(EnvironmentFailed, match=r"no answer to \w+ within 0\.5 s"):
            env.init([])
            env.step("1")
        env.close()
        assert not (tmp_path / "log").exists()  # it still works
        wait_until((tmp_path / "log").exists, timeout_s=20)


async def test_its_end_is_noticed_with_the_end_of_its_log(
    bridge: str, process: EnvProcess, pieces: Any
) -> None:
    server, play = Scripted(pieces, lambda prompt, number: "1"), SkyRLPlay(process.make)
    async with Rollout(
        bridge, server, pieces, group_size=2, env_metrics=play.env_metrics, lane_bytes="1M"
    ) as rollout:
        with pytest.raises(EpisodesLost):
            await rollout.group(SkyRLTasks([task(breaks_at=1)])[0], play)
        process.check()
        process._restarts = 0
        os.kill(process.pid, signal.SIGKILL)
        with pytest.raises(EpisodesLost) as lost:
            await rollout.group(SkyRLTasks([task()])[0], play)
    error = lost.value.__cause__
    assert isinstance(error, EnvProcessEnded)
    assert error.code == "SB514"
    assert "exit status -9" in str(error)
    assert "ZeroDivisionError: as the task wants" in str(error)  # its log
    with pytest.raises(EnvProcessEnded, match="has ended"):
        process.check()


async def test_one_killed_in_mid_episode_is_started_again(
    bridge: str,
    consumer: shmbridge.Consumer,
    process: EnvProcess,
    pieces: Any,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its episodes fail within half a second; later ones, and the rows, come from the next process."""
    begun, play = tmp_path / "begun", SkyRLPlay(process.make)
    rows = [task(slow=60.0, begun=str(begun)), *(task(uid=str(each), max_turns=1) for each in range(3))]
    fetched, killed_s = process.rows(), 0.0

    async def kill() -> None:
        nonlocal killed_s
        await asyncio.to_thread(wait_until, begun.exists, timeout_s=60)
        os.kill(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()

    async with Rollout(
        bridge, Scripted(pieces, lambda prompt, number: "1"), pieces, group_size=2, concurrency=1
    ) as rollout:
        first, *others = SkyRLTasks(rows).repeated(epochs=1)
        killing, pid = asyncio.create_task(kill()), process.pid
        with pytest.raises(EpisodesLost) as lost:
            await rollout.group(first, play)
        failed_s = time.monotonic() - killed_s
        await killing
        assert isinstance(lost.value.__cause__, EnvProcessEnded)
        assert await rollout.run(others, play) == 3
    assert failed_s < 0.5
    assert process.pid != pid
    assert fetched[1]["uid"] == "1"
    assert "it is started again, 1 of 5" in caplog.text
    assert [len(record) for record in consumer.poll()] == [2, 2, 2]


async def test_one_killed_while_the_policy_answers_fails_its_episodes_at_once(
    bridge: str, process: EnvProcess, pieces: Any
) -> None:
    asked, killed_s = asyncio.Event(), 0.0

    class Silent(Scripted):
        async def sample(self, *_: Any) -> Any:
            asked.set()
            await asyncio.Event().wait()

    async def kill() -> None:
        nonlocal killed_s
        await asked.wait()
        os.kill(process.pid, signal.SIGKILL)
        killed_s = time.monotonic()

    play = SkyRLPlay(process.make)
    async with Rollout(bridge, Silent(pieces, lambda prompt, number: "1"), pieces, group_size=2) as rollout:
        killing = asyncio.create_task(kill())
        with pytest.raises(EpisodesLost) as lost:
            await asyncio.wait_for(rollout.group(SkyRLTasks([task()])[0], play), 60)
        failed_s = time.monotonic() - killed_s
        await killing
    assert isinstance(lost.value.__cause__, EnvProcessEnded)
    assert failed_s < 0.5


def test_one_that_ends_again_and_again_stays_ended(process: EnvProcess) -> None:
    process._restarts = 2
    for _ in range(2):
        process.wait_ready()
        os.kill(process.pid, signal.SIGKILL)
        wait_until(lambda: process._process.poll() is not None)
        process.check()
    process.wait_ready()
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(EnvProcessEnded, match="exit status -9"):
        wait_until(lambda: process.check() is not None)
    with pytest.raises(EnvProcessEnded, match="has ended"):
        process.wait_ready()


def test_a_process_that_does_not_start_says_why(data: str, tmp_path: Path) -> None:
    with EnvProcess(server_command(data), modules=["no_such_module"]) as process:
        with pytest.raises(EnvProcessEnded, match=r"did not start .exit status 1.") as error:
            process.wait_ready()
        assert "No module named 'no_such_module'" in str(error.value)
    with pytest.raises(EnvProcessEnded, match="cannot be run"):
        EnvProcess(server_command(data, python=str(tmp_path / "python")))
    missing = EnvProcess(server_command(str(tmp_path / "none.parquet")))
    with missing, pytest.raises(EnvironmentFailed, match="there is no file or folder"):
        missing.rows()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_it_ends_with_its_parent(data: str, child_environment: dict[str, str], how: signal.Signals) -> None:
    command = [sys.executable, str(HERE / "envs" / "process_owner.py"), data]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=child_environment) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        assert not gone(pid)
        owner.send_signal(how)
    try:
        wait_until(lambda: gone(pid), timeout_s=10)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def test_a_parent_that_is_gone_already(data: str, child_environment: dict[str, str]) -> None:
    """Between fork and prctl: the parent is another one by then."""
    command = [*server_command(data), "--parent", str(os.getppid())]
    done = subprocess.run(command, env=child_environment, capture_output=True, timeout=60)
    assert done.returncode == 1


def test_others_cannot_call_it(shared: EnvProcess) -> None:
    shared.wait_ready()
    url = f"http://127.0.0.1:{shared._port}/rows"
    with pytest.raises(urllib.error.HTTPError, match="403"):
        urllib.request.urlopen(urllib.request.Request(url, b"{}"), timeout=10)


def test_it_needs_nothing_of_shmbridge(data: str) -> None:
    """As in a Python environment that lacks it."""
    words = server_command(data)[1:]
    run = (
        f"import runpy, sys; sys.argv = {words}; sys.modules['shmbridge'] = None; "
        f"runpy.run_path({words[0]!r}, run_name='__main__')"
    )
    with subprocess.Popen(
        [sys.executable, "-c", run], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline().startswith("http://127.0.0.1:")
        child.kill()
