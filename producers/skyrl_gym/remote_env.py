"""An environment of another process that looks like one of `skyrl_gym`: `RemoteEnv`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from shmbridge.producers.skyrl_gym.env_server import HEADER
from shmbridge.producers.skyrl_gym.errors import EnvironmentFailed


class Connection:
    """Calls to one environment server. For one thread at a time; each call blocks until it is answered.

    Args:
        port: of the server, on 127.0.0.1.
        secret: that it was given.
        timeout_s: longest time for one call.
        gone: makes the error of a server that does not answer.
        check: raises if the server's process has ended.
    """

    def __init__(
        self,
        port: int,
        secret: str,
        timeout_s: float,
        gone: Callable[[Exception], Exception],
        check: Callable[[], None],
    ) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
        self._headers = {HEADER: secret, "Content-Type": "application/json"}
        self._gone, self.check = gone, check
        self.lost = False  # whether a call had no answer: the server closes what it has of this connection

    def call(self, name: str, **said: Any) -> dict[str, Any]:
        """Returns the response to one call.

        Raises:
            EnvironmentFailed: the environment raised; the message is its own.
            Exception: what `gone` makes, where the server does not answer.
        """
        try:
            self._http.request("POST", f"/{name}", json.dumps(said), self._headers)
            response = self._http.getresponse()
            body: dict[str, Any] = json.loads(response.read())
        except TimeoutError as error:
            self._lose()
            raise EnvironmentFailed(f"no answer to {name} within {self._http.timeout:g} s") from error
        except (OSError, http.client.HTTPException, ValueError) as error:
            self._lose()
            raise self._gone(error) from error
        if response.status != 200:
            raise EnvironmentFailed(str(body.get("error")))
        return body

    def _lose(self) -> None:
        self.lost = True
        self.close()

    def close(self) -> None:
        """Closes the connection."""
        self._http.close()


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
