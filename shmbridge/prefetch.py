"""Batches formed ahead of whoever iterates over them, in a thread of their own.

Knows nothing of groups, lanes or leases: it is told how to form one. Called by batching.py.

A signal's handler may raise in any call of these, or call `stop` amid another: so there is no lock of Python's own here, only queues in C
and flags. A batch that is lost on its way is destroyed, and its records are handed out again.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from shmbridge.batch import Batch

_LOOK_AGAIN_S = 0.05


class Flag:
    """A threading.Event that nobody waits for: no lock, so that it can be set amid anything."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """From now on `is_set`."""
        self._is_set = True

    def is_set(self) -> bool:
        """Whether somebody has set it."""
        return self._is_set


class Prefetcher:
    """Forms batches ahead in a daemon thread, at most `depth` of them, once `start` was called."""

    def __init__(self, depth: int, form: Callable[[Flag], Batch | None]) -> None:
        self._ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stop = Flag()
        self._form = form
        self._thread = threading.Thread(target=self._run, name="shmbridge-prefetch", daemon=True)

    def start(self) -> None:
        """Starts the thread. Whoever is to stop it knows this object by then."""
        self._thread.start()

    def _run(self) -> None:
        batch: Batch | BaseException | None
        while True:
            self._room.get()
            if self._stop.is_set():
                return
            try:
                batch = self._form(self._stop)
            except BaseException as error:  # it belongs to whoever iterates
                batch = error
            self._ready.put(batch)
            if not isinstance(batch, Batch):
                return
            del batch  # it is the taker's: kept here, it could not be lost

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch, waiting for it; None once there are no more. Raises what forming it raised; queue.Empty if it takes too long."""
        batch = self._ready.get(timeout=timeout_s)
        if isinstance(batch, BaseException):
            raise batch
        self._room.put(None)
        return batch

    def end(self) -> None:
        """Begins no further batch. Waits for nothing: for a finalizer."""
        self._stop.set()

    def stop(self) -> list[Batch]:
        """Ends the thread and returns the batches nobody took, oldest first. May be called again, also amid itself."""
        self.end()
        self._room.put(None)
        while self._thread.is_alive():  # one whose start was interrupted finds that it is to stop
            self._thread.join(_LOOK_AGAIN_S)
        left = []
        with contextlib.suppress(queue.Empty):  # whoever waits in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # for whoever waits in next()
        return left
