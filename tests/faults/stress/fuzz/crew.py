"""Children of one process that opens no bridge itself: forked with everything imported, signalled, and reaped
one by one.

Knows processes and signals; knows nothing of what the children do. The parent must have one thread only.
"""

import ctypes
import faulthandler
import gc
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

_PR_SET_PDEATHSIG = 1
FAILED = 70
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass
class Child:
    """One forked process. `killed`: we sent SIGKILL. `status`: as of waitpid, once it has ended."""

    pid: int
    killed: bool = False
    stopped: bool = False
    status: int | None = None

    @property
    def alive(self) -> bool:
        return self.status is None

    @property
    def code(self) -> int | None:
        """Exit code, negative for a signal; None while it lives."""
        return None if self.status is None else os.waitstatus_to_exitcode(self.status)

    @property
    def running(self) -> bool:
        """Whether it is on a processor, or wants to be."""
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_bytes()
        except OSError:
            return False
        return stat.rpartition(b")")[2].split()[0] == b"R"

    def kill(self) -> None:
        self._send(signal.SIGKILL)
        self.killed = True

    def stop(self) -> None:
        self._send(signal.SIGSTOP)
        self.stopped = True

    def go_on(self) -> None:
        if self.stopped:
            self._send(signal.SIGCONT)
            self.stopped = False

    def say_where(self) -> None:
        """Its threads' stacks go to standard error."""
        self.go_on()
        self._send(signal.SIGUSR1)

    def _send(self, number: int) -> None:
        """Its pid is its own until it is reaped."""
        if self.alive:
            os.kill(self.pid, number)


class Crew:
    """All children that live."""

    def __init__(self) -> None:
        self._children: dict[int, Child] = {}
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD})
        gc.collect()
        gc.freeze()  # children share these pages, and collect only what is theirs

    def fork(self, role: Callable[[], None]) -> Child:
        """Runs `role` in a child, which ends with it: 0, or FAILED and a traceback.

        It dies with its parent.
        """
        parent = os.getpid()
        sys.stdout.flush()
        pid = os.fork()
        if pid == 0:
            _be_child(role, parent)
        child = self._children[pid] = Child(pid)
        return child

    def reap(self) -> list[Child]:
        """Those that have ended since."""
        ended = []
        while self._children:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            child = self._children.pop(pid)
            child.status = status
            ended.append(child)
        return ended

    def wait(self, timeout_s: float) -> None:
        """Until a child may have ended."""
        if timeout_s > 0:
            signal.sigtimedwait({signal.SIGCHLD}, timeout_s)

    def kill_all(self) -> None:
        """Kills all children and waits for their ends."""
        deadline = time.monotonic() + 10
        for child in self._children.values():
            child.kill()
        while self._children and time.monotonic() < deadline:
            self.reap()
            self.wait(0.01)


def _be_child(role: Callable[[], None], parent: int) -> None:
    code = FAILED
    try:
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(0)
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends us
        signal.pthread_sigmask(signal.SIG_SETMASK, set())
        role()
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
