"""How a consumer ends: by close(), at process exit, or collected because nobody holds it any more.

Holds the consumer's parts and never the consumer: its threads lead here, and must not keep it alive.
"""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Protocol

from shmbridge._ext.mapping import Mapping
from shmbridge.hub.control_plane import ControlPlane
from shmbridge.hub.counters import Counting
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.hub.tap import Tap
from shmbridge.hub.waiting import Waiting
from shmbridge.segments import locks, membership
from shmbridge.segments.closing import Closing, is_own_thread
from shmbridge.segments.helper_threads import start_apart
from shmbridge.segments.locks import LockByte

log = logging.getLogger(__name__)

_COLLECTED_WAITS_S = 5.0
_PARTS = ("_lanes", "_waiting", "_control_plane", "_former", "_iterations", "_counting")


class Iterations(Protocol):
    """The iterations over batches, as far as their end uses them."""

    def stop(self) -> None:
        """Ends iterations and the prefetch."""


class Former(Protocol):
    """The batch former, as far as its end uses it."""

    def forget(self) -> None:
        """Ends every lease that was not handed out, without release."""


class Ranks(Protocol):
    """The rank server, as far as its end uses it."""

    def stop(self) -> None:
        """Ends its thread."""

    def forget(self) -> None:
        """Ends every lease without release."""

    def stats(self) -> dict[str, float]:
        """Returns its counters."""


class Ending:
    """Ends all parts of one consumer, in order, once. Any thread.

    Attributes:
        final: the counters at the end.
        ranks: the rank server, once there is one.
    """

    _state: HubState
    _lanes: LaneSet
    _waiting: Waiting
    _control_plane: ControlPlane
    _former: Former
    _iterations: Iterations
    _counting: Counting
    _control: "weakref.ref[Mapping]"

    def __init__(self, bridge: str, tap: Tap | None) -> None:
        self.bridge, self._tap = bridge, tap
        self.closing = Closing(self._give_up, self._stop_taking)
        self.final: dict[str, float] = {}
        self.ranks: Ranks | None = None
        self.no_exit_call: Callable[[], object] = int  # cancels `leave_unclosed` at process exit
        self.no_finalizer: Callable[[], object] = int  # cancels `collected`, which would hold all parts
        self._pid, self._left = os.getpid(), False
        self._readers: list[weakref.ref[Mapping]] = []  # of the lanes, at the end

    def parts(
        self,
        state: HubState,
        lanes: LaneSet,
        waiting: Waiting,
        control_plane: ControlPlane,
        former: Former,
        iterations: Iterations,
        counting: Counting,
    ) -> None:
        """Takes the parts to end."""
        self._state, self._lanes, self._waiting, self._control_plane = state, lanes, waiting, control_plane
        self._former, self._iterations, self._counting = former, iterations, counting
        self._control = weakref.ref(state.words.mapping)

    # -- by close()

    def _stop_taking(self) -> None:
        """A close() is pending."""
        if (lanes := vars(self).get("_lanes")) is not None:
            lanes.turns.ending = True

    def _give_up(self) -> None:
        if self._state.words_gone:  # after an interrupt that came past the last line
            return
        self._stop_forming()
        self._control_plane.close()
        with self.closing.whole:
            try:
                self.final = self.stats()
            except Exception:  # a failing counter must not leave the bridge taken
                log.exception("the counters of bridge %r cannot be read at its consumer's end", self.bridge)
            self.closing.closed = True
            self._waiting.end()
        self._state.ring()  # wakes the threads that wait for a record
        self._former.forget()
        if self.ranks is not None:
            self.ranks.stop()  # one that was being made during the stop above
            self.ranks.forget()
        self.no_exit_call()
        self._waiting.close()
        self._readers += [weakref.ref(lane.reader.lane) for lane in self._lanes]
        if self._lanes.close() == 0:
            membership.leave(self._state.control_fd, self.bridge)
        self._close_tap()
        self._state.let_words_go()
        self.no_finalizer()
        for part in _PARTS:  # they lead to leases, and this object may outlive them all
            vars(self).pop(part, None)
        self._tap = self.ranks = None

    def stats(self) -> dict[str, float]:
        """Returns the counters now, the last ones after the end."""
        # In a forked child the lock may be held for ever by a thread that does not exist there.
        self._state.check_process()
        with self.closing.whole:
            if self.closing.closed:
                return self.final
            return {**self._counting.stats(), **(self.ranks.stats() if self.ranks is not None else {})}

    def _stop_forming(self) -> None:
        self._iterations.stop()
        if self.ranks is not None:
            self.ranks.stop()

    def _close_tap(self) -> None:
        try:
            if self._tap is not None:
                self._tap.close()
        except Exception:  # the bridge is to be free again whatever the tap does
            log.exception("the tap of bridge %r failed at its end", self.bridge)

    def abandon(self) -> None:
        """Leases end without release from now on."""
        if (lanes := vars(self).get("_lanes")) is not None:
            lanes.abandon()

    def free(self) -> None:
        """Frees the bridge after the end, when objects still refer to its lanes but nobody reads them.

        Any thread.
        """
        for lane in self._readers:
            if (mapping := lane()) is not None and not mapping.forked:
                locks.unlock(mapping.fd, LockByte.READER)
        mapping = self._control()
        if self.closing.over and mapping is not None and not mapping.forked:
            membership.leave(mapping.fd, self.bridge)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and nothing refers to the bridge's memory through it."""
        return self.closing.over and self._control() is None

    # -- at process exit

    def leave_unclosed(self) -> None:
        """Leaves leased records un-released, for the next consumer; waits for threads that form batches."""
        self._left = True
        self._stop_forming()
        self._lanes.abandon()
        self._lanes.unlock()
        membership.leave(self._state.control_fd, self.bridge)

    # -- collected

    def collected(self) -> None:
        """Closes for a consumer that nobody holds. For its finalizer, which runs in any thread, in any line.

        Closes in a thread of its own, since the interrupted code may hold any lock; waits for that thread, so
        that the bridge is free afterwards, but never where the thread might wait for the interrupted code,
        and for some seconds at most. Does nothing in a child of fork, or while the process ends.
        """
        if self.closing.over or self._left or os.getpid() != self._pid or sys.is_finalizing():
            return
        may_wait = not (self.closing.lock_is_mine or is_own_thread())
        done = threading.Semaphore(0)

        def close() -> None:
            try:
                self.closing.close()
            except Exception:
                log.exception("the consumer of bridge %r cannot be closed", self.bridge)
            finally:
                done.release()

        def failed(error: Exception) -> None:
            self._close_with_next_call(error)
            done.release()

        try:
            start_apart(
                threading.Thread(target=close, name=f"shmbridge-{self.bridge}-ends", daemon=True), failed
            )
        except RuntimeError as error:
            self._close_with_next_call(error)
            return
        if may_wait:
            done.acquire(timeout=_COLLECTED_WAITS_S)

    def _close_with_next_call(self, error: Exception) -> None:
        """There is no thread to close in: a call that holds a lock of the consumer closes at its end."""
        log.error("the consumer of bridge %r, which nobody holds, is not closed yet: %s", self.bridge, error)
        self.closing.owed = self.closing.ending = True
        self._stop_taking()
