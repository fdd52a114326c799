"""SkyRL-Gym in a process of its own, in another Python environment if need be: `EnvProcess`."""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shmbridge.producers.env_process import EnvProcessEnded, EnvServerProcess
from shmbridge.producers.skyrl_gym.errors import EnvironmentFailed
from shmbridge.producers.skyrl_gym.remote_env import RemoteEnv


def server_command(repo_id: str, *, python: str | None = None, split: str = "train") -> list[str]:
    """Returns the command that serves a data set's environments. Never blocks.

    Args:
        repo_id: the data set, a path or a name.
        python: the interpreter that has skyrl_gym; None: this one.
        split: part of the data set.
    """
    script = Path(__file__).with_name("env_server.py")
    return [python or sys.executable, str(script), "--repo_id", repo_id, "--split", split]


class EnvProcess(EnvServerProcess):
    """A process that serves SkyRL-Gym's environments, as of `EnvServerProcess`. Any thread.

    Args:
        command: see `server_command`.
        modules: imported there first, to register environments.
        env_config: settings of the environment class.
        timeout_s: longest time for one call of an environment.
        restarts: so many ends in a row, each within a minute of the start, are followed by another start.

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
        restarts: int = 5,
    ) -> None:
        self._env_config = dict(env_config or {})
        super().__init__(command, _failed, modules=modules, timeout_s=timeout_s, restarts=restarts)

    def make(self, env_class: str, extras: dict[str, Any]) -> RemoteEnv:
        """Returns an environment of that process; `SkyRLPlay(process.make)`. Raises EnvProcessEnded."""
        return RemoteEnv(self.connection(), env_class, extras, self._env_config)

    def rows(self) -> RemoteRows:
        """Returns the rows of its data set, each fetched when it is asked for. Blocks until it has read them.

        Raises:
            EnvironmentFailed: it cannot read them.
            EnvProcessEnded: it has ended.
        """
        return RemoteRows(self)


def _failed(answer: Mapping[str, Any]) -> EnvironmentFailed:
    return EnvironmentFailed(str(answer.get("error")))


class RemoteRows:
    """The rows of the data set that a process serves. Any thread; one asks at a time."""

    def __init__(self, process: EnvProcess) -> None:
        self._process, self._asking = process, threading.Lock()
        self._connection = process.connection()
        self._count = int(self._connection.call("rows")["count"])

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, number: int) -> Mapping[str, Any]:
        with self._asking:
            try:
                return self._row(number)
            except EnvProcessEnded:
                self._connection = self._process.connection()  # of the next one
                return self._row(number)

    def _row(self, number: int) -> Mapping[str, Any]:
        row: Mapping[str, Any] = self._connection.call("row", row=number)["row"]
        return row
