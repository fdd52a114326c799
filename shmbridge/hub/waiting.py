"""How a hub waits: for a record, sleeping or in an event loop, and for the end of a drain."""

import asyncio
import time

from shmbridge._ext.lane import HubWait
from shmbridge.errors import ConsumerEmpty
from shmbridge.hub.asyncio_wait import LoopBell
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.segments.closing import Closing, then_close

_LONGEST_WAIT_S = 1.0
_DRAIN_GRACE_S = 0.05  # time for a put that is under way to commit


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
