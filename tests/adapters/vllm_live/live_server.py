"""vLLM's own server with the middleware, and a learner, as processes that tests drive; parses the server's
answers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from vllm.outputs import CompletionOutput

from shmbridge.producers.rollout.sampling import completions_in

ROOT = Path(__file__).parents[3]
HERE = Path(__file__).parent
PYTHONPATH = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
PROMPT = [2, 7, 9, 12, 3]
PATIENCE_S = 180.0
REPORTS_SPANS = hasattr(CompletionOutput, "weight_versions")
needs_spans = pytest.mark.skipif(
    not REPORTS_SPANS, reason="vLLM reports which version sampled which token from 0.32 on"
)


def until(condition: Callable[[], Any], what: str = "") -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, what
        time.sleep(0.01)
    return value


class Server:
    """vLLM's OpenAI server in a process group of its own.

    Attributes:
        at_first: its answers before there was any version: to a request, to `/policy_version`, and the
            headers of another path.
    """

    at_first: tuple[dict[str, Any], dict[str, Any], dict[str, str]]

    def __init__(self, folder: Path, bridge: str, log: Path) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.log = log
        words = [
            "--model",
            folder,
            "--served-model-name",
            "policy",
            "--host",
            "127.0.0.1",
            "--port",
            self.port,
        ]
        words += ["--dtype", "float32", "--max-model-len", 512, "--max-num-seqs", 32, "--enforce-eager"]
        if REPORTS_SPANS:
            words += ["--enable-scale-out"]  # /inference/v1/generate, which earlier releases always have
        words += ["--weight-transfer-config", json.dumps({"backend": "shmbridge"})]
        words += ["--middleware", "shmbridge.consumers.vllm.middleware.ShmBridge"]
        words += ["--additional-config", json.dumps({"shmbridge": {"bridge": bridge, "pause": "keep"}})]
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "vllm.entrypoints.openai.api_server", *map(str, words)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": PYTHONPATH, "VLLM_LOGGING_LEVEL": "INFO"},
            )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(self, path: str, body: Any = None, timeout_s: float = 60.0) -> tuple[int, Any, dict[str, str]]:
        raw = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, raw, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=timeout_s) as answer:
                return (
                    answer.status,
                    json.loads(answer.read() or b"null"),
                    {k.lower(): v for k, v in answer.headers.items()},
                )
        except urllib.error.HTTPError as refused:
            return refused.code, json.loads(refused.read()), {}

    def is_up(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return self.ask("/health", timeout_s=2.0)[0] == 200
        except OSError:
            return False

    def generate(self, prompt: list[int] = PROMPT, tokens: int = 16, **fields: Any) -> dict[str, Any]:
        greedy = {
            "prompt": {"prompt_token_ids": prompt},
            "max_tokens": tokens,
            "temperature": 0,
            "ignore_eos": True,
            "logprobs": 0,
        }
        status, body, _ = self.ask("/generate", greedy | fields)
        assert status == 200, body
        return body

    def policy(self) -> dict[str, Any]:
        return self.ask("/policy_version")[1]

    def has(self, version: int) -> None:
        until(lambda: self.policy()["version"] == version, f"{version}: {self.policy()}")

    def metric(self, *names: str) -> float:
        """The sum of what vLLM's own metrics say under names that begin so."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=60.0) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(names))

    def requests(self) -> float:
        """How many are in the engine."""
        return self.metric("vllm:num_requests_running{", "vllm:num_requests_waiting{")

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)


class Learner:
    """`publishing_learner.py` in the environment of learners."""

    def __init__(self, python: str, bridge: str) -> None:
        self.process = subprocess.Popen(
            [python, str(HERE / "publishing_learner.py"), bridge],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONPATH": PYTHONPATH},
        )

    def does(self, what: str, version: int, folder: Path) -> str:
        self.process.stdin.write(f"{what} {version} {folder}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def spans(answer: dict[str, Any]) -> list[tuple[int, int, int]]:
    """The version spans of the first answer, as environments read them; they cover its tokens."""
    found = list(completions_in(answer)[0].spans)
    assert [start for _, start, _ in found] == [0, *(end for _, _, end in found[:-1])]
    assert found[-1][2] == len(answer["token_ids"][0])
    return found


def logprobs_of(model: Any, prompt: list[int], tokens: list[int]) -> list[float]:
    """Hugging Face's log-probabilities of these tokens, in nats."""
    import torch

    with torch.no_grad():
        rows = torch.log_softmax(model(torch.tensor([prompt + tokens])).logits[0].float(), -1)
    return [float(rows[len(prompt) + place - 1, token]) for place, token in enumerate(tokens)]
