"""Puts posts into lanes: one lane per remote environment, waiting for room, each post once.

Atropos' client resends a post whose response was lost. So such a post is remembered: the same body gets the
same response, and nothing is put again. For one event loop.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import socket
import struct
import time
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from shmbridge import (
    InvalidRecord,
    LaneFull,
    Producer,
    RecordTooBig,
    SchemaMismatch,
    ShmBridgeError,
    ShmTooSmall,
)
from shmbridge.consumers.gateway.bodies import Posted
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.errors import Closed, LaneQuarantined, LaneRemoved
from shmbridge.httpd.door import Refused, limit_unread_answer
from shmbridge.httpd.server import BoundedConnection
from shmbridge.put import RecordPlanner, checked_stamp

log = logging.getLogger(__name__)

_MEMORY_AGAIN_S = 0.25
_REMEMBERED_S = 600.0
_MOST_REMEMBERED = 20_000
_GROUPS_A_TURN = 16  # of one body, before others in the event loop have theirs

Places = list[tuple[str, int]]  # (producer, sequence) of groups
# of each group: None for queued, or how many sequences of its environment are buffered
Outcomes = list[int | None]


class RemoteLane:
    """A producer that is opened on first use, in a thread, because reserving its memory takes a while."""

    def __init__(self, options: GatewayOptions, env_name: str, opened: Callable[[str], None]) -> None:
        self._options, self._env_name, self._opened = options, env_name, opened
        self._opening = asyncio.Lock()
        self._planner: RecordPlanner | None = None
        self._left = ""
        self.producer: Producer | None = None
        self.posting = 0  # groups received but not yet in the lane

    async def open(self) -> Producer:
        """Returns the lane's producer. Raises ShmTooSmall, and as Producer."""
        async with self._opening:
            if self.producer is None:
                options, name = self._options, self._env_name
                self.producer = await asyncio.to_thread(
                    Producer, options.bridge, env_name=name, lane_bytes=options.lane_bytes
                )
                self._planner = RecordPlanner(self.producer.columns, self.producer.lane_bytes)
                self._opened(self.producer.lane_name)
            return self.producer

    def leave(self, producer: Producer) -> bool:
        """Abandons a lane without a reader; returns whether it was open. The next open() makes another."""
        if self.producer is not producer:
            return False
        self._left = producer.producer_id
        log.error(
            "the lane of %s on bridge %s is lost: %s goes on in another",
            producer.producer_id,
            self._options.bridge,
            self._env_name,
        )
        self.close()
        return True

    def was_left(self, producer: Producer) -> bool:
        """Returns whether leave() closed it, so that another is needed."""
        return producer.producer_id == self._left

    def check(self, group: dict[str, Any]) -> None:
        """Checks a group as `put` will. The lane must be open. Raises InvalidRecord, RecordTooBig."""
        assert self._planner is not None
        self._planner.plan(group, checked_stamp("", None, None, 0, "train"), True)

    def close(self) -> None:
        """Closes the lane; its records stay. Waiting posts are put if there is room, else refused."""
        producer, self.producer = self.producer, None
        if producer is not None:
            producer.close()


@dataclass(eq=False, slots=True)
class Post:
    """One body being put, with its progress into the lanes."""

    posted: Posted
    done: Places = field(default_factory=list)  # of the groups that are committed
    outcomes: Outcomes = field(default_factory=list)  # once all are
    work: asyncio.Task[Refused | None] | None = None

    @property
    def failed(self) -> bool:
        """Whether the last attempt to put it ended incomplete."""
        work = self.work
        return work is None or (
            work.done() and (work.cancelled() or work.exception() is not None or work.result() is not None)
        )


class PostLedger:
    """Puts posts into lanes, each once.

    Args:
        deadline_s: how long a post waits for room.
        outcomes: says what became of groups; asked once for each post. None: all are queued.
    """

    def __init__(
        self, deadline_s: float, outcomes: Callable[[Places], Awaitable[Outcomes]] | None = None
    ) -> None:
        self._deadline_s, self._outcomes = deadline_s, outcomes
        self._lost: dict[bytes, tuple[float, Post]] = {}
        self._under_way: set[asyncio.Task[Any]] = set()
        self.counts: Counter[str] = Counter(
            posts_total=0,
            groups_total=0,
            posts_repeated_total=0,
            posts_timed_out_total=0,
            posts_refused_total=0,
            lanes_replaced_total=0,
        )
        self.waiting = 0  # posts that wait for room
        self._is_ending = False

    async def take(
        self,
        posted: Posted,
        lane_of: Callable[[dict[str, Any]], RemoteLane],
        connection: ProvingConnection,
        waited_s: float,
    ) -> Outcomes:
        """Puts all groups of a body; returns what became of each.

        Waits for room until the deadline, less the time `waited_s` that the body has waited already. If the
        client disconnects, the groups are put all the same, or counted as dropped; the same body again gets
        the same response.

        Raises:
            Refused: 422 and nothing was put; 503 after the deadline: what is missing is put when the same
                body comes again.
        """
        self.counts["posts_total"] += 1
        post = self._recall(posted.digest)
        if post is None:
            post = Post(posted)
        else:
            self.counts["posts_repeated_total"] += 1
        if post.failed:
            post.posted = posted
            deadline = time.monotonic() + self._deadline_s - waited_s
            post.work = asyncio.get_running_loop().create_task(
                self._put(post, deque(posted.groups[len(post.done) :]), lane_of, deadline)
            )
            self._under_way.add(post.work)
            post.work.add_done_callback(self._ended)
        connection.carry(lambda read: None if read else self.remember(post))
        assert post.work is not None
        refused = await asyncio.shield(post.work)
        if refused is None:
            return post.outcomes
        if refused.status == 503 and post.done:
            self.remember(post)
        # a new exception, so that the post keeps no frames that hold the body
        raise Refused(refused.status, refused.detail, refused.kind)

    def _ended(self, work: asyncio.Task[Any]) -> None:
        self._under_way.discard(work)
        if not work.cancelled():
            work.exception()  # the client may be gone

    async def _put(
        self,
        post: Post,
        todo: deque[dict[str, Any]],
        lane_of: Callable[[dict[str, Any]], RemoteLane],
        deadline: float,
    ) -> Refused | None:
        """Puts the remaining groups. Returns a refusal: raised, it would keep this frame and the body."""
        lanes = deque(lane_of(group) for group in todo)
        for lane in lanes:
            lane.posting += 1
        self.waiting += 1
        try:
            if len(todo) > 1:
                await _check(todo, lanes, deadline)
            while todo:
                post.done.append(await self._put_one(todo[0], lanes[0], deadline))
                lanes.popleft().posting -= 1
                todo.popleft()
                self.counts["groups_total"] += 1
                if len(todo) % _GROUPS_A_TURN == 0:
                    await asyncio.sleep(0)
            queued: Outcomes = [None] * len(post.done)
            post.outcomes = (
                await self._outcomes(post.done) if self._outcomes is not None and post.done else queued
            )
            return None
        except (InvalidRecord, RecordTooBig, SchemaMismatch) as wrong:
            self.counts["posts_refused_total"] += 1
            return _refusal(422, wrong, type(wrong).__name__)
        except LaneFull as full:
            self.counts["posts_timed_out_total"] += 1
            return _refusal(503, full, "lane full")
        except ShmBridgeError as closed:  # draining, closed, no memory for a lane
            return _refusal(503, closed, type(closed).__name__)
        finally:
            self.waiting -= 1
            for lane in lanes:
                lane.posting -= 1

    async def _put_one(self, group: dict[str, Any], lane: RemoteLane, deadline: float) -> tuple[str, int]:
        """Puts one group; if its lane has no reader any more, into a new lane, once."""
        first = True
        while True:
            producer = await _opened(lane, deadline)
            if self._is_ending:
                raise Closed("the gateway is ending", hint="post again to the next one")
            try:
                sequence = await producer.put_async(
                    group, foreign=True, timeout_s=max(0.0, deadline - time.monotonic())
                )
            except (LaneRemoved, LaneQuarantined):
                if not first:
                    raise
                self.counts["lanes_replaced_total"] += lane.leave(producer)
            except Closed:
                if not (first and lane.was_left(producer)):
                    raise
            else:
                return producer.producer_id, sequence if sequence is not None else -1
            first = False

    def remember(self, post: Post) -> None:
        """Remembers a post whose response was lost, or that was put in part: the same body is this post."""
        post.posted.groups = []  # who puts them has them; only the digest is wanted from now on
        if post.failed:
            post.work = None
        self._lost.pop(post.posted.digest, None)
        self._lost[post.posted.digest] = time.monotonic(), post
        self.forget_old()

    def forget_old(self) -> None:
        """Forgets old lost posts, which count as new if resent. Call it periodically."""
        now = time.monotonic()
        while self._lost:
            digest, (when, _) = next(iter(self._lost.items()))
            if when > now - _REMEMBERED_S and len(self._lost) <= _MOST_REMEMBERED:
                break
            del self._lost[digest]

    def _recall(self, digest: bytes) -> Post | None:
        when, post = self._lost.pop(digest, (0.0, None))
        return post if when > time.monotonic() - _REMEMBERED_S else None

    def forget(self) -> None:
        """Forgets all posts, after a reset."""
        self._lost.clear()

    def end(self) -> None:
        """Refuses every group that is not being put yet, also one whose lane is being opened."""
        self._is_ending = True

    async def settled(self, timeout_s: float) -> None:
        """Waits until no post is in progress."""
        if self._under_way:
            with suppress(asyncio.CancelledError):
                await asyncio.wait(self._under_way, timeout=timeout_s)


def _refusal(status: int, error: Exception, kind: str) -> Refused:
    """Returns the response for an error, whose frames, which hold the body, are dropped."""
    error.__traceback__ = None
    return Refused(status, str(error), kind)


async def _check(groups: Sequence[dict[str, Any]], lanes: Sequence[RemoteLane], deadline: float) -> None:
    """Raises for a group that its lane cannot have, before any of them is put."""
    for place, (group, lane) in enumerate(zip(groups, lanes, strict=True), 1):
        await _opened(lane, deadline)
        lane.check(group)
        if place % _GROUPS_A_TURN == 0:
            await asyncio.sleep(0)


async def _opened(lane: RemoteLane, deadline: float) -> Producer:
    """Returns the lane's producer; waits for shared memory that other lanes give back."""
    while True:
        try:
            return await lane.open()
        except ShmTooSmall:
            if time.monotonic() + _MEMORY_AGAIN_S > deadline:
                raise
            await asyncio.sleep(_MEMORY_AGAIN_S)


_SIOCOUTQ = 0x5411  # bytes of the send queue that the peer has not acknowledged
_KEEPALIVE = (
    (socket.SO_KEEPALIVE, 1, socket.SOL_SOCKET),
    (socket.TCP_KEEPIDLE, 30, socket.IPPROTO_TCP),
    (socket.TCP_KEEPINTVL, 10, socket.IPPROTO_TCP),
    (socket.TCP_KEEPCNT, 3, socket.IPPROTO_TCP),
)


class ProvingConnection(BoundedConnection):
    """One connection of the gateway; request handlers find it in their scope's state."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.app_state = {**self.app_state, "connection": self}
        self.carried: list[Callable[[bool], None]] = []
        self.gone = False  # the peer no longer reads responses; readable from any thread

    @property
    def is_proving(self) -> bool:
        """Whether a response on it lacks proof."""
        return bool(self.carried)

    def carry(self, delivered: Callable[[bool], None]) -> None:
        """Registers what is called, once, with whether the current response was read (or False: unknown)."""
        if self.gone:
            delivered(False)
        else:
            self.carried.append(delivered)
            limit_unread_answer(self.transport.get_extra_info("socket"), 0)

    def next_request(self) -> None:
        """Reports a new request, which proves that the previous response was read."""
        if self.carried:
            limit_unread_answer(self.transport.get_extra_info("socket"), self._bounds.body_pause_s)
        self._settle(read=True)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Enables detection of peers that vanish without closing."""
        peer = transport.get_extra_info("socket")
        if peer.family in (socket.AF_INET, socket.AF_INET6):
            for option, value, level in _KEEPALIVE:
                peer.setsockopt(level, option, value)
        super().connection_made(transport)

    def eof_received(self) -> None:
        """The peer has closed its side, in order."""
        self.gone = True  # later responses are not read
        self._settle(read=self._all_delivered())
        super().eof_received()

    def connection_lost(self, exc: Exception | None) -> None:
        """Reports responses without proof as unread: the connection is gone."""
        self.gone = True
        self._settle(read=False)
        super().connection_lost(exc)

    def timeout_keep_alive_handler(self) -> None:
        """Keeps an idle connection while a response on it lacks proof."""
        if not self.carried:
            super().timeout_keep_alive_handler()

    def _settle(self, *, read: bool) -> None:
        settled, self.carried = self.carried, []
        for delivered in settled:
            delivered(read)

    def _all_delivered(self) -> bool:
        """Returns whether the response is complete, written and acknowledged, without a reset."""
        if (
            self.link is None
            or self.cycle is None
            or not self.cycle.response_complete
            or self.link.get_write_buffer_size()
        ):
            return False
        peer = self.link.get_extra_info("socket")
        try:
            (unacknowledged,) = struct.unpack("i", fcntl.ioctl(peer.fileno(), _SIOCOUTQ, b"\0\0\0\0"))
            return unacknowledged <= self.link.ended and not peer.getsockopt(
                socket.SOL_SOCKET, socket.SO_ERROR
            )
        except OSError:
            return False
