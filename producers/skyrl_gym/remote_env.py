"""An environment of another process that looks like one of `skyrl_gym`: `RemoteEnv`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge.producers.env_process import Connection


class RemoteEnv:
    """One episode's environment in another process. For one thread at a time; each call blocks.

    Args:
        connection: its own; closed with the environment.
        env_class: name under which `skyrl_gym` knows it there.
        extras: of its task; JSON, as all that goes through the connection.
        env_config: settings of its class.

    Raises:
        EnvironmentFailed: of each call, where the environment raised there.
        EnvProcessEnded: of each call, where its process is gone.
    """

    def __init__(
        self, connection: Connection, env_class: str, extras: Mapping[str, Any], env_config: Mapping[str, Any]
    ) -> None:
        self._connection = connection
        self._made_of = {"env_class": env_class, "extras": extras, "env_config": env_config}
        self._episode: int | None = None

    def init(self, prompt: Sequence[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        """Makes the environment; returns the conversation that it begins with, and nothing about it."""
        answer = self._connection.call("init", prompt=list(prompt), **self._made_of)
        self._episode = answer["episode"]
        return answer["messages"], {}

    def check(self) -> None:
        """Raises EnvProcessEnded if its process has ended. Never blocks."""
        self._connection.check()

    def step(self, action: str) -> dict[str, Any]:
        """Returns observations, reward, done, and whatever else the environment says."""
        return self._connection.call("step", episode=self._episode, action=action)

    def get_metrics(self) -> dict[str, Any]:
        """Returns the environment's metrics of the episode."""
        metrics: dict[str, Any] = self._connection.call("metrics", episode=self._episode)["metrics"]
        return metrics

    def close(self) -> None:
        """Closes the environment there, and the connection."""
        try:
            if self._episode is not None and not self._connection.lost:
                self._connection.call("close", episode=self._episode)
                self._episode = None
        finally:
            self._connection.close()
