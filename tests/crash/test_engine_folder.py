"""The copy of a model's weights that an engine loads from a path goes when its writer was killed: at any start, and by clean."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import shmbridge

WRITER = """
import sys, numpy as np
from shmbridge.consumers.engines.safetensors_folder import SafetensorsFolder
from shmbridge.weights import WeightsWriter

with WeightsWriter(sys.argv[1]) as writer:
    writer.publish(0, [("a", np.zeros(1000, np.float32))])
    print(SafetensorsFolder(sys.argv[1]).write(0), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def left(bridge: str) -> tuple[subprocess.Popen[str], Path]:
    """A living writer, and its folder."""
    writer = subprocess.Popen([sys.executable, "-c", WRITER, bridge], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert writer.stdout is not None
    yield writer, Path(writer.stdout.readline().strip())
    writer.kill()
    writer.wait()


def killed(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()


def test_clean_knows_it(bridge: str, left: tuple[subprocess.Popen[str], Path]):
    """A living writer's is kept and named, a dead one's is shown by a look and removed by the deed."""
    writer, folder = left
    name = f"/{folder.name}"
    assert (folder / "model.safetensors").stat().st_size > 4000
    report = shmbridge.clean(bridge, dry_run=False)
    assert (report.kept[name], folder.exists()) == ("its writer is alive", True)
    killed(writer)
    assert name in shmbridge.clean(bridge, dry_run=True).removed
    assert folder.exists()
    assert name in shmbridge.clean(bridge, dry_run=False).removed
    assert not folder.exists()
    assert bridge not in {each.name for each in shmbridge.list_bridges()}


def test_any_start_removes_it(left: tuple[subprocess.Popen[str], Path], make_consumer: Callable[..., shmbridge.Consumer]):
    writer, folder = left
    with make_consumer():
        assert folder.exists()
    killed(writer)
    with make_consumer():
        assert not folder.exists()
