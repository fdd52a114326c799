"""Iterations over batches: formed ahead in a thread or on request, and released step by step."""

import contextlib
import enum
import functools
import logging
import queue
import threading
import time
from collections.abc import Callable, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Literal, Protocol, Self

from shmbridge.batch import Batch, forget_spare_memory, unreadable
from shmbridge.config import check_timeout, deadline_of
from shmbridge.errors import BatchTooBig, ConsumerEmpty, Discard, IterationOver, counted
from shmbridge.hub.former import BatchRequest, Flag
from shmbridge.record import Call, Group, hand_out
from shmbridge.segments import Joined, closed_at_exit, in_another_thread, run_to_end

if TYPE_CHECKING:
    from shmbridge.hub.hub import Hub

# Yields batches; None where none came within the seconds of its argument, if that is given.
Steps = Generator[Batch | None, None, None]
_TICK_S = 0.25
_ENDED = object()
log = logging.getLogger(__name__)
_SUPERSEDED = (
    "this iteration over batches has ended: another of the same consumer has begun, or take_groups took some"
)
_ONE_AT_A_TIME = "iterate once at a time; to look at a batch beside the loop, use prefetch=0"


class Waiter(Protocol):
    """A consumer or rank, as far as its batches use it."""

    def one_wait(self) -> AbstractContextManager[None]:
        """Makes all that is waited for inside the block one wait."""


class Batches:
    """Batches, one after the other: `for batch in batches`, or `async for`, which never blocks the event
    loop.

    Holds its consumer or rank, which is not collected meanwhile. For one thread or task at a time.

    `async for` waits in a thread of the loop's executor. A cancelled step takes effect within a fraction of a
    second and loses nothing: the batch that it was about to get comes with the next step.
    """

    def __init__(self, begin: Callable[[float | None], Steps], owner: Waiter, what: str) -> None:
        self._begin, self._owner, self._what = begin, owner, what
        self._steps: Steps | None = None
        self._came: object = None  # by a step that was cancelled
        self._count = 0

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        if self._came is None and self._steps is not None:
            self._came = next(self._steps, _ENDED)  # as in _step: a call less for the common case
        while not isinstance(self._came, Batch):
            if self._came is _ENDED:
                raise StopIteration
            self._step(None)
        batch, self._came = self._came, None
        self._count += 1
        return batch

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Batch:
        with self._owner.one_wait():
            while not isinstance(self._came, Batch):
                if self._came is _ENDED:
                    raise StopAsyncIteration
                await run_to_end(self._step, _TICK_S)
        batch, self._came = self._came, None
        self._count += 1
        return batch

    def _step(self, tick_s: float | None) -> None:
        if self._steps is None:
            self._steps = closed_at_exit(self._begin(tick_s))
        self._came = next(self._steps, _ENDED)

    def close(self) -> None:
        """Ends the iteration; releases nothing. Idempotent; ValueError while another thread is in a step."""
        if self._steps is not None:
            self._steps.close()
        self._came = _ENDED

    async def aclose(self) -> None:
        """As close."""
        self.close()

    def __repr__(self) -> str:
        state = (
            "ended" if self._came is _ENDED else f"{self._count} handed out" if self._steps else "not begun"
        )
        return f"<Batches of {self._what}: {state}>"


class Prefetcher:
    """Forms batches ahead in a daemon thread, at most `depth` of them, after `start`."""

    def __init__(self, depth: int, form: Callable[[Flag], Batch | None]) -> None:
        self._ready: queue.SimpleQueue[Batch | BaseException | None] = queue.SimpleQueue()
        self._room: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(depth):
            self._room.put(None)
        self._stop = Flag()
        self._form = form
        self._thread = Joined(self._form_ahead, "shmbridge-prefetch")

    def start(self) -> None:
        """Starts the thread, without waiting. The code that will stop it must hold this object by then."""
        self._thread.begin(self._ready.put)  # an error goes to the thread in next()

    def _form_ahead(self) -> None:
        batch: Batch | BaseException | None
        while not self._stop.is_set():
            self._room.get()
            if self._stop.is_set():
                return
            try:
                batch = self._form(self._stop)
            except BaseException as error:  # raised again by next()
                batch = error
            self._ready.put(batch)
            if not isinstance(batch, Batch):
                return
            del batch  # keep no reference: a batch lost by its taker must be destroyed

    def next(self, timeout_s: float | None = None) -> Batch | None:
        """Returns the next batch, waiting for it; None once there are no more.

        Raises the error of forming it; queue.Empty on timeout.
        """
        batch = self._ready.get(timeout=timeout_s)
        if isinstance(batch, BaseException):
            raise batch
        self._room.put(None)
        return batch

    def end(self) -> None:
        """Stops forming further batches, without waiting: for a finalizer."""
        self._stop.set()

    def stop(self) -> list[Batch]:
        """Ends the thread and returns the batches not taken, oldest first.

        May be called again, also by a handler that interrupts it.
        """
        self.end()
        self._room.put(None)
        self._thread.join()
        left = []
        with contextlib.suppress(queue.Empty):  # a thread in next() may be faster
            while True:
                if isinstance(batch := self._ready.get_nowait(), Batch):
                    left.append(batch)
        self._ready.put(None)  # wakes a thread in next()
        return left


class _Answer(enum.Enum):
    NOT_YET = enum.auto()


_NOT_YET: Literal[_Answer.NOT_YET] = _Answer.NOT_YET


class Iterations:
    """The iterations over one consumer's batches, one at a time: a new one ends the previous one."""

    def __init__(self, hub: "Hub") -> None:
        self._former, self._state, self._lanes, self._waiting = hub.former, hub.state, hub.lanes, hub.waiting
        self._queue, self._closing = hub.queue, hub.closing
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
                            raise IterationOver(_SUPERSEDED, hint=_ONE_AT_A_TIME)
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
