"""Environments in a process of their own: `EnvServerProcess` starts it, `Connection` calls it.

`env_server.py` serves there. It needs the standard library and shmbridge's HTTP front door alone, which a
script may load by file.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import json
import logging
import math
import os
import secrets
import select
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from shmbridge import ShmBridgeError
from shmbridge.producers.env_server import HEADER, SECRET

log = logging.getLogger(__name__)
_LIVED_S = 60.0  # one that served so long ended for a reason of its own: it does not count as one in a row
_LOG_END = 2000  # characters of its log that an error shows
_GRACE_S = 5.0


class Connection:
    """Calls to one environment server. For one thread at a time; each call blocks until it is answered.

    Args:
        port: of the server, on 127.0.0.1.
        secret: that it was given.
        timeout_s: longest time for one call; None: any.
        gone: makes the error of a server that does not answer.
        check: raises if the server's process has ended.
        failed: makes the error of a call that failed there, of its answer: `error`, a text, and what else it
            says.
    """

    def __init__(
        self,
        port: int,
        secret: str,
        timeout_s: float | None,
        gone: Callable[[Exception], Exception],
        check: Callable[[], None],
        failed: Callable[[Mapping[str, Any]], Exception],
    ) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._headers = {HEADER: secret, "Content-Type": "application/json"}
        self._gone, self._failed, self._timeout_s = gone, failed, timeout_s
        self.check = check
        self.lost = False  # whether a call had no answer: the server closes what it has of this connection

    def call(self, name: str, **said: Any) -> dict[str, Any]:
        """Returns the response to one call.

        Raises:
            Exception: what `failed` makes, where the environment raised; what `gone` makes, where the server
                does not answer.
        """
        try:
            self._http.request("POST", f"/{name}", json.dumps(said), self._headers)
            response = self._http.getresponse()
            body: dict[str, Any] = json.loads(response.read())
        except TimeoutError as error:
            self._lose()
            raise self._failed({"error": f"no answer to {name} within {self._timeout_s:g} s"}) from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._lose()
            raise self._gone(error) from error
        if response.status != 200:
            raise self._failed(body)
        return body

    def _lose(self) -> None:
        self.lost = True
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


class EnvProcessEnded(ShmBridgeError, RuntimeError):
    """The process that environments run in did not start, or has ended; the message has its log's end."""

    code = "SB514"


class EnvServerProcess:
    """A process that serves environments, started here; it ends with this one, even if this one is killed.

    One that served and has ended is started again when the next environment is asked for; the episodes of its
    environments fail. Any thread may call it. A context manager, which ends it.

    Args:
        command: starts a script that takes `server.add_server_flags`.
        failed: makes the error of a call that failed there, as of `Connection`.
        modules: imported there first, to register environments.
        timeout_s: longest time for one call of an environment; None: any.
        ready_s: longest time from its start until it serves.
        restarts: so many ends in a row, each within a minute of the start, are followed by another start.

    Raises:
        EnvProcessEnded: the command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        failed: Callable[[Mapping[str, Any]], Exception],
        *,
        modules: Sequence[str] = (),
        timeout_s: float | None = 600.0,
        ready_s: float = 120.0,
        restarts: int = 5,
    ) -> None:
        self._failed, self._timeout_s, self._ready_s = failed, timeout_s, ready_s
        imports = [word for name in modules for word in ("--import", name)]
        self._command, self._restarts = [*command, *imports, "--parent", str(os.getpid())], restarts
        self._secret = secrets.token_hex(16)
        self._waiting = threading.Lock()
        self._ends, self._served = 0, -math.inf  # in a row; since when this one serves
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # The kernel takes the end of the thread that starts a process for the end of its parent.
        self._starter = ThreadPoolExecutor(1, "shmbridge-env-process")
        try:
            self._starter.submit(self._start).result()
        except EnvProcessEnded:
            self._starter.shutdown()
            self._log.close()
            raise

    def _start(self) -> None:
        read, ready = os.pipe()
        try:
            process = subprocess.Popen(
                [*self._command, "--ready-fd", str(ready)],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, SECRET: self._secret, "PYTHONUNBUFFERED": "1"},
                pass_fds=[ready],
            )
        except OSError as error:
            os.close(read)
            raise EnvProcessEnded(
                f"{self._command[0]} cannot be run: {error}", hint="give its interpreter"
            ) from None
        finally:
            os.close(ready)
        self._process, self._ready, self._port = process, read, 0

    def _start_again(self, what: str) -> None:
        """Starts it again. Raises EnvProcessEnded if it may not."""
        ended = self.ended(what)
        if self._is_over():
            raise ended
        self._ends = self._ends_in_a_row()
        log.warning("it is started again, %d of %d: %s", self._ends, self._restarts, ended)
        before = self._ready
        self._starter.submit(self._start).result()
        os.close(before)

    def _ends_in_a_row(self) -> int:
        return 1 if time.monotonic() - self._served > _LIVED_S else self._ends + 1

    def _is_over(self) -> bool:
        """Whether a process that has ended is not started again: it never served, or too often in a row."""
        never = self._served == -math.inf
        return never or self._log.closed or self._ends_in_a_row() > self._restarts

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Of the process, also when it has ended."""
        return self._process.pid

    def wait_ready(self) -> None:
        """Blocks until it serves. Raises EnvProcessEnded if it has ended, or takes `ready_s` and more."""
        with self._waiting:
            while not self._port or self._process.poll() is not None:
                if self._port:
                    self._start_again("has ended")
                pipe = select.poll()
                pipe.register(self._ready, select.POLLIN)
                if not pipe.poll(self._ready_s * 1000):
                    raise self.ended(f"did not serve within {self._ready_s:g} s")
                if port := os.read(self._ready, 16):
                    self._port, self._served = int(port), time.monotonic()
                    continue
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
                self._start_again("did not start")

    def check(self) -> None:
        """Raises EnvProcessEnded if it has ended and is not started again. Never blocks."""
        if self._process.poll() is not None and self._is_over():
            raise self.ended("has ended")

    def ended(self, what: str, process: subprocess.Popen[bytes] | None = None) -> EnvProcessEnded:
        """Returns the error that says what happened to it, or to an earlier one, with the end of its log."""
        process = process or self._process
        status = process.poll()
        how = "it runs" if status is None else f"exit status {status}"
        return EnvProcessEnded(
            f"the environments' process {process.pid} {what} ({how}); the end of its log:\n{self.log_end()}",
            hint="fix what its log says, and start again",
        )

    def log_end(self) -> str:
        """Returns the last that it wrote."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        begin = max(0, size - _LOG_END)
        return os.pread(self._log.fileno(), _LOG_END, begin).decode(errors="replace").strip()

    def connection(self) -> Connection:
        """Returns a connection to it. Blocks until it serves. Raises EnvProcessEnded."""
        self.wait_ready()
        gone = functools.partial(self._gone, self._process)
        check = functools.partial(self._check_lives, self._process)
        return Connection(self._port, self._secret, self._timeout_s, gone, check, self._failed)

    def close(self) -> None:
        """Ends it: SIGTERM, and SIGKILL after five seconds. Blocks until it has ended; twice is allowed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._starter.shutdown(wait=False)
        if not self._log.closed:
            self._log.close()
            os.close(self._ready)

    def _check_lives(self, process: subprocess.Popen[bytes]) -> None:
        if process.poll() is not None:
            raise self.ended("has ended", process)

    def _gone(self, process: subprocess.Popen[bytes], error: Exception) -> EnvProcessEnded:
        """What a broken connection means; a process that was killed is waited for."""
        give_up = time.monotonic() + 1.0
        while process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        return self.ended(f"does not answer: {error!r}", process)
