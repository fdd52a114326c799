"""The actors of each node: a source answers pulls, the destination makes them, in a thread of its own."""

import itertools
import logging
import os
import threading
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shmbridge.errors import ShmBridgeError
from shmbridge.relay import wire
from shmbridge.relay.destination import Destination
from shmbridge.relay.ray.directory import NAMESPACE, Gone, Placed, Report, decode_placed, encode, names
from shmbridge.relay.source import Source
from shmbridge.relay.turns import Turns

log = logging.getLogger(__name__)

_REPORT_S = 1.0
_AGAIN_S = 0.5  # after a node did not answer
_LOOK_S = 0.02  # longest sleep while records wait for room
_IDLE_S = 0.1
_GONE_SAID = 16  # nodes that left, of which the report tells
_REFUSED_SAID = 16  # sources whose records are refused


class Options(msgspec.Struct, frozen=True):
    """Of a destination: as its arguments; `in_flight_bytes` are on their way at a time, over all nodes.

    `weights`: whether the learner's weights go to all nodes, and policy versions wait for them there.
    """

    lane_bytes: int = 16 << 20
    max_bytes: int = wire.MOST_BYTES
    in_flight_bytes: int = 64 << 20
    max_staleness: int | None = None
    weights: bool = True


class SourceActor:
    """A source relay. One call at a time; the bridge's consumer is opened by the first pull, and kept."""

    def __init__(self, bridge: str, node: str) -> None:
        self._bridge, self._node = bridge, node
        self._source: Source | None = None

    def pull(self, ask: bytes) -> list[np.ndarray[Any, Any]]:
        """Returns the next parcel as arrays, which Ray copies out of the lanes into its object store."""
        if self._source is None:
            self._source = Source(self._bridge, self._node)
        return wire.encode(self._source.pull(wire.decode_ask(ask)))

    def stats(self) -> dict[str, float]:
        """Returns the counters of the bridge here, as Consumer.stats; empty before the first pull."""
        return {} if self._source is None else self._source.consumer_stats()

    def stop(self) -> None:
        """Leaves the bridge; releases nothing."""
        source, self._source = self._source, None
        if source is not None:
            source.close()


@dataclass(slots=True, eq=False)
class _Pull:
    ref: Any
    requested_ns: int


class DestinationActor:
    """The destination relay: asks the sources that the directory names, until it is stopped."""

    def __init__(self, bridge: str, node: str, options: bytes) -> None:
        self._bridge, self._node = bridge, node
        self._options = msgspec.msgpack.decode(options, type=Options)
        self._turns = Turns(self._options.in_flight_bytes)
        self._destination: Destination | None = None
        self._sources: dict[str, Placed] = {}
        self._actors: dict[str, Any] = {}
        self._pulls: dict[str, deque[_Pull]] = {}
        self._not_before: dict[str, float] = {}
        self._errors: dict[str, str] = {}
        self._gone: deque[Gone] = deque(maxlen=_GONE_SAID)
        self._gone_count = 0
        self._directory: Any = None
        self._exchange: Any = None
        self._reported_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"shmbridge-relay-{bridge}", daemon=True)
        self._thread.start()

    def report(self) -> bytes:
        """Returns what it says to the directory."""
        return encode(self._report())

    def stop(self) -> None:
        """Ends its thread and leaves the bridge."""
        self._ending.set()
        self._thread.join()

    # -- the thread

    def _run(self) -> None:
        while not self._ending.is_set():
            try:
                if self._destination is None:
                    self._destination = self._opened()
                self._step(self._destination)
            except ShmBridgeError as wrong:
                self._errors[self._node] = str(wrong)
                log.error("the relay of bridge %s waits: %s", self._bridge, wrong)
                self._ending.wait(_REPORT_S)
            except Exception:
                log.exception("the relay of bridge %s failed, and goes on", self._bridge)
                self._ending.wait(_REPORT_S)
        if self._destination is not None:
            self._destination.close()

    def _opened(self) -> Destination:
        options = self._options
        destination = Destination(
            self._bridge,
            lane_bytes=options.lane_bytes,
            max_bytes=options.max_bytes,
            max_staleness=options.max_staleness,
            weights=options.weights,
        )
        self._errors.pop(self._node, None)
        return destination

    def _step(self, destination: Destination) -> None:
        import ray

        self._talk_to_directory()
        self._ask(destination)
        heads = {pulls[0].ref: node for node, pulls in self._pulls.items() if pulls}
        placed = destination.work()
        waits_s = _LOOK_S if placed or destination.stats()["waiting"] else _IDLE_S
        if not heads:
            self._ending.wait(waits_s)
            return
        ready, _ = ray.wait(list(heads), num_returns=1, timeout=waits_s)
        for ref in ready:
            self._came(destination, heads[ref])

    def _ask(self, destination: Destination) -> None:
        """Sends as many asks as may be on their way."""
        now = time.monotonic()
        while True:
            ready = [
                node
                for node in self._sources
                if now >= self._not_before.get(node, 0) and destination.ready(node)
            ]
            node = self._turns.next(ready, self._options.max_bytes)
            if node is None:
                return
            try:
                actor = self._actor(node)
            except ValueError as wrong:  # there is none of that name, now
                self._turns.came(node, 0)
                self._failed(destination, node, wrong)
                continue
            requested_ns = time.monotonic_ns()
            ref = actor.pull.remote(wire.encode_ask(destination.ask(node)))
            self._pulls.setdefault(node, deque()).append(_Pull(ref, requested_ns))

    def _came(self, destination: Destination, node: str) -> None:
        """Takes the answer to the oldest ask of a node."""
        import ray

        pull, brought = self._pulls[node][0], 0
        try:
            parcel = wire.decode(ray.get(pull.ref))
        except (ray.exceptions.RayError, ShmBridgeError) as wrong:
            self._failed(destination, node, wrong)
            return
        self._pulls[node].popleft()
        if self._errors.pop(node, None) is not None:
            log.warning("node %s answers again", node)
        try:
            brought = destination.accept(node, parcel, pull.requested_ns)
        finally:
            self._turns.came(node, brought)
            if not destination.expects(node):  # the answer was not believed: neither are those after it
                self._drop_pulls(node)

    def _drop_pulls(self, node: str) -> None:
        for _ in self._pulls.pop(node, ()):
            self._turns.came(node, 0)

    def _failed(self, destination: Destination, node: str, wrong: Exception) -> None:
        """A node did not answer: all its asks are lost. It is asked again until it has left."""
        self._drop_pulls(node)
        self._actors.pop(node, None)
        destination.lost(node)
        self._not_before[node] = time.monotonic() + _AGAIN_S
        text = str(wrong).strip().splitlines()[0] if str(wrong).strip() else type(wrong).__name__
        if node not in self._errors:
            log.warning("node %s does not answer: %s", node, text)
        self._errors[node] = text
        if not _is_alive(self._sources[node].node_id):
            self._left(destination, node)

    def _left(self, destination: Destination, node: str) -> None:
        records, lanes, heard_s = destination.gone(node)
        self._gone_count += 1
        self._gone.append(Gone(self._gone_count, node, records, lanes, heard_s))
        log.error("node %s is gone: %d records of %d lanes were never relayed", node, records, lanes)
        self._forget(node)

    def _forget(self, node: str) -> None:
        self._drop_pulls(node)
        self._turns.remove(node)
        for table in (self._sources, self._actors, self._errors, self._not_before):
            table.pop(node, None)

    def _actor(self, node: str) -> Any:
        import ray

        if node not in self._actors:
            self._actors[node] = ray.get_actor(self._sources[node].actor, namespace=NAMESPACE)
        return self._actors[node]

    # -- the directory

    def _talk_to_directory(self) -> None:
        """Reports once a second, and hears where the sources are; never waits for an answer."""
        import ray

        now = time.monotonic()
        if self._exchange is not None:
            if not ray.wait([self._exchange], timeout=0)[0]:
                return
            answer, self._exchange = self._exchange, None
            try:
                self._place(decode_placed(ray.get(answer)))
            except ray.exceptions.RayError:
                self._directory = None
        if now - self._reported_s < _REPORT_S:
            return
        self._reported_s = now
        try:
            if self._directory is None:
                self._directory = ray.get_actor(names(self._bridge)[0], namespace=NAMESPACE)
        except ValueError:
            return
        self._exchange = self._directory.exchange.remote(encode(self._report()))

    def _place(self, sources: dict[str, Placed]) -> None:
        """Takes the sources from now on; one that is named no more stays until its node has left."""
        for node, placed in sources.items():
            if self._sources.get(node) == placed:
                continue
            if not _is_alive(placed.node_id):
                continue
            if node in self._sources:  # its node came again, under another id
                self._forget(node)
                if self._destination is not None:
                    self._destination.lost(node)
            self._sources[node] = placed
            self._turns.add(node, placed.weight)

    def _report(self) -> Report:
        destination = self._destination
        report = Report(self._node, os.getpid(), sources=dict(self._sources), errors=dict(self._errors))
        report.gone = list(self._gone)
        if destination is not None:
            report.policy_version = destination.policy_version
            report.stats, report.nodes = destination.stats(), destination.nodes()
            report.refused = dict(itertools.islice(destination.refusals().items(), _REFUSED_SAID))
        return report


def _is_alive(node_id: str) -> bool:
    """Whether Ray holds a node for alive; False for one that it does not know."""
    import ray

    return any(node["NodeID"] == node_id and node["Alive"] for node in ray.nodes())
