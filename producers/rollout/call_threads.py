"""Threads for calls of environments, which may never return: `CallThreads`."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

T = TypeVar("T")


class CallThreads:
    """Runs calls in threads, a limited number at once. Any thread may use it.

    A call that was given up leaves its place to another one. Python cannot end its thread, which stays until
    the call returns.

    Args:
        most: calls that run at once, those that were given up not counted.
        name: of the threads.
    """

    def __init__(self, most: int, name: str) -> None:
        self._places, self._name = most, name
        self._lock = threading.Lock()
        self._waiting: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._running: dict[Future[Any], int] = {}  # those that take a place, with their threads

    def submit(self, call: Callable[..., T], *arguments: Any) -> Future[T]:
        """Returns the result that a call will have. Never blocks."""
        future: Future[T] = Future()
        with self._lock:
            self._waiting.append((future, partial(call, *arguments)))
        self._start()
        return future

    def give_up(self, future: Future[Any]) -> int | None:
        """Cancels a call that waits for a thread; one that runs does not count any more. Never blocks.

        Returns the identifier of the thread that it runs in; None if it does not run.
        """
        future.cancel()
        with self._lock:
            thread = self._running.pop(future, None)
        self._start()
        return thread

    def cancel_waiting(self) -> None:
        """Cancels the calls that wait for a thread. Never blocks."""
        with self._lock:
            waiting, self._waiting = self._waiting, deque()
        for future, _ in waiting:
            future.cancel()

    def _start(self) -> None:
        if (found := self._next()) is not None:
            threading.Thread(target=self._work, args=found, name=self._name).start()

    def _next(self) -> tuple[Future[Any], Callable[[], Any]] | None:
        """The next call, which has a place now; None if there is none, or no place."""
        with self._lock:
            while self._waiting and len(self._running) < self._places:
                future, call = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    self._running[future] = 0
                    return future, call
        return None

    def _work(self, future: Future[Any], call: Callable[[], Any]) -> None:
        while True:
            with self._lock:
                if future in self._running:
                    self._running[future] = threading.get_ident()
            try:
                result = call()
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(result)
            with self._lock:
                self._running.pop(future, None)
            del call
            if (found := self._next()) is None:
                return
            future, call = found
