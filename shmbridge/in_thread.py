"""A call made in another thread: so that an event loop goes on meanwhile, or no signal handler interrupts it."""

import _thread
import asyncio
import functools
import queue
import threading
from collections.abc import Callable
from typing import Any, TypeVar, cast

Result = TypeVar("Result")


async def to_its_end(call: Callable[..., Result], *args: Any, **named: Any) -> Result:
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
    """Returns what a call returns, or raises what it raises; a thread makes it, in which no signal's handler can raise. Blocks.

    An exception that a handler raises here leaves the call running to its end. If no thread can be had, the call is made here.
    """
    outcome: queue.SimpleQueue[tuple[Result, None] | tuple[None, BaseException] | None] = queue.SimpleQueue()

    def run() -> None:
        try:
            outcome.put((call(), None))
        except BaseException as error:
            outcome.put((None, error))

    try:
        start_apart(threading.Thread(target=run, name="shmbridge-apart", daemon=True), lambda _: outcome.put(None))
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
    """Has a thread started, in one where no handler runs: an interrupt of Thread.start may keep the lock the new thread needs to begin.

    Waits for nothing. `failed` is called, there, with the error of a thread that cannot be had; RuntimeError if neither can be.
    """

    def start() -> None:
        try:
            thread.start()
        except Exception as error:
            failed(error)

    _thread.start_new_thread(start, ())
