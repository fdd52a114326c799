"""Waiting for the next batch within limits: says who is missing, tries again, gives up.

Knows nothing of what a batch is. A thread asks for the batches, since asking blocks without an end. Called by
the GRPO learner (`grpo.py`).
"""

from __future__ import annotations

import argparse
import math
import queue
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Batch = TypeVar("Batch")

_REMINDER_S = 30.0  # until the first word of a wait without limits; each next one comes after twice as long
_LONGEST_REMINDER_S = 600.0
_LONGEST_DELAY_S = 3.0
_DELAY_GROWTH = 1.5


class NoBatch(Exception):
    """No batch came within the limits; the message says who was missing and what to do."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for one batch: attempts with growing delays between them, and a limit over all of it."""

    timeout_s: float = 30.0  # of one attempt
    attempts: int = 10
    retry_delay_s: float = 0.5  # after the first attempt; each next one is half as long again, 3 s at most
    max_wait_s: float = math.inf

    def waits(self) -> Iterator[tuple[float, float]]:
        """Yield (seconds of an attempt, seconds until the next) per attempt; the last has no delay."""
        delay, left = self.retry_delay_s, self.max_wait_s
        for attempt in range(1, self.attempts + 1):
            pause = delay if attempt < self.attempts else 0.0
            if self.timeout_s + pause >= left:
                yield left, 0.0
                return
            yield self.timeout_s, pause
            left -= self.timeout_s + pause
            delay = min(delay * _DELAY_GROWTH, max(_LONGEST_DELAY_S, self.retry_delay_s))


def patience_of(options: argparse.Namespace) -> Patience | None:
    """Return the limits of the command line; None, for ever, if it sets none."""
    given = {
        "timeout_s": options.batch_timeout,
        "attempts": options.batch_attempts,
        "retry_delay_s": options.batch_retry_delay,
        "max_wait_s": options.max_wait_time,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Patience(**given) if given else None


class BatchWait(Generic[Batch]):
    """Context manager and iterator over the batches of another iterator, each waited for within limits.

    The other iterator is asked for a batch only when this one is, in a thread of its own. At the end it is
    closed, unless it still waits: then it ends with the consumer. A batch that comes once the wait was given up is
    handed to nobody, and dropping it ends its leases as if it had been used: let the exception end the consumer's
    `with` block, which leaves all that is held to the next consumer.

    Args:
        batches: where batches come from; its `next` may block for ever.
        patience: the limits; None waits for ever, and says so once in a while.
        missing: says who is missing, in a few words; any thread, never blocks.
        say: takes a line for people.
    """

    def __init__(
        self,
        batches: Iterator[Batch],
        patience: Patience | None,
        missing: Callable[[], str],
        say: Callable[[str], None],
    ) -> None:
        self._batches = batches
        self._patience = patience
        self._missing = missing
        self._say = say
        self._asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
        self._answers: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._waiting = False
        self._thread = threading.Thread(target=self._answer, name="grpo-batches", daemon=True)

    def __enter__(self) -> BatchWait[Batch]:
        self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._asked.put(False)
        if not self._waiting:
            self._thread.join()

    def __iter__(self) -> BatchWait[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch. Blocks within the limits; a signal's exception ends the wait.

        Raises:
            NoBatch: the limits are exhausted.
            StopIteration: the bridge is drained or closed. Also whatever the other iterator raises.
        """
        self._waiting = True
        self._asked.put(True)
        answer = self._wait_for_ever() if self._patience is None else self._wait_within(self._patience)
        self._waiting = False
        if isinstance(answer, BaseException):
            raise answer
        return answer  # type: ignore[no-any-return]

    def _wait_for_ever(self) -> Any:
        begun, reminder = time.monotonic(), _REMINDER_S
        while True:
            try:
                return self._answers.get(timeout=reminder)
            except queue.Empty:
                self._say(f"no batch for {time.monotonic() - begun:.0f} s: {self._missing()}")
            reminder = min(2 * reminder, _LONGEST_REMINDER_S)

    def _wait_within(self, patience: Patience) -> Any:
        begun = time.monotonic()
        attempt = 0
        for attempt, (wait, delay) in enumerate(patience.waits(), 1):
            try:
                return self._answers.get(timeout=min(wait, threading.TIMEOUT_MAX))
            except queue.Empty:
                pass
            if delay > 0.0:
                self._say(
                    f"no batch in attempt {attempt} of {patience.attempts}, {time.monotonic() - begun:.1f} s "
                    f"in all: {self._missing()}; the next begins in {delay:.1f} s"
                )
                try:
                    return self._answers.get(
                        timeout=min(delay, threading.TIMEOUT_MAX)
                    )  # it may well come meanwhile
                except queue.Empty:
                    pass
        raise NoBatch(
            f"no batch in {time.monotonic() - begun:.1f} s, {attempt} of {patience.attempts} attempts of "
            f"{patience.timeout_s:g} s: {self._missing()} -> start environments on this bridge and --resume, "
            "or raise --max-wait-time, --batch-timeout or --batch-attempts"
        )

    def _answer(self) -> None:
        """Ask for a batch whenever one is wanted; the thread."""
        while self._asked.get():
            try:
                answer: Any = next(self._batches)
            except BaseException as error:  # StopIteration too: it belongs to whoever iterates
                answer = error
            self._answers.put(answer)
            del answer  # a batch that is kept here would keep its leases
        close = getattr(self._batches, "close", None)
        if close is not None:
            close()
