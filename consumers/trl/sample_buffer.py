"""The samples of a bridge's groups as a queue: what TRL's async trainer drains, and the leases behind it."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from shmbridge import Batch
from shmbridge.record.leases import abandon

_LONG_AGO = 1 << 60  # updates: a batch without samples is over at once


@dataclass(slots=True)
class _Held:
    """A batch, and how far its samples have gone."""

    batch: Batch
    left: int  # samples not yet handed out
    update: int = 0  # weight updates before its last sample was handed out


class SampleBuffer:
    """`queue.Queue` as far as TRL uses it. For one thread.

    Args:
        fetch: returns a batch and its samples; blocks at most the given seconds (None: for ever), then raises
            queue.Empty.
        held_for: weight updates after the one in which a batch's last sample was handed out, at whose end its
            records are released; None: they are released with that sample.
    """

    def __init__(
        self, fetch: Callable[[float | None], tuple[Batch, list[Any]]], held_for: int | None
    ) -> None:
        self._fetch, self._held_for = fetch, held_for
        self._ready: deque[tuple[Any, _Held | None]] = deque()
        self._held: deque[_Held] = deque()
        self._updates = 0

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        """Returns the next sample. Blocks at most `timeout` seconds (None: for ever), then queue.Empty."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ready:
            left = 0.0 if not block else None if until is None else max(until - time.monotonic(), 0.0)
            batch, samples = self._fetch(left)
            held = _Held(batch, len(samples), self._updates if samples else self._updates - _LONG_AGO)
            self._ready.extend((sample, held) for sample in samples)
            self._held.append(held)
            self._release()
        sample, held_by = self._ready.popleft()
        if held_by is not None:
            held_by.left -= 1
            held_by.update = self._updates
            self._release()
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
    def batches_held(self) -> int:
        """Batches whose records are not released."""
        return len(self._held)

    def updated(self) -> None:
        """Notes a weight update, and releases what it shows to be trained. Never blocks."""
        self._updates += 1
        self._release()

    def _release(self) -> None:
        """Releases batches in order; those without samples at once."""
        while self._held and self._is_over(self._held[0]):
            self._held.popleft().batch.release()

    def _is_over(self, held: _Held) -> bool:
        if held.left:
            return False
        return self._held_for is None or self._updates >= held.update + self._held_for

    def abandon(self) -> None:
        """Gives all up un-released: the records come to the next consumer."""
        self._ready.clear()
        while self._held:
            abandon(self._held.popleft().batch.records)
