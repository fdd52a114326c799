"""Batches formed ahead of whoever iterates over them, in a thread of their own.

Knows nothing of groups, lanes or leases: it is told how to form one. Called by batching.py.
"""

import contextlib
import queue
import threading
from collections.abc import Callable

from shmbridge.batch import Batch


class Prefetcher:
    """Forms batches ahead in a daemon thread, at most `depth` of them."""

    def __init__(self, depth: int, form: Callable[[threading.Event], Batch | None]) -> None:
        self._ready: queue.Queue[Batch | BaseException | None] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stop = threading.Event()
        self._form = form
        self._thread = threading.Thread(target=self._run, name="shmbridge-prefetch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        batch: Batch | BaseException | None
        while True:
            self._room.acquire()
            if self._stop.is_set():
                return
            try:
                batch = self._form(self._stop)
            except BaseException as error:  # it belongs to whoever iterates
                batch = error
            self._ready.put(batch)
            if not isinstance(batch, Batch):
                return

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """The next batch, waiting for it; None once there are no more. Raises what forming it raised; queue.Empty if it takes too long."""
        batch = self._ready.get(timeout=timeout_s)
        if isinstance(batch, BaseException):
            raise batch
        self._room.release()
        return batch

    def end(self) -> None:
        """Begins no further batch. Waits for nothing: for a finalizer."""
        self._stop.set()

    def stop(self) -> list[Batch]:
        """Ends the thread and returns the batches nobody took, oldest first."""
        self.end()
        self._room.release()
        self._thread.join()
        left = []
        with contextlib.suppress(queue.Empty):  # whoever waits in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # for whoever waits in next()
        return left
