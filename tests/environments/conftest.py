"""A tiny model and a policy server that serves it, for all tests of environments."""

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LONGEST = Path(__file__).parent / "test_examples.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest file is first: it would run beside nothing at the end."""
    items.sort(key=lambda item: item.path != LONGEST)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory) -> Path:
    """The folder of a tiny random model and its tokenizer."""
    folder = tmp_path_factory.mktemp("model") / "tiny"
    runpy.run_path(str(ROOT / "examples/tiny_model.py"))["build"](folder, seed=3)
    return folder


@pytest.fixture(scope="session")
def policy_server(tiny):
    """The address of a policy server with that model, which follows nobody; its start takes seconds."""
    log = (tiny.parent / "server.log").open("w+")
    words = ["--model", str(tiny), "--port", "0", "--model-version", "5"]
    process = subprocess.Popen(
        [sys.executable, "-m", "shmbridge.consumers.policy_server", *words],
        stdout=subprocess.PIPE, stderr=log, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    try:
        line = process.stdout.readline()
        assert "http://" in line, (line, log.seek(0), log.read())
        yield "http://" + line.split("http://")[1].split()[0]
    finally:
        process.terminate()
        process.wait(30)
        log.close()
