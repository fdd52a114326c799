"""Calls in another thread: to keep an event loop running, or out of reach of signal handlers."""

import _thread
import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from shmbridge.errors import ProcessLimit
from shmbridge.segments.closing import begin_own_thread

Result = TypeVar("Result")
_LOOK_AGAIN_S = 0.05


async def run_to_end(call: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Runs a call in a thread while the event loop goes on; returns its result or raises its error.

    A cancellation takes effect after the call ends: until then the call may use the caller's data.
    """
    running = asyncio.get_running_loop().run_in_executor(None, functools.partial(call, *args, **named))
    cancelled: asyncio.CancelledError | None = None
    while not running.done():
        try:
            await asyncio.wait([running])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        raise cancelled from running.exception()
    return running.result()


def in_another_thread(call: Callable[[], Result]) -> Result:
    """Runs a call in a thread, in which no signal handler can raise; returns its result or raises its error.

    Blocks.

    If a handler raises here, the call still runs to its end. If no thread can be had, the call runs in this
    thread.
    """
    outcome: queue.SimpleQueue[tuple[Result, None] | tuple[None, BaseException] | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    try:
        start_apart(
            threading.Thread(target=run, name="shmbridge-apart", daemon=True), lambda _: outcome.put(None)
        )
        ended = outcome.get()
    except RuntimeError:  # not even the starting thread can be had
        ended = None
    if ended is None:
        return call()
    result, error = ended
    if error is not None:
        raise error
    return cast(Result, result)


def start_apart(thread: threading.Thread, failed: Callable[[Exception], None]) -> None:
    """Starts a thread from another thread, where no handler runs: an interrupted Thread.start may keep the
    lock that the new thread needs to begin.

    Does not wait. If the thread cannot be had, `failed` is called with the error, in the starting thread;
    RuntimeError if even the starting thread cannot be had.
    """

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            failed(error)

    _thread.start_new_thread(start, ())


class _Life:
    """Whether a thread runs. The thread does everything inside `with`; other threads may wait for the end."""

    def __init__(self) -> None:
        self._runs_in = 0  # process id; in a child of fork the thread does not run
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> None:
        # Set before the thread checks its stop flag; the stopping thread sets the flag, then reads this.
        self._runs_in = os.getpid()

    def __exit__(self, *_: object) -> None:
        self._runs_in = 0
        self._ended.put(None)

    def wait_for_end(self) -> None:
        """Returns at once if the thread has not begun.

        May be called again, also by a handler that interrupts it.
        """
        while self._runs_in == os.getpid():
            with contextlib.suppress(queue.Empty):  # the interrupted call may have taken the item
                self._ended.get(timeout=_LOOK_AGAIN_S)


class Joined:
    """A thread that close() waits for.

    An exception from a signal handler, at any point, leaves a thread that can begin and be joined.

    So it uses neither Thread.start (see start_apart) nor Thread.join: an interrupted join marks a running
    thread as ended.
    """

    def __init__(self, run: Callable[[], object], name: str) -> None:
        self._over, self._life = False, _Life()
        self._begun: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(run,), name=name, daemon=True)

    def start(self) -> None:
        """Blocks until it runs; RuntimeError if no thread can be had. After any error call `join`."""
        self.begin(self._begun.put)
        if (error := self._begun.get()) is not None:
            raise error

    def begin(self, failed: Callable[[Exception], None]) -> None:
        """Like `start`, without waiting; see start_apart.

        Raises ProcessLimit where a library has replaced threads by greenlets: one that waits in C stops all.
        """
        for part in (_thread.start_new_thread, queue.SimpleQueue):
            by = part.__module__.partition(".")[0]
            if by not in ("_thread", "_queue"):
                raise ProcessLimit(
                    f"thread {self._thread.name} cannot run: {by} has replaced {part.__name__} in this "
                    "process",
                    hint=f"keep both, as {by}.monkey.patch_all(thread=False, queue=False) does, or use a "
                    "process of its own; a Producer needs no thread",
                )
        start_apart(self._thread, failed)

    def join(self) -> None:
        """Blocks until the thread has ended; a thread that has not begun will do nothing.

        May be called again, also by a handler that interrupts it.
        """
        if threading.current_thread() is self._thread:
            raise RuntimeError("a thread cannot wait for its own end")
        self._over = True
        self._life.wait_for_end()

    def _run(self, run: Callable[[], object]) -> None:
        with self._life:
            begin_own_thread()
            self._begun.put(None)
            if not self._over:
                run()


class Apart:
    """A thread that makes calls for event loops, one after the other.

    It begins with the first call, and ends with `stop`.

    No Python lock: a signal handler may call `stop` wherever it interrupts, also in `call`.
    """

    def __init__(self, name: str) -> None:
        self._name, self._begun, self._stopping, self._life = name, False, False, _Life()
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )

    async def call(self, call: Callable[[], object]) -> None:
        """Returns once a call is over, or will not be made because this is stopped; raises the call's error.

        A cancellation does not end the call.
        """
        done = asyncio.get_running_loop().create_future()
        if not self._begun:
            self._begun = True
            try:
                start_apart(
                    threading.Thread(target=self._run, name=self._name, daemon=True), self._cannot_begin
                )
            except RuntimeError:
                self._begun = False
                raise
        self._calls.put((call, done))
        if not self._stopping:  # else the thread may have checked the queue for the last time
            await done

    def end(self) -> None:
        """Makes no further call. Does not wait: for a finalizer."""
        self._stopping = True
        self._calls.put(None)

    def stop(self) -> None:
        """Ends the thread; blocks until the call under way is over.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._life.wait_for_end()  # a thread that begins later sees the stop flag

    def _run(self) -> None:
        with self._life:
            while not self._stopping and (next_call := self._calls.get()) is not None:
                _finish(next_call[1], _error_of(next_call[0]))
                del next_call  # it may keep its owner alive, whose finalizer ends this thread
            self._answer_all(None)

    def _cannot_begin(self, error: Exception) -> None:
        self._begun = False
        self._answer_all(error)

    def _answer_all(self, error: BaseException | None) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (left := self._calls.get_nowait()) is not None:
                    _finish(left[1], error)


def _error_of(call: Callable[[], object]) -> BaseException | None:
    try:
        call()
    except BaseException as error:
        return error
    return None


def _finish(done: "asyncio.Future[None]", error: BaseException | None) -> None:
    """Ends the future in its own loop, if that loop still runs and waits for it."""

    def finish() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        done.get_loop().call_soon_threadsafe(finish)
