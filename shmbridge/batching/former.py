"""From records to batches: group assembly, staleness cut, what is queued, which groups are the next batch.

Knows groups and batch sizes; takes records from the lanes, and a scheduler chooses. Used by the consumer, by
its iterations and by the server of learner ranks.
"""

import itertools
import logging
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from operator import attrgetter
from typing import TYPE_CHECKING

from shmbridge.batch import Batch
from shmbridge.batching.atropos import AtroposScheduler
from shmbridge.batching.in_flight import Chosen
from shmbridge.batching.late_returns import LateReturns, abandon
from shmbridge.batching.prefetch import Flag
from shmbridge.batching.request import BatchRequest
from shmbridge.batching.scheduler import Policy, Want, scheduler_of
from shmbridge.batching.staleness import StalenessHistogram, is_stale
from shmbridge.batching.stuck import too_big
from shmbridge.hub.control_plane import ControlPlane
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.hub.waiting import Waiting
from shmbridge.record.groups import NO_VERSION, Group, GroupAssembler, hand_out, oldest_version
from shmbridge.record.unreleased import Call
from shmbridge.segments.closing import Closing, is_mine, then_close
from shmbridge.segments.discard_reasons import Discard

if TYPE_CHECKING:
    from shmbridge.control.environments import QueueView

log = logging.getLogger(__name__)

Screen = Callable[[Group], bool]
_STUCK_AFTER_S = 1.0
_LOOK_EVERY_S = 0.25
_EVERYTHING = 1 << 31


class BatchFormer:
    """Everything between the lanes' records and the groups of a batch.

    One thread forms at a time; see `choose`.

    One lock is for all that is queued. A record is in one place only: an exception between two places loses
    its lease, and it comes again.
    """

    def __init__(
        self,
        state: HubState,
        lanes: LaneSet,
        waiting: Waiting,
        control_plane: ControlPlane,
        closing: Closing,
        *,
        policy: Policy,
        group_timeout_s: float,
        allocation_wait_s: float,
    ) -> None:
        self._state, self._lanes, self._waiting, self._control_plane, self._closing = (
            state,
            lanes,
            waiting,
            control_plane,
            closing,
        )
        self._policy, self._lock = policy, closing.lock()
        self._partial = GroupAssembler(group_timeout_s)
        self._complete = scheduler_of(
            policy, control_plane.env_shares, lanes.has_live_producer, allocation_wait_s
        )
        self.screen: Screen | None = None
        self._whole: deque[Group] = deque()  # whole, and not yet shown to the screen
        self._screened = self._batches_formed = 0
        # what is queued; an exception leaves it set, and the next change puts the counts right
        self._changing = False
        # under "caller": what may still be held; under the lock
        self._handed: weakref.WeakSet[Batch] = weakref.WeakSet()
        # for the next batch; the holder of earlier ones releases nothing meanwhile
        self.somebody_waits = False
        self._late: LateReturns | None = None  # after close(): takes what is put back
        # put back, and not yet queued: put_back never comes in the middle of a change
        self._back: deque[list[Group]] = deque()
        self.put_backs = 0  # how often something was put back
        self._is_cut = False  # nothing in self._complete is stale
        self._not_cut: list[Group] = []  # but for what was put back since
        self._oldest = NO_VERSION  # lower bound of the versions in self._complete, once that is cut
        self._chosen = Chosen()  # under the lock
        self._lags = StalenessHistogram()

    @property
    def lock_is_mine(self) -> bool:
        """Whether this thread holds the lock."""
        return is_mine(self._lock)

    # -- what is queued; any thread
    # -----------------------------------------------------------------------------------------------

    def queued(self, producer_id: str | None) -> int:
        """Groups that were taken from lanes and are in no batch yet."""
        back = [group for groups in list(self._back) for group in groups]
        if producer_id is not None:
            return self._complete.queued(producer_id) + sum(
                group.producer_id == producer_id for group in back
            )
        return len(self._complete) + len(self._partial) + len(self._whole) + len(back)

    def committed(self) -> int | None:
        """Groups committed whose step is not over, a fragment not yet read counting as one; None while they
        are moved.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return sum(lane.waiting for lane in self._lanes) + self.queued(None) + self._chosen.count
        finally:
            self._lock.release()

    @property
    def queue_view(self) -> "QueueView | None":
        """What is queued by environment, where the policy knows."""
        return self._complete if isinstance(self._complete, AtroposScheduler) else None

    @property
    def steps(self) -> int:
        """Steps of all runs: the batches handed out, or those the policy has formed, if it counts these."""
        return self._batches_formed if self._complete.formed is None else self._complete.formed

    def count_batch(self, batches: int = 1) -> None:
        """A batch was handed out, or, with -1, undone before anybody read it."""
        self._batches_formed += batches

    def stats(self) -> dict[str, float]:
        """Counters: batches, what the screen and the policy did, how stale the groups of all batches were."""
        counted = {"batches_total": self._batches_formed, "screened_total": self._screened}
        return {**counted, **self._complete.stats(), **self._lags.stats()}

    # -- steps; any thread
    # --------------------------------------------------------------------------------------------------------

    def begin_step(self, groups: list[Group]) -> bool:
        """A batch is handed out: how stale it is is counted, and the step before it is over.

        False: not handed out, since this closes.
        """
        with self._lock:
            self._chosen.begin_step(groups if self._state.limit else [])
        # asked after the last lock: a handler that could only note a close has done so by now
        if not self._closing.ending:
            self.count_lags(groups)
        return not self._closing.ending

    def count_lags(self, groups: list[Group]) -> None:
        """Counts how stale the groups of a batch are."""
        self._lags.count([group.oldest_version for group in groups], self._state.training_version)

    @then_close
    def end_step(self) -> None:
        """What was handed out last is in the policy now: there may be room for groups that wait to begin."""
        if self._state.limit is not None and not self._closing.closed:
            with self._lock:
                self._chosen.end_step()
            self._state.steps_ended += 1
            self._control_plane.look_again()

    def finished(self, groups: list[Group]) -> None:
        """Learner ranks are done with these groups."""
        with self._lock:
            self._chosen.remove(groups)

    def begin_again(self) -> None:
        """Ends the last step.

        No batch is being formed, so groups of one that an exception lost are no longer counted.
        """
        self.end_step()
        with self._lock:
            self._chosen = Chosen()

    # -- what is asked for
    # --------------------------------------------------------------------------------------------------------

    def most_stale(self, max_staleness: int | None) -> int | None:
        """What a batch allows: under a limit of steps, not more than those."""
        limit = self._state.limit
        return limit.max_off_policy_steps if max_staleness is None and limit is not None else max_staleness

    def want(self, groups: int | None, rows: int | None) -> Want:
        """How large a batch is to be. Raises ValueError."""
        limit = self._state.limit
        if limit is not None and groups != limit.groups_per_step:
            raise ValueError(
                f"a batch of groups={groups}, rows={rows}: this consumer has "
                f"groups_per_step={limit.groups_per_step}"
            )
        if self._policy != "atropos":
            return Want(groups, rows)
        if (run := self._state.run) is None:
            raise ValueError(
                'policy "atropos" forms batches of run.batch_size trajectories: announce a run, '
                "Consumer(run=)"
            )
        return Want(None, run.batch_size)

    def is_stale(self, groups: list[Group], max_staleness: int | None) -> bool:
        """Whether any is."""
        if max_staleness is None:
            return False
        current = self._state.training_version
        return any(is_stale(group.oldest_version, current, max_staleness) for group in groups)

    # -- forming
    # --------------------------------------------------------------------------------------------------------

    def choose(
        self, request: BatchRequest, stop: Flag | threading.Event, deadline_s: float = float("inf")
    ) -> list[Group] | None:
        """The groups of the next batch, waiting for them; None when stopped, closed, too late, or drained
        with too few groups left.
        """
        idle_since = time.monotonic()
        while True:
            with self._lock:
                if self._closing.ending or stop.is_set():
                    return None
                self._begin_change()
                self._cut_stale(request.max_staleness)
                chosen, took = self._try(request.size, request.max_staleness)
                self._changing = False
            if chosen is not None:
                return chosen
            now = time.monotonic()
            if took:
                idle_since = now
                continue
            if now >= deadline_s:
                return None
            if self._waiting.drained():
                with self._lock:
                    self._begin_change()
                    # what was put back meanwhile: formed again, it would only be withdrawn again
                    self._cut_stale(request.max_staleness)
                    chosen = self._take(request.size, now, last=True)
                    self._changing = False
                    return chosen
            until_s = min(deadline_s, self._complete.waits_until_s, now + _LOOK_EVERY_S)
            if now - idle_since > _STUCK_AFTER_S and self._complete.waits_until_s == float("inf"):
                self._check_stuck(request.size)
            self._waiting.wait(max(until_s - now, 0.0))

    def _begin_change(self) -> None:
        """Under the lock, before what is queued changes; what an exception left of the last change is put
        right.
        """
        if self._changing:
            self._complete.recount()
            self._whole.extend(self._partial.completed())
        self._changing = True
        while self._back:  # a group is in one place only: lost on its way between two, its records come again
            groups = self._back.popleft()
            if self._is_cut:
                self._not_cut += groups
            self._complete.put_back(groups)

    def _try(self, size: Want, max_staleness: int | None) -> tuple[list[Group] | None, bool]:
        """The groups of a batch, if there is one, and whether any record was taken for it from the lanes."""
        everything = self._complete.look_ahead(len(self._lanes))
        took = everything and self._take_records(_EVERYTHING, max_staleness)
        chosen = self._take(size, time.monotonic(), last=False)
        # at most as many as groups are missing: each record completes one group at most
        if chosen is None and not everything:
            took = self._take_records(size.size - len(self._complete), max_staleness)
        return chosen, took

    def _take(self, size: Want, now_s: float, *, last: bool) -> list[Group] | None:
        chosen = self._complete.take(size, now_s, last=last) or None
        if self._state.limit is not None:
            self._chosen.add(chosen or ())
        return chosen

    def _take_records(self, most: int, max_staleness: int | None) -> bool:
        """Moves what the lanes have now into groups; whether there was anything."""
        self._state.check_open()
        now = time.monotonic()
        records = self._lanes.poll(most, Call.BATCHES)
        if self._policy == "atropos":
            records.sort(key=attrgetter("t_publish_ns"))  # upstream's order is that of arrival, whoever sends
        for record in records:
            if (group := self._partial.add(record, now)) is not None:
                self._whole.append(group)
        moved = bool(records or self._whole)
        while self._whole:
            self._queue(self._whole.popleft(), max_staleness)
        for group in self._partial.late(now, self._lanes.busy_producers()) if len(self._partial) else ():
            log.warning(
                "group %s of %s has %d of %d rows after %.0f s: discarded",
                group.records[0].group_id,
                group.producer_id,
                group.rows,
                group.size,
                self._partial.timeout_s,
            )
            group.discard(Discard.PARTIAL)
        if not records and len(self._partial):
            for group in self._partial.orphans(self._lanes.finished_producers()):
                group.discard(Discard.PARTIAL)
        return moved

    def _queue(self, group: Group, max_staleness: int | None) -> None:
        """Takes a whole group over for a batch, unless it is screened out or stale."""
        if self.screen is not None and not self._passes(self.screen, group):
            for record in group.records:
                record.release()
            self._screened += 1
        elif max_staleness is not None and self.is_stale([group], max_staleness):
            group.discard(Discard.STALE)
        else:
            if max_staleness is not None:
                self._oldest = oldest_version([group], self._oldest)
            self._complete.add(group)

    def _passes(self, screen: Screen, group: Group) -> bool:
        """What the screen says of a group; one that it raises for stays, and is shown again."""
        try:
            return screen(group)
        except BaseException:
            self._whole.appendleft(group)
            raise
        finally:
            hand_out([group], Call.BATCHES, looked_at=False)  # a screen's look is not the user's

    def _cut_stale(self, max_staleness: int | None) -> None:
        """Looks at every group only when the oldest may have grown stale: what comes later is looked at when
        it comes.
        """
        if max_staleness is None:
            self._is_cut, self._not_cut = False, []
            return
        current = self._state.training_version
        self._oldest = oldest_version(self._not_cut, self._oldest)
        self._not_cut = []
        if not self._is_cut or is_stale(self._oldest, current, max_staleness):
            for group in self._complete.remove(
                lambda group: is_stale(group.oldest_version, current, max_staleness)
            ):
                group.discard(Discard.STALE)
            self._oldest = oldest_version(self._complete)
            self._is_cut = True

    # -- a batch that can never be filled
    # -----------------------------------------------------------------------------------------

    def held_by_caller(self, batch: Batch) -> None:
        """A batch under hold="caller" is handed out: while its holder waits for another, nobody makes
        room.
        """
        with self._lock:
            self._handed.add(batch)

    def _check_stuck(self, size: Want) -> None:
        """Raises if the batch can never be filled: everything in the lanes is held here, and nobody else
        holds anything.
        """
        with self._lock:
            here = [*self._complete, *self._partial, *itertools.chain(*self._back)]
            elsewhere = sum(len(handed.records) for handed in self._handed) if self.somebody_waits else 0
            complete, partial = len(self._complete), len(self._partial)
        stuck = self._lanes.stuck(sum(len(group.records) for group in here) + elsewhere)
        if stuck is None:
            return
        raise too_big(size, here, complete=complete, partial=partial, elsewhere=elsewhere, stuck=stuck)

    # -- what comes back, and the end
    # ---------------------------------------------------------------------------------------------

    def put_back(self, groups: list[Group]) -> None:
        """Groups of a batch that was not handed out, or not read, wait again, before all others, or for the
        next consumer; any thread.

        An interrupted call may be repeated: what waits already is not queued twice.
        """
        self._state.check_process()
        hand_out(groups, Call.BATCHES, looked_at=False)
        with self._lock:
            self._chosen.remove(groups)
            if self._late is not None:
                self._late.take(groups, closed=self._state.words_gone)
                return
            waiting = set(map(id, itertools.chain(self._complete, *self._back)))
            self.put_backs += 1
            self._back.append(
                [
                    group
                    for place, group in {id(group): group for group in groups}.items()
                    if place not in waiting
                ]
            )

    def forget(self) -> None:
        """Lets go of every lease that was not handed out, un-released: the next consumer gets those
        records.
        """
        with self._lock:  # whoever iterates is through with what came, or finds that this is closed
            self._begin_change()
            abandon([*self._whole, *self._complete, *self._partial])
            self._whole.clear()
            self._complete.remove(lambda group: True)
            self._partial, self._not_cut = GroupAssembler(0.0), []
            if self._late is None:
                self._late = LateReturns(
                    [lane.reader for lane in self._lanes], self._state.words.mapping, self._state.bridge
                )
