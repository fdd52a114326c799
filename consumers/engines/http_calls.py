"""JSON requests over HTTP without a proxy; errors name the server and the request. Any thread."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

from shmbridge.consumers.engines.engine import EngineFailed, NoAnswer

_SAID = 300  # characters of an error response shown to the user
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class EngineHttpError(EngineFailed):
    """The server responded with an error status."""

    def __init__(self, message: str, status: int, *, hint: str = "") -> None:
        super().__init__(message, hint=hint)
        self.status = status

    @property
    def no_route(self) -> bool:
        """Whether the server lacks the route; any other status is a failure of the request."""
        return self.status in (404, 405)


def ask(
    url: str, path: str, body: object = None, *, timeout_s: float, method: str = "POST", **query: str
) -> dict[str, Any]:
    """Returns the JSON object of the response; empty if it is something else.

    Blocks, at most `timeout_s` seconds for each part of the response.

    Raises:
        EngineHttpError: an error status. NoAnswer: a server listens but did not respond. EngineFailed: no
            server listens, `reached` is False.
    """
    whole = url + path + ("?" + urllib.parse.urlencode(query) if query else "")
    data = None if body is None else json.dumps(body).encode()
    headers = {} if data is None else {"Content-Type": "application/json"}
    request = urllib.request.Request(
        whole, data if data is not None or method == "GET" else b"", headers, method=method
    )
    try:
        with _DIRECT.open(request, timeout=timeout_s) as response:
            said = response.read()
    except urllib.error.HTTPError as error:
        with error:
            words = error.read().decode(errors="replace")
        raise EngineHttpError(f"{url}: {path} answered {error.code}: {_short(words)}", error.code) from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        if isinstance(reason, TimeoutError):
            raise NoAnswer(f"{url}: no answer to {path} in {timeout_s:.0f} s", hint="see its log") from None
        hint = "is the engine running?"
        if isinstance(reason, (ConnectionRefusedError, FileNotFoundError)):
            raise EngineFailed(f"{url}: no server listens there", hint=hint, reached=False) from None
        raise NoAnswer(f"{url}: {path}: {type(reason).__name__}: {reason}", hint=hint) from None
    try:
        answer = json.loads(said)
    except ValueError:
        return {}
    return answer if isinstance(answer, dict) else {}


def answer_of(url: str, path: str, *, timeout_s: float) -> dict[str, Any]:
    """Returns `ask` by GET; empty if the server lacks the route."""
    try:
        return ask(url, path, timeout_s=timeout_s, method="GET")
    except EngineHttpError as refused:
        if not refused.no_route:
            raise
        return {}


def _short(words: str) -> str:
    """Returns the reason of an error response: the message in a JSON body, or the body."""
    try:
        said = json.loads(words)
    except ValueError:
        said = words
    for key in ("error", "message", "detail"):
        said = said.get(key, said) if isinstance(said, dict) else said
    text = " ".join((said if isinstance(said, str) else json.dumps(said)).split())
    return text[:_SAID] or "nothing"
