"""From records to batches: assembles groups, discards stale ones, queues the rest, forms the next batch.

What is asked of a batch is a `BatchRequest`, checked once and passed on whole.

What is queued is in one compiled object, _ext/groups.pyx, whose changes nothing interrupts. What may run
Python code, wait, or release is here, between two changes, with groups that no queue holds.
"""

import logging
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Literal, Self

from shmbridge import sizing
from shmbridge._ext import header
from shmbridge._ext.groups import NO_VERSION, AtroposScheduler, FairScheduler, GroupQueues, OldestScheduler
from shmbridge._ext.lane import LaneReader
from shmbridge.batch import Batch, Hold, Layout, MakeBatch, as_batch
from shmbridge.config import (
    check_choice,
    check_count,
    check_seconds,
    check_staleness,
    check_timeout,
    format_size,
)
from shmbridge.control.environments import Queued, as_queued
from shmbridge.errors import BadArgument, BatchTooBig, Discard, counted, shown
from shmbridge.hub.lanes import Stuck
from shmbridge.record import Call, Group, Record, hand_out, log_contradictions
from shmbridge.schema import Split
from shmbridge.segments import LockByte, leave_bridge, then_close, unlock

if TYPE_CHECKING:
    from shmbridge.control.environments import QueueView
    from shmbridge.hub.hub import Hub

Screen = Callable[[Group], bool]
MOST_LAG = 7  # staleness values counted one by one; anything staler shares one bar
LAGS = (*map(str, range(MOST_LAG + 1)), f"over_{MOST_LAG}", "unknown")
_MOST_PREFETCHED = 1024
Policy = Literal["fair", "atropos", "oldest"]


@dataclass(frozen=True, slots=True)
class Want:
    """The size of a batch: a number of groups, or a number of rows (trajectories)."""

    groups: int | None
    rows: int | None

    def __post_init__(self) -> None:
        given = [
            (name, size) for name, size in (("groups", self.groups), ("rows", self.rows)) if size is not None
        ]
        if len(given) != 1:
            said = "groups and rows are both given" if given else "neither groups nor rows is given"
            raise BadArgument(f"the size of a batch: {said}", hint="groups=8, or rows=64")
        name, size = given[0]
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            number = str(size).strip() if isinstance(size, str) else ""
            hint = f"{name}={number}, without quotes" if number.isdigit() else f"{name}=8"
            raise BadArgument(f"{name}={shown(size)} is no number of {name} from 1", hint=hint)

    def __str__(self) -> str:
        return f"{self.groups} groups" if self.rows is None else f"{self.rows} trajectories"

    @property
    def size(self) -> int:
        """The number of groups or rows; more than any memory holds is as good as 2**62."""
        return min(self.groups if self.groups is not None else self.rows or 0, 1 << 62)

    @property
    def by_rows(self) -> bool:
        """Whether the size counts rows (trajectories)."""
        return self.groups is None

    def as_groups(self, like: Sequence[Group]) -> int:
        """Returns how many groups that is, if all are like these."""
        if self.groups is not None:
            return self.groups
        return -(-(self.rows or 1) * len(like) // max(sum(group.size for group in like), 1))


def check_screen(keep: Screen | None) -> Screen | None:
    """Returns what Consumer.screen was given, or raises BadArgument."""
    if keep is not None and not callable(keep):
        raise BadArgument(f"keep={shown(keep)} cannot be called", hint="a function of a group, or None")
    return keep


def staleness(stamped: int, current: int) -> int:
    """Returns the versions between the stamped and the current one; 0 where either is unknown (-1)."""
    return max(current - stamped, 0) if stamped >= 0 and current >= 0 else 0


def is_stale(stamped: int, current: int, max_staleness: int | None) -> bool:
    """Returns whether a record exceeds the limit; None is no limit, and an unstamped record never does."""
    return max_staleness is not None and staleness(stamped, current) > max_staleness


def staleness_of(stamped: int, current: int) -> str:
    """Returns the histogram bar of a staleness: one of LAGS."""
    if stamped < 0 or current < 0:
        return "unknown"
    lag = staleness(stamped, current)
    return str(lag) if lag <= MOST_LAG else f"over_{MOST_LAG}"


class StalenessHistogram:
    """A histogram of groups' staleness at the hand-out of their batch. One thread counts; any may read."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys(LAGS, 0)
        self._largest = 0
        self._ahead = 0

    def count(self, stamped: Iterable[int], current: int) -> None:
        """Counts groups by the version under which each began."""
        for version in stamped:
            self._counts[staleness_of(version, current)] += 1
            self._ahead += version > current
            self._largest = max(self._largest, staleness(version, current))

    def stats(self) -> dict[str, float]:
        """Returns `staleness_groups_total{lag}`, the largest staleness, and groups of future versions."""
        lags = {f"staleness_groups_total{{{lag}}}": count for lag, count in self._counts.items()}
        return {**lags, "staleness_max": self._largest, "policy_version_ahead_total": self._ahead}


@dataclass(frozen=True, slots=True)
class BatchRequest:
    """The arguments of Consumer.batches; `max_staleness` includes the off-policy limit.

    Raises BadArgument for an unknown split.
    """

    size: Want
    layout: Layout = "packed"
    make: MakeBatch | None = None
    max_staleness: int | None = None
    split: Split | None = "train"
    hold: Hold = "step"
    prefetch: int = 0
    timeout_s: float | None = None

    def __post_init__(self) -> None:
        if self.split is not None:
            check_choice("split", self.split, ("train", "eval"))

    def checked(self) -> Self:
        """Returns the request for an iteration, with plain numbers. Raises BadArgument."""
        prefetch = check_count("prefetch", self.prefetch, 0, _MOST_PREFETCHED)
        timeout_s = check_timeout(self.timeout_s)
        if timeout_s is not None and timeout_s < 0:
            check_seconds("timeout_s", timeout_s)
        if self.make is not None and not callable(self.make):
            raise BadArgument(
                f"make={shown(self.make)} cannot be called",
                hint="make=a function of (groups, layout), or a Batch class",
            )
        check_choice("layout", self.layout, ("padded", "packed"))
        check_choice("hold", self.hold, ("step", "gather", "caller"))
        return replace(self, prefetch=prefetch, timeout_s=timeout_s)

    def batch_of(self, groups: list[Group]) -> Batch:
        """Returns the groups as a batch. Raises TypeError if `make` returns no batch."""
        return as_batch((self.make or Batch)(groups, self.layout))


@dataclass(frozen=True, slots=True)
class Scheduling:
    """How groups are chosen for batches; see Consumer."""

    policy: Policy
    group_timeout_s: float
    allocation_wait_s: float


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
    """Turns the lanes' records into the groups of a batch. One thread forms at a time; see `choose`."""

    def __init__(self, hub: "Hub", scheduling: Scheduling) -> None:
        self._hub, self._state, self._lanes, self._waiting = hub, hub.state, hub.lanes, hub.waiting
        self._closing, self._policy = hub.closing, scheduling.policy
        timeout_s = check_seconds("group_timeout_s", scheduling.group_timeout_s)
        self._queues = GroupQueues(scheduler_of(self._policy, scheduling.allocation_wait_s), timeout_s)
        self.screen: Screen | None = None
        self._screened = self._batches_formed = 0
        self._left_out = Counter(train=0, eval=0)  # groups of another split than was asked for, by split
        # Batches handed out under hold="caller", possibly still held; by id.
        self._handed: weakref.WeakValueDictionary[int, Batch | Held] = weakref.WeakValueDictionary()
        # True while a thread waits for the next batch: it releases no earlier batch during the wait.
        self.somebody_waits = False
        self._late: ReturnsAfterClose | None = None  # after close(): takes groups that are put back
        self._late_lock = hub.closing.lock()
        self._lags = StalenessHistogram()

    # -- the queues; any thread

    def queued(self, producer_id: str | None) -> int:
        """Returns the number of groups that were taken from lanes and are in no batch yet."""
        return self._queues.queued(producer_id)

    def committed(self) -> int | None:
        """Returns the committed groups whose step is not over; None while some move from the lanes.

        A fragment not yet read counts as one.
        """
        queues = self._queues
        moves = queues.moves
        if queues.moving:
            return None
        committed = sum(lane.waiting for lane in self._lanes) + queues.committed
        return None if queues.moving or queues.moves != moves else committed

    @property
    def queue_view(self) -> "QueueView | None":
        """The queue by environment, under policy "atropos"; else None."""
        return self if self._policy == "atropos" else None

    def __len__(self) -> int:
        """Groups that the policy may choose from."""
        return len(self._queues.scheduler)

    def by_env(self) -> Mapping[int | None, Queued]:
        """Returns the queue of each environment, under policy "atropos"."""
        scheduler = self._queues.scheduler
        return as_queued(scheduler.by_env()) if isinstance(scheduler, AtroposScheduler) else {}

    @property
    def put_backs(self) -> int:
        """How often something was put back."""
        return self._queues.put_backs

    @property
    def steps(self) -> int:
        """Steps of all runs: batches handed out, or batches formed if the policy counts those."""
        formed = self._queues.scheduler.formed
        return self._batches_formed if formed is None else formed

    def count_batch(self, batches: int = 1) -> None:
        """Counts a batch that was handed out, or, with -1, one undone before it was read."""
        self._batches_formed += batches
        if batches > 0:
            self._state.note_handed()

    def stats(self) -> dict[str, float]:
        """Returns the counters: batches, screened groups, those left out, the scheduler's, staleness."""
        counted = {"batches_total": self._batches_formed, "screened_total": self._screened}
        left_out = {f"left_out_total{{{split}}}": groups for split, groups in self._left_out.items()}
        return {**counted, **left_out, **self._queues.scheduler.stats(), **self._lags.stats()}

    # -- steps; any thread

    def begin_step(self, groups: list[Group]) -> bool:
        """Starts a batch's step: counts how stale its groups are, and ends the step before it.

        Returns False if the consumer is closing: do not hand the batch out.
        """
        self._queues.begin_step(groups if self._state.limit else [])
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
            self._queues.end_step()
            self._state.steps_ended += 1
            self._hub.look_again()

    def finished(self, groups: list[Group]) -> None:
        """Counts these groups as done: learner ranks have finished with them."""
        self._queues.finish(groups)

    def begin_again(self) -> None:
        """Ends the last step.

        No batch is being formed, so groups lost by an exception while chosen are no longer counted.
        """
        self.end_step()
        self._queues.begin_again()

    # -- the request

    def most_stale(self, max_staleness: int | None) -> int | None:
        """Returns the staleness that a batch may have, the off-policy limit by default; observers see it."""
        limit, given = self._state.limit, check_staleness(max_staleness)
        most = limit.max_off_policy_steps if given is None and limit is not None else given
        self._state.note_most_stale(most)
        return None if most is None else min(most, NO_VERSION)

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
        while not (self._closing.ending or stop.is_set()):
            chosen, took = self._try(request)
            if chosen is not None:
                return chosen
            now = time.monotonic()
            if took:
                idle_since = now
                continue
            if now >= deadline_s:
                return None
            if self._waiting.drained():
                return self._take(request, now, last=True)
            waits_until_s = self._queues.scheduler.waits_until_s
            if now - idle_since > _STUCK_AFTER_S and waits_until_s == float("inf"):
                self._check_stuck(request.size)
            if now - idle_since > _LOOK_EVERY_S:
                self._note(request.size)
            self._waiting.wait(max(min(deadline_s, waits_until_s, now + _LOOK_EVERY_S) - now, 0.0))
        return None

    def _note(self, size: Want) -> None:
        """Shows observers how much of the batch is there."""
        complete = self._queues.complete
        there = sum(group.rows for group in complete) if size.by_rows else len(complete)
        self._state.note_batch(size.size, size.by_rows, there, len(self._queues.partial))

    def _try(self, request: BatchRequest) -> tuple[list[Group] | None, bool]:
        """Returns the groups of a batch, or None, and whether any record was taken from the lanes for it."""
        # Choosing well needs every record that is there, but for "fair" without requested shares.
        everything = self._policy != "fair" or (len(self._lanes) > 1 and len(self._hub.env_shares()) > 0)
        took = everything and self._take_records(_EVERYTHING, request)
        chosen = self._take(request, time.monotonic(), last=False)
        # Take at most as many records as groups are missing: each record completes one group at most.
        if chosen is None and not everything:
            took = self._take_records(request.size.size - len(self._queues.scheduler), request)
        return chosen, took

    def _take(self, request: BatchRequest, now_s: float, *, last: bool) -> list[Group] | None:
        shares = self._hub.env_shares()
        chosen, left_out, stale = self._queues.take(
            request.size.size,
            request.size.by_rows,
            now_s,
            last=last,
            shares=shares,
            live=self._lanes.live_producers() if shares else (),
            counted=self._state.limit is not None,
            split=request.split,
            current=self._state.training_version,
            most_stale=request.max_staleness,
        )
        self._drop((left_out, stale))
        return chosen

    def _take_records(self, most: int, request: BatchRequest) -> bool:
        """Moves the lanes' present records into groups; returns whether there was anything to move."""
        self._state.check_open()
        now = time.monotonic()
        try:
            self._queues.moving = True
            self._queues.moves += 1
            records = self._lanes.poll(most, Call.BATCHES)
            if self._policy == "atropos":
                records.sort(key=attrgetter("_t_publish_ns"))  # upstream orders by arrival over all senders
            if not self._queues.add(records, now):
                self._return_late(records)
        finally:
            self._queues.moving = False
        moved = bool(records or self._queues.whole)
        self._admit(request)
        if len(self._queues.partial):
            self._discard_fragments(now, none_came=not records)
        return moved

    def _admit(self, request: BatchRequest) -> None:
        """Queues the whole groups for a batch, unless they are screened out, of another split, or stale."""
        if self.screen is None:
            self._drop(self._queues.admit(None, *self._limits(request), self._hub.env_shares()))
            return
        for group in self._queues.whole:
            if self._passes(self.screen, group):
                self._drop(self._queues.admit(group, *self._limits(request), self._hub.env_shares()))
            elif self._queues.reject(group):
                for record in group.records:
                    record.release()
                self._screened += 1

    def _passes(self, screen: Screen, group: Group) -> bool:
        """Returns what the screen says of a group; on an exception the group stays, and is shown again."""
        try:
            return screen(group)
        finally:
            # the screen reading it does not count as the user reading it
            hand_out([group], Call.BATCHES, looked_at=False)

    def _limits(self, request: BatchRequest) -> tuple[str | None, int, int | None]:
        return request.split, self._state.training_version, request.max_staleness

    def _drop(self, dropped: tuple[list[Group], list[Group]]) -> None:
        left_out, stale = dropped
        for group in left_out:
            for record in group.records:
                record.release()
            self._left_out[group.split] += 1
        for group in stale:
            group.discard(Discard.STALE)

    def _discard_fragments(self, now_s: float, *, none_came: bool) -> None:
        """Discards groups that will never be whole."""
        log_contradictions(self._queues.partial)
        left = self._lanes.finished_producers() if none_came else None
        late, orphans = self._queues.late(now_s, self._lanes.busy_producers(), left)
        for group in late:
            log.warning(
                "group %s of %s has %d of %d rows after %.0f s: discarded",
                group.group_id,
                group.producer_id,
                group.rows,
                group.size,
                self._queues.partial.timeout_s,
            )
        for group in (*late, *orphans):
            group.discard(Discard.PARTIAL)

    # -- a batch that can never be filled

    def held_by_caller(self, held: Batch | Held) -> None:
        """Notes a batch handed out under hold="caller", which frees no room while its holder waits."""
        self._handed[id(held)] = held

    def require_room(self, groups: int) -> None:
        """Raises BatchTooBig as a long wait for so many groups would. Never blocks."""
        self.somebody_waits = True
        try:
            self._check_stuck(Want(groups, None))
        finally:
            self.somebody_waits = False

    def _check_stuck(self, size: Want) -> None:
        """Raises BatchTooBig if this consumer holds every record in the lanes: no more can come."""
        complete, partial = self._queues.complete, list(self._queues.partial)
        here, elsewhere = [*complete, *partial], 0
        if self.somebody_waits:
            handed = [held for each in self._handed.valuerefs() if (held := each()) is not None]
            lent = (each for each in handed if isinstance(each, Held) or not each._is_lent)
            elsewhere = sum(len(each.records) for each in lent)
        stuck = self._lanes.stuck(sum(len(group.records) for group in here) + elsewhere)
        if stuck is None:
            return
        raise too_big(
            size, here, complete=len(complete), partial=len(partial), elsewhere=elsewhere, stuck=stuck
        )

    # -- what comes back, and the end

    def put_back(self, groups: list[Group]) -> None:
        """Returns unread groups to the queue, before all others; after close(), to the next consumer.

        Any thread. An interrupted call may be repeated: a group that is queued already is not queued twice.
        """
        self._state.check_process()
        groups = list(groups)
        hand_out(groups, Call.BATCHES, looked_at=False)
        if not self._queues.put_back(groups):
            self._return_late([record for group in groups for record in group.records])
            for group in groups:
                group.records = []  # a record keeps its lane mapped

    def _return_late(self, records: list[Record]) -> None:
        with self._late_lock:
            if self._late is not None:
                self._late.take(records, closed=self._state.words_gone)

    def forget(self) -> None:
        """Ends every lease that was not handed out, without release: the next consumer gets those records."""
        with self._late_lock:
            if self._late is None:
                self._late = ReturnsAfterClose(
                    [lane.reader for lane in self._lanes], self._state.words.mapping, self._state.bridge
                )
        for group in self._queues.close():
            group.abandon()


class ReturnsAfterClose:
    """Ends the leases of groups that come back after close(); the last return frees the bridge.

    Does not keep a lane or the control segment mapped. For one thread at a time.
    """

    def __init__(self, readers: Iterable[LaneReader], control: header.Mapping, bridge: str) -> None:
        self._held_in = weakref.WeakSet([reader.lane for reader in readers if reader.held])
        self._control, self._bridge = weakref.ref(control), bridge

    def take(self, records: Collection[Record], *, closed: bool) -> None:
        """Ends the records' leases without release. An interrupted call may be repeated.

        `closed`: close() is over, so the end of the last lease gives the bridge up.
        """
        readers = {record._lane_reader for record in records}
        for record in records:
            record._abandon()
        for reader in readers:
            if not reader.held:
                self._held_in.discard(reader.lane)
                if closed:
                    unlock(reader.lane.fd, LockByte.READER)
        if closed and not self._held_in and (control := self._control()) is not None:
            leave_bridge(control.fd, self._bridge)


def scheduler_of(
    policy: Policy, allocation_wait_s: float
) -> FairScheduler | OldestScheduler | AtroposScheduler:
    """Returns an empty scheduler of that policy. Raises BadArgument for an unknown policy."""
    check_choice("policy", policy, ("fair", "atropos", "oldest"))
    if policy == "fair":
        return FairScheduler(check_seconds("allocation_wait_s", allocation_wait_s))
    return AtroposScheduler() if policy == "atropos" else OldestScheduler()


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
