"""The findings for GPUs, and the way to them with a driver that is played: a C library in place of CUDA's."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shmbridge.doctor import gpu, gpu_process

MIB = 1 << 20


class Played:
    """A driver that copies to nowhere, the page-locked at `pinned` times the speed."""

    def __init__(self, monkeypatch, *, refuses=0, pinned=4.0, read_only=True) -> None:
        self.refuses, self.pinned, self.read_only = refuses, pinned, read_only
        self.calls, self.registered, self.now = [], False, 0.0
        monkeypatch.setattr(gpu_process.time, "perf_counter", lambda: self.now)

    def count(self) -> int:
        return 1

    def enter(self, number: int) -> str:
        self.calls.append("enter")
        return "H"

    def leave(self) -> None:
        self.calls.append("leave")

    def takes_read_only(self) -> bool:
        return self.read_only

    def allocate(self, size: int) -> int:
        self.calls.append("allocate")
        return 1

    def free(self, address: int) -> None:
        self.calls.append("free")

    def register(self, address: int, size: int) -> int:
        self.calls.append("register")
        self.registered = not self.refuses
        return self.refuses

    def unregister(self, address: int) -> None:
        self.calls.append("unregister")
        self.registered = False

    def copy(self, to: int, address: int, size: int) -> None:
        self.now += size / (10e9 * self.pinned if self.registered else 10e9)


def test_no_gpu_is_said_and_nothing_claimed(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    (found,) = gpu.devices(False, root=tmp_path)
    assert (found.name, found.state) == ("gpu", "ok")
    assert found.text == "no GPU found: page-locking and copies to it were not tried"


@pytest.mark.parametrize(("asked", "state"), [(True, "fail"), (False, "warn")])
def test_a_driver_that_is_not_there(tmp_path, asked, state) -> None:
    (tmp_path / "dev").mkdir()
    (tmp_path / "dev/nvidia0").touch()
    answer = '{"trouble": "libcuda.so.1: cannot open"}'
    (found,) = gpu.devices(asked, [sys.executable, "-c", f"print({answer!r})"], tmp_path)
    assert (found.name, found.state) == ("gpu", state)
    assert found.text == "libcuda.so.1: cannot open: page-locking and copies were not tried"
    assert "--gpus all" in found.fix


def test_a_driver_that_crashes_or_hangs(monkeypatch) -> None:
    (found,) = gpu.devices(True, [sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"])
    assert found.text.startswith("the process that asks the driver ended with -11: ")
    monkeypatch.setattr(gpu, "_MOST_S", 0.2)
    (found,) = gpu.devices(True, [sys.executable, "-c", "import time; time.sleep(30)"])
    assert found.text.startswith("the driver has not answered for 0.2 s: ")


def found_with(driver):
    answer = gpu_process.answer(lambda: driver)
    return gpu._finding(answer.devices[0])


def test_a_gpu_that_page_locks(monkeypatch) -> None:
    driver = Played(monkeypatch)
    found = found_with(driver)
    assert (found.name, found.state, found.fix) == ("gpu 0", "ok", "")
    assert found.text == "H page-locks 64 MiB of shared memory, 40.0 GB/s to the device, 10.0 unpinned"
    assert driver.calls == ["enter", "allocate", "register", "unregister", "free", "leave"]


def test_a_gpu_that_refuses_or_gains_little(monkeypatch) -> None:
    driver = Played(monkeypatch, refuses=2)
    found = found_with(driver)
    assert found.state == "warn"
    assert found.text == (
        "H does not page-lock 64 MiB of shared memory (error 2): copies from lanes go at 10.0 GB/s"
    )
    assert "memlock=-1" in found.fix
    assert driver.calls == ["enter", "allocate", "register", "free", "leave"]
    found = found_with(Played(monkeypatch, pinned=1.1, read_only=False))
    assert found.state == "warn"
    assert found.text.endswith("lanes are mapped writable: page-locking wins little")


def test_the_calls_of_the_driver(tmp_path) -> None:
    """A library that only checks its arguments: that CUDA does the same, only a GPU shows."""
    if (cc := shutil.which("cc")) is None:
        pytest.skip("needs a C compiler")
    (tmp_path / "cuda.c").write_text(LIBRARY)
    build = [cc, "-shared", "-fPIC", "-o", tmp_path / "libcuda.so.1", tmp_path / "cuda.c"]
    subprocess.run(build, check=True)
    done = subprocess.run(
        gpu.COMMAND, env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}, capture_output=True, check=True
    )
    answer = gpu_process.msgspec.json.decode(done.stdout, type=gpu.Answer)
    assert answer.trouble == ""
    assert [(each.number, each.name, each.lane_bytes, each.refused) for each in answer.devices] == [
        (0, "played 0", 64 * MIB, 0),
        (1, "played 1", 64 * MIB, 700),
    ]
    assert answer.devices[0].read_only
    assert answer.devices[0].pinned > 0


LIBRARY = Path(__file__).with_name("played_cuda.c").read_text()
