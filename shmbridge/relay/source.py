"""The relay of a node with environments: takes the records of its bridge and sends them when it is asked.

It is the bridge's consumer. A record is released here once the other side has said that it is committed
there, or refused, or when it is too stale to be sent.
"""

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Self

import msgspec
import numpy as np

from shmbridge import Consumer, Record
from shmbridge.config import Run
from shmbridge.errors import Discard
from shmbridge.hub import is_stale
from shmbridge.record import memory_of, table_of
from shmbridge.relay.wire import PullReply, PullRequest, SentRecord, SourceLane, State
from shmbridge.segments import control_name, stands_there
from shmbridge.weights import WeightsReader

_MOST_PARTIAL = 256  # groups of a lane that are remembered although nothing of them is held
_PARTIAL_S = 600.0  # as long as a hub waits for the rest of a group
log = logging.getLogger(__name__)
_POLLED = 256
_BLOCKED_WAIT_S = 0.02
_ANY = "", -1
_WEIGHTS_S = 0.05
_LOOK_S = 0.5  # whether producers have ended


@dataclass(slots=True, eq=False)
class _Group:
    """A group in more than one record: it is relayed whole, once any of it was sent, or discarded whole."""

    rows: int = 0
    held: int = 0
    relayed: bool = False
    discarded: bool = False


@dataclass(slots=True, eq=False)
class Held:
    """A lease, and its group if that has other records, too."""

    record: Record
    group: _Group | None

    @property
    def sequence(self) -> int:
        """Of the record in its lane."""
        return self.record._sequence

    def end(self) -> Record:
        """Counts the lease as ended; returns the record."""
        if self.group is not None:
            self.group.held -= 1
        return self.record


class HeldLane:
    """The leases of one lane, in the order of their sequences: those to be sent, and those that were.

    Args:
        facts: what its records share.
        first: sequence of the first that came. Records before it were released by an earlier relay: the
            beginning of a group may be among them.
    """

    def __init__(self, facts: SourceLane, first: int) -> None:
        self.facts = facts
        self.unsent: deque[Held] = deque()
        self.sent: deque[Held] = deque()
        self._partial: dict[str, _Group] = {}  # groups whose last record has not come, by id
        self._unknown_until_s = time.monotonic() + _PARTIAL_S if first > 0 else 0.0

    @property
    def held(self) -> int:
        """How many leases there are."""
        return len(self.unsent) + len(self.sent)

    def add(self, record: Record) -> Held:
        """Takes over the next lease."""
        held = Held(record, self._group_of(record))
        self.unsent.append(held)
        return held

    def next(self) -> Record:
        """Returns the next record to be sent, which is sent by that."""
        held = self.unsent.popleft()
        if held.group is not None:
            held.group.relayed = True
        self.sent.append(held)
        return held.record

    def send_again(self) -> int:
        """Begins with the first that is not acknowledged; returns how many are sent again."""
        again = len(self.sent)
        self.unsent.extendleft(reversed(self.sent))
        self.sent.clear()
        return again

    def committed(self, newest: int) -> int:
        """Releases what the other side has; returns how many."""
        before = self.held
        for queue in (self.sent, self.unsent):
            while queue and queue[0].sequence <= newest:
                held = queue.popleft()
                if held.group is not None:
                    held.group.relayed = True
                held.end().release()
        return before - self.held

    def refuse(self, sequence: int) -> bool:
        """Releases one record that the other side will not take; returns whether it was held."""
        for queue in (self.sent, self.unsent):
            for at, held in enumerate(queue):
                if held.sequence == sequence:
                    del queue[at]
                    held.end().release()
                    return True
        return False

    def discard_stale(
        self, version: int, max_staleness: int | None, among: Iterable[Held] | None = None
    ) -> int:
        """Discards what is too stale to be sent, if it is `among` these; returns how many.

        A group goes whole: if one of its records is too stale, and none was sent, all are discarded, also
        those that come later.
        """
        if max_staleness is None:
            return 0
        alone: set[int] = set()
        some = False
        for held in self.unsent if among is None else among:
            group = held.group
            if (group is None or not group.relayed) and (
                is_stale(held.record._min_policy_version, version, max_staleness)
                or (group is not None and group.discarded)
            ):
                some = True
                if group is None:
                    alone.add(held.sequence)
                else:
                    group.discarded = True
        if not some:
            return 0
        kept: deque[Held] = deque()
        before = len(self.unsent)
        for held in self.unsent:
            if held.sequence in alone or (held.group is not None and held.group.discarded):
                held.end()._discard(Discard.STALE)
            else:
                kept.append(held)
        self.unsent = kept
        return before - len(kept)

    def _group_of(self, record: Record) -> _Group | None:
        """Returns the record's group; None if the record is all of it."""
        if record.rows >= record._group_size:
            return None
        group = self._partial.get(record._group_id)
        if group is None:
            self._forget_old()
            group = self._partial[record._group_id] = _Group(relayed=time.monotonic() < self._unknown_until_s)
        group.rows += record.rows
        group.held += 1
        if group.rows >= record._group_size:
            del self._partial[record._group_id]
        return group

    def _forget_old(self) -> None:
        """Forgets the oldest groups of which nothing is held: of a producer that never completes them."""
        excess = len(self._partial) - _MOST_PARTIAL
        for group_id in [each for each, group in self._partial.items() if not group.held][: max(excess, 0)]:
            del self._partial[group_id]


class Source:
    """The consumer of a bridge whose records go to another node; a context manager. One thread at a time.

    `stats` is for any thread. At every time taken = acknowledged + discarded + refused + held.

    Args:
        bridge: name of the bridge here.
        node: name of this node, at most 63 bytes.

    Raises:
        ConsumerTaken, and all that Consumer raises.
    """

    def __init__(self, bridge: str, node: str) -> None:
        self.bridge, self.node = bridge, node
        self._consumer = Consumer(bridge)
        self._weights = WeightsReader(bridge)
        self._lanes: dict[str, HeldLane] = {}
        self._committed: dict[str, int] = {}  # by the newest request
        self._session: str | None = None
        self._run: Run | None = None
        self._most_stale: tuple[int, int | None] = (-1, None)
        self._reported_finished: set[str] = set()  # in the last answer
        self._notified = "", 0  # session and number of the request whose wait is to end
        self._first = 0  # the lane whose turn is first
        self._counts: Counter[str] = Counter()

    def pull(self, request: PullRequest) -> PullReply:
        """Returns the next records of every lane, within the request's credits, in a reply.

        Blocks at most `request.wait_s` seconds for a first record. The reply's records are views of lanes:
        drop them before the next call. Raises Closed.
        """
        began_ns = time.monotonic_ns()
        if request.session != self._session:
            self._session = request.session
            self._counts["sent_again_total"] += sum(lane.send_again() for lane in self._lanes.values())
        self._apply(request)
        self._wait(request)
        idle_ns = time.monotonic_ns() - began_ns
        records = list(self._filled(request))
        backlog = [len(lane.unsent) for lane in self._lanes.values() if lane.unsent]
        finished = list(self._finished(request))
        self._reported_finished = set(finished)
        for producer_id in finished:
            self._lanes.pop(producer_id, None)
        state = State(
            self.node,
            request.session,
            request.number,
            os.getpid(),
            idle_ns,
            bool(backlog) and not records,
            sum(backlog),
            len(backlog),
            finished,
            self.stats(),
        )
        return PullReply(state, records)

    def notify(self, session: str, number: int) -> None:
        """Ends the wait of a pull; without a session also the waits of all later ones. Any thread."""
        self._notified = session, number
        self._consumer._state.ring()

    def _apply(self, request: PullRequest) -> None:
        """Applies acknowledgements, refusals and the learner's state."""
        for producer_id, refused in request.refused.items():
            lane = self._lanes.get(producer_id)
            for sequence, code in refused:
                if lane is not None and lane.refuse(sequence):
                    self._counts[f"refused_total{{{code}}}"] += 1
        self._committed = request.committed
        for producer_id, newest in request.committed.items():
            if (lane := self._lanes.get(producer_id)) is not None:
                self._counts["acknowledged_total"] += lane.committed(newest)
        self._follow_version(request)
        self._most_stale = request.version, request.max_staleness
        for lane in self._lanes.values():
            self._counts["discarded_total{stale}"] += lane.discard_stale(*self._most_stale)
        self._follow_run(request)
        consumer = self._consumer
        if request.paused != consumer.paused:
            (consumer.pause if request.paused else consumer.resume)()
        if request.draining and not consumer.draining:
            consumer.drain()

    def _follow_version(self, request: PullRequest) -> None:
        if request.version > self._consumer.policy_version and (
            (version := self._version(request)) > self._consumer.policy_version
        ):
            self._consumer.publish_policy_version(version)

    def _version(self, request: PullRequest) -> int:
        """Returns the policy version for this node: of weights, only one that is whole here."""
        if request.weights < 0:
            return request.version
        whole = self._weights.version
        here = -1 if whole is None else whole
        return request.version if here >= request.weights else min(request.version, here)

    def _follow_run(self, request: PullRequest) -> None:
        """Announces the learner's run here, and counts its steps."""
        consumer = self._consumer
        if request.run is not None and request.run != self._run:
            self._run = request.run
            consumer.announce_run(msgspec.structs.replace(request.run, starting_step=request.step))
        while request.run is not None and consumer.current_step < request.step:
            consumer.step_done()

    # -- taking

    def _wait(self, request: PullRequest) -> None:
        """Takes what is there; if nothing of it may be sent, waits for a record that may, or for a notify."""
        self._take()
        until = time.monotonic() + request.wait_s
        while not any(self._sendable(request)):
            blocked = any(lane.unsent for lane in self._lanes.values())
            left = until - time.monotonic()
            if blocked:  # the other side knows sooner than we when there is room
                left = min(left, _BLOCKED_WAIT_S)
            if left <= 0 or self._notified in ((request.session, request.number), _ANY):
                return
            if any(producer_id not in self._reported_finished for producer_id in self._finished(request)):
                return
            if request.version > self._consumer.policy_version:  # its weights may be whole soon
                self._follow_version(request)
                left = min(left, _WEIGHTS_S)
            self._consumer._waiting.wait(min(left, _LOOK_S))
            self._take()
            if blocked:
                return

    def _sendable(self, request: PullRequest) -> Iterator[HeldLane]:
        for producer_id, lane in self._lanes.items():
            if lane.unsent and request.credits.get(producer_id, request.credit) > 0:
                yield lane

    def _take(self) -> None:
        while records := self._consumer.poll(_POLLED):
            for record in records:
                self._keep(record)

    def _keep(self, record: Record) -> None:
        producer_id = record.meta.producer_id
        lane = self._lanes.get(producer_id)
        if lane is None:
            lane = self._lanes[producer_id] = HeldLane(_facts(record), record._sequence)
        self._counts["taken_total"] += 1
        held = lane.add(record)
        if record._sequence <= self._committed.get(producer_id, -1):  # an earlier relay here had sent it
            self._counts["acknowledged_total"] += lane.committed(record._sequence)
        else:
            self._counts["discarded_total{stale}"] += lane.discard_stale(*self._most_stale, among=(held,))

    # -- sending

    def _filled(self, request: PullRequest) -> Iterator[SentRecord]:
        """Yields records of all lanes in turn, one each, until credits or the reply are used up.

        A lane with any credit sends one record at least, and an empty reply takes any record.
        """
        lanes, left = list(self._sendable(request)), request.max_bytes
        if not lanes:
            return
        self._first = (self._first + 1) % len(lanes)
        lanes = lanes[self._first :] + lanes[: self._first]
        credit = {id(lane): request.credits.get(lane.facts.producer_id, request.credit) for lane in lanes}
        while lanes:
            for lane in list(lanes):
                if not lane.unsent or credit[id(lane)] <= 0:
                    lanes.remove(lane)
                    continue
                size = lane.unsent[0].record._extent_bytes
                if size > left and left < request.max_bytes:
                    return
                record = lane.next()
                credit[id(lane)] -= size
                left -= size
                self._counts["sent_total"] += 1
                self._counts["sent_bytes_total"] += size
                yield _sent(lane.facts, record)

    def _finished(self, request: PullRequest) -> Iterator[str]:
        """Yields the producers that are asked about, or had records here, and will bring nothing more."""
        return (each for each in {**request.committed, **self._lanes} if self._is_finished(each))

    def _is_finished(self, producer_id: str) -> bool:
        """Returns whether a producer will never bring anything more: its lane is gone from this node."""
        lane = self._lanes.get(producer_id)
        number = producer_id.rpartition("-")[2]
        return (lane is None or not lane.held) and not stands_there(
            f"{control_name(self.bridge).removesuffix('.c')}.l.{number}"
        )

    # -- state

    def stats(self) -> dict[str, float]:
        """Returns counters, flat; `held` are records taken and neither acknowledged, discarded nor refused.

        Never blocks; any thread.
        """
        lanes = list(self._lanes.values())
        return {**self._counts, "held": sum(lane.held for lane in lanes), "lanes": len(lanes)}

    def consumer_stats(self) -> dict[str, float]:
        """Returns the counters of the bridge here, as Consumer.stats."""
        return self._consumer.stats()

    def close(self) -> None:
        """Leaves the bridge; releases nothing. Idempotent."""
        self._lanes.clear()
        self._weights.close()
        self._consumer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _facts(record: Record) -> SourceLane:
    about = record.meta
    return SourceLane(about.producer_id, about.env_name, table_of(record), record._lane_reader.data_bytes)


def _sent(lane: SourceLane, record: Record) -> SentRecord:
    there = memory_of(record)
    versions = there.min_policy_version, there.max_policy_version
    extent = np.frombuffer(there.memory, np.uint8)
    return SentRecord(lane, extent, there.words, there.sequence, *versions, there.waited_ns())
