"""What tests of verifiers share: environments that need no download, and a policy server that follows."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from shmbridge.producers.verifiers import VerifiersRollout

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
ENVS = [str(HERE / "envs"), str(ROOT / "examples/verifiers")]
sys.path[:0] = ENVS

HERE_ALONE = {"runtime": {"type": "subprocess"}}  # no sandbox of a provider


class Noting(VerifiersRollout):
    """Keeps verifiers' own traces of what it puts, group by group."""

    def __init__(self, *words: Any, **how: Any) -> None:
        self.noted: list[list[Any]] = []
        super().__init__(*words, **how)

    def columns(self, episodes: Sequence[Any]) -> Mapping[str, Any]:
        self.noted.append(list(episodes))
        return super().columns(episodes)


def larger(**taskset: Any) -> dict[str, Any]:
    """The taskset that is written against verifiers' public API alone."""
    return {"taskset": {"id": "larger_digit", **taskset}, "agent": HERE_ALONE}


@pytest.fixture(scope="session")
def tiny(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model, with room for the rules of a game."""
    folder = tmp_path_factory.mktemp("roomy") / "model"
    shutil.copytree(tiny, folder)
    words = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(words | {"max_position_embeddings": 2048}))
    return folder


@pytest.fixture(scope="session")
def child_environment() -> dict[str, str]:
    """Variables of a child that finds this checkout and the environments of envs/."""
    path = os.pathsep.join([str(ROOT), *ENVS, os.environ.get("PYTHONPATH", "")])
    return os.environ | {"PYTHONPATH": path, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}


Start = Callable[..., "subprocess.Popen[str]"]


@contextmanager
def programs(folder: Path, environment: dict[str, str]) -> Iterator[Start]:
    """Starts modules of ours as processes of their own, with logs in `folder`; they end with the block."""
    with ExitStack() as stack:

        @contextmanager
        def running(module: str, *words: object) -> Iterator[subprocess.Popen[str]]:
            log = stack.enter_context((folder / f"{module.rsplit('.', 1)[-1]}.log").open("a"))
            command = [sys.executable, "-m", module, *map(str, words)]
            process = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment
            )
            try:
                yield process
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(20)
                process.stdout.close()

        def start(module: str, *words: object) -> subprocess.Popen[str]:
            return stack.enter_context(running(module, *words))

        yield start


@pytest.fixture
def program(tmp_path: Path, child_environment: dict[str, str]) -> Iterator[Start]:
    """Starts a module of ours as a process of its own, which ends with the test."""
    with programs(tmp_path, child_environment) as start:
        yield start


def following(program: Start, bridge: str, tiny: Path, port: int = 0) -> tuple[str, subprocess.Popen[str]]:
    """Starts a policy server that follows the bridge; returns its address and its process."""
    process = program(
        "shmbridge.consumers.policy_server", "--bridge", bridge, "--model", tiny, "--port", port
    )
    line = process.stdout.readline()
    assert "http://" in line, line
    return "http://" + line.split("http://")[1].split()[0], process


@pytest.fixture
def serve(program: Callable[..., Any], tiny: Path, bridge: str) -> Callable[..., Any]:
    """Starts a policy server that follows the bridge; returns its address and its process."""

    def start(port: int = 0) -> tuple[str, subprocess.Popen[str]]:
        return following(program, bridge, tiny, port)

    return start


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """One event loop for all tests: verifiers' renderers have a lock that belongs to the first that waits."""
    for item in items:
        if item.path.is_relative_to(HERE) and pytest_asyncio.is_async_test(item):
            item.add_marker(pytest.mark.asyncio(loop_scope="session"), append=False)
