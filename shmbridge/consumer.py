"""Consumer: the hub of a bridge. Finds lanes, takes records in place, survives producers, and hands out records or batches.

Knows lanes, leases and lifecycles; how groups become batches is batching.py's, what environments ask on the side is control.py's.
"""

import asyncio
import atexit
import logging
import os
import time
import weakref
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Literal, Self

from shmbridge import liveness, segment
from shmbridge._ext import ring
from shmbridge._ext.mapping import Mapping
from shmbridge._ext.wait import HubWait
from shmbridge.batching import BatchAssembly, Hold
from shmbridge.config import Run, check_bridge_name, format_size
from shmbridge.deathwatch import DeathWatch
from shmbridge.errors import Closed, ConsumerEmpty, ConsumerTaken, SchemaMismatch
from shmbridge.liveness import Byte
from shmbridge.record import Lane, Record
from shmbridge.schema import Columns, columns_of

if TYPE_CHECKING:
    import pyarrow as pa

    from shmbridge.batch import Batch, Layout

log = logging.getLogger(__name__)

DISCARD_REASONS = ("stale", "partial", "resume", "corrupt")
STALE, PARTIAL, RESUME, CORRUPT = range(4)  # DISCARD_ of layout.h
_LONGEST_WAIT_S = 1.0
_DRAIN_GRACE_S = 0.05


class _LaneState:
    """One adopted lane."""

    __slots__ = ("corrupt", "dead", "lane", "name", "reader", "size")

    def __init__(self, name: str, reader: ring.LaneReader, lane: Lane, size: int) -> None:
        self.name, self.reader, self.lane, self.size = name, reader, lane, size
        self.dead = self.corrupt = False


class Consumer:
    """The one hub of a bridge; a context manager.

    For one thread at a time, except stats, publish_policy_version, pause, resume and drain. Construction adopts every lane
    that exists, also those of dead producers, before anything is removed. Left by an exception, a `with` block keeps the
    records it still holds un-released: the next consumer gets them again.

    Args:
        bridge: name of the bridge.
        run: the training run to announce; environments wait for one.
        lanes: most lanes taken from at once; more wait until others are done with.
        resume: "redeliver" hands out what an earlier consumer left un-released; "discard" counts and drops it.
        schema: a pyarrow.Schema whose fields extend the standard columns; producers that disagree on a type are refused.
        group_timeout_s: a group whose fragments do not all come within this many seconds is discarded and counted.

    Raises:
        ConsumerTaken: another consumer of this bridge is alive (named by pid; also one of this process).
        BadBridgeName, ShmPermission, NotReady, LayoutMismatch, SchemaMismatch.
    """

    def __init__(
        self,
        bridge: str,
        *,
        run: Run | None = None,
        lanes: int = 64,
        resume: Literal["redeliver", "discard"] = "redeliver",
        schema: "pa.Schema | None" = None,
        group_timeout_s: float = 600.0,
    ) -> None:
        if resume not in ("redeliver", "discard"):
            raise ValueError(f'resume={resume!r} is not "redeliver" or "discard"')
        self.bridge = check_bridge_name(bridge)
        self.columns = columns_of(schema)
        self.lanes_limit = lanes
        self._run = run
        self._lanes: dict[str, _LaneState] = {}
        self._refused: set[str] = set()
        self._gone: Counter[str] = Counter()  # counters of lanes that are no more
        self._turn = 0
        self._batches_formed = 0
        self._wait_s = 0.0
        self._closed = False
        self._final: dict[str, float] = {}
        self._waiter: ThreadPoolExecutor | None = None
        self._enter()
        self._batching = BatchAssembly(self, group_timeout_s)
        self._watch = DeathWatch(self._on_death, self._bury_dead)
        self._seen_arrivals = self._control.arrivals
        self._adopt_lanes(strict=True)
        if resume == "discard":
            self._discard_backlog()
        segment.sweep(bridge)
        self._open_control_plane()
        self._at_exit = weakref.WeakMethod(self._keep_unreleased)
        atexit.register(_call_weak, self._at_exit)

    # -- becoming the hub ---------------------------------------------------------------------------------------------------------

    def _enter(self) -> None:
        self._control = segment.open_control(self.bridge)
        if not liveness.lock_exclusive(self._control.mapping.fd, Byte.HUB):
            pid = self._control.hub_pid
            me = " (this very process)" if pid == os.getpid() else ""
            raise ConsumerTaken(
                f"bridge {self.bridge!r} has a living consumer: pid {pid}{me}",
                hint=f"close it first, or use another bridge; ps -p {pid}",
            )
        ring.fault(b"hub.locked")
        self.hub_epoch = self._control.begin_epoch(os.getpid(), liveness.pid_namespace(), self.columns.encode())
        if self._run is not None:
            self._control.next_run()
        self._sleep = HubWait(self._control.mapping)

    def _open_control_plane(self) -> None:
        from shmbridge.control import ControlServer

        self._server = ControlServer(self.bridge, self)

    def _adopt_lanes(self, *, strict: bool = False) -> None:
        """Takes over every lane there is room for, oldest first; `strict` raises SchemaMismatch where later arrivals are only refused."""
        found = []
        for name in segment.lane_names(self.bridge):
            if name not in self._lanes and name not in self._refused:
                mapping = segment.open_mapping(name, minimum=ring.control_bytes)
                info = self._header(name, mapping)
                if mapping is not None and info is not None:
                    found.append((info["created_ns"], name, mapping, info))
        for _, name, mapping, info in sorted(found, key=lambda each: each[:2]):
            if len(self._lanes) >= self.lanes_limit:
                log.warning("bridge %r has more than %d lanes: %s waits for its turn", self.bridge, self.lanes_limit, info["producer_id"])
                return
            self._adopt(name, mapping, info, strict)

    def _header(self, name: str, mapping: Mapping | None) -> dict[str, Any] | None:
        if mapping is None:
            return None
        try:
            return ring.read_lane(mapping)
        except ring.LaneCorrupt as wrong:
            self._refuse(name, str(wrong))
            return None

    def _adopt(self, name: str, mapping: Mapping, info: dict[str, Any], strict: bool) -> None:
        try:
            columns = Columns.decode(info["columns"])
            self.columns.check_agrees(columns, "in this consumer", f"in producer {info['producer_id']}")
            for other in list(self._lanes.values()):
                columns.check_agrees(other.lane.columns, f"in producer {info['producer_id']}", f"in producer {other.lane.producer_id}")
            reader = ring.LaneReader(mapping, self._control.mapping)
        except (SchemaMismatch, ring.LaneCorrupt) as wrong:
            if strict and isinstance(wrong, SchemaMismatch):
                raise
            self._refuse(name, str(wrong))
            return
        self._lanes[name] = _LaneState(name, reader, Lane(info["producer_id"], info["env_name"], columns), mapping.size)
        reader.ring()  # a predecessor may have died between release and wake
        self._watch.watch(name, mapping, info["pid"], info["pid_namespace"])

    def _refuse(self, name: str, why: str) -> None:
        self._refused.add(name)
        log.error("lane %s is refused: %s", name, why)

    def _discard_backlog(self) -> None:
        for state in list(self._lanes.values()):
            for _ in range(state.reader.waiting):
                record = self._take_from(state)
                if record is None:
                    break
                self.discard(record, RESUME)

    # -- taking records -----------------------------------------------------------------------------------------------------------

    def get(self, timeout_s: float | None = None) -> Record:
        """The next record of any lane, leased. Blocks at most `timeout_s` seconds (None: for ever).

        Raises:
            ConsumerEmpty: none came in time; the message says who is alive.
            Closed: the consumer was closed.
        """
        deadline = _deadline(timeout_s)
        while (record := self._take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._empty(timeout_s)
            self._wait(left)
        return record

    async def get_async(self, timeout_s: float | None = None) -> Record:
        """`get` that never blocks the event loop: the wait is in a thread of its own."""
        deadline = _deadline(timeout_s)
        while (record := self._take()) is None:
            left = deadline - time.monotonic()
            if left <= 0:
                raise self._empty(timeout_s)
            await self._wait_async(left)
        return record

    def poll(self, max_records: int = 256) -> list[Record]:
        """Up to `max_records` records that are there now, leased, fairly over the lanes. Never blocks."""
        records: list[Record] = []
        while len(records) < max_records and (record := self._take()) is not None:
            records.append(record)
        return records

    def __iter__(self) -> Iterator[Record]:
        """Records as they come, until close(), or until drain() and nothing is left."""
        while not self._closed:
            record = self._take()
            if record is not None:
                yield record
            elif self._drained():
                return
            else:
                self._wait(_LONGEST_WAIT_S)

    async def __aiter__(self) -> AsyncIterator[Record]:
        """`__iter__` for an event loop."""
        while not self._closed:
            record = self._take()
            if record is not None:
                yield record
            elif self._drained():
                return
            else:
                await self._wait_async(_LONGEST_WAIT_S)

    def batches(
        self,
        *,
        groups: int = 8,
        layout: "Layout" = "packed",
        max_staleness: int | None = None,
        prefetch: int = 1,
        hold: Hold = "step",
    ) -> "Iterator[Batch]":
        """Batches of whole groups, oldest first, until close(), or until drain() and too few are left.

        Blocks in `next` until a batch is full. Do not call get or poll while iterating.

        Args:
            groups: groups in a batch.
            layout: "packed" (N,) with cu_seqlens and position_ids, or "padded" (B, T).
            max_staleness: groups more versions older than the current one are discarded and counted; None: none is.
            prefetch: batches gathered ahead in a thread, 0 or more.
            hold: "step" keeps the leases until batch.release() or the next iteration, so that a killed learner's
                successor gets the batch again; "gather" ends them once gathered: at most once.

        Raises:
            BatchTooBig: the lanes are full of what the batch already has, so that it can never be filled.
        """
        return self._batching.batches(groups=groups, layout=layout, max_staleness=max_staleness, prefetch=prefetch, hold=hold)

    def _take(self) -> Record | None:
        """The next record, one lane after the other."""
        self._check_open()
        if self._control.arrivals != self._seen_arrivals:
            self._seen_arrivals = self._control.arrivals
            self._adopt_lanes()
        states = list(self._lanes.values())
        for offset in range(len(states)):
            state = states[(self._turn + offset) % len(states)]
            if not state.corrupt and (record := self._take_from(state)) is not None:
                self._turn = (self._turn + offset + 1) % len(states)
                return record
        return None

    def _take_from(self, state: _LaneState) -> Record | None:
        try:
            record: Record | None = state.reader.take(Record)
        except ring.LaneCorrupt as wrong:
            state.corrupt = True
            state.reader.quarantine()
            state.reader.count_discard(CORRUPT)
            log.error("lane of producer %s is quarantined: %s", state.lane.producer_id, wrong)
            return None
        return None if record is None else record.bind(state.lane)

    def discard(self, record: Record, reason: int) -> None:
        """Releases a record unread and counts it; reasons are this module's constants."""
        record.reader.count_discard(reason)
        record.release()

    def _wait(self, left_s: float, *, spin: bool = True) -> None:
        """Sleeps until there may be something to take, at most a second, and says how long in `wait_s`."""
        began = time.monotonic()
        readers = [state.reader for state in list(self._lanes.values()) if not state.corrupt]
        self._sleep.wait(readers, int(min(left_s, _LONGEST_WAIT_S) * 1e9), self._seen_arrivals, spin)
        self._wait_s += time.monotonic() - began

    async def _wait_async(self, left_s: float) -> None:
        if self._waiter is None:
            self._waiter = ThreadPoolExecutor(1, f"shmbridge-{self.bridge}")
        await asyncio.get_running_loop().run_in_executor(self._waiter, lambda: self._wait(left_s, spin=False))

    def _drained(self) -> bool:
        """Whether the bridge is draining and nothing is left; gives a put that is under way the time to commit."""
        if not self._control.draining:
            return False
        time.sleep(_DRAIN_GRACE_S)
        return not any(state.reader.waiting for state in list(self._lanes.values()) if not state.corrupt)

    def _empty(self, timeout_s: float | None) -> ConsumerEmpty:
        live = sum(not state.dead for state in list(self._lanes.values()))
        return ConsumerEmpty(
            f"no record within {timeout_s} s; {live} of {len(self._lanes)} lanes have a living producer",
            hint="are environments running on this bridge? shmbridge inspect " + self.bridge,
        )

    # -- deaths -------------------------------------------------------------------------------------------------------------------

    def _on_death(self, name: str) -> None:
        """In the watch's thread: the lock is free, so nothing more will be committed."""
        state = self._lanes.get(name)
        if state is not None:
            state.dead = True
            self._control.ring()

    def _bury_dead(self) -> bool:
        """In the watch's thread: removes dead lanes without undelivered records; whether any is left for later."""
        left = False
        for name, state in list(self._lanes.items()):
            if not state.dead:
                continue
            if state.reader.waiting == 0 and state.reader.held == 0:
                counters = self._counters(state)
                removed, reason, _ = segment.remove_lane(name, with_records=state.corrupt)
                if removed or reason == "gone already":
                    self._lanes.pop(name, None)
                    self._gone.update({key: value for key, value in counters.items() if not key.startswith(("held", "lane_bytes"))})
                    self._control.announce_lane()  # there may be room for one that waits
                    continue
            left = True
        return left

    # -- control: also for the control plane's thread (environments.HubView) -------------------------------------------------------------

    @property
    def run(self) -> Run | None:
        """The announced training run."""
        return self._run

    @property
    def current_step(self) -> int:
        """`run.starting_step` plus the batches formed since."""
        return (self._run.starting_step if self._run else 0) + self._batches_formed

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""
        return int(self._control.policy_version)

    @property
    def paused(self) -> bool:
        """Whether producers are held back."""
        return bool(self._control.paused)

    @property
    def draining(self) -> bool:
        """Whether the bridge takes no new records."""
        return bool(self._control.draining)

    def announce_run(self, run: Run) -> None:
        """Announces (or replaces) the training run; environments that wait for one go on."""
        self._run = run
        self._batches_formed = 0
        self._control.next_run()

    def publish_policy_version(self, version: int) -> None:
        """Tells every producer, by one store, which policy version is current. Never goes backwards: ValueError."""
        if version < self.policy_version:
            raise ValueError(f"policy version {version} is before {self.policy_version}: versions of one bridge only rise")
        self._control.policy_version = version

    def pause(self) -> None:
        """Holds producers back: their `put` waits. Records already committed still come."""
        self._control.paused = True

    def resume(self) -> None:
        """Ends a pause."""
        self._control.paused = False
        self._ring_lanes()

    def drain(self) -> None:
        """Takes no new records: `put` raises BridgeDraining, iteration ends when nothing is left."""
        self._control.draining = True
        self._ring_lanes()
        self._control.ring()

    def _ring_lanes(self) -> None:
        for state in list(self._lanes.values()):
            state.reader.ring()

    def queue_groups(self, producer_id: str | None = None) -> int:
        """Groups committed and not yet in a batch, of one producer or all; a fragment not yet read counts as one."""
        states = [state for state in list(self._lanes.values()) if producer_id in (None, state.lane.producer_id) and not state.corrupt]
        return sum(state.reader.waiting for state in states) + self._batching.queued(producer_id)

    def producer_live(self, producer_id: str) -> bool:
        """Whether a living producer's lane is attached under this id."""
        return any(state.lane.producer_id == producer_id and not state.dead for state in list(self._lanes.values()))

    def finished_producers(self) -> set[str]:
        """Ids of the producers that will put nothing more and whose records are all taken; for batching.py."""
        return {state.lane.producer_id for state in list(self._lanes.values()) if state.dead and not state.reader.waiting}

    def count_batch(self) -> None:
        """A batch was formed; for batching.py."""
        self._batches_formed += 1

    def stuck(self, held_here: int) -> str:
        """Why no lane can bring anything more until one of the `held_here` records is released, or ""; for batching.py."""
        states = [state for state in list(self._lanes.values()) if not state.corrupt]
        if all(state.dead for state in states):
            return ""
        if any(state.reader.waiting or not (state.dead or state.reader.space_waiting) for state in states):
            return ""
        held = sum(state.reader.held for state in states)
        if held > held_here:  # somebody else holds leases, whose end makes room
            return ""
        size = sum(state.reader.data_bytes for state in states)
        return f"{len(states)} lanes of {format_size(size)} in all are full with {held} records, and their producers wait for room"

    # -- state --------------------------------------------------------------------------------------------------------------------

    def stats(self) -> dict[str, float]:
        """Counters of the bridge, flat: produced = released + held + discarded, from the lanes' own words. Never blocks; any thread."""
        if self._closed:
            return self._final
        total: Counter[str] = Counter(self._gone)
        states = list(self._lanes.values())
        for state in states:
            total.update(self._counters(state))
        total["released_total"] = (
            total["records_total"] - total["held"] - sum(total[f"discarded_total{{{reason}}}"] for reason in DISCARD_REASONS)
        )
        return {
            **{key: total[key] for key in ("records_total", "released_total", "held", "tokens_total", "bytes_total", "lane_bytes")},
            **{key: value for key, value in sorted(total.items()) if "{" in key},
            "dropped_total": sum(value for key, value in total.items() if key.startswith("dropped_total{")),
            "discarded_total": sum(value for key, value in total.items() if key.startswith("discarded_total{")),
            "producer_wait_s": total["producer_wait_ns"] / 1e9,
            "wait_s": self._wait_s,
            "late_wakes_total": total["late_wakes_total"] + self._sleep.late_wakes,
            "lanes_live": sum(not state.dead for state in states),
            "lanes_dead": sum(state.dead for state in states),
            "lanes_quarantined": sum(state.corrupt for state in states),
            "lanes_refused": len(self._refused),
            "queue_groups": self.queue_groups(),
            "batches_total": self._batches_formed,
            "policy_version": self.policy_version,
        }

    def _counters(self, state: _LaneState) -> Counter[str]:
        words = ring.lane_counters(state.reader.lane)
        waiting = 0 if state.corrupt else state.reader.waiting
        return Counter(
            {
                "records_total": words["tail"],
                "held": waiting + state.reader.held,
                "tokens_total": words["tokens"],
                "bytes_total": words["bytes"],
                "producer_wait_ns": words["wait_ns"],
                "late_wakes_total": words["late_wakes"],
                "lane_bytes": state.size,
                **{f"dropped_total{{{name}}}": words["dropped"][code] for code, name in enumerate(_DROP_REASONS)},
                **{f"discarded_total{{{name}}}": words["discarded"][code] for code, name in enumerate(DISCARD_REASONS)},
            }
        )

    def _check_open(self) -> None:
        if self._closed or self._control.mapping.forked:
            why = "is closed" if self._closed else "belongs to the process before fork"
            raise Closed(f"the consumer of bridge {self.bridge!r} {why}")

    def _keep_unreleased(self) -> None:
        """What is still leased stays un-released in the lanes, for the next consumer."""
        for state in list(self._lanes.values()):
            state.reader.abandoned = True

    def close(self) -> None:
        """Gives the bridge up. Records not yet handed out come to the next consumer; live views stay valid and keep the hub lock until
        the last is gone. Idempotent; does nothing in a child of fork.
        """
        if self._closed or self._control.mapping.forked:
            return
        self._batching.close()
        self._final = self.stats()
        self._closed = True
        atexit.unregister(self._at_exit)
        self._server.close()
        self._watch.stop()
        if self._waiter is not None:
            self._control.ring()
            self._waiter.shutdown(wait=True)
        held = sum(state.reader.held for state in self._lanes.values())
        self._lanes.clear()
        if held == 0:
            liveness.unlock(self._control.mapping.fd, Byte.HUB)
            liveness.unlock(self._control.mapping.fd, Byte.PARTICIPANTS)
            segment.sweep(self.bridge)
        del self._control, self._sleep  # the views' lanes keep the mapping, and with it the lock

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None:
            self._keep_unreleased()
        self.close()

    def __repr__(self) -> str:
        return f"<Consumer of {self.bridge!r}: {len(self._lanes)} lanes, epoch {self.hub_epoch}>"


_DROP_REASONS = ("full", "cancelled", "invalid", "timeout")


def _deadline(timeout_s: float | None) -> float:
    return float("inf") if timeout_s is None else time.monotonic() + timeout_s


def _call_weak(method: "weakref.WeakMethod[Callable[[], None]]") -> None:
    if (call := method()) is not None:
        call()
