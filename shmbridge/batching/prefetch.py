"""Forms batches ahead of the iteration, in a separate thread.

A signal handler may raise in any method, or call `stop` while another method runs. So there is no Python lock
here, only queues in C and flags, and the thread is a Joined (segments/helper_threads.py). A batch lost in
transit is destroyed, and its records are handed out again.
"""

import contextlib
import queue
from collections.abc import Callable

from shmbridge.batch import Batch
from shmbridge.segments.helper_threads import Joined


class Flag:
    """A threading.Event without waiting: no lock, so that any signal handler can set it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Sets the flag."""
        self._is_set = True

    def is_set(self) -> bool:
        """Returns whether the flag is set."""
        return self._is_set


class Prefetcher:
    """Forms batches ahead in a daemon thread, at most `depth` of them, after `start`."""

    def __init__(self, depth: int, form: Callable[[Flag], Batch | None]) -> None:
        self._ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stop = Flag()
        self._form = form
        self._thread = Joined(self._form_ahead, "shmbridge-prefetch")

    def start(self) -> None:
        """Starts the thread, without waiting. The code that will stop it must hold this object by then."""
        self._thread.begin(self._ready.put)  # an error goes to the thread in next()

    def _form_ahead(self) -> None:
        batch: Batch | BaseException | None
        while not self._stop.is_set():
            self._room.get()
            if self._stop.is_set():
                return
            try:
                batch = self._form(self._stop)
            except BaseException as error:  # raised again by next()
                batch = error
            self._ready.put(batch)
            if not isinstance(batch, Batch):
                return
            del batch  # keep no reference: a batch lost by its taker must be destroyed

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """Returns the next batch, waiting for it; None once there are no more.

        Raises the error of forming it; queue.Empty on timeout.
        """
        batch = self._ready.get(timeout=timeout_s)
        if isinstance(batch, BaseException):
            raise batch
        self._room.put(None)
        return batch

    def end(self) -> None:
        """Stops forming further batches, without waiting: for a finalizer."""
        self._stop.set()

    def stop(self) -> list[Batch]:
        """Ends the thread and returns the batches not taken, oldest first.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._room.put(None)
        self._thread.join()
        left = []
        with contextlib.suppress(queue.Empty):  # a thread in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # wakes a thread in next()
        return left
