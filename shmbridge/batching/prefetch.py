"""Batches formed ahead of whoever iterates over them, in a thread of their own.

Knows nothing of groups, lanes or leases: it is told how to form one. Called by former.py.

A signal handler may raise in any method, or call `stop` while another method runs. So there is no Python lock
here, only queues in C and flags. A batch that is lost on its way is destroyed, and its records are handed out
again.

Nor does the thread that handlers run in call Thread.start (see in_thread.py) or Thread.join. A handler that
joins while `join` is interrupted waits for a lock of the interrupted call; one that raises there marks a
running thread as ended.
"""

import contextlib
import os
import queue
import threading
from collections.abc import Callable

from shmbridge.batch import Batch
from shmbridge.segments.closing import begin_own_thread
from shmbridge.segments.in_thread import start_apart

_LOOK_AGAIN_S = 0.05


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
        self._runs_in = 0  # process; in a child of fork the thread does not run
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="shmbridge-prefetch", daemon=True)

    def start(self) -> None:
        """Has the thread started; waits for nothing. Whoever is to stop it knows this object by then."""
        # no thread can be had: whoever waits in next() is to hear it
        start_apart(self._thread, self._ready.put)

    def _run(self) -> None:
        # before it looks whether it is to stop: `stop` does both the other way round
        self._runs_in = os.getpid()
        try:
            begin_own_thread()
            self._form_ahead()
        finally:
            self._runs_in = 0
            self._ended.put(None)

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
        # one that begins later finds that it is to stop, and forms nothing
        while self._runs_in == os.getpid():
            with contextlib.suppress(queue.Empty):  # the interrupted call may have taken it
                self._ended.get(timeout=_LOOK_AGAIN_S)
        left = []
        with contextlib.suppress(queue.Empty):  # whoever waits in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # for whoever waits in next()
        return left
