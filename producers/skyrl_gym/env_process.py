"""Environments in a process of their own, in another Python environment if need be: `EnvProcess`."""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from shmbridge.producers.skyrl_gym.env_server import SECRET
from shmbridge.producers.skyrl_gym.errors import EnvProcessEnded
from shmbridge.producers.skyrl_gym.remote_env import Connection, RemoteEnv

_LOG_END = 2000  # characters of its log that an error shows
_GRACE_S = 5.0


def server_command(repo_id: str, *, python: str | None = None, split: str = "train") -> list[str]:
    """Returns the command that serves a data set's environments. Never blocks.

    Args:
        repo_id: the data set, a path or a name.
        python: the interpreter that has skyrl_gym; None: this one.
        split: part of the data set.
    """
    script = Path(__file__).with_name("env_server.py")
    return [python or sys.executable, str(script), "--repo_id", repo_id, "--split", split]


class EnvProcess:
    """A process that serves environments, started here; it ends with this one, even if this one is killed.

    Start it in a thread that lives as long as this process does, such as the main thread: the kernel takes
    the end of that thread for the end of the parent. Any thread may call the rest. A context manager, which
    ends it.

    Args:
        command: see `server_command`.
        modules: imported there first, to register environments.
        env_config: settings of the environment class.
        timeout_s: longest time for one call of an environment.

    Raises:
        EnvProcessEnded: the command cannot be run.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        modules: Sequence[str] = (),
        env_config: Mapping[str, Any] | None = None,
        timeout_s: float = 600.0,
    ) -> None:
        self._env_config, self._timeout_s = dict(env_config or {}), timeout_s
        self._secret = secrets.token_hex(16)
        self._port, self._waiting = 0, threading.Lock()
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._ready, ready = os.pipe()
        imports = [word for name in modules for word in ("--import", name)]
        told = ["--parent", str(os.getpid()), "--ready-fd", str(ready)]
        try:
            self._process = subprocess.Popen(
                [*command, *imports, *told],
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                env={**os.environ, SECRET: self._secret, "PYTHONUNBUFFERED": "1"},
                pass_fds=[ready],
            )
        except OSError as error:
            os.close(self._ready)
            self._log.close()
            raise EnvProcessEnded(
                f"{command[0]} cannot be run: {error}", hint="give its interpreter"
            ) from None
        finally:
            os.close(ready)

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

    def wait_ready(self, timeout_s: float = 120.0) -> None:
        """Blocks until it serves. Raises EnvProcessEnded if it ends before, or takes `timeout_s` and more."""
        with self._waiting:
            if self._port:
                return
            pipe = select.poll()
            pipe.register(self._ready, select.POLLIN)
            if not pipe.poll(timeout_s * 1000):
                raise self.ended(f"did not serve within {timeout_s:g} s")
            said = os.read(self._ready, 16)
            if not said:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    self._process.wait(_GRACE_S)
                raise self.ended("did not start")
            self._port = int(said)

    def check(self) -> None:
        """Raises EnvProcessEnded if it has ended. Never blocks."""
        if self._process.poll() is not None:
            raise self.ended("has ended")

    def ended(self, what: str) -> EnvProcessEnded:
        """Returns the error that says what became of it, with the end of its log."""
        status = self._process.poll()
        how = "it runs" if status is None else f"exit status {status}"
        return EnvProcessEnded(
            f"the environments' process {self.pid} {what} ({how}); the end of its log:\n{self.log_end()}",
            hint="mend what its log says, and start again",
        )

    def log_end(self) -> str:
        """Returns the last that it wrote."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        begin = max(0, size - _LOG_END)
        return os.pread(self._log.fileno(), _LOG_END, begin).decode(errors="replace").strip()

    def make(self, env_class: str, extras: dict[str, Any]) -> RemoteEnv:
        """Returns an environment of that process; `SkyRLPlay(process.make)`. Raises EnvProcessEnded."""
        return RemoteEnv(self.connection(), env_class, extras, self._env_config)

    def rows(self) -> RemoteRows:
        """Returns the rows of its data set, each fetched when it is asked for. Blocks until it has read them.

        Raises:
            EnvironmentFailed: it cannot read them.
            EnvProcessEnded: it has ended.
        """
        return RemoteRows(self.connection())

    def connection(self) -> Connection:
        """Returns a connection to it. Blocks until it serves. Raises EnvProcessEnded."""
        self.wait_ready()
        return Connection(self._port, self._secret, self._timeout_s, self._gone)

    def close(self) -> None:
        """Ends it: SIGTERM, and SIGKILL after five seconds. Blocks until it has ended; twice is allowed."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(_GRACE_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if not self._log.closed:
            self._log.close()
            os.close(self._ready)

    def _gone(self, error: Exception) -> EnvProcessEnded:
        """What a broken connection means; a process that was killed is waited for."""
        give_up = time.monotonic() + 1.0
        while self._process.poll() is None and time.monotonic() < give_up:
            time.sleep(0.01)
        return self.ended(f"does not answer: {error!r}")


class RemoteRows:
    """The rows of the data set that a process serves. Any thread; one asks at a time."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._asking = connection, threading.Lock()
        self._count = int(connection.call("rows")["count"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with self._asking:
            row: Mapping[str, Any] = self._connection.call("row", row=number)["row"]
        return row
