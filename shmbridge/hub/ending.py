"""How a consumer ends: by close(), at process exit, or collected because nobody holds it any more.

Holds the consumer's parts and never the consumer: its threads lead here, and must not keep it alive.
"""

import logging
import os
import sys
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shmbridge._ext import header
from shmbridge._ext.header import Mapping
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


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of one consumer that its end ends."""

    state: HubState
    lanes: LaneSet
    waiting: Waiting
    control_plane: ControlPlane
    former: Former
    iterations: Iterations
    counting: Counting


class Ending:
    """Ends all parts of one consumer, in order, once. Any thread.

    Attributes:
        parts: what it ends; None before the consumer has started, and after the end, since they lead to
            leases, and this object may outlive them all.
        final: the counters at the end.
        ranks: the rank server, once there is one.
    """

    def __init__(self, bridge: str, tap: Tap | None) -> None:
        self.bridge, self._tap = bridge, tap
        self.closing = Closing(self._give_up, self._stop_taking)
        self.parts: Parts | None = None
        self._control: weakref.ref[Mapping] | None = None
        self.final: dict[str, float] = {}
        self.ranks: Ranks | None = None
        self.no_exit_call: Callable[[], object] = int  # cancels `leave_unclosed` at process exit
        self.no_finalizer: Callable[[], object] = int  # cancels `collected`, which would hold all parts
        self._pid, self._left = os.getpid(), False
        self._readers: list[weakref.ref[Mapping]] = []  # of the lanes, at the end

    def begin(self, parts: Parts) -> None:
        """Takes the parts to end."""
        self.parts, self._control = parts, weakref.ref(parts.state.words.mapping)

    # -- by close()

    def _stop_taking(self) -> None:
        """A close() is pending."""
        if (parts := self.parts) is not None:
            parts.lanes.turns.ending = True

    def _give_up(self) -> None:
        if (parts := self.parts) is None:
            return
        if not parts.state.words_gone:  # else an interrupt came past that line
            self._end(parts)
        self.no_finalizer()
        self.parts = self._tap = self.ranks = None

    def _end(self, parts: Parts) -> None:
        header.fault(b"hub.ending")
        self._stop_forming(parts)
        parts.control_plane.close()
        header.fault(b"hub.forming_over")
        with self.closing.whole:
            try:
                self.final = self.stats()
            except Exception:  # a failing counter must not leave the bridge taken
                log.exception("the counters of bridge %r cannot be read at its consumer's end", self.bridge)
            self.closing.closed = True
            parts.waiting.end()
        parts.state.ring()  # wakes the threads that wait for a record
        parts.former.forget()
        if self.ranks is not None:
            self.ranks.stop()  # one that was being made during the stop above
            self.ranks.forget()
        self.no_exit_call()
        parts.waiting.close()
        self._readers += [weakref.ref(lane.reader.lane) for lane in parts.lanes]
        header.fault(b"hub.leases_over")
        if parts.lanes.close() == 0:
            header.fault(b"hub.lanes_closed")
            membership.leave(parts.state.control_fd, self.bridge)
        header.fault(b"hub.left")
        self._close_tap()
        parts.state.let_words_go()

    def stats(self) -> dict[str, float]:
        """Returns the counters now, the last ones after the end."""
        if (parts := self.parts) is None:
            return self.final
        # In a forked child the lock may be held for ever by a thread that does not exist there.
        parts.state.check_process()
        with self.closing.whole:
            if self.closing.closed:
                return self.final
            return {**parts.counting.stats(), **(self.ranks.stats() if self.ranks is not None else {})}

    def _stop_forming(self, parts: Parts) -> None:
        parts.iterations.stop()
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
        if (parts := self.parts) is not None:
            parts.lanes.abandon()

    def free(self) -> None:
        """Frees the bridge after the end, when objects still refer to its lanes but nobody reads them.

        Any thread.
        """
        for lane in self._readers:
            if (mapping := lane()) is not None and not mapping.forked:
                locks.unlock(mapping.fd, LockByte.READER)
        mapping = self._mapping()
        if self.closing.over and mapping is not None and not mapping.forked:
            membership.leave(mapping.fd, self.bridge)

    @property
    def is_gone(self) -> bool:
        """Whether it has ended, and nothing refers to the bridge's memory through it."""
        return self.closing.over and self._mapping() is None

    def _mapping(self) -> Mapping | None:
        return None if self._control is None else self._control()

    # -- at process exit

    def leave_unclosed(self) -> None:
        """Leaves leased records un-released, for the next consumer; waits for threads that form batches."""
        self._left = True
        if (parts := self.parts) is None:
            return
        self._stop_forming(parts)
        parts.lanes.abandon()
        parts.lanes.unlock()
        membership.leave(parts.state.control_fd, self.bridge)

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
