"""An event loop in a thread of its own, or in the main thread of a process: `event_loop`."""

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

    The thread is a daemon: what an environment never finishes does not keep the interpreter. Where a process
    is an environment's own, it is the main thread's loop instead.
    """

    def __init__(self, name: str) -> None:
        if MAIN.loop is not None:
            self.loop, self.thread = MAIN.loop, MAIN.thread
            return
        self.loop = asyncio.new_event_loop()
        self.thread = threading.Thread(target=_run, args=(self.loop,), name=name, daemon=True)
        self.thread.start()

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Returns the future of a coroutine that runs in the loop. Never blocks."""
        return asyncio.run_coroutine_threadsafe(work, self.loop)


class MainThread:
    """The main thread's event loop, where a process is one environment's own; for all its environments."""

    def __init__(self) -> None:
        self.loop: asyncio.AbstractEventLoop | None = None
        self.thread = threading.main_thread()

    def take(self) -> None:
        """Has all environments of this process run in the main thread, from now on."""
        self.loop = asyncio.new_event_loop()

    def run(self) -> None:
        """Runs the loop without end. Main thread only."""
        assert self.loop is not None
        _run(self.loop)


MAIN = MainThread()


def is_main(thread: threading.Thread) -> bool:
    """Returns whether a loop's thread is the main thread, which goes on when an environment ends."""
    return MAIN.loop is not None and thread is MAIN.thread


def stop(loop: asyncio.AbstractEventLoop) -> None:
    """Tells a loop to cancel its tasks and to end, but the main thread's. Never blocks; any thread, again."""
    if loop is MAIN.loop:
        return
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
