"""From records to batches: assembles groups, discards stale ones, queues the rest, forms the next batch."""

import itertools
import logging
import threading
import time
import weakref
from collections import Counter, deque
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TYPE_CHECKING

from shmbridge import sizing
from shmbridge._ext.lane_reader import LaneReader
from shmbridge._ext.mapping import Mapping
from shmbridge.batch import Batch
from shmbridge.config import check_choice, check_seconds, check_staleness, format_size
from shmbridge.errors import BadArgument, BatchTooBig
from shmbridge.hub.fair import FairScheduler
from shmbridge.hub.lanes import Stuck
from shmbridge.hub.schedulers import (
    AtroposScheduler,
    BatchRequest,
    OldestScheduler,
    Policy,
    Scheduler,
    Scheduling,
    Screen,
    Shares,
    StalenessHistogram,
    Want,
    is_stale,
)
from shmbridge.record.groups import NO_VERSION, Group, GroupAssembler, hand_out, oldest_version
from shmbridge.record.record import Record
from shmbridge.record.unreleased import Call
from shmbridge.schema import Split
from shmbridge.segments import locks, membership
from shmbridge.segments.closing import then_close
from shmbridge.segments.discard_reasons import Discard
from shmbridge.segments.locks import LockByte
from shmbridge.shown import counted, shown

if TYPE_CHECKING:
    from shmbridge.control.environments import QueueView
    from shmbridge.hub.hub import Hub

log = logging.getLogger(__name__)

_STUCK_AFTER_S = 1.0
_LOOK_EVERY_S = 0.25
_EVERYTHING = 1 << 31


class Flag:
    """A threading.Event without waiting: no lock, so that any signal handler can set it."""

    def __init__(self) -> None:
        self._is_set = False

    def set(self) -> None:
        """Sets the flag."""
        self._is_set = True

    def is_set(self) -> bool:
        """Returns whether the flag is set."""
        return self._is_set


class Held:
    """Records that a caller keeps without their batch; they are counted as held while this object lives.

    `end` is called in place of their release, if learner ranks may still read them.
    """

    __slots__ = ("__weakref__", "end", "records")

    def __init__(self, records: list[Record]) -> None:
        self.records = records
        self.end: Callable[[], None] | None = None

    def release(self) -> None:
        """Releases the records, unless ranks still read them: then once these are done. Idempotent."""
        if self.end is not None:
            self.end()
            return
        for record in self.records:
            record.release()


class BatchFormer:
    """Turns the lanes' records into the groups of a batch. One thread forms at a time; see `choose`.

    One lock guards everything queued. A record is in one place only: if an exception comes while it moves
    from one place to the next, its lease is lost, and the record comes again.
    """

    def __init__(self, hub: "Hub", scheduling: Scheduling) -> None:
        self._hub, self._state, self._lanes, self._waiting = hub, hub.state, hub.lanes, hub.waiting
        self._closing = hub.closing
        self._policy, self._lock = scheduling.policy, hub.closing.lock()
        self._partial = GroupAssembler(check_seconds("group_timeout_s", scheduling.group_timeout_s))
        self._complete = scheduler_of(
            self._policy, hub.env_shares, hub.lanes.has_live_producer, scheduling.allocation_wait_s
        )
        self.screen: Screen | None = None
        self._whole: deque[Group] = deque()  # whole, not yet screened
        self._screened = self._batches_formed = 0
        self._left_out = Counter(train=0, eval=0)  # groups of another split than was asked for, by split
        self._split: Split | None = None  # the one that every group in self._complete has; None: any
        # Set while the queues change. After an exception it stays set, and the next change corrects the
        # counts.
        self._changing = False
        # Batches handed out under hold="caller", possibly still held. Guarded by the lock.
        self._handed: weakref.WeakSet[Batch | Held] = weakref.WeakSet()
        # True while a thread waits for the next batch: it releases no earlier batch during the wait.
        self.somebody_waits = False
        self._late: LateReturns | None = None  # after close(): takes groups that are put back
        # Put back and not yet queued, so that put_back never changes the queues in the middle of a change.
        self._back: deque[list[Group]] = deque()
        self.put_backs = 0  # how often something was put back
        self._is_cut = False  # whether stale groups were removed from self._complete
        self._not_cut: list[Group] = []  # groups put back since, not yet checked
        self._oldest = NO_VERSION  # lower bound of the versions in self._complete, once that is cut
        self._chosen = Chosen()  # under the lock
        self._lags = StalenessHistogram()

    # -- the queues; any thread

    def queued(self, producer_id: str | None) -> int:
        """Returns the number of groups that were taken from lanes and are in no batch yet."""
        back = [group for groups in list(self._back) for group in groups]
        if producer_id is not None:
            return self._complete.queued(producer_id) + sum(
                group.producer_id == producer_id for group in back
            )
        return len(self._complete) + len(self._partial) + len(self._whole) + len(back)

    def committed(self) -> int | None:
        """Returns the committed groups whose step is not over; None while they move.

        A fragment not yet read counts as one.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return sum(lane.waiting for lane in self._lanes) + self.queued(None) + self._chosen.count
        finally:
            self._lock.release()

    @property
    def queue_view(self) -> "QueueView | None":
        """The queue by environment, under policy "atropos"; else None."""
        return self._complete if isinstance(self._complete, AtroposScheduler) else None

    @property
    def steps(self) -> int:
        """Steps of all runs: batches handed out, or batches formed if the policy counts those."""
        return self._batches_formed if self._complete.formed is None else self._complete.formed

    def count_batch(self, batches: int = 1) -> None:
        """Counts a batch that was handed out, or, with -1, one undone before it was read."""
        self._batches_formed += batches
        if batches > 0:
            self._state.note_handed()

    def stats(self) -> dict[str, float]:
        """Returns the counters: batches, screened groups, those left out, the scheduler's, staleness."""
        counted = {"batches_total": self._batches_formed, "screened_total": self._screened}
        left_out = {f"left_out_total{{{split}}}": groups for split, groups in self._left_out.items()}
        return {**counted, **left_out, **self._complete.stats(), **self._lags.stats()}

    # -- steps; any thread

    def begin_step(self, groups: list[Group]) -> bool:
        """Starts a batch's step: counts how stale its groups are, and ends the step before it.

        Returns False if the consumer is closing: do not hand the batch out.
        """
        with self._lock:
            self._chosen.begin_step(groups if self._state.limit else [])
        # Checked after the last lock: a signal handler that could only note a close has done so by now.
        if not self._closing.ending:
            self.count_lags(groups)
        return not self._closing.ending

    def count_lags(self, groups: list[Group]) -> None:
        """Counts the staleness of a batch's groups."""
        self._lags.count([group.oldest_version for group in groups], self._state.training_version)

    @then_close
    def end_step(self) -> None:
        """Ends the step: its groups are in the policy now, so waiting groups may have room to begin."""
        if self._state.limit is not None and not self._closing.closed:
            with self._lock:
                self._chosen.end_step()
            self._state.steps_ended += 1
            self._hub.look_again()

    def finished(self, groups: list[Group]) -> None:
        """Counts these groups as done: learner ranks have finished with them."""
        with self._lock:
            self._chosen.remove(groups)

    def begin_again(self) -> None:
        """Ends the last step.

        No batch is being formed, so groups lost by an exception while chosen are no longer counted.
        """
        self.end_step()
        with self._lock:
            self._chosen = Chosen()

    # -- the request

    def most_stale(self, max_staleness: int | None) -> int | None:
        """Returns the staleness that a batch may have, the off-policy limit by default; observers see it."""
        limit, given = self._state.limit, check_staleness(max_staleness)
        most = limit.max_off_policy_steps if given is None and limit is not None else given
        self._state.note_most_stale(most)
        return most

    def want(self, groups: int | None, rows: int | None) -> Want:
        """Returns the size of a batch. Raises ValueError."""
        limit = self._state.limit
        if limit is not None and groups != limit.groups_per_step:
            said = f"groups={shown(groups)}, rows={shown(rows)}: groups_per_step={limit.groups_per_step}"
            raise BadArgument(f"a batch of {said} of the consumer", hint=f"groups={limit.groups_per_step}")
        if self._policy != "atropos":
            return Want(groups, rows)
        if (run := self._state.run) is None:
            raise BadArgument(
                'policy "atropos" forms batches of run.batch_size trajectories: announce a run',
                hint="Consumer(run=shmbridge.Run(batch_size=64))",
            )
        return Want(None, run.batch_size)

    def is_stale(self, groups: list[Group], max_staleness: int | None) -> bool:
        """Returns whether any of the groups is stale."""
        if max_staleness is None:
            return False
        current = self._state.training_version
        return any(is_stale(group.oldest_version, current, max_staleness) for group in groups)

    # -- forming

    def choose(
        self, request: BatchRequest, stop: Flag | threading.Event, deadline_s: float = float("inf")
    ) -> list[Group] | None:
        """Returns the groups of the next batch, waiting for them.

        None when stopped, closed, past the deadline, or drained with too few groups left.
        """
        idle_since = time.monotonic()
        while True:
            with self._lock:
                if self._closing.ending or stop.is_set():
                    return None
                self._begin_change()
                self._cut(request)
                chosen, took = self._try(request)
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
                    # Cut what was put back in between, too: a stale group would only be withdrawn again.
                    self._cut(request)
                    chosen = self._take(request.size, now, last=True)
                    self._changing = False
                    return chosen
            until_s = min(deadline_s, self._complete.waits_until_s, now + _LOOK_EVERY_S)
            if now - idle_since > _STUCK_AFTER_S and self._complete.waits_until_s == float("inf"):
                self._check_stuck(request.size)
            if now - idle_since > _LOOK_EVERY_S:
                with self._lock:
                    self._note(request.size)
            self._waiting.wait(max(until_s - now, 0.0))

    def _note(self, size: Want) -> None:
        """Shows observers how much of the batch is there."""
        there = sum(group.rows for group in self._complete) if size.by_rows else len(self._complete)
        self._state.note_batch(size.size, size.by_rows, there, len(self._partial))

    def _begin_change(self) -> None:
        """Starts a change of the queues, under the lock; first repairs an interrupted change."""
        if self._changing:
            self._complete.recount()
            self._whole.extend(self._partial.completed())
        self._changing = True
        # A group is in one place only: if it is lost here, its records come again.
        while self._back:
            groups = self._back.popleft()
            if self._is_cut:
                self._not_cut += groups
            if any(group.split != self._split for group in groups):
                self._split = None
            self._complete.put_back(groups)

    def _try(self, request: BatchRequest) -> tuple[list[Group] | None, bool]:
        """Returns the groups of a batch, or None, and whether any record was taken from the lanes for it."""
        size = request.size
        everything = self._complete.look_ahead(len(self._lanes))
        took = everything and self._take_records(_EVERYTHING, request)
        chosen = self._take(size, time.monotonic(), last=False)
        # Take at most as many records as groups are missing: each record completes one group at most.
        if chosen is None and not everything:
            took = self._take_records(size.size - len(self._complete), request)
        return chosen, took

    def _take(self, size: Want, now_s: float, *, last: bool) -> list[Group] | None:
        chosen = self._complete.take(size, now_s, last=last) or None
        if self._state.limit is not None:
            self._chosen.add(chosen or ())
        return chosen

    def _take_records(self, most: int, request: BatchRequest) -> bool:
        """Moves the lanes' present records into groups; returns whether there was anything to move."""
        self._state.check_open()
        now = time.monotonic()
        records = self._lanes.poll(most, Call.BATCHES)
        if self._policy == "atropos":
            records.sort(key=attrgetter("_t_publish_ns"))  # upstream orders by arrival over all senders
        for record in records:
            if (group := self._partial.add(record, now)) is not None:
                self._whole.append(group)
        moved = bool(records or self._whole)
        while self._whole:
            self._queue(self._whole.popleft(), request)
        for group in self._partial.late(now, self._lanes.busy_producers()) if len(self._partial) else ():
            log.warning(
                "group %s of %s has %d of %d rows after %.0f s: discarded",
                group.group_id,
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

    def _queue(self, group: Group, request: BatchRequest) -> None:
        """Queues a whole group for a batch, unless it is screened out, of another split, or stale."""
        max_staleness = request.max_staleness
        if self.screen is not None and not self._passes(self.screen, group):
            for record in group.records:
                record.release()
            self._screened += 1
        elif request.split is not None and group.split != request.split:
            self._leave_out(group)
        elif max_staleness is not None and self.is_stale([group], max_staleness):
            group.discard(Discard.STALE)
        else:
            if max_staleness is not None:
                self._oldest = oldest_version([group], self._oldest)
            self._complete.add(group)

    def _passes(self, screen: Screen, group: Group) -> bool:
        """Returns what the screen says of a group; on an exception the group stays, and is shown again."""
        try:
            return screen(group)
        except BaseException:
            self._whole.appendleft(group)
            raise
        finally:
            # the screen reading it does not count as the user reading it
            hand_out([group], Call.BATCHES, looked_at=False)

    def _leave_out(self, group: Group) -> None:
        for record in group.records:
            record.release()
        self._left_out[group.split] += 1

    def _cut(self, request: BatchRequest) -> None:
        """Removes the queued groups that this request must not get: of another split, or stale."""
        if self._split != request.split:
            if request.split is not None:
                for group in self._complete.remove(lambda group: group.split != request.split):
                    self._leave_out(group)
            self._split = request.split
        self._cut_stale(request.max_staleness)

    def _cut_stale(self, max_staleness: int | None) -> None:
        """Discards stale groups. Checks all only if the oldest may be stale: arrivals are checked already."""
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

    def held_by_caller(self, held: Batch | Held) -> None:
        """Notes a batch handed out under hold="caller", which frees no room while its holder waits."""
        with self._lock:
            self._handed.add(held)

    def require_room(self, groups: int) -> None:
        """Raises BatchTooBig as a long wait for so many groups would. Never blocks."""
        self.somebody_waits = True
        try:
            self._check_stuck(Want(groups, None))
        finally:
            self.somebody_waits = False

    def _check_stuck(self, size: Want) -> None:
        """Raises BatchTooBig if this consumer holds every record in the lanes: no more can come."""
        with self._lock:
            here = [*self._complete, *self._partial, *itertools.chain(*self._back)]
            handed = (each for each in self._handed if isinstance(each, Held) or not each._is_lent)
            elsewhere = sum(len(each.records) for each in handed) if self.somebody_waits else 0
            complete, partial = len(self._complete), len(self._partial)
        stuck = self._lanes.stuck(sum(len(group.records) for group in here) + elsewhere)
        if stuck is None:
            return
        raise too_big(size, here, complete=complete, partial=partial, elsewhere=elsewhere, stuck=stuck)

    # -- what comes back, and the end

    def put_back(self, groups: list[Group]) -> None:
        """Returns unread groups to the queue, before all others; after close(), to the next consumer.

        Any thread. An interrupted call may be repeated: a group that is queued already is not queued twice.
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
        """Ends every lease that was not handed out, without release: the next consumer gets those records."""
        with self._lock:  # an iteration has finished with its records by now, or finds the consumer closed
            self._begin_change()
            abandon([*self._whole, *self._complete, *self._partial])
            self._whole.clear()
            self._complete.remove(lambda group: True)
            self._partial, self._not_cut = GroupAssembler(0.0), []
            if self._late is None:
                self._late = LateReturns(
                    [lane.reader for lane in self._lanes], self._state.words.mapping, self._state.bridge
                )


class Chosen:
    """The groups chosen for a batch whose step is not over. For one thread at a time."""

    def __init__(self) -> None:
        self.count = 0
        self._in_step: list[Group] = []

    def add(self, groups: Iterable[Group]) -> None:
        """Counts groups that left the queue for a batch."""
        for group in groups:
            self.count += not group.chosen
            group.chosen = True

    def remove(self, groups: Iterable[Group]) -> None:
        """Stops counting groups: their step is over, or they were put back or discarded. Idempotent."""
        for group in groups:
            self.count -= group.chosen
            group.chosen = False

    def begin_step(self, groups: list[Group]) -> None:
        """Starts the step of these groups, and ends the step before."""
        self.end_step()
        self._in_step = list(groups)

    def end_step(self) -> None:
        """Ends the step: its groups are in the policy now."""
        self.remove(self._in_step)
        self._in_step = []


def abandon(groups: Iterable[Group]) -> None:
    """Ends the groups' leases without release."""
    for group in groups:
        group.abandon()


class LateReturns:
    """Made when the consumer closes; does not keep a lane or the control segment mapped.

    For one thread at a time.
    """

    def __init__(self, readers: Iterable[LaneReader], control: Mapping, bridge: str) -> None:
        self._held_in = weakref.WeakSet([reader.lane for reader in readers if reader.held])
        self._control, self._bridge = weakref.ref(control), bridge

    def take(self, groups: list[Group], *, closed: bool) -> None:
        """Ends the groups' leases without release.

        `closed`: close() is over, so the end of the last lease gives the bridge up.

        An interrupted call may be repeated: the groups keep their records until the rest is done.
        """
        readers = {record._lane_reader for group in groups for record in group.records}
        abandon(groups)
        for reader in readers:
            if not reader.held:
                self._held_in.discard(reader.lane)
                if closed:
                    locks.unlock(reader.lane.fd, LockByte.READER)
        if closed and not self._held_in and (control := self._control()) is not None:
            membership.leave(control.fd, self._bridge)
        for group in groups:
            group.records = []  # a record keeps its lane mapped


def too_big(
    size: Want, here: list[Group], *, complete: int, partial: int, elsewhere: int, stuck: Stuck
) -> BatchTooBig:
    """Returns the error. `here`: groups queued; `elsewhere`: records its taker holds of earlier batches."""
    sizes = [record._extent_bytes for group in here for record in group.records]
    fragments = max((-(-len(group.records) * group.size // group.rows) for group in here), default=1)
    largest = max([*sizes, stuck.wanted_bytes])
    lanes, producers = counted(stuck.lanes, "lane"), counted(stuck.live, "living producer")
    hold, their = ("holds", "its") if stuck.lanes == 1 else ("hold", "their")
    return BatchTooBig(
        f"a batch of {size} cannot be filled: {complete} are complete, {partial} in part; "
        + (f"who waits for it holds {counted(elsewhere, 'record')} of batches before; " if elsewhere else "")
        + (
            f"{stuck.dropped} were dropped without release, see take_back_dropped(); "
            if stuck.dropped
            else ""
        )
        + f"{lanes} of {format_size(stuck.data_bytes)} in all {hold} {counted(stuck.held, 'record')} "
        f"of at most {format_size(largest)}, "
        f"and {their} {producers} {'has' if stuck.live == 1 else 'have'} no room for "
        f"{format_size(stuck.wanted_bytes)} more",
        hint=sizing.what_to_raise(
            -(-(size.as_groups(here) * fragments + elsewhere) // stuck.live),
            largest,
            min([*sizes, stuck.wanted_bytes]) == largest,
        )
        + (", raise Consumer(lanes=): more lanes wait" if stuck.crowded else ""),
    )


def scheduler_of(
    policy: Policy, shares: Shares, is_live: Callable[[str], bool], allocation_wait_s: float
) -> Scheduler:
    """Returns a scheduler of that policy. `is_live` says whether a producer may still put something.

    Raises BadArgument for an unknown policy.
    """
    check_choice("policy", policy, ("fair", "atropos", "oldest"))
    if policy == "fair":
        return FairScheduler(shares, is_live, allocation_wait_s)
    if policy == "atropos":
        return AtroposScheduler(shares)
    return OldestScheduler()
