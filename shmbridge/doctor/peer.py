"""What only two processes show: locks that end with their holder, wake-ups, and the report of a death.

This side of it starts the other process, which is `peer_process.py`.
"""

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence

from shmbridge._ext.header import Descriptor, Mapping
from shmbridge._ext.weights import Versions
from shmbridge.doctor.check import Check
from shmbridge.doctor.probe_file import probe_file
from shmbridge.segments import is_locked, lock_exclusive

BYTES = 1 << 16
BYTE = 0  # which is locked
COMMAND = (sys.executable, "-m", "shmbridge.doctor.peer_process")
_START_S, _ANSWER_S, _FREE_S = 10.0, 5.0, 1.0
_ASLEEP_S = 0.02
_RUNS = "run it on a Linux kernel of its own: a sandbox such as gVisor, or an old kernel, is in between"


class _Child:
    """The other process, and what it says."""

    def __init__(self, process: subprocess.Popen[bytes], out: int) -> None:
        self.process = process
        self._out, self._read = out, b""

    def line(self, timeout_s: float) -> str:
        """Returns its next line. Raises TimeoutError, or RuntimeError if it has ended."""
        end = time.monotonic() + timeout_s
        while b"\n" not in self._read:
            if not select.select([self._out], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError(f"another process said nothing for {timeout_s:g} s")
            if not (more := os.read(self._out, 4096)):
                raise RuntimeError(f"another process ended with {self.process.wait()}")
            self._read += more
        line, _, self._read = self._read.partition(b"\n")
        return line.decode(errors="replace").strip()


def another_process(command: Sequence[str] = COMMAND) -> list[Check]:
    """Meets another process on a file of the mount: it locks, sleeps, is woken, and is killed.

    Blocks until that is done, or for the seconds that it is given.
    """
    with probe_file() as fd:
        os.posix_fallocate(fd, 0, BYTES)
        with _started(command, fd) as child:
            said = child.line(_START_S)
            locked = _holds(fd, said)
            woken = _woken(fd, child)
            return _after_death(fd, child, locked, woken)


@contextlib.contextmanager
def _started(command: Sequence[str], fd: int) -> Iterator[_Child]:
    """Starts the other process; it is killed at the end. It ends by itself when this one is gone."""
    process = subprocess.Popen(
        [*command, str(fd)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        pass_fds=[fd],
        start_new_session=True,  # Ctrl-C is for this process, which ends the other
    )
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        yield _Child(process, process.stdout.fileno())
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _holds(fd: int, said: str) -> Check | None:
    """Returns what is wrong with the lock that the other process says it has; None if nothing."""
    if said != "locked":
        return Check("locks", "fail", f"another process could not take a lock on the mount: {said}", _RUNS)
    if not is_locked(fd, BYTE) or lock_exclusive(fd, BYTE):
        return Check(
            "locks",
            "fail",
            "a lock of another process on the mount is not seen: deaths cannot be told",
            _RUNS,
        )
    return None


def _woken(fd: int, child: _Child) -> Check:
    """Rings for the other process while it sleeps."""
    words = Versions(Mapping(Descriptor(os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)), BYTES))
    child.line(_ANSWER_S)  # it sleeps from now on
    time.sleep(_ASLEEP_S)
    rung = time.monotonic_ns()
    words.ring()
    outcome, at = child.line(_ANSWER_S).split()
    took = (int(at) - rung) / 1e3
    if outcome == "woken":
        return Check("futex", "ok", f"another process was woken {took:,.0f} µs after it was rung for")
    if took < 0:
        return Check("futex", "warn", "the machine was too busy to tell", "run shmbridge doctor again")
    return Check("futex", "fail", "a futex in shared memory does not wake another process", _RUNS)


def _after_death(fd: int, child: _Child, locked: Check | None, woken: Check) -> list[Check]:
    """Kills the other process, and sees who notices."""
    pid = child.process.pid
    died = time.monotonic()
    try:
        process = Descriptor(os.pidfd_open(pid), kept_from_children=False)
    except OSError as wrong:
        os.kill(pid, signal.SIGKILL)
        told = Check(
            "pidfd",
            "warn",
            f"the kernel gives no pidfd ({wrong.strerror}): a death is noticed within a second, not at once",
            "Linux 5.3 or newer, and a seccomp profile that allows pidfd_open",
        )
    else:
        died = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        if select.select([process.fd], [], [], _FREE_S)[0]:
            told = Check("pidfd", "ok", f"a death was told after {1e3 * (time.monotonic() - died):.1f} ms")
        else:
            told = Check("pidfd", "warn", "a pidfd told no death within a second", _RUNS)
    return [locked or _freed(fd, died), woken, told]


def _freed(fd: int, died: float) -> Check:
    while is_locked(fd, BYTE):
        if time.monotonic() - died > _FREE_S:
            return Check(
                "locks", "fail", f"the lock of a killed process is held {_FREE_S:g} s after its end", _RUNS
            )
        time.sleep(0.0005)
    took = 1e3 * (time.monotonic() - died)
    return Check("locks", "ok", f"held by another process, and free {took:.1f} ms after it was killed")
