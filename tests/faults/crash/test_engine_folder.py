"""The copy of a model's weights that an engine loads from a path is removed after its writer was killed: at
any start, and by clean.
"""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import EngineFolder, membership

WRITER = """
import sys, numpy as np
from shmbridge.consumers.engines.sglang import SafetensorsFolder
from shmbridge.weights import WeightsWriter

with WeightsWriter(sys.argv[1]) as writer:
    writer.publish(0, [("a", np.zeros(1000, np.float32))])
    folder = SafetensorsFolder(sys.argv[1])
    print(folder.write(0), flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def left(bridge: str) -> tuple[subprocess.Popen[str], Path]:
    """A living writer, and its folder."""
    writer = subprocess.Popen(
        [sys.executable, "-c", WRITER, bridge], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert writer.stdout is not None
    yield writer, Path(writer.stdout.readline().strip())
    writer.kill()
    writer.wait()


@pytest.fixture
def no_descriptor_left() -> Callable[[], contextlib.AbstractContextManager[None]]:
    """While it lasts, this process can open nothing more."""

    @contextlib.contextmanager
    def lowered() -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        lowest = os.open("/dev/null", os.O_RDONLY)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))

    return lowered


def test_a_missing_descriptor_is_an_error_and_leaves_no_folder(
    bridge: str,
    no_descriptor_left: Callable[[], contextlib.AbstractContextManager[None]],
    monkeypatch: pytest.MonkeyPatch,
):
    made = []

    def mkdir(path: Path, mode: int) -> None:
        assert len(made) < 100, "the constructor does not end"
        made.append(path)
        os.mkdir(path, mode)

    monkeypatch.setattr(Path, "mkdir", mkdir)
    with no_descriptor_left(), pytest.raises(OSError, match="Too many open files"):
        EngineFolder(bridge)
    assert [path.exists() for path in made] == [False]


def test_a_folder_that_cannot_be_opened_is_kept(
    bridge: str, no_descriptor_left: Callable[[], contextlib.AbstractContextManager[None]]
):
    """It is unknown then whether its writer lives."""
    folder = EngineFolder(bridge)
    folder._file.close()  # as by the death of its process
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(membership, "_folders", lambda _: iter([folder.path]))
        with no_descriptor_left():
            dead, kept = membership.remove_dead_folders(bridge)
    assert (dead, list(kept)) == ([], [f"/{folder.path.name}"])
    assert "Too many open files" in kept[f"/{folder.path.name}"]
    assert membership.remove_dead_folders(bridge) == ([f"/{folder.path.name}"], {})


def killed(writer: subprocess.Popen[str]) -> None:
    writer.send_signal(signal.SIGKILL)
    writer.wait()


def test_clean_keeps_a_living_writers_folder_and_removes_a_dead_ones(
    bridge: str, left: tuple[subprocess.Popen[str], Path]
):
    """A living writer's folder is kept and named; a dead one's is listed by a dry run and removed by a real
    one.
    """
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


def test_a_dead_writers_folder_is_removed_by_any_start(
    left: tuple[subprocess.Popen[str], Path], make_consumer: Callable[..., shmbridge.Consumer]
):
    writer, folder = left
    with make_consumer():
        assert folder.exists()
    killed(writer)
    with make_consumer():
        assert not folder.exists()
