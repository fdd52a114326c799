"""A tiny model, verl's loop in a process of its own, and a TransferQueue for all tests here."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT, HERE = Path(__file__).parents[3], Path(__file__).parent
sys.path.insert(0, str(HERE))

from verl_process import Trainer  # noqa: E402

os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder, seed=3)
    return folder


@pytest.fixture(scope="session")
def start_trainer(tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Trainer]]:
    """Starts verl's loop on a bridge; ended at the end of all tests."""
    started: list[Trainer] = []

    def start(
        bridge: str, steps: int, *more: str, halt_at: int | str, loop: str = "verl_loop.py", actor: str = ""
    ) -> Trainer:
        folder = tmp_path_factory.mktemp("verl")
        words = [sys.executable, str(HERE / loop), bridge, str(tiny), str(steps), *more]
        variables = {
            **os.environ,
            "VERL_USE_EXTERNAL_MODULES": "verl_on_cpu,recorded_loss",
            "VERL_PLATFORM": "cpu",
            "VERL_ENGINE_DEVICE": "cuda",
            "RECORD_TO": str(folder),
            "HALT_AT": str(halt_at),
            "ACTOR": actor,
            "PYTHONPATH": os.pathsep.join([str(ROOT / "examples"), str(HERE), str(ROOT)]),
        }
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, cwd=folder, env=variables, stdout=log, stderr=log)
        started.append(Trainer(process, folder))
        return started[-1]

    yield start
    for each in started:
        if each.process.poll() is None:
            each.kill()
