"""A call made in another thread: so that an event loop goes on meanwhile, or no signal handler interrupts
it.
"""

import _thread
import asyncio
import contextlib
import functools
import os
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

from shmbridge.segments.closing import begin_own_thread

Result = TypeVar("Result")
_LOOK_AGAIN_S = 0.05


async def run_to_end(call: Callable[..., Result], *args: Any, **named: Any) -> Result:
    """Returns what a call returns, or raises what it raises; a thread makes it, and the event loop goes on.

    A cancellation comes once the call is over: whatever it reads or writes is the caller's again.
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
    """Returns what a call returns, or raises what it raises; a thread makes it, in which no signal's handler
    can raise.

    Blocks.

    An exception that a handler raises here leaves the call running to its end. If no thread can be had, the
    call is made here.
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
    except RuntimeError:  # not even the one that starts it
        ended = None
    if ended is None:
        return call()
    result, error = ended
    if error is not None:
        raise error
    return cast(Result, result)


def start_apart(thread: threading.Thread, failed: Callable[[Exception], None]) -> None:
    """Has a thread started, in one where no handler runs: an interrupt of Thread.start may keep the lock the
    new thread needs to begin.

    Waits for nothing. `failed` is called, there, with the error of a thread that cannot be had; RuntimeError
    if neither can be.
    """

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            failed(error)

    _thread.start_new_thread(start, ())


class _Life:
    """Whether a thread runs. `with` stands around all that it does; others may wait for the end."""

    def __init__(self) -> None:
        self._runs_in = 0  # process; in a child of fork the thread does not run
        self._ended: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> None:
        # before the thread looks whether it is to stop: who stops it does both the other way round
        self._runs_in = os.getpid()

    def __exit__(self, *_: object) -> None:
        self._runs_in = 0
        self._ended.put(None)

    def wait_for_end(self) -> None:
        """Returns at once if the thread has not begun.

        May be called again, also by a handler that interrupts it.
        """
        while self._runs_in == os.getpid():
            with contextlib.suppress(queue.Empty):  # the interrupted call may have taken it
                self._ended.get(timeout=_LOOK_AGAIN_S)


class Joined:
    """A thread that close() waits for.

    An exception of a signal handler, wherever it comes, leaves none that cannot begin or be joined.

    So neither Thread.start (see start_apart) nor Thread.join: one that is interrupted marks a running thread
    as ended.
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
        """`start` that waits for nothing; see start_apart."""
        start_apart(self._thread, failed)

    def join(self) -> None:
        """Blocks until it has ended; one that has not begun does nothing any more.

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
    """A thread that makes one call after the other for event loops.

    It begins with the first, and ends with `stop`.

    No lock of Python: a signal handler may call `stop` wherever it interrupts, also in `call`.
    """

    def __init__(self, name: str) -> None:
        self._name, self._begun, self._stopping, self._life = name, False, False, _Life()
        self._calls: queue.SimpleQueue[tuple[Callable[[], object], asyncio.Future[None]] | None] = (
            queue.SimpleQueue()
        )

    async def call(self, call: Callable[[], object]) -> None:
        """Returns once a call is over, or will not be made because this is stopped; raises what it raises.

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
        if not self._stopping:  # else the thread may have looked for the last time
            await done

    def end(self) -> None:
        """Makes no further call. Waits for nothing: for a finalizer."""
        self._stopping = True
        self._calls.put(None)

    def stop(self) -> None:
        """Ends the thread; blocks until the call under way is over.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._life.wait_for_end()  # a thread that begins later finds that it is to stop

    def _run(self) -> None:
        with self._life:
            while not self._stopping and (next_call := self._calls.get()) is not None:
                _finish(next_call[1], _error_of(next_call[0]))
                del next_call  # it may keep its owner, who ends this thread when it is gone
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
    """Has the future's own loop end it, if that loop still runs and waits for it."""

    def finish() -> None:
        if done.done():
            return
        if error is None:
            done.set_result(None)
        else:
            done.set_exception(error)

    with contextlib.suppress(RuntimeError):  # the loop is closed
        done.get_loop().call_soon_threadsafe(finish)
