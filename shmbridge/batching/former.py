"""From records to batches: group assembly, staleness cut, scheduling, gathering ahead.

The consumer's other half.

Knows groups and batches; takes records through the consumer, and asks the lanes only whether they are stuck.
Called by consumer.py and ranks/server.py.
"""

import functools
import itertools
import logging
import queue
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import TYPE_CHECKING, Literal

from shmbridge import sizing
from shmbridge.admission.limit import Chosen, Limit
from shmbridge.batch import Batch, Layout, MakeBatch, as_batch, forget_spare_memory, unreadable
from shmbridge.batching.atropos import AtroposScheduler
from shmbridge.batching.late_returns import LateReturns, abandon
from shmbridge.batching.prefetch import Flag, Prefetcher
from shmbridge.batching.scheduler import Policy, Want, scheduler_of
from shmbridge.batching.staleness import Lags, is_stale
from shmbridge.config import check_choice, check_count, check_timeout, format_size
from shmbridge.errors import BatchTooBig, ConsumerEmpty, IterationOver
from shmbridge.hub.lanes import LaneSet
from shmbridge.record.groups import NO_VERSION, Group, GroupAssembler, hand_out, oldest_version
from shmbridge.record.unreleased import Call
from shmbridge.segments.closing import is_mine
from shmbridge.segments.in_thread import in_another_thread
from shmbridge.segments.reasons import Discard

if TYPE_CHECKING:
    from shmbridge.consumer import Consumer
    from shmbridge.control.environments import QueueView

log = logging.getLogger(__name__)

Hold = Literal["step", "gather", "caller"]
Screen = Callable[[Group], bool]
_STUCK_AFTER_S = 1.0
_LOOK_EVERY_S = 0.25
_EVERYTHING = 1 << 31
_MOST_PREFETCHED = 1024
_OVER = (
    "this iteration over batches has ended: another of the same consumer has begun, or take_groups took some"
)
_ONE_AT_A_TIME = "iterate once at a time; to look at a batch beside the loop, use prefetch=0"


class BatchAssembly:
    """Everything between a consumer's records and its batches. One iteration at a time."""

    def __init__(
        self,
        consumer: "Consumer",
        lanes: LaneSet,
        group_timeout_s: float,
        policy: Policy,
        allocation_wait_s: float,
        limit: Limit | None,
    ) -> None:
        self._consumer, self._lanes, self._policy, self._limit = consumer, lanes, policy, limit
        self._partial = GroupAssembler(group_timeout_s)
        self._complete = scheduler_of(policy, consumer.env_shares, consumer.producer_live, allocation_wait_s)
        self._prefetcher: Prefetcher | None = None
        self.screen: Screen | None = None
        self._whole: deque[Group] = deque()  # whole, and not yet shown to the screen
        self._screened = 0
        self._changing = False  # what is queued; still set afterwards if an exception came in between
        # under "caller": what may still be held; under the lock
        self._handed: weakref.WeakSet[Batch] = weakref.WeakSet()
        self._somebody_waits = False  # for a batch: whoever it is releases nothing meanwhile
        self._closed = False
        # what is put back goes there once nothing is formed here any more
        self._late: LateReturns | None = None
        # groups are put back by whoever iterates, while others are gathered ahead
        self._lock = threading.RLock()
        # put back, and not yet queued: put_back never comes in the middle of a change
        self._back: deque[list[Group]] = deque()
        self._is_cut = False  # nothing in self._complete is stale
        self._not_cut: list[Group] = []  # but for what was put back since
        # something was put back since the prefetcher began, which may have found the end before
        self._returned = False
        self._chosen = Chosen()  # under the lock
        self._lags = Lags()
        self._oldest = NO_VERSION  # what is stamped in self._complete, and cut, has no version before this

    @property
    def lock_is_mine(self) -> bool:
        """Whether this thread holds the lock; asked in a signal handler: whether it interrupted a locked
        section.
        """
        return is_mine(self._lock)

    def end(self) -> None:
        """Forms nothing more from now on; a running iteration returns. Never blocks."""
        self._closed = True

    @property
    def closed(self) -> bool:
        """Whether nothing more is formed because the consumer closes."""
        return self._closed

    def queued(self, producer_id: str | None) -> int:
        """Groups that were taken from lanes and are in no batch yet; any thread."""
        back = [group for groups in list(self._back) for group in groups]
        if producer_id is not None:
            return self._complete.queued(producer_id) + sum(
                group.producer_id == producer_id for group in back
            )
        return len(self._complete) + len(self._partial) + len(self._whole) + len(back)

    @property
    def queue_view(self) -> "QueueView | None":
        """What is queued by environment, where the policy knows."""
        return self._complete if isinstance(self._complete, AtroposScheduler) else None

    def steps(self, handed_out: int) -> int:
        """Steps of a run: the batches handed out, or those the policy has formed, if it counts these."""
        return handed_out if self._complete.formed is None else self._complete.formed

    def stats(self) -> dict[str, float]:
        """Counters of the policy, groups that the screen kept out of batches, how stale those of all batches
        were; any thread.
        """
        return {"screened_total": self._screened, **self._complete.stats(), **self._lags.stats()}

    def committed(self) -> int | None:
        """Groups committed whose step is not over, a fragment not yet read counting as one; None while they
        are moved.

        Any thread.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            return sum(lane.waiting for lane in self._lanes) + self.queued(None) + self._chosen.count
        finally:
            self._lock.release()

    def begin_step(self, groups: list[Group]) -> bool:
        """A batch is handed out: how stale it is is counted, and the step before it is over.

        False: not handed out, since this closes.
        """
        with self._lock:
            self._chosen.begin_step(groups if self._limit else [])
        # asked after the last lock: a handler that could only note a close has done so by now
        if not self._closed:
            self.count_lags(groups)
        return not self._closed

    def count_lags(self, groups: list[Group]) -> None:
        """Counts how stale the groups of a batch are."""
        self._lags.count([group.oldest_version for group in groups], self._consumer.training_version)

    def end_step(self) -> None:
        """What was handed out last is in the policy now; any thread."""
        with self._lock:
            self._chosen.end_step()

    def finished(self, groups: list[Group]) -> None:
        """Learner ranks are done with these groups; any thread."""
        with self._lock:
            self._chosen.remove(groups)

    def most_stale(self, max_staleness: int | None) -> int | None:
        """What a batch allows: under a limit of steps, not more than those."""
        return (
            self._limit.max_off_policy_steps
            if max_staleness is None and self._limit is not None
            else max_staleness
        )

    def want(self, groups: int | None, rows: int | None) -> Want:
        """What a batch is to be. Raises ValueError."""
        if self._limit is not None and groups != self._limit.groups_per_step:
            raise ValueError(
                f"a batch of groups={groups}, rows={rows}: this consumer has "
                f"groups_per_step={self._limit.groups_per_step}"
            )
        if self._policy != "atropos":
            return Want(groups, rows)
        if (run := self._consumer.run) is None:
            raise ValueError(
                'policy "atropos" forms batches of run.batch_size trajectories: announce a run, '
                "Consumer(run=)"
            )
        return Want(None, run.batch_size)

    def batches(
        self,
        want: Want,
        *,
        layout: Layout,
        max_staleness: int | None,
        prefetch: int,
        hold: Hold,
        timeout_s: float | None,
        make: MakeBatch | None = None,
    ) -> Iterator[Batch]:
        """See Consumer.batches. Checks its arguments at once, not at the first `next`."""
        prefetch, timeout_s = check_count("prefetch", prefetch, 0, _MOST_PREFETCHED), check_timeout(timeout_s)
        if min(max_staleness or 0, timeout_s or 0) < 0:
            raise ValueError(f"max_staleness={max_staleness}, timeout_s={timeout_s}: at least 0 each")
        check_choice("layout", layout, ("padded", "packed"))
        check_choice("hold", hold, ("step", "gather", "caller"))
        return self._iterate(
            want, (make or Batch, layout), self.most_stale(max_staleness), prefetch, hold, timeout_s
        )

    def _iterate(
        self,
        want: Want,
        making: tuple[MakeBatch, Layout],
        max_staleness: int | None,
        prefetch: int,
        hold: Hold,
        timeout_s: float | None,
    ) -> Iterator[Batch]:
        form = functools.partial(self._form, want, making, max_staleness)
        self._check_process()
        ahead: Prefetcher | None = None
        try:
            with self._consumer._until_closed():
                self.stop_prefetch()  # of an earlier iteration, which ends with that
                self._begin_anew()
                self._returned = False
                ahead = self._prefetch(prefetch, form) if prefetch else None
                while not self._closed:
                    batch = self._next(ahead, want, making, max_staleness, timeout_s)
                    if batch is None:
                        if ahead is not None and self._prefetcher is not ahead and not self._closed:
                            raise IterationOver(_OVER, hint=_ONE_AT_A_TIME)
                        if not self._returned or ahead is None:
                            return
                        self._returned = False
                        ahead = self._prefetch(prefetch, form)
                        continue
                    if self._has_stale(batch.groups, max_staleness):
                        self._put_back(batch)  # it grew stale while it waited to be taken
                        continue
                    if not self._begin_batch(batch, hold):
                        self._put_back(batch)
                        return
                    if hold == "gather":
                        batch.release()  # the last thing before it is handed out: what raises later loses it
                    yield batch
                    self._check_process()
                    if hold != "caller":
                        batch.release()
                    self._consumer.end_step()
        finally:
            if ahead is not None:
                # no waiting: a collection may end an iteration in any thread, also in that one, and under the
                # lock
                ahead.end()
            # whose handler owes it
            if not self.lock_is_mine and threading.get_ident() == threading.main_thread().ident:
                self._consumer.close_if_owed()

    def _check_process(self) -> None:
        """Raises Closed in a child of fork, where a thread that is not there may hold the lock for ever."""
        self._consumer._words_here()

    def _begin_batch(self, batch: Batch, hold: Hold) -> bool:
        """A batch is about to be handed out; whether it may be."""
        if hold == "caller":
            with self._lock:
                self._handed.add(batch)
        if not self.begin_step(batch.groups):
            return False
        hand_out(batch.groups, Call.BATCHES, looked_at=True)
        self._consumer.count_batch()
        return True

    def _prefetch(self, depth: int, form: Callable[[Flag], Batch | None]) -> Prefetcher:
        ahead = self._prefetcher = Prefetcher(depth, form)
        ahead.start()
        return ahead

    def _next(
        self,
        ahead: Prefetcher | None,
        want: Want,
        making: tuple[MakeBatch, Layout],
        max_staleness: int | None,
        timeout_s: float | None,
    ) -> Batch | None:
        self._somebody_waits = True
        try:
            if ahead is not None:
                return ahead.next(timeout_s)
            deadline_s = float("inf") if timeout_s is None else time.monotonic() + timeout_s
            batch = self._form(want, making, max_staleness, Flag(), deadline_s)
            if (
                batch is not None
                or time.monotonic() < deadline_s
                or self._closed
                or self._consumer._drained()
            ):
                return batch
        except queue.Empty:
            pass
        finally:
            self._somebody_waits = False
        raise ConsumerEmpty(
            f"no batch of {want} within {timeout_s} s; {self._lanes.live} of {len(self._lanes)} lanes have "
            f"a living producer, {self._consumer.queue_groups()} groups are queued",
            hint=self._consumer.hint_when_empty(),
        )

    def _form(
        self,
        want: Want,
        making: tuple[MakeBatch, Layout],
        max_staleness: int | None,
        stop: Flag | threading.Event,
        deadline_s: float = float("inf"),
    ) -> Batch | None:
        make, layout = making
        while (chosen := self.choose(want, max_staleness, stop, deadline_s)) is not None:
            try:
                batch = as_batch(make(chosen, layout))
                # not yet: lost before that, it is formed again
                hand_out(chosen, Call.BATCHES, looked_at=False)
                return batch
            except BaseException as error:
                wrong = self._at_fault(error, chosen, layout)
                at_fault = {id(group) for group, _ in wrong}
                self.put_back([group for group in chosen if id(group) not in at_fault])
                for group, why in wrong:
                    log.error(
                        "group %s of %s is discarded: %s", group.records[0].group_id, group.producer_id, why
                    )
                    self.finished([group])
                    self._discard(group, Discard.CORRUPT)
                if not wrong:
                    raise
        return None

    def _at_fault(
        self, error: BaseException, chosen: list[Group], layout: Layout
    ) -> list[tuple[Group, Exception]]:
        """The groups that cannot be read, if it is that; puts all back if the search is interrupted."""
        if not isinstance(error, Exception) or isinstance(error, (MemoryError, BatchTooBig)):
            return []
        try:
            # where no signal's handler raises
            return in_another_thread(functools.partial(unreadable, chosen, layout))
        except BaseException:
            self.put_back(chosen)
            raise

    def choose_within(self, want: Want, max_staleness: int | None, timeout_s: float) -> list[Group] | None:
        """The groups of the next batch; None if there is none in time."""
        deadline_s = float("inf") if check_timeout(timeout_s) is None else time.monotonic() + timeout_s
        self._check_process()
        self.stop_prefetch()
        self._begin_anew()
        chosen = self.choose(want, self.most_stale(max_staleness), Flag(), deadline_s)
        if not self.begin_step(chosen or []):
            self.put_back(chosen or [])
            chosen = None
        hand_out(chosen or [], Call.TAKE_GROUPS, looked_at=False)
        self._consumer.close_if_owed()
        return chosen

    def _begin_anew(self) -> None:
        """Ends the last step.

        No batch is being formed, so groups of one that an exception lost are no longer counted.
        """
        self._consumer.end_step()
        with self._lock:
            self._chosen = Chosen()

    def choose(
        self,
        want: Want,
        max_staleness: int | None,
        stop: Flag | threading.Event,
        deadline_s: float = float("inf"),
    ) -> list[Group] | None:
        """The groups of the next batch, waiting for them; None when stopped, closed, too late, or drained
        with too few groups left.
        """
        idle_since = time.monotonic()
        while True:
            with self._lock:
                if self._closed or stop.is_set():
                    return None
                self._begin_change()
                self._cut_stale(max_staleness)
                chosen, took = self._try(want, max_staleness)
                self._changing = False
            if chosen is not None:
                return chosen
            now = time.monotonic()
            if took:
                idle_since = now
                continue
            if now >= deadline_s:
                return None
            if self._consumer._drained():
                with self._lock:
                    self._begin_change()
                    # what was put back meanwhile: formed again, it would only be withdrawn again
                    self._cut_stale(max_staleness)
                    chosen = self._take(want, now, last=True)
                    self._changing = False
                    return chosen
            until_s = min(deadline_s, self._complete.waits_until_s, now + _LOOK_EVERY_S)
            if now - idle_since > _STUCK_AFTER_S and self._complete.waits_until_s == float("inf"):
                self._check_stuck(want)
            self._consumer._wait(max(until_s - now, 0.0))

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

    def _try(self, want: Want, max_staleness: int | None) -> tuple[list[Group] | None, bool]:
        """The groups of a batch, if there is one, and whether any record was taken for it from the lanes."""
        everything = self._complete.look_ahead(len(self._lanes))
        took = everything and self._take_records(_EVERYTHING, max_staleness)
        chosen = self._take(want, time.monotonic(), last=False)
        # no more than can be missing: each record completes one group at most
        if chosen is None and not everything:
            took = self._take_records(want.size - len(self._complete), max_staleness)
        return chosen, took

    def _take(self, want: Want, now_s: float, *, last: bool) -> list[Group] | None:
        chosen = self._complete.take(want, now_s, last=last) or None
        if self._limit is not None:
            self._chosen.add(chosen or ())
        return chosen

    def _take_records(self, most: int, max_staleness: int | None) -> bool:
        """Moves what the lanes have now into groups; whether there was anything."""
        self._consumer._check_open()
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
            self._discard(group, Discard.PARTIAL)
        if not records and len(self._partial):
            for group in self._partial.orphans(self._lanes.finished_producers()):
                self._discard(group, Discard.PARTIAL)
        return moved

    def _queue(self, group: Group, max_staleness: int | None) -> None:
        """Takes a whole group over for a batch, unless it is screened out or stale."""
        if self.screen is not None and not self._passes(self.screen, group):
            for record in group.records:
                record.release()
            self._screened += 1
        elif max_staleness is not None and self._has_stale([group], max_staleness):
            self._discard(group, Discard.STALE)
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
        current = self._consumer.training_version
        self._oldest = oldest_version(self._not_cut, self._oldest)
        self._not_cut = []
        if not self._is_cut or is_stale(self._oldest, current, max_staleness):
            for group in self._complete.remove(
                lambda group: is_stale(group.oldest_version, current, max_staleness)
            ):
                self._discard(group, Discard.STALE)
            self._oldest = oldest_version(self._complete)
            self._is_cut = True

    def _has_stale(self, groups: list[Group], max_staleness: int | None) -> bool:
        if max_staleness is None:
            return False
        current = self._consumer.training_version
        return any(is_stale(group.oldest_version, current, max_staleness) for group in groups)

    def _discard(self, group: Group, reason: Discard) -> None:
        for record in group.records:
            self._consumer.discard(record, reason)

    def _put_back(self, batch: Batch) -> None:
        batch.records = []
        self.put_back(batch.groups)

    def put_back(self, groups: list[Group]) -> None:
        """Groups of a batch that was not handed out, or not read, wait again, before all others, or for the
        next consumer; any thread.

        An interrupted call may be repeated: what waits already is not queued twice.
        """
        self._check_process()
        hand_out(groups, Call.BATCHES, looked_at=False)
        with self._lock:
            self._chosen.remove(groups)
            if self._late is not None:
                self._late.take(groups, closed=self._consumer._control_words is None)
                return
            waiting = set(map(id, itertools.chain(self._complete, *self._back)))
            self._returned = True
            self._back.append(
                [
                    group
                    for place, group in {id(group): group for group in groups}.items()
                    if place not in waiting
                ]
            )

    def _check_stuck(self, want: Want) -> None:
        """Raises if the batch can never be filled: everything in the lanes is held here, and nobody else
        holds anything.
        """
        with self._lock:
            all_here = [*self._complete, *self._partial, *itertools.chain(*self._back)]
            sizes = [record.extent_bytes for group in all_here for record in group.records]
            fragments = max(
                (-(-len(group.records) * group.size // group.rows) for group in all_here), default=1
            )
            elsewhere = sum(len(handed.records) for handed in self._handed) if self._somebody_waits else 0
        stuck = self._lanes.stuck(len(sizes) + elsewhere)
        if stuck is None:
            return
        largest = max([*sizes, stuck.wanted_bytes])
        raise BatchTooBig(
            f"a batch of {want} cannot be filled: {len(self._complete)} are complete, {len(self._partial)} "
            "in part; "
            + (f"who waits for it holds {elsewhere} records of batches before; " if elsewhere else "")
            + (
                f"{stuck.dropped} were dropped without release, see take_back_dropped(); "
                if stuck.dropped
                else ""
            )
            + (
                f"{stuck.lanes} lanes of {format_size(stuck.data_bytes)} in all hold {stuck.held} records "
                f"of at most {format_size(largest)}, and their {stuck.live} living producers have no room "
                f"for {format_size(stuck.wanted_bytes)} more"
            ),
            hint=sizing.what_to_raise(
                -(-(want.as_groups(all_here) * fragments + elsewhere) // stuck.live),
                largest,
                min([*sizes, stuck.wanted_bytes]) == largest,
            )
            + (", raise Consumer(lanes=): more lanes wait" if stuck.crowded else ""),
        )

    def stop_prefetch(self) -> None:
        """What an iteration that is over has gathered ahead waits again."""
        if (ahead := self._prefetcher) is not None:
            for batch in reversed(ahead.stop()):
                self._put_back(batch)
            self._prefetcher = None

    def stop(self) -> None:
        """Ends iterations and gathering ahead; what was gathered is still held."""
        self._closed = True
        self._consumer._control.ring()
        self.stop_prefetch()
        forget_spare_memory()

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
                    [lane.reader for lane in self._lanes],
                    self._consumer._control.mapping,
                    self._consumer.bridge,
                )
