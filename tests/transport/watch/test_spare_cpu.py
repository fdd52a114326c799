"""Observers that copy records let other processes go first, and still get their share of a core."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from shmbridge.testing import wait_until
from shmbridge.watch.observer import give_way

NICEST = 19
BUSY = "import os\nos.sched_setaffinity(0, {})\nwhile True: pass"


@pytest.fixture
def two_cores():
    """Two cores, or one where there is no second."""
    return set(sorted(os.sched_getaffinity(0))[:2])


def cpu_s(pid):
    with open(f"/proc/{pid}/stat") as file:
        return sum(map(int, file.read().rpartition(")")[2].split()[11:13])) / os.sysconf("SC_CLK_TCK")


def words(command, bridge, tmp_path):
    given = {"BRIDGE": bridge, "FOLDER": f"{tmp_path}/records"}
    return [sys.executable, "-m", "shmbridge.cli", *(given.get(each, each) for each in command)]


@pytest.fixture
def two_records(make_producer):
    producer = make_producer(env_name="gsm8k")
    for _ in range(2):
        producer.put({"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]]})
    return producer


@pytest.mark.parametrize("command", [["tail", "BRIDGE"], ["record", "BRIDGE", "--out", "FOLDER"]])
def test_a_command_that_copies_records_lets_others_go_first(bridge, two_records, tmp_path, command):
    with subprocess.Popen(
        words(command, bridge, tmp_path), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as observing:
        try:
            wait_until(lambda: NICEST in nice_of_threads(observing.pid).values(), 20)
            assert os.sched_getscheduler(observing.pid) == os.SCHED_OTHER
            if command[0] == "tail":
                assert "group 0" in observing.stdout.readline()  # it was quick to show what there was
                two_records.put({"tokens": [[1]]})
                assert "group 1" in observing.stdout.readline()
                assert "group 2" in observing.stdout.readline()
            else:  # it goes on copying, and the thread that ends it is as quick as any
                written = size_of(tmp_path)
                two_records.put({"tokens": [[1]]})
                wait_until(lambda: size_of(tmp_path) > written, 20)
                assert nice_of_threads(observing.pid)[observing.pid] == os.getpriority(os.PRIO_PROCESS, 0)
                observing.send_signal(signal.SIGTERM)
                assert "3 records in" in observing.stdout.readline()
        finally:
            observing.kill()


def size_of(folder):
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def nice_of_threads(pid):
    """Thread id -> how nice it is."""
    found = {}
    for thread in map(int, os.listdir(f"/proc/{pid}/task")):
        with contextlib.suppress(ProcessLookupError):
            found[thread] = os.getpriority(os.PRIO_PROCESS, thread)
    return found


def test_a_watcher_takes_little_of_a_core_that_is_busy(two_cores):
    """One that copies all the time, beside one other process on its only core."""
    core = {min(two_cores)}
    with contextlib.ExitStack() as ends:
        gives_way = f"from shmbridge.watch.observer import give_way\ngive_way()\n{BUSY.format(core)}"
        each = [subprocess.Popen([sys.executable, "-c", code]) for code in (gives_way, BUSY.format(core))]
        for process in each:
            ends.callback(process.wait)
            ends.callback(process.kill)
        wait_until(lambda: nice_of_threads(each[0].pid)[each[0].pid] == NICEST, 20)
        wait_until(lambda: os.sched_getaffinity(each[0].pid) == os.sched_getaffinity(each[1].pid) == core, 20)
        before = [cpu_s(process.pid) for process in each]
        wait_until(lambda: cpu_s(each[1].pid) - before[1] > 1.0, 60)
        assert cpu_s(each[0].pid) - before[0] < 0.25


def test_it_leaves_the_session_it_was_started_in_alone(bridge, two_records, tmp_path):
    """A terminal whose processes are one group for the kernel (an autogroup) stays as nice as it was."""
    group = "/proc/self/autogroup"
    if not os.path.exists(group):
        pytest.skip("this kernel has no autogroups")
    script = f"cat {group}; {' '.join(words(['tail', bridge, '-n', '2'], bridge, tmp_path))} >&2; cat {group}"
    done = subprocess.run(["sh", "-c", script], stdout=subprocess.PIPE, text=True, start_new_session=True)
    before, after = done.stdout.splitlines()
    assert before == after


def test_what_the_kernel_does_not_allow_is_no_error(monkeypatch):
    def refused(*_):
        raise PermissionError(1, "no")

    monkeypatch.setattr(os, "setpriority", refused)
    give_way()
