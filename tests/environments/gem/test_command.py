"""`python -m shmbridge.producers.gem`: plays, says what was wrong in two lines, and ends in order."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from aiohttp import web

from shmbridge.producers.gem.__main__ import main
from shmbridge.testing import wait_until
from tests.environments.byte_tokenizer import byte_tokenizer

pytestmark = pytest.mark.timeout(300)  # a process imports for seconds, on a busy machine for minutes

ROOT = Path(__file__).parents[3]
ENVS = Path(__file__).parent / "envs"


@pytest.fixture(scope="module")
def server():
    """The address of a policy server that says a boxed five, in a thread of its own."""
    tokenizer, loop, ready = byte_tokenizer(), asyncio.new_event_loop(), threading.Event()
    said = [*tokenizer.encode("\\boxed{5}"), tokenizer.eos_token_id]
    where = []

    async def answer(request: web.Request) -> web.Response:
        if request.method == "GET":
            known = {
                "/v1/models": {"data": [{"id": "policy", "owned_by": "shmbridge", "max_model_len": 4096}]}
            }
            found = known.get(request.path)
            return web.json_response(found) if found else web.Response(status=404)
        prompt = (await request.json())["prompt"]["prompt_token_ids"]
        body = {
            "token_ids": [said],
            "prompt_token_ids": prompt,
            "logprobs": [[[{str(token): -0.5}] for token in said]],
            "finish_reasons": ["stop"],
        }
        return web.json_response(body)

    async def start() -> None:
        app = web.Application()
        app.add_routes([web.route("*", "/{anything:.*}", answer)])
        runner = web.AppRunner(app)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        where.append("http://{}:{}".format(*runner.addresses[0][:2]))
        ready.set()

    thread = threading.Thread(target=lambda: (loop.create_task(start()), loop.run_forever()), daemon=True)
    thread.start()
    assert ready.wait(30)
    yield where[0]
    loop.call_soon_threadsafe(loop.stop)
    thread.join(30)


@pytest.fixture
def needed(bridge, server, policy_tokenizer):
    """The arguments that all need."""
    where = ["--bridge", bridge, "--server", server, "--tokenizer", policy_tokenizer]
    return [*where, "--group-size", "2"]


@pytest.fixture
def command(needed, tmp_path):
    """Start it as a process: `command(*arguments)`, its output in a file."""
    started = []

    def start(*arguments: str) -> subprocess.Popen[bytes]:
        path = os.pathsep.join([str(ROOT), str(ENVS), os.environ.get("PYTHONPATH", "")])
        with (tmp_path / "said").open("wb") as output:
            started.append(
                subprocess.Popen(
                    [sys.executable, "-W", "ignore", "-m", "shmbridge.producers.gem", *needed, *arguments],
                    stdout=output,
                    stderr=output,
                    env=os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1"},
                )
            )
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.wait(30)


def test_command_plays_a_game(needed, make_consumer, capsys):
    """In this process, as what follows it: processes of their own are started where their end matters."""
    consumer = make_consumer()
    words = ["--env", "game:GuessTheNumber-v0-easy", "--max-groups", "3", "--max-turns", "4", "--seed", "7"]
    assert main([*needed, *words]) == 0
    assert "3 groups were put; lost: none" in capsys.readouterr().out
    seeds = set()
    for _ in range(3):
        record = consumer.get(timeout_s=5)
        seeds |= {row["seed"] for row in record.json("extra")["rows"]}
        assert record.meta.env_name == "game:GuessTheNumber-v0-easy"
        assert len({row.tolist()[-1] for row in record["step_rewards"]}) == 1, "one number for both"
    assert seeds == {7, 8, 9}


def test_command_of_which_all_groups_failed(needed, gem_envs, capsys):
    words = ["--env", "test:Echo", "--import", "gem", "--env-arg", "breaks=true", "--max-groups", "2"]
    assert main([*needed, *words]) == 1
    said = capsys.readouterr().out
    assert "0 groups were put; lost: 4 episodes KeyError, 2 groups KeyError" in said


def test_command_plays_an_atropos_environment_until_it_is_told_to_end(
    command, make_consumer, policy_tokenizer, tmp_path
):
    consumer = make_consumer()
    arguments = [f"environment={ENVS / 'atropos_envs.py'}:GroupEnv", f"tokenizer={policy_tokenizer}"]
    arguments += ['config={"turns": 2, "score": -1.0}']
    child = command("--env", "atropos", *(f"--env-arg={each}" for each in arguments))
    for _ in range(2):
        record = consumer.get(timeout_s=250)
        assert record["score"].tolist() == [-1.0, -1.0]
        assert len(record["turn_ends"][0]) == 2
        record.release()
    child.send_signal(signal.SIGTERM)
    assert child.wait(250) == 143, (tmp_path / "said").read_text()
    assert "Traceback" not in (tmp_path / "said").read_text()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--env", "nope"], "gem has no environment 'nope'"),
        (["--env", "rg:leg_counting", "--env-arg", "size"], "is not KEY=VALUE"),
        (["--env", "atropos", "--env-arg", "environment=nowhere.py:X"], "there is no file nowhere.py"),
        (["--env", "test:Echo", "--import", "no_such_module"], "no_such_module"),
    ],
)
def test_command_says_what_was_wrong_in_one_line(bridge, capsys, arguments, says):
    """In this process: what can be wrong is found before anything is asked."""
    needed = ["--bridge", bridge, "--server", "http://127.0.0.1:9", "--tokenizer", "none"]
    assert main([*needed, *arguments]) == 2
    said = capsys.readouterr().err
    error = said.splitlines()[-1]
    assert error.startswith("shmbridge.producers.gem: error: ")
    assert says in error
    assert " -> " in error
    assert "Traceback" not in said


def test_command_that_cannot_start_exits_with_two(command, tmp_path):
    assert command("--env", "nope").wait(250) == 2
    (line,) = (tmp_path / "said").read_text().splitlines()
    assert re.match(r"\S+ \S+ ERROR gem: \[SB\d+\] .* -> ", line), line


def test_command_does_not_wait_for_a_call_that_never_returns(command, tmp_path):
    child = command("--env", "test:Echo", "--import", "gem_envs", "--env-arg", "sleeps=1e6")
    wait_until(lambda: "asleep" in (tmp_path / "said").read_text(), timeout_s=90)
    child.send_signal(signal.SIGINT)
    assert child.wait(30) == 130, (tmp_path / "said").read_text()
    assert "did not return within 3 s" in (tmp_path / "said").read_text()
    assert "Traceback" not in (tmp_path / "said").read_text()
