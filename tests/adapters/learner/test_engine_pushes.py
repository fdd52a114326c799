"""The learner's engines are brought to each version in order while it waits; failures are logged and counted,
and lasting ones end it.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import shmbridge
from shmbridge.consumers.engines.engine import Engine, EngineFailed
from shmbridge.consumers.learner.train.publishing import EnginePushes
from shmbridge.weights import WeightsReader

PAGE = Path(__file__).parents[3] / "docs" / "reference" / "metrics.md"
GROUPS = 2  # per step


class Fake(Engine):
    """An engine that loads each version, unless the test holds it."""

    def __init__(self, address="http://fake"):
        self.address, self.versions, self.fails, self.may = address, [], "", threading.Event()
        self.may.set()
        self.closed = 0

    def update(self, update):
        assert self.may.wait(30)
        if self.fails:
            raise EngineFailed(f"{self.address}: {self.fails}")
        self.versions.append(update.version)

    def version(self):
        return self.versions[-1] if self.versions else None

    def close(self):
        self.closed += 1


@pytest.fixture
def said():
    return []


def test_a_push_goes_on_while_the_learner_does(said):
    engine = Fake()
    pushes = EnginePushes([engine], "b", say=said.append)
    assert pushes.metrics() == {
        "engines/version": -1,
        "engines/push_s": 0.0,
        "engines/wait_s": 0.0,
        "engines/failures_total": 0,
    }
    pushes.settled()
    engine.may.clear()
    pushes.begin(3)
    assert engine.versions == []  # and here the learner waits for its batch
    threading.Timer(0.2, engine.may.set).start()
    pushes.settled()
    assert engine.versions == [3]
    found = pushes.metrics()
    assert found["engines/version"] == 3
    assert min(found["engines/wait_s"], found["engines/push_s"]) > 0.1
    assert pushes.metrics()["engines/wait_s"] == 0.0
    pushes.begin(4)
    pushes.close()
    assert (engine.versions, engine.closed, said) == ([3, 4], 1, [])


def test_an_engine_that_fails_is_said_once_and_counted_and_the_others_go_on(said):
    good, bad = Fake("http://good"), Fake("http://bad")
    pushes = EnginePushes([good, bad], "b", say=said.append)
    bad.fails = "out of memory"
    for version in range(3):
        pushes.begin(version)
        pushes.settled()
    assert (good.versions, bad.versions) == ([0, 1, 2], [])
    assert len(said) == 1
    assert "training goes on: [SB505] http://bad: out of memory" in said[0]
    assert (pushes.metrics()["engines/version"], pushes.metrics()["engines/failures_total"]) == (-1, 3)
    bad.fails = ""
    pushes.begin(3)
    pushes.settled()
    assert said[1:] == ["http://bad is at version 3, after 3 that it did not take"]
    assert pushes.metrics()["engines/version"] == 3


def test_one_failure_ends_nothing_and_lasting_ones_do(said):
    engine = Fake()
    engine.fails = "gone"
    pushes = EnginePushes([engine], "b", patience_s=0.0, say=said.append)
    pushes.begin(0)
    pushes.settled()
    pushes.begin(1)
    with pytest.raises(
        EngineFailed,
        match=r"http://fake has taken none of the last 2 versions, in \d+ s: .*gone.*--engine-patience",
    ):
        pushes.settled()


def test_an_unexpected_error_is_that_engines_failure_alone(said):
    odd, other = Fake("http://odd"), Fake("http://other")
    odd.update = lambda update: {}["float3"]
    pushes = EnginePushes([odd, other], "b", patience_s=60.0, say=said.append)
    pushes.begin(3)
    pushes.settled()
    assert other.versions == [3]
    assert pushes.metrics()["engines/failures_total"] == 1
    assert "http://odd: KeyError: 'float3'" in said[0]
    pushes.close()


def test_pushes_without_engines_do_nothing():
    pushes = EnginePushes()
    pushes.begin(1)
    pushes.begin(2)
    pushes.settled()
    assert pushes.metrics() == {}
    pushes.close()


# --- the learner as a process -------------------------------------------------------------------------------


class StandIn:
    """A server that reports versions as vLLM with the middleware does, following a bridge."""

    def __init__(self, bridge, *, follows=True):
        self._bridge, self.follows = bridge, follows
        self.asked = []

    def __call__(self, method, path, query, body):
        if path != "/policy_version":
            return 404, ""
        if not self.follows:
            return 200, {"version": None, "loaded_total": 0, "last_error": "no room"}
        with WeightsReader(self._bridge) as reader:
            self.asked.append(reader.version)
        return 200, {"version": self.asked[-1], "loaded_total": 1, "last_error": None}


@pytest.fixture
def start_learner(bridge, tiny_model, tmp_path):
    tiny_model(5).save_pretrained(tmp_path / "model")
    started = []

    def start(*flags):
        command = [
            sys.executable,
            "-u",
            "-m",
            "shmbridge.consumers.grpo",
            "--bridge",
            bridge,
            "--model",
            str(tmp_path / "model"),
        ]
        command += [
            "--run-dir",
            str(tmp_path / "run"),
            "--device",
            "cpu",
            "--threads",
            "1",
            "--groups",
            str(GROUPS),
        ]
        command += ["--group-size", "4", "--lr", "1e-3", *flags]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True))
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def put_groups(producer, count):
    for first in range(count):
        tokens = [[1, 2 + first % 8, 10 + row, 11] for row in range(4)]
        group = {"tokens": tokens, "loss_mask": [[0, 0, 1, 1]] * 4, "score": [1.0, 0.0, 0.0, 1.0]}
        producer.put(group, policy_version=0, timeout_s=10.0)


def metrics(tmp_path):
    return [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]


def test_the_learner_brings_its_engine_to_every_version_and_the_page_has_its_metrics(
    bridge, serving, start_learner, tmp_path
):
    server = StandIn(bridge)
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 4)
        learner = start_learner("--steps", "4", "--engine", serving(server))
        _, err = learner.communicate(timeout=90)
    assert learner.returncode == 0, err
    assert sorted(set(server.asked)) == [0, 1, 2, 3, 4]
    assert server.asked == sorted(server.asked)
    lines = metrics(tmp_path)
    # its own push goes on, or is over
    assert all(line["engines/version"] in (step, step + 1) for step, line in enumerate(lines))
    assert [line["engines/failures_total"] for line in lines] == [0] * 4
    section = PAGE.read_text().split("\n## Engines\n")[1].split("\n## ")[0]
    assert {name for name in lines[0] if name.startswith("engines/")} == set(
        re.findall(r"^\| `([^`]+)` \|", section, re.MULTILINE)
    )


def test_versions_every_second_step_and_after_the_last_and_when_it_stops_early(
    bridge, serving, start_learner, tmp_path
):
    server = StandIn(bridge)
    url = serving(server)
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 5)
        learner = start_learner("--steps", "5", "--publish-every", "2", "--engine", url)
        _, err = learner.communicate(timeout=90)
        assert learner.returncode == 0, err
        assert [line["policy_version"] for line in metrics(tmp_path)] == [0, 2, 2, 4, 5]
        assert sorted(set(server.asked)) == [0, 2, 4, 5]
        put_groups(producer, GROUPS)
        flags = (
            "--resume",
            "--publish-every",
            "4",
            "--stop-when",
            "reward_mean>=0",
            "--stop-patience",
            "1",
            "--engine",
            url,
        )
        learner = start_learner("--steps", "9", *flags)
        out, err = learner.communicate(timeout=90)
        assert learner.returncode == 0, err
        assert "stopped early" in out
        assert "version 7" in out.splitlines()[-1]  # 6 when it began; the step's weights are out, too
        assert server.asked[-1] == 7


def test_an_engine_that_does_not_come_is_said_and_the_training_goes_on(bridge, start_learner, tmp_path):
    with socket.socket() as taken, shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        put_groups(producer, GROUPS * 3)
        learner = start_learner("--steps", "3", "--engine", url)
        out, err = learner.communicate(timeout=90)
        assert learner.returncode == 0, err
        assert (
            out.count(f"an engine has old weights, training goes on: [SB505] {url}: no server listens there")
            == 1
        )
        failures = [line["engines/failures_total"] for line in metrics(tmp_path)]
        assert all(count in (step, step + 1) for step, count in enumerate(failures, 1))

        put_groups(producer, GROUPS * 3)
        learner = start_learner("--steps", "9", "--resume", "--engine", url, "--engine-patience", "0.001")
        out, err = learner.communicate(timeout=90)
        assert learner.returncode == 1
        assert re.search(rf"grpo: error: \[SB505\] {url} has taken none of the last 2 versions", err)
    steps = [line["step"] for line in metrics(tmp_path)]
    assert steps == [1, 2, 3, 4]
    with shmbridge.Consumer(bridge) as consumer:  # the batch that was not trained is there
        assert len(consumer.poll()) == GROUPS * 2


def test_a_stop_does_not_wait_for_an_engine_and_nothing_of_the_batch_is_lost(
    bridge, serving, start_learner, tmp_path
):
    hanging, server = threading.Event(), StandIn(bridge)

    def answer(method, path, query, body):
        if path == "/policy_version" and len(server.asked) > 1:
            hanging.set()
            return 200, {"version": 0, "last_error": None}
        return server(method, path, query, body)

    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        put_groups(producer, GROUPS * 3)
        learner = start_learner("--steps", "3", "--engine", serving(answer))
        assert hanging.wait(60)
        time.sleep(0.5)  # by now it waits for the engine, or for its second batch's gradient: either will do
        learner.send_signal(signal.SIGTERM)
        begun = time.monotonic()
        _, err = learner.communicate(timeout=60)
        assert learner.returncode == 128 + signal.SIGTERM, err
        assert time.monotonic() - begun < 20
    (line,) = metrics(tmp_path)
    with shmbridge.Consumer(bridge) as consumer:
        assert len(consumer.poll()) == GROUPS * 2
    assert (tmp_path / "run" / "checkpoints" / f"step-{line['step']:08d}").exists()


def test_the_policy_server_answers_with_what_was_pushed(bridge, start_learner, tiny_model, tmp_path):
    """From end to end: a learner that waits for its policy server, a request, the tokens of the
    checkpoint.
    """
    pytest.importorskip("aiohttp")
    from shmbridge.consumers.engines.engine import ask

    folder = tmp_path / "served"
    subprocess.run(
        [sys.executable, Path(__file__).parents[3] / "examples" / "tiny_model.py", str(folder)],
        check=True,
        capture_output=True,
    )
    tiny_model(7).save_pretrained(folder)
    command = [
        sys.executable,
        "-u",
        "-m",
        "shmbridge.consumers.policy_server",
        "--bridge",
        bridge,
        "--model",
        str(folder),
        "--port",
        "0",
    ]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            url = server.stdout.readline().split()[2]
            with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
                put_groups(producer, GROUPS * 3)
                learner = start_learner("--steps", "3", "--lr", "1e-1", "--warmup", "0", "--engine", url)
                out, err = learner.communicate(timeout=90)
            assert learner.returncode == 0, err
            assert "old weights" not in out
            greedy = {
                "prompt": {"prompt_token_ids": [2, 7, 9]},
                "temperature": 0,
                "max_tokens": 8,
                "logprobs": 0,
            }
            answer = ask(url, "/generate", greedy, timeout_s=30)
            assert answer["weight_version"] == 3
            from transformers import AutoModelForCausalLM

            trained = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoints" / "step-00000003")
            tokens, reference = answer["token_ids"][0], []
            import torch

            for _ in tokens:
                logits = trained(torch.tensor([[2, 7, 9, *reference]])).logits[0, -1]
                reference.append(int(logits.argmax()))
            assert tokens == reference
        finally:
            server.send_signal(signal.SIGTERM)
