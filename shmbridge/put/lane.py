"""The lane of a producer: its creation, what it waits for, its claim, and tickets to begin groups."""

import asyncio
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from shmbridge import sizing
from shmbridge._ext import header
from shmbridge._ext import lane as lane_writer
from shmbridge._ext.header import Mapping
from shmbridge._ext.lane import Claim, LaneWriter
from shmbridge._ext.put import Plan
from shmbridge.config import deadline_of, format_size
from shmbridge.control.messages import Full
from shmbridge.errors import (
    BadArgument,
    BridgeDraining,
    ClaimOpen,
    Closed,
    Drop,
    LaneFull,
    LaneQuarantined,
    LaneRemoved,
    Lost,
    NoColumn,
    NoConsumer,
    NotAdmitted,
    SchemaMismatch,
    ShmBridgeError,
    counted,
    did_you_mean,
    labelled,
    shown,
)
from shmbridge.schema import Columns
from shmbridge.segments import (
    MOST_TICKETS,
    LockByte,
    OneProcess,
    control_name,
    is_locked,
    lane_header,
    lane_names,
    pid_namespace,
    show_tickets,
    still_named,
)
from shmbridge.segments import create_lane as new_lane_segment

if TYPE_CHECKING:
    from shmbridge.control.messages import Answer, BeginGroup
    from shmbridge.control.server import AsyncControlClient, ControlClient

log = logging.getLogger(__name__)

LOOK_S = 0.4  # seconds between two checks while putting or waiting

# Why a producer can put nothing: what is wrong -> what to do.
_OBSTACLES = {
    "closed": "producer {producer} is closed -> open a new one: Producer(bridge)",
    "forked": "producer {producer} belongs to the process before fork -> open a new one in this process",
    "closed while waiting": "producer {producer} was closed while this group waited for room -> open a new "
    "one: the group is counted in dropped_total",
    "quarantined": "the consumer (pid {pid}) has quarantined the lane of {producer}: its words cannot be true"
    " -> something overwrote shared memory: see the consumer's log, then open a new producer",
    "removed": "lane {lane} of {producer}, or its bridge's control segment, was removed from /dev/shm; "
    "records that no consumer can reach: {records} -> close it and open a new producer; if the user's last "
    "logout did it, set RemoveIPC=no in /etc/systemd/logind.conf",
    "not drained": "not released within {timeout_s} s: {records} records of {producer} -> close(drain=False) "
    "leaves them for the next consumer",
    "claim open": "producer {producer} has an open claim -> put after the `with producer.claim(...)` block",
    "claim over": "the claim is over, committed or given up -> write inside the block, before the close",
    "draining": "the consumer of bridge {bridge!r} is draining it -> the run is over: close the producer",
    "no origin": "record {sequence} is of another node, {producer} has no origin -> open it with origin=",
    "no ticket": "{producer} got no ticket within {timeout_s} s and holds {tickets}; {culprit} -> {hint}",
    "other clock": "{producer} reads a clock that is {ahead_s:.0f} s ahead of its consumer's (pid {pid}): "
    "another time namespace -> run both in one time namespace",
    "tickets": "{producer} holds {tickets} tickets, the most of a lane -> end those of groups that were put",
    "no later consumer": "no consumer will answer {producer}: its lane or the control segment was removed"
    " -> close it and open a new producer",
}


def obstacle(error: type[ShmBridgeError], why: str, **numbers: object) -> ShmBridgeError:
    """Returns the error of a producer that can put nothing."""
    message, hint = (part.format(**numbers) for part in _OBSTACLES[why].split(" -> "))
    return error(message, hint=hint)


def lane_full(
    producer_id: str, control: header.Control, writer: LaneWriter, wanted_bytes: int, waited_s: float
) -> LaneFull:
    """Returns the error of a group for which no room came in time."""
    if not is_locked(control.mapping.fd, LockByte.HUB):
        culprit, hint = "no consumer is alive: waiting for the next one", "start the learner"
    elif control.paused:
        culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
    else:
        records = counted(writer.outstanding, "record")
        culprit = f"consumer pid {control.hub_pid} is alive and has not released {records}"
        hint = "the learner is slow or holds leases: raise lane_bytes, or lower what it holds"
        if dropped := writer.leases_dropped:
            culprit += f", {dropped} of them dropped without release"
            hint = "release() records where the consumer's log names the call, or call take_back_dropped()"
    return LaneFull(
        f"lane of {producer_id} has no room for {format_size(wanted_bytes)} after {waited_s:.1f} s "
        f"({format_size(writer.free_bytes)} of {format_size(writer.data_bytes)} free, "
        f"{writer.slot_count - writer.outstanding} of {writer.slot_count} slots); {culprit}",
        hint=hint,
    )


def not_admitted(
    producer_id: str, control: header.Control, answer: object, tickets: int, timeout_s: float | None
) -> ShmBridgeError:
    """Returns the error of a producer that got no ticket in time; a messages.Full has the counts."""
    error: type[ShmBridgeError] = NotAdmitted
    culprit = f"the consumer (pid {control.hub_pid}) has no room"
    hint = "the learner's steps make room: wait longer, or raise Consumer(max_off_policy_steps=)"
    if not is_locked(control.mapping.fd, LockByte.HUB):
        error, culprit, hint = NoConsumer, "no consumer is alive", "start the learner"
    elif control.paused:
        culprit, hint = f"paused by the consumer (pid {control.hub_pid})", "resume the bridge"
    elif isinstance(answer, Full):
        culprit += (
            f": {answer.running} groups are being generated and {answer.committed} wait or are trained "
        )
        culprit += f"with, of {answer.limit}"
    numbers = {"producer": producer_id, "tickets": tickets, "timeout_s": timeout_s}
    return obstacle(error, "no ticket", culprit=culprit, hint=hint, **numbers)


def ahead(producer_id: str, bridge: str, stamped: int, published: int) -> str:
    """Returns the warning, logged once, about groups stamped with an unpublished version."""
    newest = f"{published} is the newest published" if published >= 0 else "none is published"
    return (
        f"{producer_id} puts groups of policy version {stamped}, and {newest} on bridge {bridge!r}: they "
        "count as new, however old they get -> policy_version= is the one when generation began"
    )


def check_agrees_with_bridge(columns: Columns, control: header.Control, bridge: str) -> None:
    """Raises SchemaMismatch if the consumer or another producer has a column of another type."""
    columns.check_agrees(Columns.decode(control.columns), "in this producer", "in the consumer")
    for name in lane_names(bridge):
        if (info := lane_header(name)) is not None:
            try:
                peer = Columns.decode(info["columns"])
            except SchemaMismatch:  # a lane this build cannot read: the consumer refuses it
                continue
            columns.check_agrees(peer, "in this producer", f"in producer {info['producer_id']}")


def lane_counters(lane: Mapping) -> dict[str, float]:
    """Returns the lane's counters, some of them per reason. Never blocks; any thread."""
    words = header.lane_counters(lane)
    return {
        "records_total": words["tail"],
        "bytes_total": words["bytes"],
        "tokens_total": words["tokens"],
        "wait_s": words["wait_ns"] / 1e9,
        "late_wakes_total": words["late_wakes"],
        "logprobs_unrecorded_total": words["logprobs_unrecorded"],
        "waiting": words["tail"] - words["head"],
        **labelled("dropped_total", Drop, words["dropped"]),
        **labelled("episodes_lost_total", Lost, words["episodes_lost"]),
    }


def create_lane(
    bridge: str,
    lane_bytes: int,
    columns: Columns,
    given_id: str,
    env_name: str,
    origin: tuple[bytes, bytes, int] | None = None,
) -> tuple[str, Mapping, str]:
    """Returns a new lane's segment, its name and mapping, and the producer id that its records carry.

    `origin`: LaneOrigin.words() of a lane that a relay writes. Blocks to reserve memory. A text that
    cannot be encoded leaves no lane behind.
    """
    given, env = given_id.encode()[:63], env_name.encode()[:127]
    slots = sizing.slots_of(lane_bytes)
    *_, size = header.lane_geometry(lane_bytes, slots)
    name, lane = new_lane_segment(bridge, size)
    producer_id = f"{given.decode(errors='ignore')}-{name.rpartition('.')[2]}"
    header.format_lane(
        lane,
        lane_bytes,
        slots,
        columns.encode(),
        len(columns),
        os.getpid(),
        pid_namespace(),
        producer_id.encode(),
        env,
        *(origin or ()),
    )
    return name, lane, producer_id


class OwnNames:
    """The names of one producer's lane and control segment. Any thread."""

    def __init__(
        self,
        producer_id: str,
        bridge: str,
        control: header.Control,
        lane_name: str,
        lane: Mapping,
        writer: LaneWriter,
    ) -> None:
        self._producer_id, self._lane_name, self._lane, self._writer = producer_id, lane_name, lane, writer
        self._control, self._control_name = control, control_name(bridge)

    @property
    def removed(self) -> bool:
        """Whether either was removed. Two stat calls."""
        both = ((self._lane.fd, self._lane_name), (self._control.mapping.fd, self._control_name))
        return not all(still_named(*each) for each in both)

    def check(self) -> None:
        """Raises LaneRemoved if either was removed; checks at most every LOOK_S."""
        if self._writer.look_due:
            if self.removed:
                raise self._is_removed(self._unreachable())
            self._writer.looked(LOOK_S)

    def check_reachable(self) -> None:
        """Raises LaneRemoved if the lane holds records that no consumer reads or can find."""
        if lost := self._unreachable():
            raise self._is_removed(lost)

    def log_unreachable(self) -> None:
        """Logs the number of such records, if any."""
        if lost := self._unreachable():
            log.error("%s", self._is_removed(lost))

    def _is_removed(self, records: int) -> ShmBridgeError:
        names = {"producer": self._producer_id, "lane": self._lane_name}
        return obstacle(LaneRemoved, "removed", records=records, **names)

    def _unreachable(self) -> int:
        if still_named(self._lane.fd, self._lane_name) or is_locked(self._lane.fd, LockByte.READER):
            return 0
        return self._writer.outstanding


class Slot(Claim):
    """`slot[column]` is a writable flat view in the lane until the `with` block ends; then `sequence` is set.

    An exception in the block aborts the claim; leaving the block a second time does nothing. For the
    producer's thread. Do not write to an array after the block: its memory is the consumer's then.
    """

    def __init__(self, writer: LaneWriter, plan: Plan, publish: Callable[["Slot"], None]) -> None:
        self.plan, self._publish = plan, publish
        self._columns = {column.name: column for column in plan.columns}
        self._unused = dict.fromkeys(column.name for column in plan.columns if column.count)

    @property
    def sequence(self) -> int | None:
        """Sequence of the committed record; None before."""
        return self.plan.sequence

    def __getitem__(self, name: str) -> np.ndarray[Any, Any]:
        """Returns the column's values: those of every row, one after another.

        NoColumn (a KeyError) for a column that was not claimed, ClaimOpen after the block.
        """
        if not self.is_open:
            raise obstacle(ClaimOpen, "claim over")
        if name not in self._columns:
            raise self._not_claimed(name)
        view = self.plan.view(self.memory(), self._columns[name])
        self._unused.pop(name, None)
        return view

    def __setitem__(self, name: str, values: object) -> None:
        """Refuses `slot[column] = values`: the memory is written in place."""
        if name not in self._columns:
            raise self._not_claimed(name)
        raise BadArgument(
            f"slot[{name!r}] = ... would replace the view, and write nothing", hint=f"slot[{name!r}][:] = ..."
        )

    def _not_claimed(self, name: object) -> NoColumn:
        claimed = ", ".join(map(repr, self._columns))
        hint = did_you_mean(name, self._columns) or f"add it to lengths= of claim: {{{name!r}: ...}}"
        return NoColumn(f"column {shown(name)} was not claimed; the claim has {claimed}", hint=hint)

    @property
    def unused(self) -> str | None:
        """A column with values that the block never asked for; None if there is none."""
        return next(iter(self._unused), None)

    def publish_whole(self) -> None:
        """Checks and publishes the values the block wrote; for `__exit__`."""
        self._publish(self)

    def __repr__(self) -> str:
        state = (
            "open" if self.is_open else "over" if self.sequence is None else f"committed as {self.sequence}"
        )
        return f"<Slot of {self.plan.rows} rows, {self.plan.tokens} tokens: {state}>"


# Re-ask interval: the bridge may be draining by now. Must be <= the client's resend interval: a resend voids
# the promise.
_ASK_S = 0.5
_LAST_S = 0.5  # for the answer to the last question, which gives the reason


class Ticket(OneProcess):
    """Permission to generate one group. A context manager: put the group inside it, so that it is counted.

    Generation begins under `policy_version`; pass it as `put(policy_version=)`. The ticket ends with the
    block, with `end()`, when it is dropped, or with its producer. For the threads of its producer.
    """

    def __init__(self, policy_version: int, held: "_Held") -> None:
        self.policy_version = policy_version
        self._held, self._key = held, object()
        self._end = weakref.finalize(self, held.give_back, self._key)
        self._end.atexit = False  # at process exit the lane's locks end anyway

    def show(self) -> None:
        """Locks a byte for the ticket; called by its maker."""
        self._held.show(self._key)

    def end(self) -> None:
        """Ends the ticket. Never blocks; idempotent."""
        self._held.give_back(self._key)
        self._end.detach()  # last: if this is interrupted, the finalizer still ends the ticket

    def __repr__(self) -> str:
        state = "held" if self._held.holds(self._key) else "ended"
        return f"<Ticket for a group under policy version {self.policy_version}: {state}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()


class _Held:
    """The tickets a lane shows, as that many locked bytes in a row. Any thread.

    The GC may end tickets at any point, also inside these methods, and an interrupt may end the methods
    anywhere: each call locks as many bytes as there are tickets, whatever was locked.
    """

    def __init__(self, lane: Mapping) -> None:
        self._lane, self._lock = lane, threading.RLock()
        self._tickets: set[object] = set()
        self.over = False

    @property
    def count(self) -> int:
        return len(self._tickets)

    def holds(self, ticket: object) -> bool:
        return ticket in self._tickets

    def show(self, ticket: object) -> None:
        with self._lock:
            if not self.over:
                self._tickets.add(ticket)
                self._lock_as_many()

    def give_back(self, ticket: object) -> None:
        if self._lane.forked:
            return
        with self._lock:
            self._tickets.discard(ticket)
            self._lock_as_many()

    def end(self) -> None:
        with self._lock:
            self.over = True
            self._tickets.clear()
            self._lock_as_many()

    def _lock_as_many(self) -> None:
        shown = -1
        while shown != self.count:
            shown = self.count
            show_tickets(self._lane.fd, shown)


class Tickets:
    """The tickets one producer asks for and holds."""

    def __init__(
        self,
        producer_id: str,
        bridge: str,
        lane_name: str,
        lane: Mapping,
        control: header.Control,
        writer: lane_writer.LaneWriter,
        names: "OwnNames",
    ) -> None:
        self._producer_id, self._bridge, self._lane_name = producer_id, bridge, lane_name
        self._lane, self._control, self._writer, self._names = lane, control, writer, names
        self._held = _Held(lane)
        self._asking = threading.Lock()  # one question at a time: the hub keeps one promise per lane
        self._client: ControlClient | None = None
        self._async_client: tuple[asyncio.AbstractEventLoop, AsyncControlClient, asyncio.Lock] | None = None

    def begin_group(self, timeout_s: float | None) -> Ticket:
        """See Producer.begin_group."""
        deadline = deadline_of(timeout_s)
        if self._asking.locked():
            raise self._asks_already()
        try:
            with self._asking:
                self._check_may_ask()
                if self._client is None:
                    from shmbridge.control.server import ControlClient

                    self._client = ControlClient(self._bridge, role="producer", name=self._producer_id)
                return self._ask_until(self._client, deadline, timeout_s)
        except ShmBridgeError:
            raise
        except BaseException:  # an interrupt, possibly between the frames of a message
            self._close_client()
            raise
        finally:
            self._close_if_over()

    def _ask_until(self, client: "ControlClient", deadline: float, timeout_s: float | None) -> Ticket:
        asked_ns = time.monotonic_ns()
        while True:
            left_s = deadline - time.monotonic()
            question = self._question(wait=left_s > 0)
            answer: Answer | None = None
            with suppress(NoConsumer):  # no consumer, or no room: asked again below
                answer = client.request(question, min(_ASK_S, left_s) if left_s > 0 else _LAST_S)
            if (ticket := self._taken(answer, asked_ns)) is not None:
                return ticket
            self._check_may_ask()
            if left_s <= 0:
                raise self._not_admitted(timeout_s, answer)

    async def begin_group_async(self, timeout_s: float | None) -> Ticket:
        """See Producer.begin_group_async."""
        deadline = deadline_of(timeout_s)
        self._check_may_ask()
        client, turn = self._client_of_this_loop()
        waits = asyncio.timeout(timeout_s)
        try:
            # Nothing in between, where an exception of a signal handler would keep the turn.
            async with waits, turn:
                waits.reschedule(None)
                return await self._ask_in_turn(client, deadline, timeout_s)
        except TimeoutError:
            if waits.expired():
                raise self._not_admitted(timeout_s, None) from None
            raise
        finally:
            self._close_if_over()

    async def _ask_in_turn(
        self, client: "AsyncControlClient", deadline: float, timeout_s: float | None
    ) -> Ticket:
        if self._asking.locked():
            raise self._asks_already()
        with self._asking:
            asked_ns = time.monotonic_ns()
            while True:
                self._check_may_ask()
                left_s = deadline - time.monotonic()
                question = self._question(wait=left_s > 0)
                answer: Answer | None = None
                with suppress(NoConsumer):
                    answer = await client.request(question, min(_ASK_S, left_s) if left_s > 0 else _LAST_S)
                if (ticket := self._taken(answer, asked_ns)) is not None:
                    return ticket
                if left_s <= 0:
                    raise self._not_admitted(timeout_s, answer)

    def _close_if_over(self) -> None:
        """Closes the sockets if the producer has closed and left them to the thread that was using them."""
        if self._held.over and not self._asking.locked():
            self._close_async_client()
            self._close_client()

    def _question(self, *, wait: bool) -> "BeginGroup":
        from shmbridge.control import messages

        return messages.BeginGroup(self._lane_name, self._held.count, wait)

    def _taken(self, answer: "Answer | None", asked_ns: int = 0) -> Ticket | None:
        """Returns the ticket that an answer grants, shown in the lane; None if it grants none, or no longer.

        A new hub stores its epoch before it reads lanes; this reads the epoch after the lane shows the
        ticket. So one of the two sees the other. The same holds for the time after which this hub no longer
        counts the promise.
        """
        from shmbridge.control import messages

        if not isinstance(answer, messages.MayBegin) or self._held.over:
            return None
        # The promise expired before it was asked for: the two processes read different clocks.
        if answer.until_ns < asked_ns:
            numbers = {"pid": self._control.hub_pid, "ahead_s": (asked_ns - answer.until_ns) / 1e9}
            raise obstacle(NotAdmitted, "other clock", producer=self._producer_id, **numbers)
        # From here on the ticket is ended, whatever interrupts.
        ticket = Ticket(answer.policy_version, self._held)
        header.fault(b"ticket.granted")
        ticket.show()
        header.fault(b"ticket.shown")
        if time.monotonic_ns() < answer.until_ns and self._control.hub_epoch == answer.hub_epoch:
            return ticket
        ticket.end()
        return None

    def _check_may_ask(self) -> None:
        producer = self._producer_id
        if self._lane.forked:
            raise obstacle(Closed, "forked", producer=producer)
        if self._held.over:
            raise obstacle(Closed, "closed", producer=producer)
        if self._writer.quarantined:
            raise obstacle(LaneQuarantined, "quarantined", producer=producer, pid=self._control.hub_pid)
        if self._control.draining:
            raise obstacle(BridgeDraining, "draining", bridge=self._bridge)
        if self._held.count >= MOST_TICKETS:
            raise obstacle(NotAdmitted, "tickets", producer=producer, tickets=MOST_TICKETS)
        if self._names.removed:
            raise obstacle(NoConsumer, "no later consumer", producer=producer)

    def _asks_already(self) -> ClaimOpen:
        return ClaimOpen(
            f"producer {self._producer_id} asks for a ticket already, in another thread or task",
            hint="from tasks, use begin_group_async only; give each thread a producer of its own",
        )

    def _not_admitted(self, timeout_s: float | None, answer: "Answer | None") -> ShmBridgeError:
        return not_admitted(self._producer_id, self._control, answer, self._held.count, timeout_s)

    def _client_of_this_loop(self) -> "tuple[AsyncControlClient, asyncio.Lock]":
        from shmbridge.control.server import AsyncControlClient

        loop = asyncio.get_running_loop()
        if self._async_client is None or self._async_client[0] is not loop:
            if self._asking.locked():
                raise self._asks_already()
            self._close_async_client()
            client = AsyncControlClient(self._bridge, role="producer", name=self._producer_id)
            self._async_client = loop, client, asyncio.Lock()
        return self._async_client[1:]

    def _close_async_client(self) -> None:
        if self._async_client is not None:
            self._async_client[1].close()
            self._async_client = None

    def _close_client(self) -> None:
        client, self._client = self._client, None
        if client is not None:
            client.close()

    def end(self) -> None:
        """Ends all tickets for good. Idempotent. A thread that still asks closes the sockets itself."""
        self._held.end()
        self._close_if_over()
