"""Hands what an episode does next to the thread that waits for it: `Mailbox`."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeAlias

from shmbridge.producers.gem.request import Request


@dataclass(frozen=True)
class Ended:
    """An episode is over; this is what it gave."""

    result: Any


Outcome: TypeAlias = Request | Ended


class Mailbox:
    """What happens in an event loop, for one waiting thread at a time. For the event loop's thread."""

    def __init__(self) -> None:
        self._reader: Future[Outcome] | None = None
        self._unread: Outcome | BaseException | None = None

    def expect(self, reader: Future[Outcome]) -> None:
        """Gives what comes next to `reader`."""
        self._reader = reader

    def take_unread(self) -> Outcome | BaseException | None:
        """Returns what came while nobody waited, or None."""
        unread, self._unread = self._unread, None
        return unread

    def put(self, outcome: Outcome | BaseException) -> None:
        """Gives this to the one who waits, or keeps it: the last stays."""
        reader, self._reader = self._reader, None
        if reader is None or not reader.set_running_or_notify_cancel():
            self._unread = outcome
        elif isinstance(outcome, BaseException):
            reader.set_exception(outcome)
        else:
            reader.set_result(outcome)
