"""The samples of a bridge's groups as a queue: what TRL's async trainer drains, and the leases behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmbridge.consumers.feed import Step

_LONG_AGO = 1 << 60  # updates: a step without samples is over at once


@dataclass(slots=True)
class _Held:
    """A step of the feed, and how far its samples have gone."""

    step: Step
    left: int  # samples not yet handed out
    update: int = 0  # weight updates before its last sample was handed out


class SampleBuffer:
    """`queue.Queue` as far as TRL uses it. For one thread.

    Args:
        fetch: returns a step and its samples; blocks at most the given seconds (None: for ever), then raises
            queue.Empty.
        trained: called with each step that is over.
        held_for: weight updates after the one in which a step's last sample was handed out, at whose end it
            is over; None: with that sample.
    """

    def __init__(
        self,
        fetch: Callable[[float | None], tuple[Step, list[Any]]],
        trained: Callable[[Step], None],
        held_for: int | None,
    ) -> None:
        self._fetch, self._trained, self._held_for = fetch, trained, held_for
        self._ready: deque[tuple[Any, _Held | None]] = deque()
        self._held: deque[_Held] = deque()
        self._updates = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns the next sample. Blocks at most `timeout` seconds (None: for ever), then queue.Empty."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = 0.0 if not block else None if until is None else max(until - time.monotonic(), 0.0)
            step, samples = self._fetch(left)
            held = _Held(step, len(samples), self._updates if samples else self._updates - _LONG_AGO)
            self._ready.extend((sample, held) for sample in samples)
            self._held.append(held)
            self._end()
        sample, held_by = self._ready.popleft()
        if held_by is not None:
            held_by.left -= 1
            held_by.update = self._updates
            self._end()
        return sample

    def get_nowait(self) -> Any:
        """`get` without waiting."""
        return self.get(block=False)

    def put_nowait(self, sample: Any) -> None:
        """Adds a sample that is not from the bridge, behind those already here. Never blocks."""
        self._ready.append((sample, None))

    def qsize(self) -> int:
        """Returns the samples that are made already; groups wait in the bridge besides. Never blocks."""
        return len(self._ready)

    def empty(self) -> bool:
        """Whether `get_nowait` would have to ask the bridge. Never blocks."""
        return not self._ready

    @property
    def steps_held(self) -> int:
        """Steps that are not over."""
        return len(self._held)

    def updated(self) -> None:
        """Notes a weight update, and ends what it shows to be trained. Never blocks."""
        self._updates += 1
        self._end()

    def _end(self) -> None:
        """Ends steps in order; those without samples at once."""
        while self._held and self._is_over(self._held[0]):
            self._trained(self._held.popleft().step)

    def _is_over(self, held: _Held) -> bool:
        if held.left:
            return False
        return self._held_for is None or self._updates >= held.update + self._held_for

    def clear(self) -> list[Step]:
        """Forgets all; returns the steps that are not over. Never blocks."""
        self._ready.clear()
        held = [each.step for each in self._held]
        self._held.clear()
        return held
