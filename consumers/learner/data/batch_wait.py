"""The limits of waiting for the next batch: retries, giving up. It never blocks itself.

What a long wait is for is in the log of the consumer, with and without limits.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from shmbridge.consumers.learner.config.options import WaitingConfig

_LONGEST_WAIT_S = 3600.0  # longest single wait: clocks do not accept every number
_LONGEST_DELAY_S = 3.0
_DELAY_GROWTH = 1.5


class NoBatch(Exception):
    """No batch came within the limits; the message says who was missing and what to do."""


@dataclass(frozen=True)
class Patience:
    """How long to wait for one batch: attempts with growing delays, and a total limit."""

    timeout_s: float = 30.0  # per attempt
    attempts: int = 10
    retry_delay_s: float = 0.5  # after the first attempt; grows by half each time, at most 3 s
    max_wait_s: float = math.inf

    def waits(self) -> Iterator[tuple[float, float]]:
        """Yields (seconds of the attempt, delay until the next) per attempt; the last has no delay."""
        delay, left = self.retry_delay_s, self.max_wait_s
        for attempt in range(1, self.attempts + 1):
            pause = delay if attempt < self.attempts else 0.0
            if self.timeout_s + pause >= left:
                yield left, 0.0
                return
            yield self.timeout_s, pause
            left -= self.timeout_s + pause
            delay = min(delay * _DELAY_GROWTH, max(_LONGEST_DELAY_S, self.retry_delay_s))


def patience_of(waiting: WaitingConfig) -> Patience | None:
    """Returns the configured limits; None if there are none: wait for ever."""
    given: dict[str, Any] = {
        "timeout_s": waiting.batch_timeout,
        "attempts": waiting.batch_attempts,
        "retry_delay_s": waiting.batch_retry_delay,
        "max_wait_s": waiting.max_wait_time,
    }
    given = {name: value for name, value in given.items() if value is not None}
    return Patience(**given) if given else None


class BatchWait:
    """The wait for one batch, starting at construction: how long to wait at a time, and what to print then.

    Without limits (`patience` is None) it waits for ever, and prints nothing.
    """

    def __init__(
        self, patience: Patience | None, missing: Callable[[], str], say: Callable[[str], None]
    ) -> None:
        self._patience = patience
        self._missing = missing
        self._say = say
        self._begun = time.monotonic()
        self._words = itertools.repeat(_LONGEST_WAIT_S) if patience is None else self._attempts(patience)
        # shared by all batches within these limits
        self.first_s = min(next(self._words), _LONGEST_WAIT_S)
        self._until = self._begun + self.first_s

    @property
    def left_s(self) -> float:
        """Seconds until `look` has something to do; 0 if it has now."""
        return min(max(self._until - time.monotonic(), 0.0), _LONGEST_WAIT_S)

    def look(self) -> None:
        """Prints that an attempt is over, once it is. Never blocks. Raises `NoBatch` after the last one."""
        while time.monotonic() >= self._until:
            self._until += next(self._words)

    def _attempts(self, patience: Patience) -> Iterator[float]:
        attempt = 0
        for attempt, (wait, delay) in enumerate(patience.waits(), 1):
            yield wait
            if delay > 0.0:
                self._say(
                    f"no batch in attempt {attempt} of {patience.attempts}, {self._waited_s:.1f} s "
                    f"in all: {self._missing()}; the next begins in {delay:.1f} s"
                )
                yield delay  # the batch may arrive in this time
        raise NoBatch(
            f"no batch in {self._waited_s:.1f} s, {attempt} of {patience.attempts} attempts of "
            f"{patience.timeout_s:g} s: {self._missing()} -> start environments on this bridge and --resume, "
            "or raise --max-wait-time, --batch-timeout or --batch-attempts"
        )

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._begun
