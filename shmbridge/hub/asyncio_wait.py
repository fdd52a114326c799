"""The doorbell as an event loop hears it: a thread relays its rings to an eventfd that the loop reads, so
that the loop never blocks.

Knows event loops and who waits in them; knows nothing of records. Owned by the consumer, from its first wait
in a loop on.
"""

import asyncio
import contextlib
import functools
import os
import threading

from shmbridge._ext.lane_reader import LaneReader
from shmbridge._ext.mapping import Descriptor
from shmbridge._ext.wait import HubWait
from shmbridge.segments.helper_threads import Joined

_TICK_S = 1.0


class LoopBell:
    """Waits in the running event loop; one loop at a time. The thread never takes the GIL while it relays."""

    def __init__(self, wait: HubWait, bridge: str) -> None:
        self._wait = wait
        self._ends = False
        # a signal handler may call close() while a method of this thread holds it
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
        """Returns when there may be work, `left_s` are over or a tick is; a cancelled wait leaves nothing
        behind.
        """
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
        """The running loop, which hears the bell from now on."""
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
        """Ends the relay, and every wait that is under way. Blocks until the thread has ended.

        May be called again, and finishes then.
        """
        with self._closing:  # the loop that begins to listen now is one to be told
            self._ends, loop, listens = True, self._loop, self._listens
        self._wait.stop_relay()
        self._relay.join()
        if listens:  # called by a handler that interrupted _listen(): `wait` does the rest
            return
        if loop is not None and loop.is_running() and not _is_running_here(loop):
            with contextlib.suppress(RuntimeError):  # it has closed meanwhile
                loop.call_soon_threadsafe(self._close)
                return
        self._close()

    def _close(self) -> None:
        self._leave_loop()
        for future in self._waiting:
            _end(future)
        self._event.close()


def _relay(wait: HubWait, event: Descriptor) -> None:
    """For the thread, which keeps the descriptor: nobody else's file gets its number while it may be written
    to.
    """
    wait.relay(event.fd)


def _end(future: "asyncio.Future[None]") -> None:
    # nobody waits in a loop that an interrupt has ended
    if not future.done() and not future.get_loop().is_closed():
        future.set_result(None)


def _is_running_here(loop: asyncio.AbstractEventLoop) -> bool:
    with contextlib.suppress(RuntimeError):
        return asyncio.get_running_loop() is loop
    return False
