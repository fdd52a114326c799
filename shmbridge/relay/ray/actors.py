"""The actors of each node: a source answers pulls, the destination makes them, in a thread of its own."""

import itertools
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import msgspec
import numpy as np

from shmbridge.errors import ShmBridgeError
from shmbridge.relay import wire
from shmbridge.relay.destination import Destination, Turns
from shmbridge.relay.ray.directory import (
    NAMESPACE,
    Gone,
    NodeWeights,
    Placed,
    Report,
    WeightsReport,
    decode_placed,
    encode,
    names,
)
from shmbridge.relay.source import Source
from shmbridge.relay.weights import (
    PART_BYTES,
    Head,
    Offer,
    WeightsReceiver,
    WeightsSender,
    decode_head,
    encode_head,
)

REPORT_S = 1.0
log = logging.getLogger(__name__)
_WINDOW = 4  # parts on their way to one node
_WEIGHTS_LOOK_S = 0.05
_IDLE_S = 0.25
_GATHER_S = 0.1  # for nodes to say that they take a version
_REFUSED_S, _REFUSED_MOST_S = 0.5, 30.0  # after a node did not take a version; twice as long each time
_SENDER_S = 10.0
_AGAIN_S = 0.5  # after a node did not answer
_LOOK_S = 0.02  # longest sleep while records wait for room
_IDLE_S = 0.25  # between two looks for a new policy version, a pause or the end
_GONE_SAID = 16  # nodes that left, of which the report tells
_REFUSED_SAID = 16  # sources whose records are refused
BESIDE = "beside"  # calls of a source that do not wait for a pull to end


def get_or_make(kind: type, name: str, node_id: str, *arguments: Any, beside: str | None = None) -> Any:
    """Returns the actor of that name, made on that node if there is none; it outlives this process.

    `beside` names a group of calls (`.options(concurrency_group=...)`) that run beside all others.
    """
    import ray
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    return (
        (ray.remote(kind) if beside is None else ray.remote(concurrency_groups={beside: 1})(kind))
        .options(
            name=name,
            namespace=NAMESPACE,
            lifetime="detached",
            get_if_exists=True,
            max_restarts=-1,
            max_task_retries=0,
            num_cpus=0,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        )
        .remote(*arguments)
    )


def find(name: str) -> Any:
    """Returns the actor of that name. Raises ValueError if there is none."""
    import ray

    return ray.get_actor(name, namespace=NAMESPACE)


class Steps(Protocol):
    """What such an actor does. All but `report` run in its thread."""

    def step(self) -> None:
        """Does what there is to do; blocks a little while there is nothing."""

    def failed(self, wrong: Exception) -> None:
        """Notes that a step failed; the next one comes a second later."""

    def place(self, sources: dict[str, Placed]) -> None:
        """Takes where the sources are from now on."""

    def report(self) -> bytes:
        """Returns what is said to the directory."""

    def close(self) -> None:
        """Leaves the bridge."""


class ActorThread:
    """Runs the steps of an actor. Once a second it reports to the directory, and hears where the sources are.

    Args:
        name: of the thread.
        bridge: whose directory it is.
        exchange: the directory's method that takes the report.
        steps: the actor's.
    """

    def __init__(self, name: str, bridge: str, exchange: str, steps: Steps) -> None:
        self._bridge, self._exchange_by, self._steps = bridge, exchange, steps
        self._directory: Any = None
        self._exchange: Any = None
        self._reported_s = 0.0
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Begins: once the actor has all that its steps need."""
        self._thread.start()

    @property
    def stopping(self) -> bool:
        """Whether it is to end."""
        return self._ending.is_set()

    def wait(self, timeout_s: float) -> None:
        """Sleeps so long, or until it is to end. For its own thread."""
        self._ending.wait(timeout_s)

    def stop(self) -> None:
        """Ends the thread, which leaves the bridge; blocks until it has."""
        self._ending.set()
        self._thread.join()

    def _run(self) -> None:
        while not self.stopping:
            try:
                self._talk_to_directory()
                self._steps.step()
            except Exception as wrong:
                self._steps.failed(wrong)
                self.wait(REPORT_S)
        self._steps.close()

    def _talk_to_directory(self) -> None:
        """Reports once a second, and hears where the sources are; never waits for an answer."""
        import ray

        if self._exchange is not None:
            if not ray.wait([self._exchange], timeout=0)[0]:
                return
            answer, self._exchange = self._exchange, None
            try:
                raw = ray.get(answer)
                if raw is not None:
                    self._steps.place(decode_placed(raw))
            except ray.exceptions.RayError:
                self._directory = None
        now = time.monotonic()
        if now - self._reported_s < REPORT_S:
            return
        self._reported_s = now
        try:
            if self._directory is None:
                self._directory = ray.get_actor(names(self._bridge)[0], namespace=NAMESPACE)
        except ValueError:
            return
        call: Callable[[bytes], Any] = getattr(self._directory, self._exchange_by).remote
        self._exchange = call(self._steps.report())


def receiver_name(placed: Placed) -> str:
    """Returns the name of the actor on a source's node."""
    return f"shmbridge-inward-{placed.bridge}-{placed.node_id[:16]}"


def make_receiver(placed: Placed) -> Any:
    """Returns the actor on a source's node, made if there is none."""
    return get_or_make(WeightsReceiverActor, receiver_name(placed), placed.node_id, placed.bridge)


class WeightsReceiverActor:
    """Writes weights into the segment of a source's node; opened by the first version, and kept."""

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._receiver: WeightsReceiver | None = None

    def begin(self, head: bytes) -> int:
        """Begins a version, unless it is there; returns the newest that is."""
        about = decode_head(head)
        if self._receiver is None:
            self._receiver = WeightsReceiver(self._bridge)
        self._receiver.begin(about)
        return self._receiver.version

    def write(self, transfer: str, number: int, part: np.ndarray[Any, Any]) -> None:
        """Writes a part, out of the object store here."""
        self._opened().write(transfer, number, part)

    def commit(self, transfer: str) -> int:
        """Makes the version the newest, and returns it."""
        return self._opened().commit(transfer)

    def stop(self) -> None:
        """Leaves the bridge; whole versions stay."""
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            receiver.close()

    def _opened(self) -> WeightsReceiver:
        if self._receiver is None:  # begun again in the middle of a transfer
            self._receiver = WeightsReceiver(self._bridge)
        return self._receiver


def sender_name(bridge: str) -> str:
    """Returns the name of the actor of the learner's node."""
    return f"shmbridge-outward-{bridge}"


@dataclass(slots=True, eq=False)
class _Version:
    """A version that goes out, and its parts in the object store that some node still needs, by number."""

    head: Head
    raw: bytes
    began_s: float = field(default_factory=time.monotonic)
    parts: dict[int, Any] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class _Sending:
    """A version on its way to one node: calls that are not answered yet, oldest first; parts written."""

    version: _Version
    calls: deque[Any] = field(default_factory=deque)
    begun: bool = False
    sent: int = 0
    written: int = 0
    committing: bool = False

    def lacks_a_part(self) -> bool:
        """Whether the next part to be sent is not in the object store."""
        return self.begun and self.sent < self.version.head.parts and self.sent not in self.version.parts


@dataclass(slots=True, eq=False)
class _Node:
    name: str
    placed: Placed
    actor: Any = None
    sending: _Sending | None = None
    may_replace: bool = True
    not_before: float = 0.0
    again_s: float = _REFUSED_S
    said: NodeWeights = field(default_factory=NodeWeights)


class WeightsSenderActor:
    """Brings each version of the weights to the nodes that the directory names, in a thread of its own.

    A version that is newer than the one under way takes its place, but not twice in a row for a node: a
    learner faster than the network still gets versions out.
    """

    def __init__(self, bridge: str, node: str, part_bytes: int = PART_BYTES) -> None:
        self._bridge, self._part_bytes = bridge, part_bytes
        self._sender: WeightsSender | None = None
        self._nodes: dict[str, _Node] = {}
        self._said = WeightsReport(node, os.getpid())
        self._thread = ActorThread(f"shmbridge-weights-{bridge}", bridge, "exchange_weights", self)
        self._thread.start()

    def report(self) -> bytes:
        """Returns what it says to the directory."""
        return encode(self._report())

    def stop(self) -> None:
        """Ends its thread and leaves the bridge."""
        self._thread.stop()

    # -- the thread

    def step(self) -> None:
        """Sends what there is to send; blocks a little while there is nothing."""
        if self._sender is None:
            self._sender = WeightsSender(self._bridge, self._part_bytes)
        self._send(self._sender)
        self._said.error = ""

    def failed(self, wrong: Exception) -> None:
        """Says why a step failed."""
        self._said.error = _first_line(wrong)
        log.exception("the weights of bridge %s do not go out, and are tried again", self._bridge)

    def close(self) -> None:
        """Leaves the bridge."""
        if self._sender is not None:
            self._sender.close()

    def _send(self, sender: WeightsSender) -> None:
        newest = self._said.version = sender.version
        if wanting := [node for node in self._nodes.values() if self._wants(node, newest)]:
            with sender.read() as offer:
                self._offer(offer, wanting)
        for version in {id(each.version): each.version for each in self._sendings()}.values():
            if any(each.lacks_a_part() for each in self._of(version)):
                with sender.read() as offer:
                    self._go_on(offer, version)
        if not self._turn(_WEIGHTS_LOOK_S):
            sender.wait(newest, _IDLE_S)

    def _wants(self, node: _Node, newest: int) -> bool:
        """Whether a node is to be sent that version now; first it answers whether it takes the last."""
        if newest <= node.said.version or time.monotonic() < node.not_before:
            return False
        sending = node.sending
        return sending is None or (
            sending.begun and sending.version.head.version < newest and node.may_replace
        )

    def _sendings(self) -> Iterator[_Sending]:
        return (node.sending for node in self._nodes.values() if node.sending is not None)

    def _of(self, version: _Version) -> list[_Sending]:
        return [each for each in self._sendings() if each.version is version]

    def _offer(self, offer: Offer, wanting: list[_Node]) -> None:
        """Sends a version to nodes; those that do not answer at once get it later, or a newer one."""
        version = _Version(offer.head, encode_head(offer.head))
        for node in wanting:
            self._begin(node, version)
        until = time.monotonic() + _GATHER_S
        while not all(each.begun for each in self._of(version)) and time.monotonic() < until:
            self._turn(_GATHER_S / 4)
        self._put(offer, version)

    def _go_on(self, offer: Offer, version: _Version) -> None:
        """Sends a version to nodes that answered late, if it is still the newest."""
        if offer.head.version == version.head.version:
            self._put(offer, version)
            return
        for node in self._nodes.values():
            sending = node.sending
            if sending is not None and sending.version is version and sending.lacks_a_part():
                node.said.replaced += 1
                node.sending, node.said.under_way = None, -1

    def _put(self, offer: Offer, version: _Version) -> None:
        """Puts parts that nodes lack into the object store; the first go out while others are put.

        The segment is leased meanwhile: Ray copies a part while it is put.
        """
        import ray

        for number in range(version.head.parts):
            taking = [each.sent for each in self._of(version) if each.begun]
            if self._thread.stopping or not taking:
                return
            if number not in version.parts and number >= min(taking):
                try:
                    version.parts[number] = ray.put(offer.part(number))
                except ray.exceptions.RayError as wrong:  # no room
                    self._fail_all(version, wrong)
                self._turn(0)

    def _fail_all(self, version: _Version, wrong: Exception) -> None:
        for node in self._nodes.values():
            if node.sending is not None and node.sending.version is version:
                self._failed(node, wrong)

    # -- one node

    def _begin(self, node: _Node, version: _Version) -> None:
        import ray

        if node.sending is not None:
            node.said.replaced += 1
            node.may_replace = False
        node.sending = _Sending(version)
        node.said.under_way = version.head.version
        try:
            if node.actor is None:
                node.actor = make_receiver(node.placed)
            node.sending.calls.append(node.actor.begin.remote(version.raw))
        except (ValueError, ray.exceptions.RayError) as wrong:  # its node has left, or Ray does not answer
            self._failed(node, wrong)

    def _turn(self, timeout_s: float) -> bool:
        """Sends what may be sent and hears what was answered; returns False if nothing is on its way."""
        import ray

        heads: dict[Any, _Node] = {}
        for node in self._nodes.values():
            if node.sending is not None:
                self._feed(node, node.sending)
                if node.sending.calls:
                    heads[node.sending.calls[0]] = node
        if not heads:
            return False
        ready, _ = ray.wait(list(heads), num_returns=len(heads) if not timeout_s else 1, timeout=timeout_s)
        for ref in ready:
            self._heard(heads[ref])
        return True

    def _feed(self, node: _Node, sending: _Sending) -> None:
        """Sends parts that are in the object store, a few at a time, and after the last one the commit."""
        head, parts = sending.version.head, sending.version.parts
        if not sending.begun or sending.committing:
            return
        while len(sending.calls) < _WINDOW and sending.sent in parts:
            part = parts[sending.sent]
            sending.calls.append(node.actor.write.remote(head.transfer, sending.sent, part))
            sending.sent += 1
        if sending.sent == head.parts:
            sending.calls.append(node.actor.commit.remote(head.transfer))
            sending.committing = True

    def _heard(self, node: _Node) -> None:
        """Takes the answer to the oldest call of a node."""
        import ray

        sending = node.sending
        assert sending is not None
        head = sending.version.head
        try:
            answer = ray.get(sending.calls[0])
        except (ray.exceptions.RayError, ShmBridgeError) as wrong:
            self._failed(node, wrong)
            return
        sending.calls.popleft()
        if not sending.begun:
            sending.begun = True
            if answer >= head.version:
                self._done(node, answer)
        elif sending.committing and not sending.calls:
            node.said.versions += 1
            node.said.bytes += head.slot_bytes
            node.said.last_s = time.monotonic() - sending.version.began_s
            self._done(node, answer)
        else:
            sending.written += 1
            self._free(sending.version)

    def _done(self, node: _Node, version: int) -> None:
        if node.said.error:
            log.warning("node %s takes weights again", node.name)
        node.said.version, node.said.under_way, node.said.error = version, -1, ""
        node.sending, node.may_replace, node.again_s = None, True, _REFUSED_S

    def _failed(self, node: _Node, wrong: Exception) -> None:
        """A node did not take a version: it is asked again a little later, from the beginning."""
        node.sending = node.actor = None
        node.said.version = node.said.under_way = -1
        node.not_before = time.monotonic() + node.again_s
        node.again_s = min(2 * node.again_s, _REFUSED_MOST_S)
        text = _first_line(wrong)
        if text != node.said.error:
            log.warning("node %s does not take weights: %s", node.name, text)
        node.said.error = text

    def _free(self, version: _Version) -> None:
        """Frees the parts that no node needs any more."""
        taking = [each.written for each in self._of(version) if each.begun]
        for number in [each for each in version.parts if not taking or each < min(taking)]:
            del version.parts[number]

    # -- the directory

    def place(self, sources: dict[str, Placed]) -> None:
        """Takes the nodes from now on."""
        for name in [name for name, node in self._nodes.items() if sources.get(name) != node.placed]:
            del self._nodes[name]
        for name, placed in sources.items():
            self._nodes.setdefault(name, _Node(name, placed))

    def _report(self) -> WeightsReport:
        self._said.nodes = {name: node.said for name, node in list(self._nodes.items())}
        return self._said


def _first_line(wrong: Exception) -> str:
    text = str(getattr(wrong, "cause", wrong)).strip()  # of an error in a call, without its stack
    return text.splitlines()[0] if text else type(wrong).__name__


class Options(msgspec.Struct, frozen=True):
    """Of a destination: as its arguments; `in_flight_bytes` are on their way at a time, over all nodes.

    `weights`: whether the learner's weights go to all nodes, and policy versions wait for them there.
    """

    lane_bytes: int = 16 << 20
    max_bytes: int = wire.MOST_BYTES
    in_flight_bytes: int = 64 << 20
    max_staleness: int | None = None
    weights: bool = True


def make_source(placed: Placed, node: str) -> Any:
    """Returns the source relay of a node, made if there is none."""
    return get_or_make(SourceActor, placed.actor, placed.node_id, placed.bridge, node, beside=BESIDE)


class SourceActor:
    """A source relay. One pull at a time; the bridge's consumer is opened by the first one, and kept."""

    def __init__(self, bridge: str, node: str) -> None:
        self._bridge, self._node = bridge, node
        self._source: Source | None = None

    def notify(self, session: str = "", number: int = -1) -> None:
        """Ends the wait of a pull soon, or of all that come; called beside it."""
        if (source := self._source) is not None:
            source.notify(session, number)

    def pull(self, request: bytes) -> list[np.ndarray[Any, Any]]:
        """Returns the next reply as arrays, which Ray copies out of the lanes into its object store."""
        if self._source is None:
            self._source = Source(self._bridge, self._node)
        return wire.encode(self._source.pull(wire.decode_request(request)))

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
    """The destination relay: pulls from the sources that the directory names, until it is stopped."""

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
        """Pulls from sources and takes their answers; blocks a little while there is nothing to do."""
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

        self._keep_sender()
        self._pull(destination)
        heads = {pulls[0].ref: node for node, pulls in self._pulls.items() if pulls}
        placed = destination.work()
        for node, request in destination.to_notify().items():
            self._actors[node].notify.options(concurrency_group=BESIDE).remote(*request)
        waits_s = _LOOK_S if placed or destination.waits else _IDLE_S
        if not heads:
            self._thread.wait(waits_s)
            return
        ready, _ = ray.wait(list(heads), num_returns=1, timeout=waits_s)
        for ref in ready:
            self._came(destination, heads[ref])

    def _pull(self, destination: Destination) -> None:
        """Sends as many requests as may be on their way."""
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
                ref = actor.pull.remote(wire.encode_request(destination.request(node)))
            except Exception as wrong:  # there is none of that name, now; or Ray does not answer
                self._turns.came(node, 0)
                self._failed(destination, node, wrong)
                continue
            self._pulls.setdefault(node, deque()).append(_Pull(ref, requested_ns))

    def _came(self, destination: Destination, node: str) -> None:
        """Takes the answer to the oldest request of a node."""
        import ray

        pull, brought = self._pulls[node][0], 0
        try:
            reply = wire.decode(ray.get(pull.ref))
        except (ray.exceptions.RayError, ShmBridgeError) as wrong:
            self._failed(destination, node, wrong)
            return
        self._pulls[node].popleft()
        if self._errors.pop(node, None) is not None:
            log.warning("node %s answers again", node)
        try:
            brought = destination.accept(node, reply, pull.requested_ns)
        finally:
            self._turns.came(node, brought)
            if not destination.in_session(node):  # all of its pulls were cancelled
                self._drop_pulls(node)

    def _drop_pulls(self, node: str) -> None:
        for _ in self._pulls.pop(node, ()):
            self._turns.came(node, 0)

    def _failed(self, destination: Destination, node: str, wrong: Exception) -> None:
        """A node did not answer: all its requests are lost. It is asked again until it has left."""
        self._drop_pulls(node)
        self._actors.pop(node, None)
        destination.cancel(node)
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

    def _keep_sender(self) -> None:
        """Looks now and then for the actor that sends the weights, and makes it again if it has ended."""
        import ray

        if not self._options.weights or time.monotonic() - self._looked_s < _SENDER_S:
            return
        self._looked_s = time.monotonic()
        try:
            find(sender_name(self._bridge))
        except ValueError:
            here = ray.get_runtime_context().get_node_id()
            get_or_make(WeightsSenderActor, sender_name(self._bridge), here, self._bridge, self._node)

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
                    self._destination.cancel(node)
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
