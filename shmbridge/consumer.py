"""Consumer: the hub of a bridge. Takes records in place and hands them out, one by one or as batches.

Knows the hub lock and who may call what; which lanes there are is lanes.py's, how groups become batches is
batching/former.py's, what the bridge is told is hub/state.py's, what environments and learner ranks ask on
the side is control/server.py's.
"""

import asyncio
import logging
import os
import time
from collections.abc import AsyncIterator, Iterator
from typing import TYPE_CHECKING, Literal, Self

from shmbridge import batch
from shmbridge._ext import header
from shmbridge._ext.wait import HubWait
from shmbridge.admission.limit import limit_of
from shmbridge.batching.former import BatchAssembly, Hold, Screen
from shmbridge.batching.scheduler import Policy
from shmbridge.config import Run, check_bridge_name, check_lanes, check_run, check_timeout
from shmbridge.errors import Closed, ConsumerEmpty, ConsumerTaken, ServesRanks
from shmbridge.hub.asyncio_wait import LoopBell
from shmbridge.hub.lanes import LaneSet
from shmbridge.hub.state import Hub
from shmbridge.record.groups import Group
from shmbridge.record.record import Record
from shmbridge.record.unreleased import Call
from shmbridge.schema import columns_of
from shmbridge.segments import locks, membership, one_thread, os_limits
from shmbridge.segments.at_exit import at_exit
from shmbridge.segments.closing import is_mine, is_own_thread, then_close
from shmbridge.segments.locks import Byte
from shmbridge.segments.placement import MemoryUse
from shmbridge.segments.reasons import Discard

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.batch import Batch, Layout, MakeBatch
    from shmbridge.control.server import ControlServer
    from shmbridge.ranks.server import DeadRank, RankServer
    from shmbridge.ranks.shares import Mode

log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 1.0
_DRAIN_GRACE_S = 0.05


class Consumer(Hub):
    """The one hub of a bridge; a context manager.

    For one thread at a time, which SHMBRIDGE_DEBUG=1 checks, except stats, publish_policy_version, pause,
    resume and drain. Construction adopts every lane that exists, also those of dead producers, before
    anything is removed. A record is released by a word only: its release(), the end of its own `with`, the
    next step of an iteration. The end of the consumer's `with` releases nothing, nor does close(): the next
    consumer gets again what is held. docs/reference/releases.md has every case.

    Args:
        bridge: name of the bridge.
        run: the training run to announce; environments wait for one.
        lanes: most lanes taken from at once; more wait until others are done with. "auto": as many as
            descriptors allow, 1024 at most.
        resume: "redeliver" hands out what an earlier consumer left un-released; "discard" counts and drops
            it.
        schema: a pyarrow.Schema whose fields extend the standard columns; producers that disagree on a type
            are refused.
        group_timeout_s: a group whose fragments do not all come within this many seconds is discarded and
            counted.
        policy: how batches are formed: "fair" over environments, "atropos" as the Atropos server does, or
            "oldest" version first.
        allocation_wait_s: seconds a batch is held back under "fair" for an environment that is promised a
            part of it.
        max_off_policy_steps: producers that ask (Producer.begin_group) begin no group that would be trained
            with later than so many steps on, and no batch holds a group of more versions, whoever sent it;
            with policy "oldest". None: no limit.
        groups_per_step: groups of a batch, where the limit is to be kept.

    Raises:
        BadArgument: `lanes` is no number from 1, `run` no shmbridge.Run.
        ConsumerTaken: another consumer of this bridge is alive (named by pid; also one of this process).
        BadBridgeName, ShmPermission, NotReady, LayoutMismatch, SchemaMismatch.
    """

    def __init__(
        self,
        bridge: str,
        run: Run | None = None,
        lanes: int | Literal["auto"] = "auto",
        resume: Literal["redeliver", "discard"] = "redeliver",
        schema: "pa.Schema | None" = None,
        group_timeout_s: float = 600.0,
        policy: Policy = "fair",
        allocation_wait_s: float = 10.0,
        max_off_policy_steps: int | None = None,
        groups_per_step: int | None = None,
    ) -> None:
        if resume not in ("redeliver", "discard"):
            raise ValueError(f'resume={resume!r} is not "redeliver" or "discard"')
        self.columns = columns_of(schema)
        limit = limit_of(max_off_policy_steps, groups_per_step, policy)
        super().__init__(bridge, check_run(run), self._enter(check_bridge_name(bridge)), limit)
        self._closed = self._close_owed = False
        self._final: dict[str, float] = {}
        self._loop_bell: LoopBell | None = None
        self._memory = MemoryUse()
        try:
            self._start(check_lanes(lanes), resume, group_timeout_s, policy, allocation_wait_s)
        except BaseException:
            membership.leave(self._control.mapping.fd, bridge)
            raise
        self._no_exit_call = at_exit(self._leave_unclosed)
        one_thread.watch(
            self, f"the consumer of bridge {bridge!r}", ("get", "poll", "_take", "batches", "take_groups")
        )

    # -- becoming the hub
    # --------------------------------------------------------------------------------------------------------

    @staticmethod
    def _enter(bridge: str) -> header.Control:
        """Takes the hub lock, or raises ConsumerTaken."""
        control = membership.open_control(bridge)
        namespace = locks.pid_namespace()
        if not locks.lock_after(
            lambda: control.hub_pid if control.hub_pid_namespace == namespace else 0,
            control.mapping.fd,
            Byte.HUB,
        ):
            pid = control.hub_pid
            membership.leave(control.mapping.fd, bridge)
            me = " (this very process)" if pid == os.getpid() else ""
            raise ConsumerTaken(
                f"bridge {bridge!r} has a living consumer: pid {pid}{me}",
                hint=f"close it and drop its records first, or use another bridge; ps -p {pid}",
            )
        control.enter(os.getpid(), namespace)  # a second consumer that comes meanwhile names the right pid
        header.fault(b"hub.locked")
        return control

    def _start(
        self, lanes: int | None, resume: str, group_timeout_s: float, policy: Policy, allocation_wait_s: float
    ) -> None:
        """Everything a hub does before it serves; whoever dies or fails in here leaves the bridge as it
        was.
        """
        self._lanes = LaneSet(
            self.bridge, self._control, self.columns, os_limits.lanes_at_most() if lanes is None else lanes
        )
        self._turns = self._lanes.turns
        try:
            self._lanes.adopt(strict=True)
            self.hub_epoch = self._control.begin_epoch(
                os.getpid(), locks.pid_namespace(), self.columns.encode()
            )
            # after the epoch was stored: a rank that joins the old one sees that
            self._lanes.look_for_ranks()
            if self.run is not None:
                self._control.next_run()
            self._sleep = HubWait(self._control.mapping)
            self._batching = BatchAssembly(
                self, self._lanes, group_timeout_s, policy, allocation_wait_s, self._limit
            )
            if resume == "discard":
                for record in self._lanes.take_backlog():
                    self.discard(record, Discard.RESUME)
            membership.sweep(self.bridge)
            self._server = self._open_control_plane()
        except BaseException:
            self._lanes.abandon()
            self._lanes.close()
            raise

    def _open_control_plane(self) -> "ControlServer":
        from shmbridge.control.server import ControlServer

        return ControlServer(self.bridge, self, self._batching.queue_view)

    # -- taking records
    # --------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> Record:
        """The next record of any lane, leased until its release().

        Blocks at most `timeout_s` seconds (None: for ever).

        Raises:
            ConsumerEmpty: none came in time; the message says who is alive.
            Closed: the consumer was closed.
        """
        if self._ranks is None and (record := self._turns.take()) is not None:
            return record
        self._check_mine()
        deadline = _deadline(timeout_s)
        while (record := self._take(Call.GET)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._empty(timeout_s)
            self._wait(left)
        return record

    async def get_async(self, timeout_s: float | None = None) -> Record:
        """`get` that never blocks the event loop: a thread of its own waits, and tells the loop."""
        self._check_mine()
        deadline = _deadline(timeout_s)
        while (record := self._take(Call.GET_ASYNC)) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._empty(timeout_s)
            await self._wait_async(left)
        return record

    def poll(self, max_records: int = 256) -> list[Record]:
        """Up to `max_records` records that are there now, each leased until its own release(), fairly over
        the lanes.

        Never blocks.
        """
        if self._ranks is None and (records := self._turns.poll(max_records)):
            return records
        self._check_mine()
        self._check_open()
        try:
            return self._lanes.poll(max_records)
        finally:
            self.close_if_owed()

    def __iter__(self) -> Iterator[Record]:
        """Records as they come, until close(), or until drain() and nothing is left.

        Each step releases what the one before yielded.

        A `break`, an exception or close() releases nothing: the record of that step is released by its
        release() only.
        """
        self._check_mine()
        with self._until_closed():
            while (record := self._take(Call.FOR)) is not None or not self._drained():
                if record is not None:
                    yield record
                    record.release()
                else:
                    self._wait(_LONGEST_WAIT_S)

    async def __aiter__(self) -> AsyncIterator[Record]:
        """`__iter__` for an event loop."""
        self._check_mine()
        with self._until_closed():
            while True:
                record = self._take(Call.ASYNC_FOR)
                if record is not None:
                    yield record
                    record.release()
                elif not self._control.draining:
                    await self._wait_async(_LONGEST_WAIT_S)
                else:
                    await asyncio.sleep(_DRAIN_GRACE_S)  # a put that is under way commits meanwhile
                    if self._lanes.nothing_left:
                        return

    def batches(
        self,
        groups: int = 8,
        layout: "Layout" = "packed",
        max_staleness: int | None = None,
        prefetch: int = 1,
        hold: Hold = "step",
        timeout_s: float | None = None,
        rows: int | None = None,
        make: "MakeBatch | None" = None,
        whole_rows: bool = False,
    ) -> "Iterator[Batch]":
        """Batches of whole groups, oldest first, until close(), or until drain() and too few are left.

        Blocks in `next` until a batch is full. Do not call get or poll while iterating, and iterate once at a
        time.

        Args:
            groups: groups in a batch; under policy "atropos" a batch has `run.batch_size` trajectories
                instead.
            layout: "packed" (N,) with cu_seqlens and position_ids, or "padded" (B, T).
            max_staleness: groups more versions older than the current one are discarded and counted; None:
                none is.
            prefetch: batches gathered ahead in a thread, 0 or more.
            hold: "step" keeps the leases until batch.release() or the next iteration, so that a killed
                learner's successor gets the batch again; "caller" until batch.release() only; "gather" ends
                them once gathered: at most once. A `break` releases nothing: leave the loop by `with batch:`
                or batch.release().
            timeout_s: seconds that `next` waits; None: for ever.
            rows: trajectories in a batch, instead of groups: whole groups as far as they fit, at least one.
            make: makes a batch of leased groups and a layout, in the thread that forms batches; None: `Batch`
                itself. For a subclass.
            whole_rows: `loss_mask` is 1 in the rows that have neither a mask nor `prompt_length`, and not 0.

        Raises:
            ConsumerEmpty: no batch could be formed in time; what is queued stays. Begin another iteration to
                go on.
            BatchTooBig: the lanes are full of what the batch already has, so that it can never be filled.
            IterationOver: a later iteration, or take_groups, took what this one had gathered ahead.
        """
        self._check_mine()
        want = self._batching.want(groups if rows is None else None, rows)
        make = batch.whole_rows(make) if whole_rows else make
        return self._batching.batches(
            want,
            layout=layout,
            max_staleness=max_staleness,
            prefetch=prefetch,
            hold=hold,
            timeout_s=timeout_s,
            make=make,
        )

    @then_close
    def take_groups(
        self,
        *,
        groups: int | None = None,
        rows: int | None = None,
        max_staleness: int | None = None,
        timeout_s: float = 0.0,
    ) -> list[Group] | None:
        """The whole groups of the next batch, leased and in place, for who does not want arrays; None if
        there is no batch in time.

        Blocks at most `timeout_s` seconds. Each group's `records` are the caller's to release, or to return
        with `put_back`. The batch is counted as a step. Do not call get or poll, nor iterate over batches,
        beside it.

        Args:
            groups: groups in the batch; or else
            rows: trajectories in it. Under policy "atropos" neither is used: a batch has `run.batch_size`
                trajectories.
            max_staleness: as in batches.
            timeout_s: seconds to wait.
        """
        self._check_mine()
        chosen = self._batching.choose_within(self._batching.want(groups, rows), max_staleness, timeout_s)
        if chosen is not None:
            self.count_batch()
        return chosen

    @then_close
    def put_back(self, groups: list[Group]) -> None:
        """Returns groups of take_groups that nobody has read: they come again before all others. Any thread.

        Waits for no record, only while another thread moves records into groups.
        """
        self._batching.put_back(groups)

    def screen(self, keep: Screen | None) -> None:
        """Shows every whole group to `keep` before it goes into a batch, and releases those it returns False
        for: `screened_total`.

        It runs in the thread that forms batches: be quick, call no consumer. What it raises ends the batches;
        its group stays.
        """
        self._batching.screen = keep

    def take_back_dropped(self) -> int:
        """Hands out again, `redelivered`, the records that were looked at and whose leases were dropped
        without release; how many.

        They come before all others, in their order, from get, poll, iteration and batches alike. Never
        blocks; the consumer's thread.
        """
        self._check_mine()
        self._check_open()
        return self._lanes.take_back_dropped()

    def _take(self, call: Call) -> Record | None:
        record = self._turns.take(False, call)
        if record is None:
            self.close_if_owed()
            self._check_open()
            try:
                record = self._lanes.take(call)
            finally:
                self.close_if_owed()
        return record

    def _check_mine(self) -> None:
        self.close_if_owed()
        if self._ranks is not None:
            raise ServesRanks(
                f"the consumer of bridge {self.bridge!r} serves ranks",
                hint="read through a shmbridge.Rank, here too",
            )

    def discard(self, record: Record, reason: Discard) -> None:
        """Releases a record unread and counts it."""
        record.discard(reason)

    def _wait(self, left_s: float) -> None:
        """Sleeps until there may be something to take, at most a second."""
        arrivals = self._turns.arrivals  # before the lanes: one that is adopted in between ends the wait
        if (sleep := self._sleep) is not None:
            sleep.wait(self._lanes.readers(), int(min(left_s, _LONGEST_WAIT_S) * 1e9), arrivals)

    async def _wait_async(self, left_s: float) -> None:
        """`_wait` for an event loop."""
        if (bell := self._loop_bell or self._hang_loop_bell()) is not None:
            arrivals = self._turns.arrivals  # as in _wait
            await bell.wait(self._lanes.readers(), arrivals, left_s)

    @then_close
    def _hang_loop_bell(self) -> LoopBell | None:
        """The bell that an event loop listens to; None once this is closed."""
        with self._closing:
            if self._loop_bell is None and self._sleep is not None:
                self._loop_bell = LoopBell(self._sleep, self.bridge)
            return self._loop_bell

    def _drained(self) -> bool:
        """Whether the bridge is draining and nothing is left; gives a put that is under way the time to
        commit.
        """
        if not self._control.draining:
            return False
        time.sleep(_DRAIN_GRACE_S)
        return self._lanes.nothing_left

    def _empty(self, timeout_s: float | None) -> ConsumerEmpty:
        return ConsumerEmpty(
            f"no record within {timeout_s} s; {self._lanes.live} of {len(self._lanes)} lanes have a living "
            "producer" + self._lanes.dropped_words(),
            hint=self.hint_when_empty(),
        )

    @then_close
    def serve_ranks(
        self,
        world_size: int,
        groups: int = 8,
        mode: "Mode" = "sharded",
        max_staleness: int | None = None,
        prefetch: int = 1,
        dead_rank: "DeadRank" = "wait",
    ) -> "RankServer":
        """Deals batches out to `world_size` learner ranks (shmbridge.Rank) from now on, in a thread.

        Does not block.

        get, poll and batches raise ServesRanks from now on. The server it returns says when all is done:
        `wait`, `idle`, `stats`.

        Args:
            world_size: ranks, 1 to 1024; rank 0 may well be in this process.
            groups: groups of a batch, over all ranks, at least one for each; under policy "atropos" as in
                batches.
            mode: "sharded": every rank gets groups of its own, as many as the others and about as many
                tokens; "broadcast": all groups.
            max_staleness: as in batches.
            prefetch: batches formed ahead of the one that is being read.
            dead_rank: what a dead rank leaves goes to the next process that takes its number ("wait"), or to
                the others ("spread").
        """
        from shmbridge.ranks.server import RankServer

        self._check_open()
        if self._ranks is not None:
            raise ValueError("this consumer serves ranks already")
        self._batching.stop_prefetch()
        with self._closing:  # close() stops its thread
            self._check_open()
            server = self._ranks = RankServer(
                self,
                self._batching,
                world_size=world_size,
                groups=groups,
                mode=mode,
                max_staleness=max_staleness,
                prefetch=prefetch,
                dead_rank=dead_rank,
            )
        self.look_again()
        return server

    # -- the end
    # --------------------------------------------------------------------------------------------------------

    def _check_open(self) -> None:
        if self._closed or self._control.mapping.forked:  # in a child of fork, _control says so itself
            raise Closed(f"the consumer of bridge {self.bridge!r} is closed")

    def _leave_unclosed(self) -> None:
        """The process ends: what is still leased stays un-released, for the next consumer."""
        self._stop_forming()
        self._lanes.abandon()
        self._lanes.unlock()
        membership.leave(self._control.mapping.fd, self.bridge)

    def _stop_forming(self) -> None:
        self._batching.stop()
        if self._ranks is not None:
            self._ranks.stop()

    def close(self) -> None:
        """Gives the bridge up; releases nothing.

        Records handed out and not released come to the next consumer again, as do those not yet handed out;
        live views stay valid and keep the hub lock until the last is gone.

        Idempotent, goes on where an interrupt ended it; blocks while another thread closes; does nothing in a
        child of fork, nor in a signal handler that interrupts it. In a handler that interrupts a call of this
        thread which holds a lock, it only notes that it is to close: that call, or the next step of an
        iteration, closes. Nothing more is handed out meanwhile.
        """
        if self._control_words is None or self._control_words.mapping.forked or is_mine(self._one_closer):
            return
        if self._lock_is_mine:
            self._close_owed = True
            self._batching.end()
            self._turns.ending = True
            return
        with self._one_closer:
            if self._control_words is not None:
                self._give_up()

    def close_if_owed(self) -> None:
        """Does what close() has put off: at the end of every call that takes a lock. See closing.py."""
        if self._close_owed and not is_own_thread():
            self.close()

    def _give_up(self) -> None:
        self._stop_forming()
        if self._server is not None:
            self._server.close()
        with self._closing:
            try:
                self._final = self.stats()
            except Exception:  # no counter is worth a bridge that stays taken
                log.exception("the counters of bridge %r cannot be read at its consumer's end", self.bridge)
            self._closed, self._sleep = True, None  # the views' lanes keep the mapping, and with it the lock
        self._control.ring()  # to who waits for a record
        self._batching.forget()
        if self._ranks is not None:
            self._ranks.stop()  # one that was just being made above
            self._ranks.forget()
        self._no_exit_call()
        if self._loop_bell is not None:
            self._loop_bell.close()
        if self._lanes.close() == 0:
            membership.leave(self._control.mapping.fd, self.bridge)
        self._control_words, self._close_owed = None, False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._lanes.abandon()
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self.bridge!r}: {len(self._lanes)} lanes, epoch {self.hub_epoch}>"


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if (timeout_s := check_timeout(timeout_s)) is None else time.monotonic() + timeout_s
