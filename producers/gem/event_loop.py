"""An event loop in a thread of its own: `EventLoopThread`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")

_LAST_S = 5.0  # for tasks that do not end when they are cancelled


class EventLoopThread:
    """Runs an event loop until it is stopped. Any thread may make and use it; it installs no signal handlers.

    The thread is a daemon: what an environment never finishes does not keep the interpreter.
    """

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Returns the future of a coroutine that runs in the loop. Never blocks."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


def stop(loop: asyncio.AbstractEventLoop) -> None:
    """Tells a loop to cancel its tasks and to end. Never blocks; any thread, and again."""
    with suppress(RuntimeError):  # it is closed
        loop.call_soon_threadsafe(loop.stop)


def _run(loop: asyncio.AbstractEventLoop) -> None:
    asyncio.set_event_loop(loop)
    stopped = False
    try:
        while not stopped:
            # A task that raises SystemExit or KeyboardInterrupt breaks out of the loop: go on for the others.
            with suppress(SystemExit, KeyboardInterrupt):
                loop.run_forever()
                stopped = True
    finally:
        with suppress(SystemExit, KeyboardInterrupt):
            loop.run_until_complete(_cancel_all())
        loop.close()


async def _cancel_all() -> None:
    rest = asyncio.all_tasks() - {asyncio.current_task()}
    for task in rest:
        task.cancel()
    if rest:
        await asyncio.wait(rest, timeout=_LAST_S)
