"""Calls to a process of environments: `Connection`."""

from __future__ import annotations

import http.client
import json
from collections.abc import Callable, Mapping
from typing import Any

from shmbridge.producers.env_process.server import HEADER


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
