"""How a hub waits: for a record, sleeping or in an event loop, and for the end of a drain.

In an event loop a thread relays the doorbell's rings to an eventfd, so that the loop never blocks.
"""

import asyncio
import contextlib
import functools
import os
import threading
import time

from shmbridge._ext.header import Descriptor
from shmbridge._ext.lane import HubWait, LaneReader
from shmbridge.errors import ConsumerEmpty
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.segments import Closing, Joined, then_close

_TICK_S = 1.0
_LONGEST_WAIT_S = 1.0
_DRAIN_GRACE_S = 0.05  # time for a put that is under way to commit


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


class Waiting:
    """For the consumer's thread and the thread that forms batches; the counters for any thread."""

    def __init__(self, state: HubState, lanes: LaneSet, closing: Closing) -> None:
        self._state, self._lanes, self._closing = state, lanes, closing
        self._sleep: HubWait | None = HubWait(state.words.mapping)
        self._loop_bell: LoopBell | None = None

    def wait(self, left_s: float = _LONGEST_WAIT_S) -> None:
        """Sleeps until there may be something to take, at most a second."""
        # Read before the lanes: a lane adopted in between ends the wait.
        arrivals = self._lanes.turns.arrivals
        if (sleep := self._sleep) is not None:
            sleep.wait(self._lanes.turns.readers(), int(min(left_s, _LONGEST_WAIT_S) * 1e9), arrivals)

    async def wait_async(self, left_s: float = _LONGEST_WAIT_S) -> None:
        """`wait` for an event loop."""
        if (bell := self._loop_bell or self._hang_loop_bell()) is not None:
            arrivals = self._lanes.turns.arrivals  # as in wait
            await bell.wait(self._lanes.turns.readers(), arrivals, left_s)

    @then_close
    def _hang_loop_bell(self) -> LoopBell | None:
        """Returns the bell that an event loop listens to; None once this is closed."""
        with self._closing.whole:
            if self._loop_bell is None and self._sleep is not None:
                self._loop_bell = LoopBell(self._sleep, self._state.bridge)
            return self._loop_bell

    def drained(self) -> bool:
        """Returns whether the bridge drains and nothing is left, after a pause in which puts can commit."""
        if not self._state.draining:
            return False
        time.sleep(_DRAIN_GRACE_S)
        return self._lanes.nothing_left

    async def drained_async(self) -> bool:
        """`drained` for an event loop."""
        if not self._state.draining:
            return False
        await asyncio.sleep(_DRAIN_GRACE_S)
        return self._lanes.nothing_left

    def nothing_came(self, timeout_s: float | None) -> ConsumerEmpty:
        """Returns the error for no record in time."""
        return ConsumerEmpty(
            f"no record within {timeout_s} s; {self._lanes.producers_words()}{self._lanes.dropped_words()}",
            hint=self.hint_when_empty(),
        )

    def hint_when_empty(self) -> str:
        """Returns advice for ConsumerEmpty when no record comes."""
        if self._state.run is None and self._lanes.live:
            return (
                "this consumer has announced no run, and Atropos environments wait for one: "
                "Consumer(run=shmbridge.Run(batch_size=...)); "
                f"else see shmbridge inspect {self._state.bridge}"
            )
        return f"are environments running on this bridge? shmbridge inspect {self._state.bridge}"

    @property
    def wait_s(self) -> float:
        """Seconds slept; 0 once this is closed."""
        return 0.0 if self._sleep is None else self._sleep.wait_ns / 1e9

    @property
    def late_wakes(self) -> int:
        """Sleeps that ended by a tick and found work."""
        return 0 if self._sleep is None else self._sleep.late_wakes

    def end(self) -> None:
        """Ends sleeping for good.

        Views keep the bell's mapping, and with it the hub's lock; this object drops it.
        """
        self._sleep = None

    def close(self) -> None:
        """Ends the waits in event loops. An interrupted call may be repeated, and then finishes."""
        if self._loop_bell is not None:
            self._loop_bell.close()
            self._loop_bell = None  # it keeps the mapping, and with it the hub's lock
