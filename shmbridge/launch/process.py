"""One service as a process: its start under a guardian, its log, how it ended."""

import contextlib
import os
import signal
import sys
import time
from pathlib import Path

from shmbridge.cli.log import LOG_NAME, lines
from shmbridge.launch import guardian
from shmbridge.launch.backoff import Backoff
from shmbridge.launch.config import Restart
from shmbridge.launch.logs import log_parts
from shmbridge.launch.plan import Service

_LAST_BYTES, _LAST_LINES = 16 << 10, 15


class Process:
    """A service and its present process, if any.

    Args:
        service: what to run.
        log: file its output is appended to; its guardian keeps it within a limit.
        log_bytes: that limit.
    """

    def __init__(self, service: Service, log: Path, log_bytes: int) -> None:
        self.service = service
        self.log = log
        self._log_bytes = log_bytes
        self._missing: int | None = guardian.missing(str(self.log))[0]  # of earlier launches; None: was told
        self.pid = 0  # of the guardian; 0: not running
        self.status: int | None = None  # of its last end
        self.started = 0.0
        self.starts = 0
        self.lived_s = 0.0  # of its last run
        self.up = self.came_up = False  # now; in any of its runs
        self.over = False  # ended for good, and reported
        self.due: float | None = None  # time of the next start
        self.backoff = Backoff(service.restart or Restart())
        self._begins = b""  # the first line of this start

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
        self._begins = (lines(self.name, f"start {self.starts} of {self.name}") + "\n").encode()
        with self.log.open("ab", buffering=0) as log:
            with contextlib.suppress(OSError):  # a full disk costs output, and no restart
                log.write(self._begins)
            self.pid = os.posix_spawn(
                sys.executable,
                guardian.command(
                    os.getpid(),
                    signal.SIGKILL,
                    self.service.folder or os.getcwd(),
                    self.name,
                    self.service.command + (self.service.again if self.starts > 1 else []),
                    str(self.log.absolute()),
                    self._log_bytes,
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
        text = b"".join(map(_end_of, log_parts(self.log)[-2:]))[-_LAST_BYTES:].rpartition(self._begins)[2]
        lines = text.decode(errors="replace").splitlines()
        return "\n".join(f"    {line[:800]}" for line in lines[-_LAST_LINES:])

    def missing_now(self) -> int:
        """Returns how many bytes its log lacks, once: when that number grew in this launch; else 0."""
        if self._missing is None or (found := guardian.missing(str(self.log))[0]) <= self._missing:
            return 0
        self._missing = None
        return found


def _end_of(log: Path) -> bytes:
    with log.open("rb") as file:
        file.seek(max(file.seek(0, os.SEEK_END) - _LAST_BYTES, 0))
        return file.read()
