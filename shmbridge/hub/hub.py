"""The hub of a bridge in this process: it owns all parts of a consumer, and ends them in order.

A Consumer is a handle on its hub and has the only finalizer. The parts and their threads may hold the hub:
that does not keep the consumer alive.
"""

import gc
import logging
import os
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from typing import TYPE_CHECKING

from shmbridge._ext import header
from shmbridge._ext.lane import LaneReader
from shmbridge.config import Run, check_run
from shmbridge.control import messages
from shmbridge.control.environments import EnvWeight
from shmbridge.errors import ConsumerTaken, Discard
from shmbridge.hub.batches import Iterations
from shmbridge.hub.counts import GroupQueue, OutsideQueue, RecentLatency, lane_counters
from shmbridge.hub.former import BatchFormer, Scheduling
from shmbridge.hub.lanes import LaneSet, Tap
from shmbridge.hub.state import Admission, HubState, OffPolicyLimit
from shmbridge.hub.waiting import Waiting
from shmbridge.record import Record, lane_name
from shmbridge.schema import Columns
from shmbridge.segments import (
    Closing,
    LockByte,
    MemoryUse,
    at_exit,
    is_lane_of,
    is_own_namespace,
    is_own_thread,
    leave_bridge,
    lock_after,
    open_control,
    pid_namespace,
    start_apart,
    sweep_bridge,
    then_close,
    unlock,
)

if TYPE_CHECKING:
    from shmbridge.control.messages import Evaluated
    from shmbridge.control.server import ControlServer
    from shmbridge.hub.ranks import ShareDealer

log = logging.getLogger(__name__)

_COLLECTED_WAITS_S = 5.0


class Hub:
    """Lanes, state, waiting, groups, iterations, admission, ranks and the control server of one bridge.

    Construction adopts the lanes; a death or failure in it leaves the bridge unchanged. The control server
    calls what `control.environments.HubView` names, from its own thread.

    Attributes:
        closing: whether it ends, and the locks that its end may wait for.
        ranks: what serves learner ranks, once something does.
        server: answers participants; None until all else has started.
    """

    def __init__(
        self,
        bridge: str,
        words: header.Control,
        *,
        columns: Columns,
        run: Run | None,
        limit: OffPolicyLimit | None,
        lanes: int,
        resume: str,
        scheduling: Scheduling,
        outside: OutsideQueue,
        tap: Tap | None,
    ) -> None:
        self.bridge, self._tap, self._pid, self._left = bridge, tap, os.getpid(), False
        self.closing = self._closing = Closing(self._give_up, self._stop_taking)
        self.server: ControlServer | None = None
        self.ranks: ShareDealer | None = None
        self._bell = self.closing.lock()  # of the server; its close waits for it
        self._memory, self._latency, self._last_stats = MemoryUse(), RecentLatency(), dict[str, float]()
        self.remains = Remains(bridge, words.mapping)
        try:
            self.state = HubState(bridge, words, self.closing, run, limit)
            self.lanes = LaneSet(bridge, words, columns, lanes, self.closing, tap)
            self._start(words, columns, resume, scheduling, outside)
            self._no_exit_call = at_exit(self.leave_unclosed)
        except BaseException:
            leave_bridge(words.mapping.fd, bridge)
            vars(self).clear()  # else a cycle keeps the segment mapped until a collection
            raise

    def _start(
        self,
        words: header.Control,
        columns: Columns,
        resume: str,
        scheduling: Scheduling,
        outside: OutsideQueue,
    ) -> None:
        from shmbridge.control.server import ControlServer

        try:
            self.lanes.adopt(strict=True)
            self.state.begin_epoch(columns.encode())
            # After the epoch is stored: a rank that joins the old epoch sees that.
            self.lanes.look_for_ranks()
            if self.state.run is not None:
                words.next_run()
            self.waiting = Waiting(self.state, self.lanes, self.closing)
            self.former = BatchFormer(self, scheduling)
            self.queue = GroupQueue(self, outside)
            self.iterations = Iterations(self)
            self.admission = Admission(self)
            if resume == "discard":
                for record in self.lanes.take_backlog():
                    record._discard(Discard.RESUME)
            sweep_bridge(self.bridge)
            # Set last: its thread answers requests before.
            self.server = ControlServer(
                self.bridge, self, self.former.queue_view, first_env_id=outside.first_env_id, bell=self._bell
            )
        except BaseException:
            self.lanes.abandon()
            self.lanes.close()
            raise

    def described(self) -> str:
        """Returns what `repr` says of the consumer."""
        if self.closing.over:
            return "closed"
        words = [
            f"epoch {self.hub_epoch}",
            f"{len(self.lanes)} lanes",
            f"{self.queue_groups()} groups queued",
        ]
        states = {"pausing": self.paused, "draining": self.draining, "serves ranks": self.ranks is not None}
        return ", ".join(words + [state for state, is_so in states.items() if is_so])

    # -- as the control server sees it: any thread, never blocks

    @property
    def hub_epoch(self) -> int:
        """See HubView."""
        return self.state.hub_epoch

    @property
    def run(self) -> Run | None:
        """See HubView."""
        return self.state.run

    @property
    def current_step(self) -> int:
        """See Consumer.current_step."""
        return self.state.current_step(self.former.steps)

    @property
    def policy_version(self) -> int:
        """See HubView."""
        return self.state.policy_version

    @property
    def paused(self) -> bool:
        """See HubView."""
        return self.state.paused

    @property
    def draining(self) -> bool:
        """See HubView."""
        return self.state.draining

    def refused_lanes(self) -> dict[str, str]:
        """See HubView."""
        return self.lanes.refused_lanes()

    def queue_groups(self) -> int:
        """See HubView."""
        return self.queue.groups()

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """See HubView."""
        return self.queue.look_at_producers(producer_ids)

    def begin_group(
        self, request: messages.BeginGroup
    ) -> messages.MayBegin | messages.Full | messages.Refused | None:
        """See HubView."""
        return self.admission.begin_group(request)

    def announce_run(self, run: Run) -> None:
        """See Consumer.announce_run."""
        self.state.announce(check_run(run), self.former.steps)

    @then_close
    def publish_policy_version(
        self, version: int, run_id: str | None = None, same_as: int | None = None
    ) -> None:
        """See Consumer.publish_policy_version."""
        self.state.publish(version, run_id, same_as)
        self.former.end_step()  # after the store: a group that begins now begins under this version

    def pause(self) -> None:
        """See HubView."""
        self.state.paused = True

    def resume(self) -> None:
        """See HubView."""
        self.state.paused = False
        self.lanes.ring_all()

    def drain(self) -> None:
        """See HubView."""
        self.state.drain()
        self.lanes.ring_all()
        self.state.ring()

    def next_share(
        self, request: messages.NextShare
    ) -> messages.Manifest | messages.NoMoreShares | messages.Refused | None:
        """See HubView; None before ranks are served."""
        return None if self.ranks is None else self.ranks.next_share(request)

    def shares_done(self, request: messages.SharesDone) -> messages.Ack | messages.Refused:
        """See HubView."""
        if self.ranks is not None:
            return self.ranks.shares_done(request)
        said = f"the consumer of bridge {self.bridge!r} hands out no shares"
        return messages.Refused(messages.NO_RANKS, said, "call Consumer.serve_ranks in it")

    # -- what participants asked of the server

    def look_again(self) -> None:
        """Has the server retry its waiting requests. Never blocks."""
        if self.server is not None:
            self.server.look_again()

    def env_shares(self) -> Mapping[str, EnvWeight]:
        """Returns the shares that environments requested, by producer id; an immutable snapshot."""
        return {} if self.server is None else self.server.shares

    def take_evaluations(self) -> "list[Evaluated]":
        """See Consumer.take_evaluations."""
        return [] if self.server is None else self.server.evaluations.take()

    # -- counters

    def stats(self) -> dict[str, float]:
        """Returns the counters now, the last ones after the end. Any thread; never blocks for long."""
        # In a forked child the lock may be held for ever by a thread that does not exist there.
        if self.state.check_process() is None:
            return self._last_stats
        with self.closing.whole:
            if self.closing.closed:
                return self._last_stats
            return {
                **lane_counters(self.lanes, self.waiting, self._memory),
                **self.queue.stats(self.env_shares()),
                **self.former.stats(),
                **self.state.waits(),
                **self._latency.stats(self.state.words.latency[0]),
                "policy_version": self.state.policy_version,
                **self.admission.stats(),
                **(self.server.evaluations.stats() if self.server is not None else {}),
                **(self.lanes.tapped.stats() if self.lanes.tapped else {}),
                **(self.ranks.stats() if self.ranks is not None else {}),
            }

    # -- the end, by close()

    def _stop_taking(self) -> None:
        """A close() is pending."""
        self.lanes.turns.ending = True

    def _give_up(self) -> None:
        if not self.state.words_gone:  # else an interrupt came past that line
            self._end()
        self._tap = self.ranks = None

    def _end(self) -> None:
        header.fault(b"hub.ending")
        self._stop_forming()
        if self.server is not None:
            self.server.close()  # blocks until the answer being written is sent
        header.fault(b"hub.forming_over")
        with self.closing.whole:
            try:
                self._last_stats = self.stats()
            except Exception:  # a failing counter must not leave the bridge taken
                log.exception("the counters of bridge %r cannot be read at its consumer's end", self.bridge)
            self.closing.closed = True
            self.waiting.end()
        self.state.ring()  # wakes the threads that wait for a record
        self.former.forget()
        if self.ranks is not None:
            self.ranks.stop()  # one that was being made during the stop above
            self.ranks.forget()
        self._no_exit_call()
        self.waiting.close()
        self.remains.lanes += [weakref.ref(lane.reader.lane) for lane in self.lanes]
        header.fault(b"hub.leases_over")
        if self.lanes.close() == 0:
            header.fault(b"hub.lanes_closed")
            leave_bridge(self.state.control_fd, self.bridge)
        header.fault(b"hub.left")
        self._close_tap()
        self.state.let_words_go()

    def _stop_forming(self) -> None:
        self.iterations.stop()
        if self.ranks is not None:
            self.ranks.stop()

    def _close_tap(self) -> None:
        try:
            if self._tap is not None:
                self._tap.close()
        except Exception:  # the bridge is to be free again whatever the tap does
            log.exception("the tap of bridge %r failed at its end", self.bridge)

    # -- the end, without close()

    def leave_unclosed(self) -> None:
        """At process exit: leaves leased records un-released, for the next consumer.

        Waits for threads that form batches.
        """
        self._left = True
        if self.closing.over:
            return
        self._stop_forming()
        self.lanes.abandon()
        self.lanes.unlock()
        leave_bridge(self.state.control_fd, self.bridge)

    def close_unheld(self) -> None:
        """The finalizer of a consumer that was dropped without close(): runs in any thread, in any line.

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
        """There is no thread to close in: a call that holds a lock of the hub closes at its end."""
        log.error("the consumer of bridge %r was dropped without close(); still open: %s", self.bridge, error)
        self.closing.owed = self.closing.ending = True
        self._stop_taking()


# -- becoming the hub


class Remains:
    """What a hub, alive or ended, has mapped: by weak references, since views of its records may keep it."""

    def __init__(self, bridge: str, control: header.Mapping) -> None:
        self.bridge, self._control = bridge, weakref.ref(control)
        self.lanes: list[weakref.ref[header.Mapping]] = []  # at its end

    @property
    def are_gone(self) -> bool:
        """Whether nothing keeps the bridge's memory mapped here."""
        return self._control() is None

    def free(self) -> None:
        """Frees the bridge after the end, when objects still refer to its lanes but nobody reads them.

        Any thread.
        """
        for lane in self.lanes:
            if (mapping := lane()) is not None and not mapping.forked:
                unlock(mapping.fd, LockByte.READER)
        if (control := self._control()) is not None and not control.forked:
            leave_bridge(control.fd, self.bridge)


# The newest hub of this process, by bridge, until nothing refers to its memory. A child of fork inherits its
# parent's, whose close() does nothing there.
_ours: dict[str, tuple[weakref.ref[Hub], Remains]] = {}


def note_hub(hub: Hub) -> None:
    """Notes the newest hub of this process on a bridge, and forgets those that are gone."""
    for name, (_, remains) in list(_ours.items()):
        if remains.are_gone:
            _ours.pop(name, None)
    _ours[hub.bridge] = weakref.ref(hub), hub.remains


def become_hub(bridge: str, *, replace: bool = False) -> header.Control:
    """Takes the hub lock and returns the control segment's words.

    Args:
        bridge: name of the bridge.
        replace: first close an earlier hub of this process, and end its leases that no view needs. Blocks
            until it is closed.

    Raises:
        ConsumerTaken: another process is the hub; or this one, or views of its records are left.
    """
    earlier = _ours[bridge] if replace and bridge in _ours else None
    if earlier is not None and (hub := earlier[0]()) is not None:
        hub.closing.close()
        if not hub.closing.over:  # in a handler that interrupted it: that call closes
            earlier = None
    control = open_control(bridge)

    def is_ours() -> bool:
        return lock_after(
            lambda: control.hub_pid if is_own_namespace(control.hub_pid_namespace) else 0,
            control.mapping.fd,
            LockByte.HUB,
        )

    if not (is_ours() or (earlier is not None and _give_back(earlier[1]) and is_ours())):
        pid, same = control.hub_pid, is_own_namespace(control.hub_pid_namespace)
        leave_bridge(control.mapping.fd, bridge)
        raise _taken(bridge, pid, pid == os.getpid() and same)
    control.enter(os.getpid(), pid_namespace())  # so that a second consumer names the right pid in its error
    header.fault(b"hub.locked")
    return control


def _give_back(remains: Remains) -> bool:
    """Ends, without release, the leases of a closed hub that no view needs; frees the bridge if all are.

    Returns whether it is free. A loop variable or a cell's result may hold such records for ever.
    """
    views = False
    for record, viewed in _leased(remains.bridge):
        if viewed:
            views = True
        else:
            record._abandon()
    if not views:
        remains.free()
    return not views


def _taken(bridge: str, pid: int, own: bool) -> ConsumerTaken:
    earlier = _ours[bridge][0]() if bridge in _ours else None
    if not own:
        return ConsumerTaken(
            f"bridge {bridge!r} has a living consumer: pid {pid}",
            hint=f"close it and drop its records first, or use another bridge; ps -p {pid}",
        )
    if earlier is not None and not earlier.closing.over:
        return ConsumerTaken(
            f"bridge {bridge!r} has a living consumer: pid {pid} (this very process)",
            hint="close it first; or, when a notebook's cell runs again, Consumer(..., replace=True)",
        )
    return ConsumerTaken(
        f"bridge {bridge!r} has a closed consumer in pid {pid} (this very process): {_still_held(bridge)}",
        hint="drop them: del, or copy what you keep. IPython keeps what cells showed: show three other "
        "results, then %reset -f out; after an error also sys.last_traceback = sys.last_value = None",
    )


def _still_held(bridge: str) -> str:
    """Returns the words for the records of closed hubs of this process that something still refers to."""
    leased = [viewed for _, viewed in _leased(bridge)]
    if not leased:
        return "something of it is still in use"
    columns = Counter(name for viewed in leased for name in viewed)
    views = ", ".join(f"{count} of {name}" for name, count in sorted(columns.items()))
    return f"{len(leased)} of its records are still referred to, with views: {views or 'none'}"


def _leased(bridge: str) -> Iterator[tuple[Record, list[str]]]:
    """Yields the records that keep a hub of that bridge here, each with the columns of its views."""
    for each in gc.get_objects():
        if issubclass(type(each), Record) and type(each._lane_reader) is LaneReader:
            viewed = each._viewed()
            if viewed is not None and is_lane_of(lane_name(each), bridge):
                yield each, viewed
