"""Consumer: the hub of a bridge. Takes records in place and hands them out, one by one or as batches.

A handle on hub/hub.py, which owns all parts. No part holds the consumer: one that is dropped is collected,
and its finalizer closes the hub.
"""

import functools
import time
import weakref
from collections.abc import AsyncIterator, Generator, Iterator
from contextlib import AbstractContextManager
from inspect import signature
from typing import TYPE_CHECKING, Literal, Never, Self

from shmbridge import batch
from shmbridge.batch import Hold
from shmbridge.config import (
    Run,
    check_bridge_name,
    check_choice,
    check_count,
    check_lanes,
    check_run,
    check_timeout,
    deadline_of,
)
from shmbridge.errors import BadArgument, ServesRanks, unknown_argument
from shmbridge.hub import (
    Batches,
    BatchRequest,
    GroupQueue,
    Hub,
    OutsideQueue,
    Policy,
    Scheduling,
    Screen,
    Tap,
    become_hub,
    check_outside,
    check_screen,
    check_tap,
    limit_of,
    note_hub,
)
from shmbridge.record import Call, Group, Record
from shmbridge.schema import Split, columns_of
from shmbridge.segments import OneProcess, closed_at_exit, lanes_at_most, then_close, watch_threads

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.batch import Layout, MakeBatch
    from shmbridge.control.messages import Evaluated
    from shmbridge.hub import DeadRank, Mode, RankServer, ShareDealer

_MOST_POLLED = 1 << 31


class Consumer(OneProcess):
    """The one hub of a bridge; a context manager.

    For one thread at a time, which SHMBRIDGE_DEBUG=1 checks, except stats, publish_policy_version, pause,
    resume and drain. Construction adopts every existing lane, also those of dead producers, before
    anything is removed. Only three things release a record: its release(), the end of its own `with`, the
    next step of an iteration. Leaving the consumer's `with`, or close(), releases nothing: the next
    consumer gets the held records again. docs/reference/releases.md has every case.

    Args:
        bridge: name of the bridge.
        run: the training run to announce; environments wait for one.
        lanes: most lanes taken from at once; further lanes wait until others are finished. "auto": as many as
            descriptors allow, 1024 at most.
        resume: "redeliver" hands out the records that an earlier consumer left un-released; "discard" counts
            and drops them.
        schema: a pyarrow.Schema whose fields extend the standard columns; producers that disagree on a type
            are refused.
        group_timeout_s: a group whose fragments do not all come within this many seconds is discarded and
            counted.
        policy: how batches are formed: "fair" over environments, "atropos" as the Atropos server does, or
            "oldest" version first.
        allocation_wait_s: under "fair", seconds a batch is delayed for an environment that is promised a
            part of it.
        max_off_policy_steps: the off-policy limit, with policy "oldest". A producer that asks
            (Producer.begin_group) begins no group that would be trained with more than this many steps later,
            and no batch holds a staler group, whichever producer sent it. None: no limit.
        groups_per_step: groups of a batch, for the off-policy limit.
        outside: for a program that takes all records at once and queues their groups itself; see
            OutsideQueue.
        tap: gets every record before it is handed out, such as a shmbridge.archive.recorder.Recorder; closed
            with the consumer. Records that resume="discard" drops are handed out to nobody, the tap included.
        replace: first close an earlier consumer of this bridge in this very process, as when a notebook's
            cell runs again. One of another process is never touched: ConsumerTaken.

    Attributes:
        bridge: as given.
        columns: the standard columns and those of `schema`, by name.

    Raises:
        BadArgument: `lanes` is not a number from 1, `run` is not a shmbridge.Run, or `tap` is no tap.
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
        outside: OutsideQueue | None = None,
        tap: Tap | None = None,
        replace: bool = False,
    ) -> None:
        check_choice("resume", resume, ("redeliver", "discard"))
        outside, scheduling = check_outside(outside), Scheduling(policy, group_timeout_s, allocation_wait_s)
        self.columns, self.bridge, tap = columns_of(schema), check_bridge_name(bridge), check_tap(tap)
        limit = limit_of(max_off_policy_steps, groups_per_step, policy)
        run, most = check_run(run), check_lanes(lanes)
        most = lanes_at_most() if most is None else most
        self._hub = hub = Hub(
            bridge,
            become_hub(bridge, replace=replace),
            columns=self.columns,
            run=run,
            limit=limit,
            lanes=most,
            resume=resume,
            scheduling=scheduling,
            outside=outside,
            tap=tap,
        )
        try:
            note_hub(hub)
            # Read in each call: one attribute instead of two.
            self._closing, self._state, self._waiting = hub.closing, hub.state, hub.waiting
            self._lanes, self._turns = hub.lanes, hub.lanes.turns
            self._ranks: ShareDealer | None = None  # forms the batches: nothing is taken here
            weakref.finalize(self, hub.close_unheld).atexit = False
            methods = "get", "poll", "_take", "batches", "take_groups"
            watch_threads(self, f"the consumer of bridge {bridge!r}", methods)
        except BaseException:  # its threads are running
            hub.closing.close()
            raise

    # -- taking records

    def get(self, timeout_s: float | None = None) -> Record:
        """Returns the next record of any lane, leased until its release().

        Blocks at most `timeout_s` seconds (None: for ever).

        Raises:
            ConsumerEmpty: no record came in time; the message says which producers are alive.
            Closed: the consumer was closed.
        """
        if self._ranks is None and (record := self._turns.take()) is not None:
            return record
        self._check_mine()
        deadline, call = deadline_of(check_timeout(timeout_s)), Call.GET  # slow to look up after a sleep
        with self._state.asking(for_record=True):
            while (record := self._take(call)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._waiting.nothing_came(timeout_s)
                self._waiting.wait(left)
        return record

    async def get_async(self, timeout_s: float | None = None) -> Record:
        """`get` that never blocks the event loop: a separate thread waits and wakes the loop."""
        self._check_mine()
        deadline, call = deadline_of(check_timeout(timeout_s)), Call.GET_ASYNC
        with self._state.asking(for_record=True):
            while (record := self._take(call)) is None:
                left = deadline - time.monotonic()
                if left <= 0:
                    raise self._waiting.nothing_came(timeout_s)
                await self._waiting.wait_async(left)
        return record

    def poll(self, max_records: int = 256) -> list[Record]:
        """Returns up to `max_records` records that are there now, fairly over the lanes; each is leased until
        its own release().

        Never blocks.
        """
        if type(max_records) is not int or max_records > _MOST_POLLED:
            max_records = check_count("max_records", max_records, 0, _MOST_POLLED)
        if self._ranks is None and (records := self._turns.poll(max_records)):
            return records
        self._check_mine()
        self._state.check_open()
        try:
            return self._lanes.poll(max_records)
        finally:
            self._closing.close_if_owed()

    def __iter__(self) -> Iterator[Record]:
        """Yields records as they come, until close(), or until drain() and nothing is left.

        Each step releases the record of the step before.

        A `break`, an exception or close() releases nothing: the record of that step is released only by its
        own release().
        """
        return closed_at_exit(self._records())

    def _records(self) -> Generator[Record, None, None]:
        self._check_mine()
        with self._state.until_closed():
            while True:
                if (record := self._take(Call.FOR)) is None:
                    record = self._wait_for_record()
                if record is None:
                    return
                yield record
                record.release()

    def _wait_for_record(self) -> Record | None:
        """Returns the next record; None once the bridge is drained and nothing is left."""
        call = Call.FOR
        with self._state.asking(for_record=True):
            while not self._waiting.drained():
                self._waiting.wait()
                if (record := self._take(call)) is not None:
                    return record
        return None

    async def __aiter__(self) -> AsyncIterator[Record]:
        """`__iter__` for an event loop."""
        self._check_mine()
        with self._state.until_closed():
            while True:
                if (record := self._take(Call.ASYNC_FOR)) is None:
                    record = await self._wait_for_record_async()
                if record is None:
                    return
                yield record
                record.release()

    async def _wait_for_record_async(self) -> Record | None:
        """`_wait_for_record` for an event loop."""
        call = Call.ASYNC_FOR
        with self._state.asking(for_record=True):
            while not await self._waiting.drained_async():
                await self._waiting.wait_async()
                if (record := self._take(call)) is not None:
                    return record
        return None

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
        split: Split | None = "train",
        **unknown: Never,
    ) -> "Batches":
        """Yields batches of whole groups, oldest first, until close(), or until drain() and too few are left.

        Blocks in `next` until a batch is full; `async for` waits without blocking the event loop. Do not call
        get or poll while iterating, and iterate once at a time.

        Args:
            groups: groups in a batch; under policy "atropos" a batch has `run.batch_size` trajectories
                instead.
            layout: "packed" (N,) with cu_seqlens and position_ids, or "padded" (B, T).
            max_staleness: groups that are more versions behind the current one are discarded and counted;
                None: no group is.
            prefetch: batches gathered ahead in a thread, 0 or more.
            hold: "step" keeps the leases until batch.release() or the next iteration, so that the successor
                of a killed learner gets the batch again; "caller" until batch.release() only; "gather" ends
                them once the batch is gathered: at most once. A `break` releases nothing: leave the loop by
                `with batch:` or batch.release().
            timeout_s: seconds that `next` waits; None: for ever.
            rows: trajectories in a batch, instead of groups: whole groups as far as they fit, at least one.
            make: makes a batch of leased groups and a layout, in the thread that forms batches; None:
                `Batch`. For a subclass.
            whole_rows: `loss_mask` is 1, not 0, in the rows that have neither a mask nor `prompt_length`.
            split: "train" or "eval": groups of the other are released untrained, and counted in
                `left_out_total{split}`; None: both are handed out.

        Raises:
            ConsumerEmpty: no batch could be formed in time; queued groups stay. Begin another iteration to
                continue.
            BatchTooBig: the groups already queued for the batch fill the lanes, so that it can never be
                filled.
            IterationOver: a later iteration, or take_groups, took the batches gathered ahead by this one.
        """
        for name in unknown:
            raise unknown_argument("batches", name, signature(self.batches).parameters)
        self._check_mine()
        request = BatchRequest(
            self._hub.former.want(groups if rows is None else None, rows),
            layout=layout,
            make=batch.whole_rows(make) if whole_rows else make,
            max_staleness=self._hub.former.most_stale(max_staleness),
            hold=hold,
            prefetch=prefetch,
            timeout_s=timeout_s,
            split=split,
        )
        begin = functools.partial(self._hub.iterations.iterate, request.checked())
        return Batches(begin, self, f"{request.size} on {self.bridge!r}")

    @then_close
    def take_groups(
        self,
        *,
        groups: int | None = None,
        rows: int | None = None,
        max_staleness: int | None = None,
        timeout_s: float = 0.0,
        split: Split | None = "train",
    ) -> list[Group] | None:
        """Returns the whole groups of the next batch, leased and in place; None if there is no batch in time.

        For callers that do not want arrays. Blocks at most `timeout_s` seconds. The caller releases each
        group's `records`, or returns them with `put_back`. The batch is counted as a step. Do not call get or
        poll, nor iterate over batches, at the same time.

        Args:
            groups: groups in the batch; or else
            rows: trajectories in the batch. Under policy "atropos" neither is used: a batch has
                `run.batch_size` trajectories.
            max_staleness, split: as in batches.
            timeout_s: seconds to wait.
        """
        self._check_mine()
        size = self._hub.former.want(groups, rows)
        most_stale = self._hub.former.most_stale(max_staleness)
        return self._hub.iterations.take_groups(
            BatchRequest(size, max_staleness=most_stale, timeout_s=timeout_s, split=split)
        )

    @then_close
    def put_back(self, groups: list[Group]) -> None:
        """Returns unread groups of take_groups to the queue: they come again before all others. Any thread.

        Does not wait for records, only while another thread moves records into groups.
        """
        self._hub.former.put_back(groups)

    def screen(self, keep: Screen | None) -> None:
        """Shows every whole group to `keep` before it goes into a batch, those of evaluation too, and
        releases the groups for which `keep` returns False: `screened_total`.

        `keep` runs in the thread that forms batches: it must be quick and must not call the consumer. An
        exception from it ends the batches; its group stays.
        """
        self._hub.former.screen = check_screen(keep)

    def one_wait(self) -> AbstractContextManager[None]:
        """Makes one wait of several calls, for a loop that asks again and again with a short `timeout_s`:
        `with consumer.one_wait(): ...`.

        Observers see the wait whole, and the log says what it is for once it has lasted five seconds, then
        every minute, as for a single call that waits that long. Never blocks.
        """
        return self._state.asking()

    def take_back_dropped(self) -> int:
        """Hands out again, as `redelivered`, the records that were read and whose leases were dropped without
        release; returns how many.

        They come before all others, in their order, from get, poll, iteration and batches alike. Never
        blocks; for the consumer's thread.
        """
        self._check_mine()
        self._state.check_open()
        return self._lanes.take_back_dropped()

    def _take(self, call: Call) -> Record | None:
        record = self._turns.take(False, call)
        if record is None:
            self._closing.close_if_owed()
            self._state.check_open()
            try:
                record = self._lanes.take(call)
            finally:
                self._closing.close_if_owed()
        return record

    def _check_mine(self) -> None:
        self._closing.close_if_owed()
        if self._ranks is not None:
            raise ServesRanks(
                f"the consumer of bridge {self.bridge!r} serves ranks",
                hint="read through a shmbridge.Rank, here too",
            )

    @then_close
    def serve_ranks(
        self,
        world_size: int,
        groups: int | None = 8,
        mode: "Mode" = "sharded",
        max_staleness: int | None = None,
        prefetch: int = 1,
        dead_rank: "DeadRank" = "wait",
        split: Split | None = "train",
    ) -> "RankServer":
        """Deals batches out to `world_size` learner ranks (shmbridge.Rank) from now on, in a thread.

        Does not block.

        From now on get, poll and batches raise ServesRanks. The returned server reports when all is done:
        `wait`, `idle`, `stats`.

        Args:
            world_size: ranks, 1 to 1024; rank 0 may be in this process.
            groups: groups of a batch, over all ranks, at least one per rank; under policy "atropos" as in
                batches. None: no batch is formed, and `deal` of the server gets them, as from a Feed, which
                takes groups as before.
            mode: "sharded": every rank gets different groups, the same number each and about the same number
                of tokens; "broadcast": every rank gets all groups.
            max_staleness, split: as in batches.
            prefetch: batches formed ahead of the one being read.
            dead_rank: the shares of a dead rank go to the next process that takes its number ("wait"), or to
                the other ranks ("spread").
        """
        from shmbridge.hub import RankServer, ShareDealer

        self._state.check_open()
        if self._hub.ranks is not None:
            raise BadArgument(
                f"the consumer of bridge {self.bridge!r} serves ranks already",
                hint="keep the server that serve_ranks returned, or close this consumer first",
            )
        self._hub.iterations.stop_prefetch()
        with self._closing.whole:  # close() stops its thread
            self._state.check_open()
            dealer = self._hub.ranks = ShareDealer(
                self._hub,
                world_size=world_size,
                groups=groups,
                mode=mode,
                max_staleness=max_staleness,
                prefetch=prefetch,
                dead_rank=dead_rank,
                split=split,
            )
            self._ranks = None if groups is None else dealer
        self._hub.look_again()
        return RankServer(dealer, self.bridge, self)

    # -- bridge state

    def step_done(self) -> None:
        """Counts a step of the run, for a loop over `get` or `poll`: `current_step` rises by one.

        Call it after each optimizer step. Environments with a number of steps end by that count. `batches`,
        `take_groups` and ranks count by themselves; under policy "atropos" the batches formed are counted,
        and this changes nothing. Never blocks; any thread.
        """
        self._state.check_open()
        self._hub.queue.count_batch()
        self._hub.former.end_step()

    @property
    def hub_epoch(self) -> int:
        """The number of this hub among the hubs of the bridge: 1 for the first, rising."""
        return self._state.hub_epoch

    @property
    def run(self) -> Run | None:
        """The announced training run."""
        return self._state.run

    @property
    def current_step(self) -> int:
        """The run's step: `starting_step`, and batches handed out, or formed under policy "atropos".

        In a loop over `get` or `poll` it moves with `step_done` only.
        """
        return self._hub.current_step

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""
        return self._state.policy_version

    @property
    def training_version(self) -> int:
        """The version that staleness is counted from: `policy_version`, or a later one that was noted."""
        return self._state.training_version

    @property
    def paused(self) -> bool:
        """Whether producers are held back."""
        return self._state.paused

    @property
    def draining(self) -> bool:
        """Whether the bridge takes no new records."""
        return self._state.draining

    def announce_run(self, run: Run) -> None:
        """Announces (or replaces) the training run; environments that wait for one continue."""
        self._hub.announce_run(run)

    def publish_policy_version(
        self, version: int, *, run_id: str | None = None, same_as: int | None = None
    ) -> None:
        """Publishes the current policy version by one store. Raises ValueError if it goes backwards.

        Args:
            version: counts optimizer steps.
            run_id: as a learner starts: the training run that this and later versions are of, 16 hexadecimal
                digits. `list_bridges` then tells the versions of that run from those of another.
            same_as: with `run_id`: the version whose weights this one repeats; None: no step has trained
                these weights.
        """
        self._hub.publish_policy_version(version, run_id, same_as)

    def end_run(self) -> None:
        """Tells the bridge that all it was trained to is saved elsewhere. For a learner that ends in order.

        Without this, what a run with a `run_id` has trained stays in shared memory after the last participant
        has left, for the next learner: as after a kill.
        """
        self._state.end_run()

    def note_training_version(self, version: int) -> None:
        """Records which version the weights in training have, before that version is published. For a learner
        that does not publish each step.

        Groups still begin under `policy_version`; the further it is behind, the fewer. Raises ValueError if
        it is further behind than `max_off_policy_steps`, since then no group could begin. Never goes
        backwards: ValueError.
        """
        self._state.note_training_version(version)

    def pause(self) -> None:
        """Holds producers back: their `put` waits. Committed records are still handed out."""
        self._hub.pause()

    def resume(self) -> None:
        """Ends a pause."""
        self._hub.resume()

    def drain(self) -> None:
        """Stops taking new records: `put` raises BridgeDraining, iteration ends when nothing is left."""
        self._hub.drain()

    @then_close
    def take_evaluations(self) -> "list[Evaluated]":
        """Returns what environments measured in evaluations of their own since the last call, in order.

        The newest 256 are kept; `evaluations_lost_total` counts the others. Never blocks; any thread. Each
        has `env_name`, `metrics` by name, and the `policy_version` and `step` at which it began.
        """
        return self._hub.take_evaluations()

    # -- counters

    @property
    def queue(self) -> GroupQueue:
        """The groups in no batch yet, for programs that serve batches to others, such as the gateway."""
        return self._hub.queue

    @then_close
    def stats(self) -> dict[str, float]:
        """Counters of the bridge, flat: produced = released + held + discarded, from the lanes' own words.

        Never blocks; any thread.
        """
        return self._hub.stats()

    # -- the end

    def close(self) -> None:
        """Gives the bridge up; releases nothing.

        Records handed out and not released come to the next consumer again, as do those not yet handed out;
        live views stay valid and keep the hub lock until the last is gone.

        Idempotent; a repeated call continues where an interrupt ended the last one. Blocks while another
        thread closes. Does nothing in a child of fork, nor in a signal handler that interrupts close()
        itself. In a handler that interrupts a call of this thread which holds a lock, it only notes the
        close: that call, or the next step of an iteration, then closes. Nothing more is handed out until
        then.
        """
        self._closing.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._lanes.abandon()
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self.bridge!r}: {self._hub.described()}>"
