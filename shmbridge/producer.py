"""Producer: opens a lane, and puts groups into it.

Knows lanes, waiting and policy versions; knows nothing of who reads, or of ZeroMQ. One Producer is one lane and one incarnation.
"""

import asyncio
import logging
import os
import secrets
import time
from collections import deque
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from shmbridge import intake, liveness, segment
from shmbridge._ext import ring
from shmbridge._ext.pack import BadValue, Column, LossyMasks, Plan
from shmbridge.config import check_bridge_name, format_size, parse_size
from shmbridge.errors import BridgeDraining, Closed, InvalidRecord, LaneFull, RecordTooBig, SchemaMismatch
from shmbridge.liveness import Byte
from shmbridge.schema import Columns, Kind, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

log = logging.getLogger(__name__)

OnFull = Literal["block", "raise", "drop"]
_FULL, _CANCELLED, _INVALID, _TIMEOUT = range(4)  # DROP_ of layout.h
DROP_REASONS = ("full", "cancelled", "invalid", "timeout")
_SMALLEST_LANE = 64 << 10
_SAY_SO_AFTER_S = 5.0


class _Record:
    """One measured group and what its slot says: everything commit needs besides a claim."""

    __slots__ = ("done", "fields", "group", "plan")

    def __init__(self, plan: Plan, fields: dict[str, int], group: Any) -> None:
        self.plan, self.fields, self.group = plan, fields, group
        self.done = False  # committed or counted


class Producer:
    """One producer's end of a bridge. For one thread at a time; a context manager.

    Never blocks at construction beyond reserving the lane's memory (about 0.3 ms per MiB); a consumer need not be there yet.

    Args:
        bridge: name of the bridge, 1 to 48 of `A-Z a-z 0-9 _ -`.
        env_name: what the environment is called in metrics.
        lane_bytes: size of the lane's data area, `"64M"` or bytes. A record may take half of it.
        on_full: what `put` does when the lane has no room: "block" waits, "raise" raises LaneFull, "drop" counts and returns None.
        schema: a pyarrow.Schema whose fields extend the standard columns.
        producer_id: unique name of this incarnation; made up if None.

    Raises:
        BadBridgeName, ShmTooSmall, ShmPermission, NotReady, LayoutMismatch, SchemaMismatch: nothing was left behind.
    """

    def __init__(
        self,
        bridge: str,
        *,
        env_name: str = "",
        lane_bytes: int | str = "64M",
        on_full: OnFull = "block",
        schema: "pa.Schema | None" = None,
        producer_id: str | None = None,
    ) -> None:
        if on_full not in ("block", "raise", "drop"):
            raise ValueError(f'on_full={on_full!r} is not "block", "raise" or "drop"')
        self.bridge = check_bridge_name(bridge)
        self.env_name, self.on_full = env_name, on_full
        self.producer_id = (producer_id or f"{env_name[:32] or 'producer'}-{os.getpid()}-{secrets.token_hex(3)}")[:63]
        self.lane_bytes = max(parse_size(lane_bytes), _SMALLEST_LANE) & ~63
        self.columns = columns_of(schema)
        self._control = segment.open_control(bridge)
        segment.sweep(bridge)
        self._check_columns()
        self._open_lane()
        self._groups_put = 0
        self._waiting: deque[_Record] = deque()  # handed over by put_async, not yet committed
        self._turn: asyncio.Lock | None = None
        self._sleeper: ThreadPoolExecutor | None = None
        self._tasks: set[asyncio.Task[Any]] = set()
        self._closed = False

    def _open_lane(self) -> None:
        slots = 1 << max(6, min(13, (self.lane_bytes >> 13).bit_length() - 1))
        *_, size = ring.lane_geometry(self.lane_bytes, slots)
        self.lane_name, self._lane = segment.create_lane(self.bridge, size)
        ring.format_lane(
            self._lane, self.lane_bytes, slots, self.columns.encode(), len(self.columns),
            os.getpid(), liveness.pid_namespace(), self.producer_id.encode()[:63], self.env_name.encode()[:127],
        )  # fmt: skip
        self._writer = ring.LaneWriter(self._lane, self._control.mapping)
        self._control.announce_lane()

    def _check_columns(self) -> None:
        hub_columns = Columns.decode(self._control.columns)
        self.columns.check_agrees(hub_columns, "in this producer", "in the consumer")
        for name in segment.lane_names(self.bridge):
            fate = segment.lane_fate(name)
            if fate is not None and fate.info is not None:
                with suppress(SchemaMismatch):  # a lane this build cannot read is the consumer's to refuse
                    peer = Columns.decode(fate.info["columns"])
                    self.columns.check_agrees(peer, "in this producer", f"in producer {fate.info['producer_id']}")

    # -- putting ----------------------------------------------------------------------------------------------------------------

    def put(
        self,
        group: "Mapping[str, Any] | pa.RecordBatch",
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        split: Literal["train", "eval"] = "train",
        timeout_s: float | None = None,
        foreign: bool = False,
    ) -> int | None:
        """Commits one group (or a fragment of one), packed straight into the lane.

        Blocks while the lane is full or the bridge is paused, at most `timeout_s` (None: for ever), only under on_full="block".

        Args:
            group: an Atropos ScoredDataGroup, a mapping from column to rows, or a pyarrow.RecordBatch. Rows are lists, 1-D arrays, CPU
                tensors, or (flat array, lengths); columns with one number per row are sequences or arrays. Copied before this returns.
            group_id: which group; default is one of its own.
            group_size: rows of the whole group, when this is only a part of it; default: the rows given.
            policy_version: version when generation began, or (oldest, newest); default `producer.policy_version`.
            split: "train" or "eval".
            timeout_s: seconds.
            foreign: carry what Atropos accepts: unequal rows (flagged) and unknown keys (in `extra`).

        Returns:
            The sequence, counting from 0 per producer; None if it was dropped under "drop" (counted).

        Raises:
            InvalidRecord, SchemaMismatch, RecordTooBig, LaneFull, BridgeDraining, Closed: nothing was committed.
        """
        record = self._measure(group, group_id, group_size, policy_version, split, foreign)
        if not self._claim(record.plan, timeout_s):
            return None
        return self._commit(record)

    def put_many(self, groups: Iterable["Mapping[str, Any] | pa.RecordBatch"], **options: Any) -> list[int | None]:
        """`put` for each of the groups, in order; options as there. What was committed before an error stays committed."""
        return [self.put(group, **options) for group in groups]

    async def put_async(
        self,
        group: "Mapping[str, Any] | pa.RecordBatch",
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        split: Literal["train", "eval"] = "train",
        timeout_s: float | None = None,
        foreign: bool = False,
    ) -> int | None:
        """`put` that never blocks the event loop; arguments, result and errors as there.

        Once called, the group is committed or counted as dropped, also if the awaiting task is cancelled; it must not be changed meanwhile.
        Groups are committed in the order of the calls.
        """
        record = self._measure(group, group_id, group_size, policy_version, split, foreign)
        if not self._waiting and self._try_claim(record.plan):
            return self._commit(record)
        if self.on_full == "raise":
            raise self._lane_full(record.plan, 0.0)
        if self.on_full == "drop":
            self._drop(record, _FULL)
            return None
        self._waiting.append(record)
        task = asyncio.get_running_loop().create_task(self._put_later(record, timeout_s))
        self._tasks.add(task)
        task.add_done_callback(self._forget)
        return await asyncio.shield(task)

    def _forget(self, task: "asyncio.Task[Any]") -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the caller may have been cancelled: it is counted, not "never retrieved"

    async def _put_later(self, record: _Record, timeout_s: float | None) -> int | None:
        """Waits its turn and for room, in a thread; commits, or counts why not."""
        if self._turn is None:
            self._turn = asyncio.Lock()
        if self._sleeper is None:
            self._sleeper = ThreadPoolExecutor(1, f"shmbridge-{self.bridge}")
        began = time.monotonic()
        reason = _CANCELLED
        try:
            async with self._turn:
                while not record.done and not self._try_claim(record.plan):
                    left = _left(began, timeout_s)
                    if left <= 0:
                        reason = _TIMEOUT
                        raise self._lane_full(record.plan, time.monotonic() - began)
                    await asyncio.get_running_loop().run_in_executor(self._sleeper, self._sleep, left)
                if record.done:  # close() was faster
                    raise Closed(f"producer {self.producer_id} was closed while this group waited for room: it is counted in dropped_total")
                return self._commit(record)
        except BridgeDraining:
            reason = _CANCELLED
            raise
        finally:
            if not record.done:
                self._drop(record, reason)
            with suppress(ValueError):
                self._waiting.remove(record)

    def claim(
        self,
        rows: int,
        lengths: Mapping[str, Any],
        *,
        group_id: str | int | None = None,
        group_size: int | None = None,
        policy_version: int | tuple[int, int] | None = None,
        split: Literal["train", "eval"] = "train",
        timeout_s: float | None = None,
    ) -> "Slot":
        """Reserves room in the lane to be written in place: `with producer.claim(...) as slot: slot["tokens"][:] = ...`.

        Blocks like `put`. Committed when the block ends, given back if it raises; one open claim per producer.

        Args:
            rows: rows of the record.
            lengths: per list column, the length of each row; per scalar column, anything (`None` will do).
            group_id, group_size, policy_version, split, timeout_s: as in `put`.
        """
        columns = [self._claimed_column(name, rows, wanted) for name, wanted in lengths.items()]
        tokens = next((column for column in columns if column.name == "tokens"), None)
        if rows < 1 or tokens is None:
            raise InvalidRecord(f"a claim needs `tokens` and at least one row, got {rows} rows of {', '.join(lengths) or 'nothing'}")
        wanted = _lengths_of(tokens)
        for column in columns:
            if self.columns[column.name].per_token and not np.array_equal(_lengths_of(column), wanted):
                raise InvalidRecord(
                    f"column {column.name!r} has lengths {column.lengths}, tokens have {wanted}", column=column.name
                )
        measured = intake.Intake(columns, rows, int(wanted.sum()), False, rows, -1)
        record = self._record_of(measured, group_id, group_size, policy_version, split, None)
        if not self._claim(record.plan, timeout_s):
            raise self._lane_full(record.plan, 0.0)
        return Slot(self, record)

    def _claimed_column(self, name: str, rows: int, wanted: Any) -> Column:
        column = self.columns.get(name)
        if column is None or column.kind not in (Kind.LIST, Kind.SCALAR):
            raise InvalidRecord(f"column {name!r} cannot be claimed: only number and list<number> columns can", column=name)
        number = self.columns.number[name]
        if column.kind is Kind.SCALAR:
            return Column(name, number, column.kind, column.dtype, entries=rows, count=rows, finite=column.finite)
        lengths = np.ascontiguousarray(wanted, np.uint32)
        if lengths.shape != (rows,):
            raise InvalidRecord(f"column {name!r}: lengths of shape {lengths.shape} for {rows} rows", column=name)
        return Column(
            name, number, column.kind, column.dtype, entries=rows, count=int(lengths.sum()), lengths=lengths, finite=column.finite
        )

    def _measure(
        self,
        group: Any,
        group_id: str | int | None,
        group_size: int | None,
        version: int | tuple[int, int] | None,
        split: str,
        foreign: bool,
    ) -> _Record:
        self._check_open()
        try:
            measured = intake.take_in(group, self.columns, foreign=foreign)
        except InvalidRecord:
            self._writer.count_drop(_INVALID)
            raise
        return self._record_of(measured, group_id, group_size, version, split, (group, foreign))

    def _record_of(
        self,
        measured: intake.Intake,
        group_id: str | int | None,
        group_size: int | None,
        version: int | tuple[int, int] | None,
        split: str,
        group: Any,
    ) -> _Record:
        if split not in ("train", "eval"):
            raise InvalidRecord(f'split={split!r} is not "train" or "eval"')
        if group_size is not None and group_size < measured.rows:
            raise InvalidRecord(f"group_size={group_size} is less than the {measured.rows} rows given")
        oldest, newest = version if isinstance(version, tuple) else (version, version)
        current = self.policy_version
        if group_id is None:
            group_id = f"{self.producer_id}:{self._groups_put}"
        self._groups_put += 1
        raw_id = str(group_id).encode()
        if len(raw_id) > 4096:
            raise InvalidRecord(f"group_id has {len(raw_id)} bytes, allowed are 4096")
        plan = Plan(measured.columns, raw_id)
        if plan.extent_bytes > self.lane_bytes // 2:
            self._writer.count_drop(_INVALID)
            raise RecordTooBig(
                f"a record of {format_size(plan.extent_bytes)} ({measured.rows} rows, {measured.tokens} tokens); half of the lane's "
                f"{format_size(self.lane_bytes)} is the limit",
                hint=f"Producer(lane_bytes={_next_power(4 * plan.extent_bytes)}), or put the group in fragments with group_size=",
            )
        fields = {
            "rows": measured.rows,
            "columns": len(measured.columns),
            "index_bytes": plan.index_bytes,
            "group_id_bytes": len(raw_id),
            "flags": (split == "eval") | measured.uneven << 1,
            "tokens": measured.tokens,
            "min_policy_version": current if oldest is None else int(oldest),
            "max_policy_version": current if newest is None else int(newest),
            "t_created_ns": time.monotonic_ns(),
            "group_size": measured.group_size if group_size is None else group_size,
            "env_id": measured.env_id,
        }
        return _Record(plan, fields, group)

    def _try_claim(self, plan: Plan) -> bool:
        self._check_open()
        if self._control.draining:
            raise BridgeDraining(f"the consumer of bridge {self.bridge!r} is draining it", hint="the run is over: close the producer")
        return not self._control.paused and self._writer.claim(plan.extent_bytes)

    def _claim(self, plan: Plan, timeout_s: float | None) -> bool:
        """Claims room, waiting as `on_full` says; False if the record was dropped and counted."""
        if self._try_claim(plan):
            return True
        if self.on_full == "drop":
            self._writer.count_drop(_FULL)
            return False
        began, said = time.monotonic(), False
        while self.on_full == "block" and (left := _left(began, timeout_s)) > 0:
            self._sleep(left)
            if self._try_claim(plan):
                return True
            if not said and time.monotonic() - began > _SAY_SO_AFTER_S:
                said = True
                log.warning("%s", self._lane_full(plan, time.monotonic() - began))
        raise self._lane_full(plan, time.monotonic() - began)

    def _sleep(self, left_s: float) -> None:
        """Sleeps until something may have changed; in any thread."""
        slept = self._writer.wait_space(int(min(left_s, 1.0) * 1e9))
        self._writer.count_wait(slept)
        if self._control.paused:  # room is not what we wait for
            time.sleep(min(left_s, 0.02))

    def _lane_full(self, plan: Plan, waited_s: float) -> LaneFull:
        control = self._control
        if control.paused:
            culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
        elif not liveness.is_locked(control.mapping.fd, Byte.HUB):
            culprit, hint = "no consumer is alive: waiting for the next one", "start the learner"
        else:
            culprit = f"consumer pid {control.hub_pid} is alive and holds {self._writer.outstanding} records of this lane"
            hint = "the learner is slow or holds leases: raise lane_bytes, or lower what it holds"
        return LaneFull(
            f"lane of {self.producer_id} has no room for {format_size(plan.extent_bytes)} after {waited_s:.1f} s "
            f"({format_size(self._writer.free_bytes)} of {format_size(self.lane_bytes)} free); {culprit}",
            hint=hint,
        )

    def _commit(self, record: _Record) -> int:
        """Writes the measured group into the open claim and publishes it."""
        try:
            record.plan.write(self._writer)
        except LossyMasks:
            self._writer.abort()
            return self._commit_masks_as_they_are(record)
        except BadValue as bad:
            self._writer.abort()
            self._drop(record, _INVALID)
            raise intake.as_invalid(bad) from None
        except BaseException:
            self._writer.abort()
            raise
        record.done = True
        return int(self._writer.commit(**record.fields))

    def _commit_masks_as_they_are(self, record: _Record) -> int:
        """The rare group whose masks are neither -100 nor the token: once more, with `masks` as a column of its own."""
        group, foreign = record.group
        measured = intake.take_in(group, self.columns, foreign=foreign, fold_masks=False)
        raw_id = record.plan.group_id
        plan = Plan(measured.columns, raw_id)
        fields = {**record.fields, "columns": len(measured.columns), "index_bytes": plan.index_bytes}
        if not self._writer.claim(plan.extent_bytes) and not self._claim(plan, None):
            record.done = True
            raise self._lane_full(plan, 0.0)
        record.plan, record.fields = plan, fields
        return self._commit(record)

    def _drop(self, record: _Record, reason: int) -> None:
        record.done = True
        self._writer.count_drop(reason)

    # -- state ------------------------------------------------------------------------------------------------------------------

    @property
    def policy_version(self) -> int:
        """The newest policy version the learner has published, -1 before the first. Never blocks: one load of shared memory."""
        return int(self._control.policy_version)

    @property
    def paused(self) -> bool:
        """Whether the consumer has paused the bridge: `put` waits."""
        return bool(self._control.paused)

    def stats(self) -> dict[str, float]:
        """Counters of this lane, flat; `dropped_total{reason}` per reason. Never blocks; any thread."""
        counters = ring.lane_counters(self._lane)
        return {
            "records_total": counters["tail"],
            "bytes_total": counters["bytes"],
            "tokens_total": counters["tokens"],
            "wait_s": counters["wait_ns"] / 1e9,
            "late_wakes_total": counters["late_wakes"],
            "held": self._writer.outstanding if not self._closed else 0,
            "lane_bytes": self.lane_bytes,
            "lane_free_bytes": self._writer.free_bytes if not self._closed else self.lane_bytes,
            **{f"dropped_total{{{name}}}": counters["dropped"][code] for code, name in enumerate(DROP_REASONS)},
        }

    def _check_open(self) -> None:
        if self._closed or self._lane.forked:
            why = "belongs to the process before fork: open a new one here" if self._lane.forked else "is closed"
            raise Closed(f"producer {self.producer_id} {why}")

    def close(self, *, drain: bool = False, timeout_s: float | None = None) -> None:
        """Leaves the bridge; committed records stay for the consumer. Idempotent; does nothing in a child of fork.

        Args:
            drain: wait until the consumer has released everything first, at most `timeout_s` (None: for ever), then LaneFull.
            timeout_s: seconds.
        """
        if self._closed or self._lane.forked:
            return
        self._settle_waiting()
        began = time.monotonic()
        try:
            while drain and self._writer.outstanding:
                left = _left(began, timeout_s)
                if left <= 0:
                    raise LaneFull(
                        f"{self._writer.outstanding} records of {self.producer_id} were not released within {timeout_s} s",
                        hint="close(drain=False) leaves them for the next consumer",
                    )
                self._sleep(left)
        finally:
            self._leave()

    def _settle_waiting(self) -> None:
        """What put_async has taken over and not yet placed: committed if there is room now, else counted."""
        for record in self._waiting:
            with suppress(BridgeDraining, InvalidRecord):
                if not record.done and self._try_claim(record.plan):
                    self._commit(record)
            if not record.done:
                self._drop(record, _CANCELLED)

    def _leave(self) -> None:
        self._closed = True
        if self._sleeper is not None:
            self._sleeper.shutdown(wait=True)
        liveness.unlock(self._lane.fd, Byte.PRODUCER)
        liveness.unlock(self._control.mapping.fd, Byte.PARTICIPANTS)
        self._control.announce_lane()
        segment.sweep(self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Producer {self.producer_id} on {self.bridge!r}: {self._writer.slot_count} slots, {format_size(self.lane_bytes)}>"


class Slot:
    """An open claim: `slot[column]` is a writable flat view in the lane, valid until the `with` block ends."""

    def __init__(self, producer: Producer, record: _Record) -> None:
        self._producer, self._record = producer, record
        self._memory = producer._writer.claimed_memory()
        self._columns = {column.name: column for column in record.plan.columns}

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """The column's values: every row's, one after another."""
        return self._record.plan.view(self._memory, self._columns[name])

    def __enter__(self) -> Self:
        self._record.plan.write(self._producer._writer)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        producer = self._producer
        if kind is not None:
            producer._writer.abort()
            return
        try:
            self._record.plan.check_values(self._memory)
        except BadValue as bad:
            producer._writer.abort()
            producer._drop(self._record, _INVALID)
            raise intake.as_invalid(bad) from None
        self.sequence = int(producer._writer.commit(**self._record.fields))


def _lengths_of(column: Column) -> "np.ndarray[Any, np.dtype[np.uint32]]":
    return np.empty(0, np.uint32) if column.lengths is None else column.lengths


def _left(began: float, timeout_s: float | None) -> float:
    return 3600.0 if timeout_s is None else timeout_s - (time.monotonic() - began)


def _next_power(size: int) -> str:
    power = 1 << (size - 1).bit_length()
    return f'"{power >> 20}M"' if power >= 1 << 20 else f'"{max(power >> 10, 1)}K"'
