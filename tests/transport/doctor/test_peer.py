"""Another process, and others that play a kernel without locks, wake-ups or deaths that are told."""

import errno
import os
import sys
import time

import pytest

from shmbridge.doctor import peer
from shmbridge.doctor.check import guarded


def by_name(command=peer.COMMAND):
    return {each.name: each for each in peer.another_process(command)}


def test_all_works_here() -> None:
    found = by_name()
    assert list(found) == ["locks", "futex", "pidfd"]
    assert {each.state for each in found.values()} == {"ok"}, found
    assert "was woken" in found["futex"].text
    assert "after it was killed" in found["locks"].text
    assert "a death was told after" in found["pidfd"].text


def played(*lines: str) -> list[str]:
    """A process that takes no lock and sleeps on nothing, and says these lines."""
    code = f"import sys, time\n{chr(10).join(lines)}\nsys.stdout.flush(); time.sleep(30)"
    return [sys.executable, "-uc", code]


LATE = "print('asleep'); time.sleep(0.3); print('late', time.monotonic_ns())"
EARLY = "print('late', 0)"


def test_a_mount_without_locks() -> None:
    found = by_name(played("print('Invalid argument'); print('asleep')", EARLY))["locks"]
    assert found.state == "fail"
    assert found.text == "another process could not take a lock on the mount: Invalid argument"
    assert "gVisor" in found.fix


def test_locks_that_others_do_not_see_and_a_futex_that_wakes_nobody() -> None:
    found = by_name(played("print('locked')", LATE))
    assert found["locks"].state == found["futex"].state == "fail"
    assert "is not seen: deaths cannot be told" in found["locks"].text
    assert found["futex"].text == "a futex in shared memory does not wake another process"


def test_a_machine_that_is_too_busy() -> None:
    found = by_name(played("print('locked'); print('asleep')", EARLY))["futex"]
    assert (found.state, found.fix) == ("warn", "run shmbridge doctor again")


def test_a_lock_that_outlives_its_holder() -> None:
    """A child of the killed process has its open file."""
    code = """
import os, sys, time
from shmbridge.segments import locks
file = os.open(f"/proc/self/fd/{sys.argv[1]}", os.O_RDWR)
locks.lock_exclusive(file, 0)
if os.fork() == 0:
    time.sleep(1.5)
    os._exit(0)
print("locked"); print("asleep"); print("late", 0, flush=True)
time.sleep(30)
"""
    found = by_name([sys.executable, "-c", code])["locks"]
    assert found.state == "fail"
    assert found.text == "the lock of a killed process is held 1 s after its end"


def test_a_kernel_without_pidfd(monkeypatch) -> None:
    def refused(pid):
        raise OSError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "pidfd_open", refused)
    found = by_name()
    assert (found["locks"].state, found["pidfd"].state) == ("ok", "warn")
    assert "gives no pidfd (Operation not permitted)" in found["pidfd"].text
    assert "seccomp" in found["pidfd"].fix


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "RuntimeError: another process ended with 3"),
        (played(), "TimeoutError: another process said nothing for 0.2 s"),
    ],
)
def test_a_process_that_says_nothing_is_a_warning(command, says, monkeypatch) -> None:
    monkeypatch.setattr(peer, "_START_S", 0.2 if "said" in says else 10.0)
    (found,) = guarded("another process", lambda: peer.another_process(command))
    assert (found.state, found.text) == ("warn", f"could not be checked: {says}")


def test_the_other_process_ends_with_this_one(child) -> None:
    """Killed in the middle, this side leaves no process that waits for ever."""
    process = child(
        "import shmbridge.doctor.peer as peer, os, time\n"
        "fd = os.memfd_create('probe')\n"
        "os.posix_fallocate(fd, 0, peer.BYTES)\n"
        "with peer._started(peer.COMMAND, fd) as other:\n"
        "    other.line(10)\n"
        "    print('ready', flush=True)\n"
        "    print(other.process.pid, flush=True)\n"
        "    time.sleep(30)\n"
    )
    pid = int(process.stdout.readline())
    process.kill()
    process.wait()
    end = time.monotonic() + 10
    while os.path.exists(f"/proc/{pid}") and time.monotonic() < end:
        with open(f"/proc/{pid}/stat") as stat:
            if stat.read().rpartition(")")[2].split()[0] == "Z":
                break
        time.sleep(0.01)
    assert time.monotonic() < end
