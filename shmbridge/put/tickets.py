"""Tickets: permission to begin a group, asked of the hub so that it will not be too stale when trained with.

A ticket is a locked byte of the producer's own lane: the kernel frees it however the producer ends, and
every later hub can count it. The hub decides who gets a ticket (limit.py).
"""

import asyncio
import threading
import time
import weakref
from contextlib import suppress
from typing import TYPE_CHECKING, Self

from shmbridge._ext import header
from shmbridge._ext import lane as lane_writer
from shmbridge._ext.header import Mapping
from shmbridge.config import deadline_of
from shmbridge.errors import (
    BridgeDraining,
    ClaimOpen,
    Closed,
    LaneQuarantined,
    NoConsumer,
    NotAdmitted,
    ShmBridgeError,
)
from shmbridge.put.lane import not_admitted, obstacle
from shmbridge.segments import MOST_TICKETS, OneProcess, show_tickets

if TYPE_CHECKING:
    from shmbridge.control.client import AsyncControlClient, ControlClient
    from shmbridge.control.messages import Answer, BeginGroup
    from shmbridge.put.lane import OwnNames

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
                    from shmbridge.control.client import ControlClient

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
        from shmbridge.control.client import AsyncControlClient

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
