"""Batches formed ahead of whoever iterates over them, in a thread of their own.

Knows nothing of groups, lanes or leases: it is told how to form one. Called by former.py.

A signal handler may raise in any method, or call `stop` while another method runs. So there is no Python lock
here, only queues in C and flags. A batch that is lost on its way is destroyed, and its records are handed out
again.

The thread is a Joined (segments/helper_threads.py), for the same reason.
"""

import contextlib
import queue
from collections.abc import Callable

from shmbridge.batch import Batch
from shmbridge.segments.helper_threads import Joined


class Flag:
    """A threading.Event that nobody waits for: no lock, so that any handler can set it."""

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
        self._thread = Joined(self._form_ahead, "shmbridge-prefetch")

    def start(self) -> None:
        """Has the thread started; waits for nothing. Whoever is to stop it knows this object by then."""
        self._thread.begin(self._ready.put)  # no thread can be had: whoever waits in next() is to hear it

    def _form_ahead(self) -> None:
        batch: Batch | BaseException | None
        while not self._stop.is_set():
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
        """The next batch, waiting for it; None once there are no more.

        Raises what forming it raised; queue.Empty if it takes too long.
        """
        batch = self._ready.get(timeout=timeout_s)
        if isinstance(batch, BaseException):
            raise batch
        self._room.put(None)
        return batch

    def end(self) -> None:
        """Begins no further batch. Waits for nothing: for a finalizer."""
        self._stop.set()

    def stop(self) -> list[Batch]:
        """Ends the thread and returns the batches nobody took, oldest first.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._room.put(None)
        self._thread.join()
        left = []
        with contextlib.suppress(queue.Empty):  # whoever waits in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # for whoever waits in next()
        return left
