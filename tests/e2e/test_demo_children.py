"""The demo's children: however a guarded one ends, its processes end too, and its end is reported."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

import pytest

from shmbridge.demo.children import Child, adopt_orphans, end_orphans, stop

# Like vLLM's server: a process of its own, which lives on without it.
SERVER = """
import os, subprocess, sys, time
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(os.getpid(), other.pid, flush=True)
if len(sys.argv) > 1:
    sys.exit(int(sys.argv[1]))
time.sleep(600)
"""


def until(condition):
    deadline = time.monotonic() + 30.0
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return value


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[0] != b"Z"
    except FileNotFoundError:
        return False


@pytest.fixture
def server(tmp_path):
    def start(*words: str) -> tuple[Child, int, int]:
        child = Child("server", [sys.executable, "-c", SERVER, *words], tmp_path, guarded=True)
        child.start()
        children.append(child)
        pid, other = until(lambda: child.log.read_text().split()[-2:])
        return child, int(pid), int(other)

    children: list[Child] = []
    yield start
    stop([children], lambda: True)


def test_a_killed_server_takes_its_processes_with_it(server):
    child, pid, other = server()
    os.kill(pid, signal.SIGKILL)
    until(lambda: child.status is not None)
    assert child.killed_by == signal.SIGKILL
    assert not is_alive(other)


def test_a_server_killed_together_with_its_guardian_leaves_orphans_that_are_ended(server):
    """Run in a separate process: one that adopts orphans does so for good, and ends children that it does not
    know.
    """
    if (forked := os.fork()) == 0:
        adopt_orphans()
        child, pid, other = server()
        os.kill(child.pid, signal.SIGKILL)
        os.kill(pid, signal.SIGKILL)
        until(lambda: child.status is not None)
        lived = is_alive(other)
        end_orphans([child.pid])
        os._exit(0 if lived and child.killed_by == signal.SIGKILL and not is_alive(other) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0


def test_an_ordered_end_is_one_and_leaves_nothing(server):
    child, pid, other = server()
    assert stop([[child]], lambda: False) == []
    assert not is_alive(pid)
    assert not is_alive(other)


def test_a_server_that_ends_by_itself_was_not_killed(server):
    child, _, other = server("3")
    until(lambda: child.status is not None)
    assert (child.status, child.killed_by) == (3, None)
    assert not is_alive(other)
