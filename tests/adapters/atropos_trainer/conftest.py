"""Upstream's example trainer on a CPU: its real loop and loss, and no vLLM server to restart."""

import runpy
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "gateway")]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("tiny")
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder, seed=3)
    return folder


@pytest.fixture
def without_vllm(monkeypatch):
    """Upstream's trainer without the server that it would restart."""
    import legacy_run
    from example_trainer import trainers

    for name in ("launch_vllm_server", "set_vllm_process", "terminate_vllm_process"):
        monkeypatch.setattr(trainers, name, getattr(trainers, name))
    monkeypatch.setattr(trainers, "check_vllm_process_health", trainers.check_vllm_process_health)
    legacy_run.without_vllm()
