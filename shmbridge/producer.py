"""Producer: opens one lane, and puts groups into it."""

import asyncio
import functools
import logging
import operator
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from shmbridge import sizing
from shmbridge._ext import lane as lane_writer
from shmbridge._ext import put as fast_put
from shmbridge._ext.lane import ClaimLost
from shmbridge._ext.put import BadValue, LossyMasks, Plan, Stamp
from shmbridge.config import (
    check_bridge_name,
    check_choice,
    check_env_name,
    check_lane_bytes,
    check_producer_id,
    check_timeout,
    format_size,
)
from shmbridge.errors import (
    BadArgument,
    BridgeDraining,
    ClaimOpen,
    Closed,
    Drop,
    InvalidRecord,
    LaneFull,
    LaneQuarantined,
    Lost,
    RecordTooBig,
    ShmBridgeError,
)
from shmbridge.put import (
    LOOK_S,
    LaneOrigin,
    OwnNames,
    RecordedGroup,
    RecordPlanner,
    RelayedRecord,
    Slot,
    Ticket,
    Tickets,
    Version,
    ahead,
    as_invalid,
    check_agrees_with_bridge,
    checked_stamp,
    create_lane,
    groups_of,
    lane_counters,
    lane_full,
    obstacle,
)
from shmbridge.schema import Split, columns_of
from shmbridge.segments import (
    Apart,
    LockByte,
    MemoryUse,
    OneProcess,
    at_exit,
    leave_bridge,
    open_control,
    sweep_bridge,
    unlock,
    watch_threads,
)

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

OnFull = Literal["block", "raise", "drop"]
LostReason = Literal["failed", "late", "too_old"]
_SAY_SO_AFTER_S = 5.0


class Producer(OneProcess):
    """One producer's end of a bridge.

    For one thread at a time, which SHMBRIDGE_DEBUG=1 checks; a context manager, also for `async with`.

    Construction blocks only to reserve the lane's memory (0.1 to 0.3 ms per MiB); a consumer need not exist
    yet.

    Args:
        bridge: name of the bridge, 1 to 48 of `A-Z a-z 0-9 _ -`.
        env_name: the environment's name in metrics.
        lane_bytes: size of the lane's data area, `"64M"` or bytes, 64 KiB at least. A record may take half of
            it.
        on_full: what `put` does when the lane has no room: "block" waits, "raise" raises LaneFull, "drop"
            counts and returns None.
        schema: a pyarrow.Schema whose fields extend the standard columns.
        producer_id: prefix of the `producer_id` property, at most 63 bytes of UTF-8; from `env_name` and the
            pid if None.
        origin: for a relay: the producer on another node whose records this one puts.

    Attributes:
        bridge, env_name, on_full: as given.
        lane_bytes: as given, in bytes.
        lane_name: name of the lane's segment.
        columns: the standard columns and those of `schema`, by name.
        origin: as given; None unless a relay puts records of another node.

    Raises:
        BadBridgeName, BadArgument, ShmTooSmall, ShmPermission, NotReady, LayoutMismatch, SchemaMismatch:
            nothing is left behind.
    """

    def __init__(
        self,
        bridge: str,
        env_name: str = "",
        lane_bytes: int | str = "64M",
        on_full: OnFull = "block",
        schema: "pa.Schema | None" = None,
        producer_id: str | None = None,
        *,
        origin: LaneOrigin | None = None,
    ) -> None:
        check_choice("on_full", on_full, ("block", "raise", "drop"))
        self.bridge = check_bridge_name(bridge)
        self.env_name, self.on_full = check_env_name(env_name), on_full
        self._given_id = check_producer_id(producer_id) or f"{env_name[:32] or 'producer'}-{os.getpid()}"
        self.lane_bytes = check_lane_bytes(lane_bytes, sizing.SMALLEST_LANE)
        self.origin, origin_words = origin, None if origin is None else origin.words()
        self.columns = columns_of(schema)
        self._planner = RecordPlanner(self.columns, self.lane_bytes, env_name)
        self._control = open_control(bridge)
        try:
            sweep_bridge(bridge)
            check_agrees_with_bridge(self.columns, self._control, bridge)
            self._open_lane(origin_words)
        except BaseException:
            leave_bridge(self._control.mapping.fd, bridge)
            raise
        self._tickets = Tickets(
            self._producer_id, bridge, self.lane_name, self._lane, self._control, self._writer, self._names
        )
        self._waiting: deque[Plan] = deque()  # handed over by put_async, not yet committed
        self._turn: tuple[asyncio.AbstractEventLoop, asyncio.Lock] | None = None
        self._one_sleeper = threading.Lock()
        self._sleeper = Apart(f"shmbridge-{bridge}")
        weakref.finalize(self, self._sleeper.end).atexit = False
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed, self._memory = False, MemoryUse()
        self._no_exit_call = at_exit(self.close)
        watch_threads(self, f"producer {self.producer_id}", ("put", "claim", "begin_group", "_try_put"))

    def _open_lane(self, origin: tuple[bytes, bytes, int] | None) -> None:
        self.lane_name, self._lane, self._producer_id = create_lane(
            self.bridge, self.lane_bytes, self.columns, self._given_id, self.env_name, origin
        )
        self._writer = lane_writer.LaneWriter(self._lane, self._control.mapping)
        self._names = OwnNames(
            self.producer_id, self.bridge, self._control, self.lane_name, self._lane, self._writer
        )
        self._fast_put = fast_put.FastPut(
            self._planner.forms, self._writer, self.producer_id, self._planner.most_bytes, self._planner.look
        )
        self._control.announce_lane()

    # -- putting

    def put(
        self,
        group: "Mapping[str, Any] | pa.RecordBatch | RecordedGroup | RelayedRecord",
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: Version = None,
        split: Split = "train",
        timeout_s: float | None = None,
        foreign: bool = False,
    ) -> int | None:
        """Commits one group (or a fragment of one), packed straight into the lane.

        Blocks while the lane is full or the bridge is paused, at most `timeout_s` (None: for ever), only
        under on_full="block".

        Args:
            group: an Atropos ScoredDataGroup, a mapping from column to rows, a pyarrow.RecordBatch, a
                RecordedGroup of an archive, or a relay's RelayedRecord, which brings all the rest. Rows
                are lists, 1-D arrays, CPU tensors, or (flat array, lengths); columns with one number per row
                are sequences or arrays. Copied before this returns. A tuple of a 1-D array and whole numbers
                is always (flat array, lengths): `(np.array([1, 2, 3]), np.array([1, 2]))` is the rows [1] and
                [2, 3]. Give two rows as a list.
            group_id: id of the group; default: a new one.
            group_size: rows of the whole group, when this is only a part of it; default: the rows given.
            policy_version: version when generation began, or (oldest, newest); default
                `producer.policy_version`.
            split: "train" or "eval".
            timeout_s: seconds.
            foreign: accept whatever Atropos accepts: unequal rows (flagged) and unknown keys (in `extra`).

        Returns:
            The sequence, counting from 0 per producer; None if it was dropped under "drop" (counted).

        Raises:
            InvalidRecord, SchemaMismatch, RecordTooBig, LaneFull, LaneRemoved, BridgeDraining, Closed:
                nothing was committed.
        """
        if group_size is None and split == "train" and not (foreign or self._closed):
            sequence: int | None = self._fast_put.put(group, group_id, policy_version)
            if sequence is not None:
                return sequence
        plan = self._measure(group, group_id, group_size, policy_version, split, foreign)
        attempt = functools.partial(self._try_put, plan)  # a closure would cost each call above
        return plan.sequence if attempt() or self._wait_for(attempt, plan, timeout_s) else None

    def put_many(
        self, groups: Iterable["Mapping[str, Any] | pa.RecordBatch"], **options: Any
    ) -> list[int | None]:
        """Calls `put` for each of the groups, in order, with the same options.

        Records committed before an error stay committed.
        """
        return [self.put(group, **options) for group in groups_of(groups)]

    async def put_async(
        self,
        group: "Mapping[str, Any] | pa.RecordBatch",
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: Version = None,
        split: Split = "train",
        timeout_s: float | None = None,
        foreign: bool = False,
    ) -> int | None:
        """`put` that never blocks the event loop; same arguments, result and errors.

        The group is committed or counted as dropped even if the awaiting task is cancelled; do not change it
        until then. Groups are committed in the order of the calls, except those that still wait when their
        event loop is closed: close() commits or counts them.
        """
        check_timeout(timeout_s)
        plan = self._measure(group, group_id, group_size, policy_version, split, foreign)
        if not self._waiting and self._try_put(plan):
            return plan.sequence
        if self.on_full == "raise":
            raise self._lane_full(plan, 0.0)
        if self.on_full == "drop":
            self._drop(plan, Drop.FULL)
            return None
        self._waiting.append(plan)
        task = asyncio.get_running_loop().create_task(self._put_later(plan, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # retrieves the error of a cancelled caller, so that asyncio does not log it

    async def _put_later(self, plan: Plan, timeout_s: float | None) -> int | None:
        """Waits for its turn and for room, in a thread; commits, or counts the drop with its reason."""
        loop = asyncio.get_running_loop()
        if self._turn is None or self._turn[0] is not loop:
            self._turn = loop, asyncio.Lock()
        began, reason, turn = time.monotonic(), Drop.CANCELLED, self._turn[1]
        try:
            async with asyncio.timeout(timeout_s):
                await turn.acquire()
            try:
                self._writer.note_blocked(True)
                while not plan.done and (self._writer.claiming or not self._try_put(plan)):
                    left = _left(began, timeout_s)
                    if left <= 0:
                        raise TimeoutError
                    await self._sleeper.call(functools.partial(self._sleep, left))
            finally:
                self._writer.note_blocked(False)
                turn.release()
        except TimeoutError:
            reason = Drop.TIMEOUT
            raise self._lane_full(plan, time.monotonic() - began) from None
        finally:
            if not plan.done:
                self._drop(plan, reason)
            with suppress(ValueError):
                self._waiting.remove(plan)
        if plan.sequence is None:  # close() came first and had no room
            raise obstacle(Closed, "closed while waiting", producer=self.producer_id)
        return plan.sequence

    def claim(
        self,
        rows: int,
        lengths: Mapping[str, Any],
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: Version = None,
        split: Split = "train",
        timeout_s: float | None = None,
    ) -> Slot:
        """Reserves room in the lane for a record that the caller writes in place:
        `with producer.claim(...) as slot: slot["tokens"][:] = ...`.

        Blocks like `put`. Committed when the block ends, aborted if it raises; one open claim per
        producer. The memory is not zeroed: it holds the bytes of earlier records. Write every value of
        every claimed column. A column that the block never asked for (`slot[name]`) raises InvalidRecord at
        the end; unwritten values inside a view cannot be detected.

        Args:
            rows: rows of the record.
            lengths: per list column, the length of each row; per scalar column, anything (`None` will do).
            group_id, group_size, policy_version, split, timeout_s: as in `put`.
        """
        self._check_open()
        plan = self._planner.claimed(rows, lengths, self._stamp(group_id, group_size, policy_version, split))
        slot = Slot(self._writer, plan, self._publish)

        def begin() -> bool:
            if self._held_back() or not slot.begin(plan.extent_bytes):
                return False
            plan.begin(slot)
            return True

        try:
            if not begin() and not self._wait_for(begin, plan, timeout_s):
                raise self._lane_full(plan, 0.0)
            return slot
        except ClaimLost:  # between two checks another thread opened a claim, or this producer was closed
            self._held_back()
            raise
        except BaseException:
            slot.abort()
            raise

    def begin_group(self, timeout_s: float | None = None) -> Ticket:
        """Returns a ticket for one group, once the consumer has room for it:
        `with producer.begin_group() as ticket: ...`.

        Blocks until then, also while there is no consumer or the bridge is paused, at most `timeout_s` (None:
        for ever). A consumer without max_off_policy_steps always has room. Generate and put the group inside
        the `with` block; its end ends the ticket.

        Raises:
            NotAdmitted: the most groups allowed were under way all the time. NoConsumer: no consumer
                answered, or none can any more.
            RequestRefused: the consumer does not read this lane. LaneQuarantined, BridgeDraining, Closed.
            ClaimOpen: another thread or task is asking.
        """
        return self._tickets.begin_group(timeout_s)

    async def begin_group_async(self, timeout_s: float | None = None) -> Ticket:
        """`begin_group` that never blocks the event loop; tasks are served in the order of their calls.

        May be cancelled.
        """
        return await self._tickets.begin_group_async(timeout_s)

    # -- how it is put

    def _measure(
        self,
        group: Any,
        group_id: str | int | None,
        group_size: int | None,
        version: Version,
        split: str,
        foreign: bool,
    ) -> Plan:
        self._check_open()
        try:
            if isinstance(group, RelayedRecord):
                if self.origin is None:
                    raise obstacle(
                        InvalidRecord, "no origin", producer=self.producer_id, sequence=group.sequence
                    )
                return self._planner.relayed(group, self._writer.newest_origin)
            return self._planner.plan(group, self._stamp(group_id, group_size, version, split), foreign)
        except (InvalidRecord, RecordTooBig):
            self._writer.count_drop(Drop.INVALID)
            raise

    def _stamp(
        self, group_id: str | int | None, group_size: int | None, version: Version, split: str
    ) -> Stamp:
        # Increment first: after an interrupt the record may be committed, and no two groups may share an id.
        self._fast_put.groups += 1
        own = f"{self.producer_id}:{self._fast_put.groups - 1}"
        published = self._control.policy_version
        stamp = checked_stamp(own if group_id is None else group_id, group_size, version, published, split)
        newest = version[1] if isinstance(version, tuple) else version
        # Counted, not refused: an engine may have a version a moment before it is published.
        if newest is not None and operator.index(newest) > published:
            self._fast_put.ahead += 1
            if self._fast_put.ahead == 1:
                log.warning("%s", ahead(self.producer_id, self.bridge, newest, published))
        return stamp

    def _held_back(self) -> bool:
        """Returns whether the bridge is paused; raises for a lasting obstacle to a claim."""
        return (self._closed or self._writer.blocked) and self._is_paused()

    def _is_paused(self) -> bool:
        self._check_open()
        if self._writer.quarantined:
            raise obstacle(
                LaneQuarantined, "quarantined", producer=self.producer_id, pid=self._control.hub_pid
            )
        if self._writer.claiming:
            raise obstacle(ClaimOpen, "claim open", producer=self.producer_id)
        if self._control.draining:
            raise obstacle(BridgeDraining, "draining", bridge=self.bridge)
        self._names.check()
        return bool(self._control.paused)

    def _try_put(self, plan: Plan) -> bool:
        """Claims and commits if there is room now."""
        while not self._held_back():
            try:
                placed = plan.put_into(self._writer)
                if placed:
                    self._planner.fragments.note(plan)
                return placed
            except LossyMasks:
                # Rare masks, neither -100 nor the token: `masks` becomes a separate column, which needs room.
                self._unfold(plan)
            except BadValue as bad:
                self._drop(plan, Drop.INVALID)
                raise as_invalid(bad, self.columns, plan.source and plan.source[0]) from None
            except ClaimLost:
                # A signal handler closed this producer, or has a claim open: _held_back raises for either.
                continue
        return False

    def _unfold(self, plan: Plan) -> None:
        try:
            plan.become(self._planner.with_masks_as_they_are(plan))
        except (InvalidRecord, RecordTooBig):
            self._drop(plan, Drop.INVALID)
            raise

    def _wait_for(self, attempt: Callable[[], bool], plan: Plan, timeout_s: float | None) -> bool:
        """Waits as `on_full` says, and retries; returns False if the record was dropped and counted."""
        if self.on_full == "drop":
            self._drop(plan, Drop.FULL)
            return False
        began, said, timeout_s = time.monotonic(), False, check_timeout(timeout_s)
        self._writer.note_blocked(True)
        try:
            while self.on_full == "block" and (left := _left(began, timeout_s)) > 0:
                self._sleep(left)
                if attempt():
                    return True
                if not said and time.monotonic() - began > _SAY_SO_AFTER_S:
                    said = True
                    log.warning("%s", self._lane_full(plan, time.monotonic() - began))
        finally:
            self._writer.note_blocked(False)
        raise self._lane_full(plan, time.monotonic() - began)

    def _sleep(self, left_s: float) -> None:
        """Sleeps until something may have changed; any thread."""
        if self._closed:
            return
        # A put during a put_async's sleep: only one thread may own space_waiting.
        if not self._one_sleeper.acquire(blocking=False):
            time.sleep(min(left_s, 0.005))
            return
        try:
            self._writer.count_wait(self._writer.wait_space(int(min(left_s, LOOK_S) * 1e9)))
        finally:
            self._one_sleeper.release()
        if self._control.paused:  # room does not end a pause: sleep for it
            time.sleep(min(left_s, 0.02))

    def _lane_full(self, plan: Plan, waited_s: float) -> LaneFull:
        return lane_full(self.producer_id, self._control, self._writer, plan.extent_bytes, waited_s)

    def _publish(self, slot: Slot) -> None:
        """Checks and publishes the values that the caller wrote into an open claim."""
        self._check_open()
        if (name := slot.unused) is not None and slot.is_open:
            self._drop(slot.plan, Drop.INVALID)
            raise as_invalid(BadValue(name, -1, -1, None, "unwritten"), self.columns)
        try:
            slot.plan.finish(slot)
            self._planner.fragments.note(slot.plan)
        except BadValue as bad:
            self._drop(slot.plan, Drop.INVALID)
            raise as_invalid(bad, self.columns, None) from None
        except ClaimLost:
            self._check_open()
            raise obstacle(ClaimOpen, "claim over") from None

    def _drop(self, plan: Plan, reason: Drop) -> None:
        # set first: a signal handler that closes drops the waiting plans too
        done, plan.done = plan.done, True
        if not done:
            self._writer.count_drop(reason)

    def count_lost(self, reason: LostReason, episodes: int = 1) -> None:
        """Counts episodes that an environment began and that are in no record: `episodes_lost_total{reason}`.

        For producers that play episodes; `inspect`, metrics and the consumer's stats show the counts. Never
        blocks; the thread that puts.

        Args:
            reason: "failed"; "late", beyond its deadline; "too_old", cancelled since newer weights are there.
            episodes: how many.

        Raises:
            BadArgument: another reason, or a negative number.
        """
        check_choice("reason", reason, tuple(each.name.lower() for each in Lost))
        if episodes < 0:
            raise BadArgument(f"episodes={episodes} is below 0", hint="give the number of lost episodes")
        self._check_process()
        self._writer.count_lost(Lost[reason.upper()], episodes)

    # -- state

    @property
    def producer_id(self) -> str:
        """The id in this producer's records: the given prefix and 16 hexadecimal digits, unique to this
        incarnation.

        `(meta.producer_id, meta.sequence)` identifies a record for ever. Never blocks; any thread.
        """
        return self._producer_id

    @property
    def policy_version(self) -> int:
        """The newest policy version the learner has published, -1 before the first.

        Never blocks: one load of shared memory.
        """
        self._check_process()
        return int(self._control.policy_version)

    @property
    def paused(self) -> bool:
        """Whether the consumer has paused the bridge: `put` waits."""
        self._check_process()
        return bool(self._control.paused)

    @property
    def removed(self) -> bool:
        """Whether its lane or the control segment was removed by force: no later consumer will find either.

        Two stat calls; any thread.
        """
        return not self._closed and self._names.removed

    def close_origin(self) -> None:
        """Notes that the lane's origin will send nothing again: its partial groups are discarded once this
        producer is closed, and the lane leaves no receipt.

        For a relay, in the thread that puts. Never blocks. Raises Closed.
        """
        self._check_open()
        self._writer.close_origin()

    def leave_receipt(self) -> None:
        """Has whoever removes this lane, once this producer has ended, leave a receipt for its records.

        For a producer that is started again and goes on where this one ended: see `segments.receipts`. The
        thread that puts; never blocks. Raises Closed.
        """
        self._check_open()
        self._writer.leave_receipt()

    @property
    def held(self) -> int:
        """Its committed records that are not released. Never blocks; any thread."""
        self._check_process()
        return 0 if self._closed else self._writer.outstanding

    @property
    def free_bytes(self) -> int:
        """Bytes of its lane that no un-released record has. Never blocks; any thread."""
        self._check_process()
        return self.lane_bytes if self._closed else self._writer.free_bytes

    def stats(self) -> dict[str, float]:
        """Counters of this lane, flat; `dropped_total{reason}` per reason. Never blocks; any thread."""
        self._check_process()
        return {
            **lane_counters(self._lane),
            **self._memory.of([self._lane]),
            "lane_bytes": self.lane_bytes,
            "held": self.held,
            "lane_free_bytes": self.free_bytes,
            "policy_version_ahead_total": self._fast_put.ahead,
        }

    def _check_process(self) -> None:
        if self._lane.forked:
            raise obstacle(Closed, "forked", producer=self.producer_id)

    def _check_open(self) -> None:
        self._check_process()
        if self._closed:
            raise obstacle(Closed, "closed", producer=self.producer_id)

    def close(self, drain: bool = False, timeout_s: float | None = None) -> None:
        """Leaves the bridge; committed records stay for the consumer.

        Idempotent; does nothing in a child of fork.

        Args:
            drain: first wait until the consumer has released everything, at most `timeout_s` (None: for
                ever), then LaneFull.
            timeout_s: seconds.
        """
        if self._closed or self._lane.forked:
            return
        self._writer.abort()  # an open claim is given up
        self._settle_waiting()
        began = time.monotonic()
        try:
            # End tickets first: the consumer may wait for groups that our tickets block, and so release
            # nothing.
            self._tickets.end()
            while drain and self._writer.outstanding:
                self._writer.reclaim()  # a release already seen must not wake us again
                self._names.check_reachable()
                left = _left(began, timeout_s)
                if left <= 0:
                    numbers = {"records": self._writer.outstanding, "timeout_s": timeout_s}
                    raise obstacle(LaneFull, "not drained", producer=self.producer_id, **numbers)
                self._sleep(left)
        finally:
            self._leave()

    def _settle_waiting(self) -> None:
        """Commits the plans that put_async has not yet placed, if there is room now; else counts them."""
        for plan in self._waiting:
            with suppress(ShmBridgeError):
                if not plan.done:
                    self._try_put(plan)
            if not plan.done:
                self._drop(plan, Drop.CANCELLED)

    def _leave(self) -> None:
        try:
            self._give_back()
        except Closed:  # its descriptors were closed under it, and its locks went with them
            self._closed = True
            self._no_exit_call()
            raise

    def _give_back(self) -> None:
        self._names.log_unreachable()
        # Before _closed is set, in case an interrupt ended close() above: a thread in begin_group checks only
        # the tickets.
        self._tickets.end()
        self._closed = True
        self._sleeper.end()
        self._writer.ring()  # the closing thread may be an event loop's
        self._sleeper.stop()
        self._no_exit_call()
        unlock(self._lane.fd, LockByte.PRODUCER)
        self._control.announce_lane()
        leave_bridge(self._control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()
        await asyncio.sleep(0)  # the tasks of put_async see the end

    def __repr__(self) -> str:
        state = "; closed" if self._closed else "; of the process before fork" if self._lane.forked else ""
        return (
            f"<Producer {self.producer_id} on {self.bridge!r}: {self._writer.slot_count} slots, "
            f"{format_size(self.lane_bytes)}{state}>"
        )


def _left(began: float, timeout_s: float | None) -> float:
    return 3600.0 if timeout_s is None else timeout_s - (time.monotonic() - began)
