"""The doorbell for event loops: a thread relays its rings to an eventfd, so that the loop never blocks.

Owned by the consumer's Waiting, from the first wait in a loop on.
"""

import asyncio
import contextlib
import functools
import os
import threading

from shmbridge._ext.header import Descriptor
from shmbridge._ext.lane import HubWait, LaneReader
from shmbridge.segments.helper_threads import Joined

_TICK_S = 1.0


class LoopBell:
    """Waits in the running event loop; one loop at a time. The thread never takes the GIL while it relays."""

    def __init__(self, wait: HubWait, bridge: str) -> None:
        self._wait = wait
        self._ends = False
        # Re-entrant: a signal handler may call close() while a method of this thread holds it.
        self._closing = threading.RLock()
        self._listens = False  # `wait` is in _listen(); if a handler calls close() then, `wait` does the rest
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: set[asyncio.Future[None]] = set()
        self._event = Descriptor(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK), kept_from_children=False)
        wait.start_relay(self._event.fd)
        self._relay = Joined(functools.partial(_relay, wait, self._event), f"shmbridge-{bridge}")
        try:
            self._relay.start()
        except BaseException:
            self.close()
            raise

    async def wait(self, readers: list[LaneReader], arrivals: int, left_s: float) -> None:
        """Returns when there may be work, or after `left_s` or one tick. May be cancelled."""
        with self._closing:
            if self._ends:
                return
            self._listens = True
            try:
                loop = self._listen()
            finally:
                self._listens = False
                if self._ends:
                    self._close()
            if self._ends:
                return
        there, tick, future = self._wait.arm(readers, arrivals), None, loop.create_future()
        self._waiting.add(future)
        try:
            if there:
                await asyncio.sleep(0)
            else:
                tick = loop.call_later(min(left_s, _TICK_S), _end, future)
                await future
        finally:
            self._waiting.discard(future)
            self._wait.disarm(tick is not None and left_s >= _TICK_S and loop.time() >= tick.when())
            if tick is not None:
                tick.cancel()

    def _listen(self) -> asyncio.AbstractEventLoop:
        """Registers the bell with the running loop, and returns that loop."""
        loop = asyncio.get_running_loop()
        if loop is not self._loop:
            self._leave_loop()
            loop.add_reader(self._event.fd, self._ring)
            self._loop = loop
        return loop

    def _ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._event.fd)
        for future in self._waiting:
            _end(future)

    def _leave_loop(self) -> None:
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._event.fd)
        self._loop = None

    def close(self) -> None:
        """Ends the relay and every wait under way. Blocks until the thread has ended.

        An interrupted call may be repeated, and then finishes.
        """
        with self._closing:  # a loop that begins to listen now sees _ends
            self._ends, loop, listens = True, self._loop, self._listens
        self._wait.stop_relay()
        self._relay.join()
        if listens:  # called by a handler that interrupted _listen(): `wait` does the rest
            return
        if loop is not None and loop.is_running() and not _is_running_here(loop):
            with contextlib.suppress(RuntimeError):  # the loop has closed since
                loop.call_soon_threadsafe(self._close)
                return
        self._close()

    def _close(self) -> None:
        self._leave_loop()
        for future in self._waiting:
            _end(future)
        self._event.close()


def _relay(wait: HubWait, event: Descriptor) -> None:
    """Runs the relay thread, which keeps the descriptor: its number is not reused while it is written to."""
    wait.relay(event.fd)


def _end(future: "asyncio.Future[None]") -> None:
    # A loop that an interrupt has ended has no waiting tasks.
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(None)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop() is loop
    return False
