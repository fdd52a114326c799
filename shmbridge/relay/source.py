"""The relay of a node with environments: takes the records of its bridge and sends them when it is asked.

It is the bridge's consumer. A record is released here once the other side has said that it is committed
there, or refused, or when it is too stale to be sent.
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Self

import msgspec
import numpy as np

from shmbridge import Consumer, Record
from shmbridge.config import Run
from shmbridge.record import memory_of, table_of
from shmbridge.relay.source_lane import HeldLane
from shmbridge.relay.wire import Ask, Parcel, SentRecord, SourceLane, State
from shmbridge.segments import control_name, stands_there
from shmbridge.weights import WeightsReader

log = logging.getLogger(__name__)

_POLLED = 256
_BLOCKED_WAIT_S = 0.02
_ANY = "", -1
_WEIGHTS_S = 0.05
_LOOK_S = 0.5  # whether producers have ended


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
        self._committed: dict[str, int] = {}  # as the newest ask said
        self._session: str | None = None
        self._run: Run | None = None
        self._most_stale: tuple[int, int | None] = (-1, None)
        self._said_finished: set[str] = set()  # in the last answer
        self._nudged = "", 0  # session and number of the ask whose wait is to end
        self._first = 0  # the lane whose turn is first
        self._counts: Counter[str] = Counter()

    def pull(self, ask: Ask) -> Parcel:
        """Returns the next records of every lane, within the ask's credits, in a parcel.

        Blocks at most `ask.wait_s` seconds for a first record. The parcel's records are views of the lanes:
        drop them before the next call. Raises Closed.
        """
        began_ns = time.monotonic_ns()
        if ask.session != self._session:
            self._session = ask.session
            self._counts["sent_again_total"] += sum(lane.send_again() for lane in self._lanes.values())
        self._hear(ask)
        self._wait(ask)
        idle_ns = time.monotonic_ns() - began_ns
        records = list(self._filled(ask))
        backlog = [len(lane.unsent) for lane in self._lanes.values() if lane.unsent]
        finished = list(self._finished(ask))
        self._said_finished = set(finished)
        for producer_id in finished:
            self._lanes.pop(producer_id, None)
        state = State(
            self.node,
            ask.session,
            ask.number,
            os.getpid(),
            idle_ns,
            bool(backlog) and not records,
            sum(backlog),
            len(backlog),
            finished,
            self.stats(),
        )
        return Parcel(state, records)

    def nudge(self, session: str, number: int) -> None:
        """Ends the wait for records that answer an ask: there is news for the next one. With no session, also
        all later waits. Any thread.
        """
        self._nudged = session, number
        self._consumer._state.ring()

    def _hear(self, ask: Ask) -> None:
        """Does what the other side has said."""
        for producer_id, refused in ask.refused.items():
            lane = self._lanes.get(producer_id)
            for sequence, code in refused:
                if lane is not None and lane.refuse(sequence):
                    self._counts[f"refused_total{{{code}}}"] += 1
        self._committed = ask.committed
        for producer_id, newest in ask.committed.items():
            if (lane := self._lanes.get(producer_id)) is not None:
                self._counts["acknowledged_total"] += lane.committed(newest)
        self._follow_version(ask)
        self._most_stale = ask.version, ask.max_staleness
        for lane in self._lanes.values():
            self._counts["discarded_total{stale}"] += lane.discard_stale(*self._most_stale)
        self._follow_run(ask)
        consumer = self._consumer
        if ask.paused != consumer.paused:
            (consumer.pause if ask.paused else consumer.resume)()
        if ask.draining and not consumer.draining:
            consumer.drain()

    def _follow_version(self, ask: Ask) -> None:
        if ask.version > self._consumer.policy_version and (
            (version := self._version(ask)) > self._consumer.policy_version
        ):
            self._consumer.publish_policy_version(version)

    def _version(self, ask: Ask) -> int:
        """Returns the policy version for this node: of weights, only one that is whole here."""
        if ask.weights < 0:
            return ask.version
        whole = self._weights.version
        here = -1 if whole is None else whole
        return ask.version if here >= ask.weights else min(ask.version, here)

    def _follow_run(self, ask: Ask) -> None:
        """Announces the learner's run here, and counts its steps."""
        consumer = self._consumer
        if ask.run is not None and ask.run != self._run:
            self._run = ask.run
            consumer.announce_run(msgspec.structs.replace(ask.run, starting_step=ask.step))
        while ask.run is not None and consumer.current_step < ask.step:
            consumer.step_done()

    # -- taking

    def _wait(self, ask: Ask) -> None:
        """Takes what is there; if nothing of it may be sent, waits for a record that may, or for a nudge."""
        self._take()
        until = time.monotonic() + ask.wait_s
        while not any(self._sendable(ask)):
            blocked = any(lane.unsent for lane in self._lanes.values())
            left = until - time.monotonic()
            if blocked:  # the other side knows sooner than we when there is room
                left = min(left, _BLOCKED_WAIT_S)
            if left <= 0 or self._nudged in ((ask.session, ask.number), _ANY):
                return
            if any(producer_id not in self._said_finished for producer_id in self._finished(ask)):
                return
            if ask.version > self._consumer.policy_version:  # its weights may be whole soon
                self._follow_version(ask)
                left = min(left, _WEIGHTS_S)
            self._consumer._waiting.wait(min(left, _LOOK_S))
            self._take()
            if blocked:
                return

    def _sendable(self, ask: Ask) -> Iterator[HeldLane]:
        for producer_id, lane in self._lanes.items():
            if lane.unsent and ask.credits.get(producer_id, ask.credit) > 0:
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

    def _filled(self, ask: Ask) -> Iterator[SentRecord]:
        """Yields records of all lanes in turn, one each, until credits or the parcel are used up.

        A lane with any credit sends one record at least, and an empty parcel takes any record.
        """
        lanes, left = list(self._sendable(ask)), ask.max_bytes
        if not lanes:
            return
        self._first = (self._first + 1) % len(lanes)
        lanes = lanes[self._first :] + lanes[: self._first]
        credit = {id(lane): ask.credits.get(lane.facts.producer_id, ask.credit) for lane in lanes}
        while lanes:
            for lane in list(lanes):
                if not lane.unsent or credit[id(lane)] <= 0:
                    lanes.remove(lane)
                    continue
                size = lane.unsent[0].record._extent_bytes
                if size > left and left < ask.max_bytes:
                    return
                record = lane.next()
                credit[id(lane)] -= size
                left -= size
                self._counts["sent_total"] += 1
                self._counts["sent_bytes_total"] += size
                yield _sent(lane.facts, record)

    def _finished(self, ask: Ask) -> Iterator[str]:
        """Yields the producers that are asked about, or had records here, and will bring nothing more."""
        return (each for each in {**ask.committed, **self._lanes} if self._is_finished(each))

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
