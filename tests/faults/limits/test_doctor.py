"""`shmbridge doctor` on mounts of its own: what it says of real shortages, and that it leaves nothing."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
DOCTOR = f"{sys.executable} -m shmbridge.cli doctor"


@pytest.fixture
def in_namespace(namespaces):
    """Runs shell commands in a mount namespace of their own; returns status and output."""

    def run(script: str) -> tuple[int, str]:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            ["unshare", "-m", "bash", "-c", script], env=environment, capture_output=True, text=True
        )
        return done.returncode, done.stdout

    return run


def states(said: str) -> dict[str, dict[str, str]]:
    return {each["name"]: each for each in json.loads(said)}


@pytest.mark.parametrize(
    ("options", "failing", "text", "fix"),
    [
        ("size=64m", "shared memory", "64 MiB is what a container gets by default", "--shm-size=16g"),
        ("size=1g,ro", "shared memory", "/dev/shm is mounted read-only", "rw"),
        ("size=8g,nr_inodes=1", "inodes", "0 of 1 left", "shmbridge clean"),
    ],
)
def test_a_mount_that_is_not_enough(in_namespace, options, failing, text, fix) -> None:
    code, said = in_namespace(f"mount -t tmpfs -o {options} tmpfs /dev/shm; {DOCTOR} --json")
    found = states(said)
    assert found[failing]["state"] == "fail", found
    assert text in found[failing]["text"]
    assert fix in found[failing]["fix"]
    assert code == 2


def test_a_full_mount(in_namespace) -> None:
    fill = "mount -t tmpfs -o size=2g tmpfs /dev/shm; fallocate -l 2G /dev/shm/full"
    code, said = in_namespace(f"{fill}; {DOCTOR} --json")
    found = states(said)
    assert found["shared memory"]["state"] == "fail"
    assert found["shared memory"]["text"] == "0 B free of 2 GiB: room for 0 lanes of 64 MiB"
    assert code == 2


def test_a_mount_that_is_not_there(in_namespace) -> None:
    gone = "mount -t tmpfs tmpfs /dev; mknod /dev/null c 1 3; mknod /dev/urandom c 1 9"
    code, said = in_namespace(f"{gone}; {DOCTOR} --json")
    assert states(said)["shared memory"]["text"] == "/dev/shm does not exist"
    assert code == 2


def test_the_mount_is_as_it_was(in_namespace) -> None:
    """After its end, an interrupt, and kill -9 at any time."""
    script = f"""
    mount -t tmpfs -o size=8g tmpfs /dev/shm
    {DOCTOR} > /dev/null; code=$?
    ls -A /dev/shm
    for signal in INT KILL; do for after in 0.2 0.5 0.9; do
        setsid env --default-signal=INT {DOCTOR} > /dev/null 2>&1 & child=$!
        sleep $after; kill -$signal $child; wait $child
        ls -A /dev/shm
    done; done
    exit $code"""
    code, said = in_namespace(script)
    assert said == ""
    assert code in (0, 1), "a mount of its own has no dead bridges"
