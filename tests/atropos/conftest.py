"""What tests of Atropos environments share: a tokenizer without a network, environments as processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVS = Path(__file__).parent / "envs"


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a tokenizer with a word per id."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tokenizer")
    words = models.WordLevel({f"w{number}": number for number in range(1000)}, unk_token="w0")
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(words), unk_token="w0").save_pretrained(folder)
    return str(folder)


class EnvProcess:
    """`python -m shmbridge.producers.atropos` as a child, its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shmbridge.producers.atropos", *arguments],
                stdout=output,
                stderr=output,
                env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"},
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def until(self, holds: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Poll until it holds; the environment must be alive meanwhile."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.running, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.02)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        self._process.send_signal(how)
        return self.wait()

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._process.wait(timeout_s)


@pytest.fixture
def start_env(tmp_path: Path, bridge: str, tokenizer: str) -> Iterator[Callable[..., EnvProcess]]:
    """Start envs/seeded_env.py: `start_env(*arguments of its own, lane_bytes=...)`."""
    started: list[EnvProcess] = []

    def start(*arguments: str, lane_bytes: str = "1M") -> EnvProcess:
        command = ["--bridge", bridge, "--lane-bytes", lane_bytes, str(ENVS / "seeded_env.py"), "serve"]
        log = tmp_path / f"env{len(started)}.log"
        started.append(EnvProcess(log, *command, "--env.tokenizer_name", tokenizer, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.running:
            process.end()
