"""The actors of each node: a source answers pulls, the destination makes them, in a thread of its own."""

import itertools
import logging
import os
import time
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shmbridge.errors import ShmBridgeError
from shmbridge.relay import wire
from shmbridge.relay.destination import Destination
from shmbridge.relay.ray.actor_thread import ActorThread
from shmbridge.relay.ray.actors import find, get_or_make
from shmbridge.relay.ray.directory import Gone, Placed, Report, encode
from shmbridge.relay.ray.weights import OutwardActor, outward_name
from shmbridge.relay.source import Source
from shmbridge.relay.turns import Turns

log = logging.getLogger(__name__)

_OUTWARD_S = 10.0
_AGAIN_S = 0.5  # after a node did not answer
_LOOK_S = 0.02  # longest sleep while records wait for room
_IDLE_S = 0.25  # between two looks for a new policy version, a pause or the end
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


BESIDE = "beside"  # calls of a source that do not wait for a pull to end


def make_source(placed: Placed, node: str) -> Any:
    """Returns the source relay of a node, made if there is none."""
    return get_or_make(SourceActor, placed.actor, placed.node_id, placed.bridge, node, beside=BESIDE)


class SourceActor:
    """A source relay. One pull at a time; the bridge's consumer is opened by the first one, and kept."""

    def __init__(self, bridge: str, node: str) -> None:
        self._bridge, self._node = bridge, node
        self._source: Source | None = None

    def nudge(self, session: str = "", number: int = -1) -> None:
        """Ends the wait of a pull soon, or of all that come; called beside it."""
        if (source := self._source) is not None:
            source.nudge(session, number)

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
        self._looked_s = 0.0
        self._thread = ActorThread(f"shmbridge-relay-{bridge}", bridge, "exchange", self)
        self._thread.start()

    def report(self) -> bytes:
        """Returns what it says to the directory."""
        return encode(self._report())

    def stop(self) -> None:
        """Ends its thread and leaves the bridge."""
        self._thread.stop()

    # -- the thread

    def step(self) -> None:
        """Asks sources and takes their answers; blocks a little while there is nothing to do."""
        if self._destination is None:
            self._destination = self._opened()
        self._turn(self._destination)

    def failed(self, wrong: Exception) -> None:
        """Says why a step failed."""
        if isinstance(wrong, ShmBridgeError):
            self._errors[self._node] = str(wrong)
            log.error("the relay of bridge %s waits: %s", self._bridge, wrong)
        else:
            log.exception("the relay of bridge %s failed, and goes on", self._bridge)

    def close(self) -> None:
        """Leaves the bridge."""
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

    def _turn(self, destination: Destination) -> None:
        import ray

        self._keep_outward()
        self._ask(destination)
        heads = {pulls[0].ref: node for node, pulls in self._pulls.items() if pulls}
        placed = destination.work()
        for node, ask in destination.to_nudge().items():
            self._actors[node].nudge.options(concurrency_group=BESIDE).remote(*ask)
        waits_s = _LOOK_S if placed or destination.waits else _IDLE_S
        if not heads:
            self._thread.wait(waits_s)
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
                requested_ns = time.monotonic_ns()
                ref = actor.pull.remote(wire.encode_ask(destination.ask(node)))
            except Exception as wrong:  # there is none of that name, now; or Ray does not answer
                self._turns.came(node, 0)
                self._failed(destination, node, wrong)
                continue
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
        """Returns a source's actor, made again if it was ended for good."""
        if node not in self._actors:
            placed = self._sources[node]
            try:
                self._actors[node] = find(placed.actor)
            except ValueError:
                if not _is_alive(placed.node_id):
                    raise
                self._actors[node] = make_source(placed, node)
        return self._actors[node]

    def _keep_outward(self) -> None:
        """Looks now and then for the actor that sends the weights, and makes it again if it has ended."""
        import ray

        if not self._options.weights or time.monotonic() - self._looked_s < _OUTWARD_S:
            return
        self._looked_s = time.monotonic()
        try:
            find(outward_name(self._bridge))
        except ValueError:
            here = ray.get_runtime_context().get_node_id()
            get_or_make(OutwardActor, outward_name(self._bridge), here, self._bridge, self._node)

    # -- the directory

    def place(self, sources: dict[str, Placed]) -> None:
        """Takes the sources from now on; one that is named no more, or in another way, stays as it is until
        its node has left.
        """
        for node, placed in sources.items():
            # Also under another name, which it had while Ray held two nodes of one name for alive.
            if placed in self._sources.values():
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
