"""The interface of an inference engine for a weight pusher. Every method blocks; one thread at a time."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.parse
import urllib.request
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, Literal, get_args

import shmbridge

# Requests in flight during a weight update: continued afterwards, waited for, or aborted.
Pause = Literal["keep", "wait", "abort"]
PAUSES: tuple[Pause, ...] = get_args(Pause)


UNKNOWN = "unknown"  # stamp of samples whose version is uncertain


HALF_LOADED = "its model is of two versions"  # in a worker's message, wherever that comes through


class EngineFailed(shmbridge.ShmBridgeError, RuntimeError):
    """An inference engine did not load the requested version; the message has its address.

    `reached` is False if no server listens there, so none can have been paused.
    """

    code = "SB505"

    def __init__(self, message: str, *, hint: str = "", reached: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.reached = reached


class NoAnswer(EngineFailed):
    """An engine did not respond in time, or the connection was lost: it may still carry out the request."""


def doubt(error: BaseException, engines: int) -> str:
    """Returns why an engine's version is uncertain after a failed load; empty: it still has the earlier
    version.

    Args:
        error: the engine's error, or that of the request.
        engines: number of data-parallel engines; each loads separately.
    """
    if engines > 1:
        return f"some of its {engines} data-parallel engines may have taken it"
    if isinstance(error, NoAnswer) or not isinstance(error, Exception):
        return "it may have taken it"
    return HALF_LOADED if HALF_LOADED in str(error) else ""


def doubt_hint(why: str) -> str:
    """Returns the hint for such an error."""
    return f"{why}: samples are of version {UNKNOWN!r} until it takes one"


@dataclass(frozen=True)
class Update:
    """One version in a bridge's weights segment, and how an engine is to take it."""

    bridge: str
    version: int
    pause: Pause = "keep"
    timeout_s: float = 300.0  # for the whole update


class Engine(ABC):
    """One inference engine."""

    address: str  # a URL, or another name for the user
    # whether it runs in the caller's thread, which must then be the thread that made it
    in_process = False

    def require_callable(self) -> None:  # noqa: B027
        """Raises EngineFailed if every call from this thread would fail. Never blocks."""

    @abstractmethod
    def update(self, update: Update) -> None:
        """Loads the version; on return the engine samples with it. Blocks; raises EngineFailed."""

    @abstractmethod
    def version(self) -> int | None:
        """Returns the engine's version; None if it reports none. Blocks; raises EngineFailed."""

    def sleep(self, pause: Pause) -> bool:
        """Frees device memory; returns whether it could. Blocks; raises EngineFailed."""
        return False

    def wake(self) -> None:  # noqa: B027  # most have nothing to do
        """Undoes a sleep; does nothing to an engine that is awake. Blocks; raises EngineFailed."""

    def close(self) -> None:  # noqa: B027
        """Releases the engine without changing it. Idempotent."""


def version_of(said: object) -> int | None:
    """Parses an engine's version text; None for text such as "default"."""
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        return None
    try:
        return int(said)
    except ValueError:
        return None


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
