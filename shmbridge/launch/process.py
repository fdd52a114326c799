"""One service as a process: its start under a guardian, its log, how it ended."""

import os
import signal
import sys
import time
from pathlib import Path

from shmbridge.launch import guardian
from shmbridge.launch.backoff import Backoff
from shmbridge.launch.config import Restart
from shmbridge.launch.plan import Service
from shmbridge.log_format import LOG_NAME, lines

_LAST_BYTES, _LAST_LINES = 16 << 10, 15


class Process:
    """A service and its present process, if any.

    Args:
        service: what to run.
        log: file its output is appended to.
    """

    def __init__(self, service: Service, log: Path) -> None:
        self.service = service
        self.log = log
        self.pid = 0  # of the guardian; 0: not running
        self.status: int | None = None  # of its last end
        self.started = 0.0
        self.starts = 0
        self.lived_s = 0.0  # of its last run
        self.up = self.came_up = False  # now; in any of its runs
        self.over = False  # ended for good, and reported
        self.due: float | None = None  # time of the next start
        self.backoff = Backoff(service.restart or Restart())
        self._log_begins = log.stat().st_size if log.exists() else 0

    @property
    def name(self) -> str:
        """The service's name."""
        return self.service.name

    @property
    def coming_up(self) -> bool:
        """Whether it runs and has not passed its health check yet."""
        return self.pid != 0 and not self.up

    def start(self) -> None:
        """Starts the service; never blocks. If the program cannot be run, its log says so and it ends with
        127.
        """
        self.starts += 1
        self.started, self.due, self.status, self.up = time.monotonic(), None, None, False
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            log.write(lines(self.name, f"start {self.starts} of {self.name}") + "\n")
            log.flush()
            self.pid = os.posix_spawn(
                sys.executable,
                guardian.command(
                    os.getpid(),
                    signal.SIGKILL,
                    self.service.folder or os.getcwd(),
                    self.name,
                    self.service.command + (self.service.again if self.starts > 1 else []),
                ),
                os.environ | self.service.env | {LOG_NAME: self.name},
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )

    def ended(self, status: int) -> None:
        """Records an end. `status`: the exit status, or 128 + signal."""
        self.pid, self.status, self.up = 0, status, False
        self.lived_s = time.monotonic() - self.started

    def send(self, signum: signal.Signals) -> None:
        """Signals the guardian, which passes the signal on; for SIGKILL, the kernel does.

        Harmless once the process has ended.
        """
        if self.pid:
            os.kill(self.pid, signum)  # not waited for yet: the pid is not reused

    def how(self) -> str:
        """Returns how it last ended, in words."""
        status = self.status or 0
        if status > 128 and status - 128 in set(signal.Signals):
            return f"status {status} ({signal.Signals(status - 128).name})"
        return f"status {status}"

    def last_words(self) -> str:
        """Returns the end of its log, of this start alone."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begins, size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line[:800]}" for line in lines[-_LAST_LINES:])
