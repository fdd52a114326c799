"""Turns SIGINT and SIGTERM into one exception that never interrupts a commit, from update to checkpoint."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class Stopped(BaseException):
    """A signal asked the process to stop. A BaseException, so that libraries do not swallow it."""

    def __init__(self, signum: int) -> None:
        super().__init__(signal.Signals(signum).name)
        self.signum = signum


class StopSignals:
    """Context manager that turns SIGINT and SIGTERM into `Stopped`; main thread only, never blocks."""

    def __init__(self) -> None:
        self._holding = False
        self._received: int | None = None
        self._earlier: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._earlier[signum] = signal.signal(signum, self._on_signal)
        return self

    def __exit__(self, *exc_info: object) -> None:
        for signum, handler in self._earlier.items():
            signal.signal(signum, handler)

    @property
    def received(self) -> int | None:
        """The last signal received; None if there was none."""
        return self._received

    def check(self) -> None:
        """Raises `Stopped` if a signal came during a hold, or where Python discards exceptions."""
        if self._received is not None:
            raise Stopped(self._received)

    @contextmanager
    def held(self) -> Iterator[None]:
        """Delays signals until the block ends, then raises `Stopped` if one came, except inside `noted`."""
        with self.noted() as earlier:
            yield
        if not earlier:
            self.check()

    @contextmanager
    def noted(self) -> Iterator[bool]:
        """Records signals until the block ends, without raising; yields whether they were already delayed."""
        earlier, self._holding = self._holding, True
        try:
            yield earlier
        finally:
            self._holding = earlier

    def _on_signal(self, signum: int, frame: FrameType | None) -> None:
        self._received = signum
        if not self._holding:
            raise Stopped(signum)
