"""The baseline of today's users: the unchanged rollout server of Atropos 0.4, and how far ahead of it lists
through a bridge are.

Starts and ends that server; environment.py sends to it, and trainer.py polls it.
"""

import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Self

import numpy as np

from shmbridge.bench.groups import SEED, Form, Group, Shape, make

# columns with a field in Atropos, one value per token
COLUMNS = ("tokens", "loss_mask", "inference_logprobs", "advantages")
VOCABULARY = 150_000
UNDER_WAY = 3  # groups at a time; more would wait longer in the server without coming faster
_START_S = 60.0


def group_of(length: int, form: Form, number: int) -> Group:
    """A full record as an Atropos environment has it, 8 x `length` tokens, with scores; the same values in
    every form.
    """
    shape = Shape(length=length, columns=COLUMNS)
    scores = np.random.default_rng(SEED + number).normal(size=shape.rows)
    return make(shape, form, SEED + number) | {"scores": [float(score) for score in scores]}


class Server:
    """`run-api` on 127.0.0.1 and a free port, on one core, for as long as the `with` block."""

    def __init__(self, core: int) -> None:
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        command = [
            str(Path(sys.executable).with_name("run-api")),
            "--host",
            "127.0.0.1",
            "--port",
            str(self.port),
        ]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.sched_setaffinity(self._process.pid, {core})

    @property
    def pid(self) -> int:
        return self._process.pid

    def __enter__(self) -> Self:
        try:
            deadline = time.monotonic() + _START_S
            while not self._answers():
                if self._process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"run-api does not answer at {self.url}; exit code {self._process.poll()}"
                    )
                time.sleep(0.05)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *raised: object) -> None:
        self._process.terminate()
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/info", timeout=2) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def tokenizer_folder(folder: Path) -> str:
    """A tokenizer with a word per id, for the rollout that BaseEnv decodes of every group; no network."""
    from tokenizers import Tokenizer, models

    words = models.WordLevel({f"w{number}": number for number in range(VOCABULARY)}, unk_token="w0")
    Tokenizer(words).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "w0"})
    )
    return str(folder)


def ratio_to_http(seconds: float = 6.0) -> float:
    """Tokens per second from Python lists through a bridge, over those of the server with BaseEnv's own
    client; groups of 8 x 2048.

    Blocks for about 15 s longer than the `seconds` of HTTP that are measured; lists are measured before and
    after, for a tenth of it each.
    """
    from shmbridge.bench.flow import Flow

    def rate(flow: Flow, warm: int, seconds: float) -> float:
        with flow:
            flow.go(groups=warm)
            return float(flow.go(seconds=seconds)["tokens_per_s"])

    before = rate(Flow("put", 2048), 300, 0.1 * seconds)
    http = rate(Flow("http", 2048, window=UNDER_WAY), UNDER_WAY, seconds)
    after = rate(Flow("put", 2048), 300, 0.1 * seconds)
    return (before + after) / 2 / http
