"""A stock vLLM server over its own routes: a learner pushes to it by address; one that is killed at any call
leaves whole weights.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import shmbridge
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.weights import WeightsReader

ROOT = Path(__file__).parents[3]
PROMPT = [2, 7, 9, 12, 3]
# an engine starts in half a minute on an idle machine
pytestmark = pytest.mark.timeout(300)


class Server:
    """`python -m vllm.entrypoints.openai.api_server`, ready."""

    def __init__(self, folder: Path, log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.url = f"http://127.0.0.1:{free.getsockname()[1]}"
        self.log = log
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            "--model",
            str(folder),
            "--host",
            "127.0.0.1",
        ]
        command += [
            "--port",
            self.url.rpartition(":")[2],
            "--dtype",
            "float32",
            "--enforce-eager",
            "--max-model-len",
            "256",
        ]
        command += ["--max-num-seqs", "8", "--weight-transfer-config", '{"backend": "shmbridge"}']
        environment = os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
        with log.open("w") as file:
            self.process = subprocess.Popen(
                command, stdout=file, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        deadline = time.monotonic() + 240
        while not self.answers("/health"):
            assert self.process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.2)

    def answers(self, path: str) -> bool:
        try:
            self.ask(path)
        except OSError:
            return False
        return True

    def ask(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as response:
            said = response.read()
        return json.loads(said) if said else None

    def answer(self, tokens: int = 16) -> list[int]:
        greedy = {
            "prompt": PROMPT,
            "temperature": 0,
            "max_tokens": tokens,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        found: list[int] = self.ask("/v1/completions", greedy)["choices"][0]["token_ids"]
        return found

    @property
    def version(self) -> str:
        said: str = self.ask("/weight_info")["weight_version"]
        return said

    def close(self) -> None:
        os.killpg(self.process.pid, signal.SIGTERM)
        try:
            self.process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture(scope="module")
def server(tiny_folder: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    started = Server(tiny_folder(), tmp_path_factory.mktemp("server") / "log")
    yield started
    started.close()


@pytest.fixture(autouse=True)
def let_go(server: Server, bridge: str) -> Iterator[None]:
    """Afterwards the engine has let the bridge go."""
    yield
    server.ask("/init_weight_transfer_engine", {"init_info": {}})


def test_pushes_by_address_and_what_it_says_without_one(server, bridge, make_model, greedy):
    with WeightSync(bridge, server.url) as sync:
        for seed in (1, 2, 3):
            version = sync.push(make_model(seed))
            assert (server.version, server.answer()) == (str(version), greedy(make_model(seed)))
        with sync.updated(make_model(4)) as url:
            assert url == server.url
            assert server.answer() == greedy(make_model(4))
        assert server.ask("/is_sleeping") == {"is_sleeping": False}  # it was not started so that it can
    assert server.answer() != greedy(make_model(5)), "nobody pushed that"


PUSHER = """
import os, signal, sys
from safetensors.numpy import load_file
from shmbridge.consumers.engines.vllm import VllmHttp
from shmbridge.consumers.weight_sync import WeightSync

bridge, url, first, second, dies_before = sys.argv[1:]
with WeightSync(bridge, url) as sync:
    sync.push(load_file(first + "/model.safetensors"))
    call = VllmHttp.call
    def dies(self, name, *given, **options):
        if name == dies_before:
            os.kill(os.getpid(), signal.SIGKILL)
        return call(self, name, *given, **options)
    VllmHttp.call = dies
    sync.push(load_file(second + "/model.safetensors"))
"""


@pytest.mark.parametrize(
    "dies_before",
    [
        "start_weight_update",
        "update_weights",
        "finish_weight_update",
        "reset_prefix_cache",
        "resume_generation",
    ],
)
def test_a_killed_pusher_leaves_whole_weights_under_their_version(
    server, bridge, make_model, tiny_folder, greedy, learner_python, dies_before
):
    command = [
        learner_python,
        "-c",
        PUSHER,
        bridge,
        server.url,
        str(tiny_folder(5)),
        str(tiny_folder(6)),
        dies_before,
    ]
    with WeightsReader(bridge) as held:
        pusher = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
        )
        assert pusher.returncode == -signal.SIGKILL, pusher.stderr
        assert held.version is not None
        deadline = time.monotonic() + 20
        while server.ask("/is_paused")["is_paused"]:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        served = (
            held.version
            if dies_before in ("finish_weight_update", "reset_prefix_cache", "resume_generation")
            else held.version - 1
        )
        assert (server.version, server.answer()) == (
            str(served),
            greedy(make_model(5 + served - held.version + 1)),
        )
        with WeightSync(bridge, server.url) as successor:
            assert successor.push(make_model(7)) == held.version
        assert server.answer() == greedy(make_model(7))


def test_the_learner_pushes_after_each_step(server, bridge, tiny_folder, greedy, learner_python, tmp_path):
    from transformers import AutoModelForCausalLM

    command = [
        learner_python,
        "-m",
        "shmbridge.consumers.grpo",
        "--bridge",
        bridge,
        "--model",
        str(tiny_folder(8)),
        "--steps",
        "3",
    ]
    command += [
        "--run-dir",
        str(tmp_path),
        "--device",
        "cpu",
        "--threads",
        "1",
        "--groups",
        "1",
        "--group-size",
        "4",
        "--lr",
        "1e-2",
    ]
    command += ["--warmup", "0", "--schedule", "constant", "--engine", server.url]
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        for first in range(3):
            rows = [[1, 2 + first, 10 + row, 11] for row in range(4)]
            producer.put(
                {"tokens": rows, "loss_mask": [[0, 0, 1, 1]] * 4, "score": [1.0, 0.0, 0.0, 1.0]},
                policy_version=0,
            )
        learner = subprocess.run(
            command, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=120
        )
    assert learner.returncode == 0, learner.stderr
    assert "old weights" not in learner.stdout
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert (lines[-1]["policy_version"], lines[-1]["engines/failures_total"]) == (3, 0)
    assert server.version == "3"
    trained = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoints" / "step-00000003")
    assert server.answer() == greedy(trained)
    assert server.answer() != greedy(AutoModelForCausalLM.from_pretrained(tiny_folder(8)))
