"""Iterations over batches: formed ahead or on request, and released step by step."""

import enum
import functools
import logging
import queue
import threading
import time
from typing import Literal

from shmbridge.batch import Batch, forget_spare_memory, unreadable
from shmbridge.batching.former import BatchFormer
from shmbridge.batching.iterator import Steps
from shmbridge.batching.prefetch import Flag, Prefetcher
from shmbridge.batching.queue import GroupQueue
from shmbridge.batching.request import BatchRequest
from shmbridge.config import check_timeout, deadline_of
from shmbridge.errors import BatchTooBig, ConsumerEmpty, IterationOver
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import HubState
from shmbridge.hub.waiting import Waiting
from shmbridge.record.groups import Group, hand_out
from shmbridge.record.unreleased import Call
from shmbridge.segments.closing import Closing
from shmbridge.segments.discard_reasons import Discard
from shmbridge.segments.helper_threads import in_another_thread
from shmbridge.shown import counted

log = logging.getLogger(__name__)

_OVER = (
    "this iteration over batches has ended: another of the same consumer has begun, or take_groups took some"
)
_ONE_AT_A_TIME = "iterate once at a time; to look at a batch beside the loop, use prefetch=0"


class _Answer(enum.Enum):
    NOT_YET = enum.auto()


_NOT_YET: Literal[_Answer.NOT_YET] = _Answer.NOT_YET


class Iterations:
    """The iterations over one consumer's batches, one at a time: a new one ends the previous one."""

    def __init__(
        self,
        former: BatchFormer,
        state: HubState,
        lanes: LaneSet,
        waiting: Waiting,
        queued: GroupQueue,
        closing: Closing,
    ) -> None:
        self._former, self._state, self._lanes, self._waiting = former, state, lanes, waiting
        self._queue, self._closing = queued, closing
        self._prefetcher: Prefetcher | None = None

    def iterate(self, request: BatchRequest, tick_s: float | None) -> Steps:
        """See Consumer.batches.

        Args:
            request: which batches.
            tick_s: yields None after so many seconds without a batch; None: waits on.
        """
        self._state.check_process()
        ahead: Prefetcher | None = None
        try:
            with self._state.until_closed():
                self.stop_prefetch()  # ends an earlier iteration too
                self._former.begin_again()
                put_backs = self._former.put_backs
                ahead = self._prefetch(request)
                until_s: float | None = None
                while not self._closing.ending:
                    until_s = deadline_of(request.timeout_s) if until_s is None else until_s
                    batch = self._next(ahead, request, until_s, tick_s)
                    if batch is _NOT_YET:
                        yield None
                        self._state.check_process()
                        continue
                    until_s = None
                    if batch is None:
                        if ahead is not None and self._prefetcher is not ahead and not self._closing.ending:
                            raise IterationOver(_OVER, hint=_ONE_AT_A_TIME)
                        if ahead is None or self._former.put_backs == put_backs:
                            return
                        # the prefetcher may have stopped before the put_back
                        put_backs = self._former.put_backs
                        ahead = self._prefetch(request)
                        continue
                    if self._former.is_stale(batch.groups, request.max_staleness):
                        self._put_back(batch)  # it grew stale in the prefetch queue
                        continue
                    if not self._begin_batch(batch, request):
                        self._put_back(batch)
                        return
                    if request.hold == "gather":
                        # the last step before the yield: an exception after it loses the batch
                        batch.release()
                    yield batch
                    self._state.check_process()
                    if request.hold != "caller":
                        batch.release()
                    self._former.end_step()
        finally:
            if ahead is not None:
                # Only signal: the GC may finalize this generator in any thread, even in the prefetch thread,
                # which holds the lock.
                ahead.end()
            # Only in the main thread: signal handlers run there.
            if not self._closing.lock_is_mine and threading.get_ident() == threading.main_thread().ident:
                self._closing.close_if_owed()

    def _begin_batch(self, batch: Batch, request: BatchRequest) -> bool:
        """Prepares a batch to be handed out; returns whether it may be."""
        if request.hold == "caller":
            self._former.held_by_caller(batch)
        if not self._former.begin_step(batch.groups):
            return False
        hand_out(batch.groups, Call.BATCHES, looked_at=True)
        self._former.count_batch()
        return True

    def _next(
        self, ahead: Prefetcher | None, request: BatchRequest, until_s: float, tick_s: float | None
    ) -> "Batch | Literal[_Answer.NOT_YET] | None":
        stop_s = until_s if tick_s is None else min(until_s, deadline_of(tick_s))
        self._former.somebody_waits = True
        try:
            with self._state.asking():
                if ahead is not None:
                    return ahead.next(None if stop_s == float("inf") else max(stop_s - time.monotonic(), 0.0))
                batch = self._form(request, Flag(), stop_s)
                if (
                    batch is not None
                    or time.monotonic() < stop_s
                    or self._closing.ending
                    or self._waiting.drained()
                ):
                    return batch
        except queue.Empty:
            pass
        finally:
            self._former.somebody_waits = False
        if stop_s < until_s:
            return _NOT_YET
        groups = self._queue.groups()
        raise ConsumerEmpty(
            f"no batch of {request.size} within {request.timeout_s} s; {self._lanes.producers_words()}, "
            f"{counted(groups, 'group')} {'is' if groups == 1 else 'are'} queued",
            hint=self._waiting.hint_when_empty(),
        )

    def _form(self, request: BatchRequest, stop: Flag, deadline_s: float = float("inf")) -> Batch | None:
        """Returns the next batch; None as in `choose`.

        A group that cannot be read is discarded, and the batch is formed again with the others.
        """
        while (chosen := self._former.choose(request, stop, deadline_s)) is not None:
            try:
                batch = request.batch_of(chosen)
                # Not looked at yet: if the batch is lost before it is handed out, it is formed again.
                hand_out(chosen, Call.BATCHES, looked_at=False)
                return batch
            except BaseException as error:
                wrong = self._at_fault(error, chosen, request)
                at_fault = {id(group) for group, _ in wrong}
                self._former.put_back([group for group in chosen if id(group) not in at_fault])
                for group, why in wrong:
                    log.error("group %s of %s is discarded: %s", group.group_id, group.producer_id, why)
                    self._former.finished([group])
                    group.discard(Discard.CORRUPT)
                if not wrong:
                    raise
        return None

    def _at_fault(
        self, error: BaseException, chosen: list[Group], request: BatchRequest
    ) -> list[tuple[Group, Exception]]:
        """Returns the unreadable groups that caused the error; puts all back if the search is interrupted."""
        if not isinstance(error, Exception) or isinstance(error, (MemoryError, BatchTooBig)):
            return []
        try:
            # In a thread where no signal handler raises.
            return in_another_thread(functools.partial(unreadable, chosen, request.layout))
        except BaseException:
            self._former.put_back(chosen)
            raise

    def take_groups(self, request: BatchRequest) -> list[Group] | None:
        """See Consumer.take_groups."""
        deadline_s = deadline_of(check_timeout(request.timeout_s))
        self._state.check_process()
        self.stop_prefetch()
        self._former.begin_again()
        with self._state.asking():
            chosen = self._former.choose(request, Flag(), deadline_s)
        if not self._former.begin_step(chosen or []):
            self._former.put_back(chosen or [])
            chosen = None
        hand_out(chosen or [], Call.TAKE_GROUPS, looked_at=False)
        self._closing.close_if_owed()
        if chosen is not None:
            self._former.count_batch()
        return chosen

    # -- prefetch

    def _prefetch(self, request: BatchRequest) -> Prefetcher | None:
        if not request.prefetch:
            return None
        ahead = self._prefetcher = Prefetcher(request.prefetch, functools.partial(self._form, request))
        ahead.start()
        return ahead

    def stop_prefetch(self) -> None:
        """Returns the unread prefetched batches of an ended iteration to the queue."""
        if (ahead := self._prefetcher) is not None:
            for batch in reversed(ahead.stop()):
                self._put_back(batch)
            self._prefetcher = None

    def _put_back(self, batch: Batch) -> None:
        batch.records = []
        self._former.put_back(batch.groups)

    def stop(self) -> None:
        """For close(): ends iterations and the prefetch; groups formed ahead stay held."""
        self._closing.ending = True
        self._state.ring()
        self.stop_prefetch()
        forget_spare_memory()
