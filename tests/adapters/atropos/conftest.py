"""Shared by tests of Atropos environments: a tokenizer without a network, environments as processes."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
sys.path.insert(0, str(Path(__file__).parent))  # for stamped_rows
ENVS = Path(__file__).parent / "envs"


class EnvProcess:
    """`python -m shmbridge.producers.atropos` as a child, its output in a file."""

    def __init__(self, log: Path, *arguments: str) -> None:
        self._log = log
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shmbridge.producers.atropos", *arguments],
                stdout=output,
                stderr=output,
                env=os.environ
                | {
                    "PYTHONPATH": str(ROOT),
                    "HF_HUB_OFFLINE": "1",
                    "WANDB_MODE": "disabled",
                    "PYTHONUNBUFFERED": "1",
                },
            )

    @property
    def output(self) -> str:
        return self._log.read_text()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def until(self, holds: Callable[[], object], timeout_s: float = 60.0) -> None:
        """Poll until the condition holds; the environment must stay alive."""
        deadline = time.monotonic() + timeout_s
        while not holds():
            assert self.running, self.output[-4000:]
            assert time.monotonic() < deadline, self.output[-4000:]
            time.sleep(0.02)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int:
        self._process.send_signal(how)
        return self.wait()

    def send(self, what: signal.Signals) -> None:
        self._process.send_signal(what)

    def wait(self, timeout_s: float = 60.0) -> int:
        return self._process.wait(timeout_s)


@pytest.fixture
def start_env(tmp_path: Path, bridge: str, tokenizer: str) -> Iterator[Callable[..., EnvProcess]]:
    """Start an environment of envs/: `start_env(*arguments of its own, script=..., lane_bytes=...,
    options=(those of the bridge))`.
    """
    started: list[EnvProcess] = []

    def start(
        *arguments: str,
        script: str = "seeded_env.py",
        command: str = "serve",
        lane_bytes: str = "1M",
        options: tuple[str, ...] = (),
        tokenizer: str = tokenizer,
    ) -> EnvProcess:
        ours = ["--bridge", bridge, "--lane-bytes", lane_bytes, *options, str(ENVS / script), command]
        log = tmp_path / f"env{len(started)}.log"
        started.append(EnvProcess(log, *ours, "--env.tokenizer_name", tokenizer, *arguments))
        return started[-1]

    yield start
    for process in started:
        if process.running:
            process.end()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of the examples' tiny model, with its tokenizer and chat template."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    subprocess.run(
        [sys.executable, str(ROOT / "examples" / "tiny_model.py"), str(folder), "--seed", "1"],
        check=True,
        timeout=100,
    )
    return folder


@pytest.fixture(scope="session")
def policy_url(model: Path) -> Iterator[str]:
    """The address of a policy server with the tiny model."""
    log = model.parent / "server.log"
    command = [
        sys.executable,
        "-m",
        "shmbridge.consumers.policy_server",
        "--model",
        str(model),
        "--port",
        "0",
    ]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    with log.open("wb") as output:
        server = subprocess.Popen(
            command,
            stdout=output,
            stderr=output,
            env=os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
        )
    try:
        deadline = time.monotonic() + 60
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", log.read_text())):
            assert server.poll() is None, log.read_text()[-4000:]
            assert time.monotonic() < deadline, log.read_text()[-4000:]
            time.sleep(0.05)
        yield f"{found[0]}/v1"
    finally:
        server.kill()
        server.wait(30)


@pytest.fixture(scope="session")
def groups_file() -> ModuleType:
    """groups_file.py: what environments recorded, comparable with what was delivered."""
    spec = importlib.util.spec_from_file_location("groups_file", Path(__file__).with_name("groups_file.py"))
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def script() -> ModuleType:
    """envs/seeded_env.py, for environments in this process."""
    spec = importlib.util.spec_from_file_location("seeded_env", ENVS / "seeded_env.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def make_env(
    script: ModuleType, tokenizer: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[..., Any]]:
    """Make an environment in this process: `make_env(class or None, **fields of its config)`.

    Everything is detached at the end.
    """
    from atroposlib.envs import base

    from shmbridge.producers import atropos

    sleep = asyncio.sleep
    # BaseEnv waits 5 s at its start
    monkeypatch.setattr(base.asyncio, "sleep", lambda seconds, *rest: sleep(min(seconds, 0.05), *rest))

    def make(env_class: type | None = None, **config: Any) -> Any:
        defaults, servers = script.SeededEnv.config_init()
        settings = defaults.model_dump() | {"tokenizer_name": tokenizer} | config
        return (env_class or script.SeededEnv)(script.SeededConfig(**settings), servers)

    yield make
    atropos.detach()
