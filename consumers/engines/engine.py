"""The interface of an inference engine for a weight pusher. Every method blocks; one thread at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

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
