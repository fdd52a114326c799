"""What a pusher of weights wants of an inference engine: to be at a version, to give its memory back, to
wake.

Knows no engine: each has a file of its own beside this one. Every method blocks; one thread at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, get_args

import shmbridge

# What becomes of requests in flight while weights change: they go on afterwards, are waited for, or end where
# they are.
Pause = Literal["keep", "wait", "abort"]
PAUSES: tuple[Pause, ...] = get_args(Pause)


UNKNOWN = "unknown"  # what samples are stamped with where nobody can say which version they are of


HALF_LOADED = "its model is of two versions"  # in a worker's message, wherever that comes through


class EngineFailed(shmbridge.ShmBridgeError, RuntimeError):
    """An inference engine is not at the version that it was asked for; the message has its address.

    `reached` is False where nobody listens who could have been paused.
    """

    code = "SB505"

    def __init__(self, message: str, *, hint: str = "", reached: bool = True) -> None:
        super().__init__(message, hint=hint)
        self.reached = reached


class NoAnswer(EngineFailed):
    """An engine that was asked for something said nothing in time, or the connection ended before: it may do
    it, or have done it.
    """


def doubt(error: BaseException, engines: int) -> str:
    """Returns why nobody can say which version an engine has after a load that ended so; empty: the one that
    it had before.

    Args:
        error: what the engine said, or became of the question.
        engines: how many data-parallel engines it is; each loads for itself.
    """
    if engines > 1:
        return f"some of its {engines} data-parallel engines may have taken it"
    if isinstance(error, NoAnswer) or not isinstance(error, Exception):
        return "it may have taken it"
    return HALF_LOADED if HALF_LOADED in str(error) else ""


def doubt_hint(why: str) -> str:
    """Returns what to say with the error then."""
    return f"{why}: samples are of version {UNKNOWN!r} until it takes one"


@dataclass(frozen=True)
class Update:
    """One version in a bridge's weights segment, and how an engine is to take it."""

    bridge: str
    version: int
    pause: Pause = "keep"
    timeout_s: float = 300.0  # for the whole of it


class Engine(ABC):
    """One inference engine."""

    address: str  # a URL, or what else names it to people
    # whether it computes in the caller's thread, which then has to be the one that made it
    in_process = False

    def require_callable(self) -> None:  # noqa: B027
        """Raises EngineFailed where every call from this thread would fail, so that nothing is begun.

        Never blocks.
        """

    @abstractmethod
    def update(self, update: Update) -> None:
        """Has the engine at the version when this returns, and sampling. Blocks; raises EngineFailed."""

    @abstractmethod
    def version(self) -> int | None:
        """Returns the version that the engine says it samples with; None if it says none.

        Blocks; raises EngineFailed.
        """

    def sleep(self, pause: Pause) -> bool:
        """Gives the engine's device memory back, where it can; return whether it did.

        Blocks; raises EngineFailed.
        """
        return False

    def wake(self) -> None:  # noqa: B027  # most have nothing to do
        """Undoes a sleep; does nothing to an engine that is awake. Blocks; raises EngineFailed."""

    def close(self) -> None:  # noqa: B027
        """Lets the engine go, as it is. Idempotent."""


def version_of(said: object) -> int | None:
    """Returns the policy version that an engine's word for it means; None for words such as "default"."""
    if isinstance(said, bool) or not isinstance(said, (int, str)):
        return None
    try:
        return int(said)
    except ValueError:
        return None
