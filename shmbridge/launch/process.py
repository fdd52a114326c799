"""One service as a process: started under a guardian, its log, how it ended. Decides nothing."""

import os
import signal
import sys
import time
from pathlib import Path

from shmbridge.launch.backoff import Backoff
from shmbridge.launch.config import Restart
from shmbridge.launch.plan import Service

_GUARDIAN = str(Path(__file__).with_name("guardian.py"))
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
        self.lived_s = 0.0  # last time
        self.up = False
        self.over = False  # ended for good, and said so
        self.due: float | None = None  # when it is to be started again
        self.backoff = Backoff(service.restart or Restart())
        self._log_begins = log.stat().st_size if log.exists() else 0

    @property
    def name(self) -> str:
        """The service's."""
        return self.service.name

    @property
    def coming_up(self) -> bool:
        """Whether it runs and has not passed its health check yet."""
        return self.pid != 0 and not self.up

    def start(self) -> None:
        """Starts it; never blocks. What cannot be run says so in the log and ends with 127."""
        self.starts += 1
        self.started, self.due, self.status, self.up = time.monotonic(), None, None, False
        self._log_begins = self.log.stat().st_size if self.log.exists() else 0
        with self.log.open("a") as log:
            log.write(f"--- {time.strftime('%Y-%m-%d %H:%M:%S')} start {self.starts} of {self.name} ---\n")
            log.flush()
            self.pid = os.posix_spawn(
                sys.executable,
                # Isolated and without site: the guardian takes no part in the run's Python environment, and
                # is up in a blink.
                [
                    sys.executable,
                    "-I",
                    "-S",
                    _GUARDIAN,
                    str(os.getpid()),
                    str(int(signal.SIGKILL)),
                    self.service.folder or os.getcwd(),
                    self.name,
                    *self.service.command,
                ],
                os.environ | self.service.env,
                file_actions=[
                    (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 1),
                    (os.POSIX_SPAWN_DUP2, log.fileno(), 2),
                ],
                setsid=True,
            )

    def ended(self, status: int) -> None:
        """Notes an end. `status`: the exit status, or 128 + signal."""
        self.pid, self.status, self.up = 0, status, False
        self.lived_s = time.monotonic() - self.started

    def send(self, signum: signal.Signals) -> None:
        """Signals the guardian, which passes it on; if it is SIGKILL, the kernel does.

        Harmless once it has ended.
        """
        if self.pid:
            os.kill(self.pid, signum)  # not waited for yet: the pid is still its own

    def how(self) -> str:
        """Its last end, in words."""
        status = self.status or 0
        if status > 128 and status - 128 in set(signal.Signals):
            return f"status {status} ({signal.Signals(status - 128).name})"
        return f"status {status}"

    def last_words(self) -> str:
        """The end of its log, of this start alone."""
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(self._log_begins, size - _LAST_BYTES))
            lines = log.read().decode(errors="replace").splitlines()
        return "\n".join(f"    {line[:300]}" for line in lines[-_LAST_LINES:])
