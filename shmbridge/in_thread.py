"""A call made in another thread: so that an event loop goes on meanwhile, or no signal handler interrupts it."""

import asyncio
import functools
import threading
from collections.abc import Callable
from typing import Any, TypeVar

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
    """Returns what a call returns, or raises what it raises; a thread makes it, in which no signal's handler can raise. Blocks."""
    outcome: list[Result] = []
    wrong: list[BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:
            wrong.append(error)

    thread = threading.Thread(target=run, name="shmbridge-apart", daemon=True)
    thread.start()
    thread.join()
    if wrong:
        raise wrong[0]
    return outcome[0]
