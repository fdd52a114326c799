"""`python -m shmbridge.producers.skyrl_gym`: groups on the bridge, mistakes in two lines, an orderly end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from skyrl_rows import task

import shmbridge
from shmbridge.producers.skyrl_gym.__main__ import main
from shmbridge.testing import wait_until

pytestmark = pytest.mark.timeout(600)

Start = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def data(tmp_path: Path) -> str:
    path = tmp_path / "rows.jsonl"
    rows = [
        task(uid=str(number), max_turns=2, prompt=[{"role": "user", "content": f">{number}"}])
        for number in range(4)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def words(bridge: str, tiny: Path, data: str, policy_server: str) -> Callable[..., list[str]]:
    """The flags that all need; others take their place or follow."""

    def words(*flags: str, **instead: str) -> list[str]:
        needed = {
            "bridge": bridge,
            "server": policy_server,
            "tokenizer": str(tiny),
            "repo-id": data,
        } | instead
        given = [word for name, value in needed.items() for word in (f"--{name}", value)]
        given += ["--import", "counting_env", "--lane-bytes", "1M", "--max-tokens", "6", "--context", "100"]
        return [*given, "--group-size", "4", *flags]

    return words


@pytest.fixture
def start(words: Callable[..., list[str]], child_environment: dict[str, str]) -> Iterator[Start]:
    """Starts the command as a process, where its end or another one's matters."""
    started = []

    def run(*flags: str, **instead: str) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "shmbridge.producers.skyrl_gym", *words(*flags, **instead)]
        started.append(
            subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=child_environment
            )
        )
        return started[-1]

    yield run
    for each in started:
        if each.poll() is None:
            each.kill()
        each.communicate()


def check_groups(consumer: shmbridge.Consumer) -> None:
    for _ in range(4):
        with consumer.get(90) as record:
            assert len(record) == 4
            assert [len(row) for row in record["step_rewards"]] == [2] * 4
            assert min(row.min() for row in record["step_rewards"]) >= 0.5
            assert record.json("extra")["env_metrics"]["prm_supported"]


def test_groups_of_a_data_set(
    words: Callable[..., list[str]], consumer: shmbridge.Consumer, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words("--epochs", "1", "--env-config", "bonus=0.5")) == 0
    assert "4 groups were put; lost: none" in capsys.readouterr().out
    check_groups(consumer)


def test_sigterm_ends_it_in_order(start: Start, bridge: str, consumer: shmbridge.Consumer) -> None:
    """With environments in a process of their own."""
    process = start("--shuffle", "1", "--env-config", "bonus=0.5", "--env-python", sys.executable)
    check_groups(consumer)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 143, errors
    assert "Traceback" not in errors
    wait_until(
        lambda: (
            not any(
                lane.alive for info in shmbridge.list_bridges() if info.name == bridge for lane in info.lanes
            )
        )
    )


def test_flags_of_tags_and_rewards(words: Callable[..., list[str]], consumer: shmbridge.Consumer) -> None:
    """Digits stand for tags: the tiny model says nothing else."""
    tags = [word for digit in range(10) for word in ("--thought-tags", str(digit), ":")]
    assert main(words("--max-groups", "2", "--no-process-rewards", *tags)) == 0
    with consumer.get(5) as record:
        assert "step_rewards" not in record
        said = "".join(
            each["content"] for row in record.json("messages") for each in row if each["role"] == "assistant"
        )
        assert any(each.isdigit() for each in said)
        assert any(record.json("extra")["env_metrics"]["reasoning_traces"])


def test_a_call_that_never_returns_does_not_keep_it(start: Start, tmp_path: Path) -> None:
    path, begun = tmp_path / "slow.jsonl", tmp_path / "begun"
    path.write_text(json.dumps(task(slow=1e6, begun=str(begun))))
    process = start("--max-groups", "1", **{"repo-id": str(path)})
    wait_until(begun.exists, timeout_s=90)
    process.send_signal(signal.SIGTERM)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 143, errors
    assert "calls of environments did not return within 3 s" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    ("flags", "instead", "said"),
    [
        ([], {"repo-id": "./none.parquet"}, "there is no file or folder ./none.parquet"),
        (["--env", "chess"], {}, "no environment 'chess' is registered"),
        (["--import", "no_such_module"], {}, "no_such_module cannot be imported"),
        (["--thought-tags", "x", "x"], {}, "a trace needs two different tags"),
        (["--env-config", "bonus"], {}, "'bonus' is not KEY=VALUE"),
        (["--env-python", "/no/python"], {}, "/no/python cannot be run"),
        (["--group-size", "0"], {}, "group_size=0"),
        ([], {"tokenizer": "./no-tokenizer"}, "no-tokenizer"),
    ],
)
def test_mistakes_are_answered_in_two_lines(
    bridge: str,
    tiny: Path,
    data: str,
    capsys: pytest.CaptureFixture[str],
    flags: list[str],
    instead: dict[str, str],
    said: str,
) -> None:
    """In this process: what can be wrong is found before anything is asked."""
    needed = {"bridge": bridge, "server": "http://127.0.0.1:9", "tokenizer": str(tiny), "repo-id": data}
    words = [word for name, value in (needed | instead).items() for word in (f"--{name}", value)]
    assert main([*words, *flags]) == 2
    errors = capsys.readouterr().err
    (line,) = (
        each for each in errors.splitlines() if each.startswith("shmbridge.producers.skyrl_gym: error: ")
    )
    assert said in line
    assert " -> " in line
    assert "Traceback" not in errors


def test_environments_that_fail_end_it(
    words: Callable[..., list[str]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    path = tmp_path / "breaking.jsonl"
    path.write_text(json.dumps(task(breaks_at=1)) + "\n")
    assert main(words("--stop-after-failures", "2", **{"repo-id": str(path)})) == 1
    assert "error: [SB511] groups failed 2 times in a row" in capsys.readouterr().err
    assert "as the task wants" in caplog.text
