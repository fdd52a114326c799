"""The policy's weights on their way out over Ray: an actor on the learner's node puts each version once into
the object store, part by part, for the actor on each other node.
"""

import logging
import os
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from shmbridge.errors import ShmBridgeError
from shmbridge.relay.outward import PART_BYTES, Head, Offer, Outward, encode_head
from shmbridge.relay.ray.actor_thread import ActorThread
from shmbridge.relay.ray.directory import NodeWeights, Placed, WeightsReport, encode
from shmbridge.relay.ray.inward import make_inward

log = logging.getLogger(__name__)

_WINDOW = 4  # parts on their way to one node
_LOOK_S = 0.05
_IDLE_S = 0.25
_GATHER_S = 0.1  # for nodes to say that they take a version
_AGAIN_S, _AGAIN_MOST_S = 0.5, 30.0  # after a node did not take a version; twice as long each time


def outward_name(bridge: str) -> str:
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
    again_s: float = _AGAIN_S
    said: NodeWeights = field(default_factory=NodeWeights)


class OutwardActor:
    """Brings each version of the weights to the nodes that the directory names, in a thread of its own.

    A version that is newer than the one under way takes its place, but not twice in a row for a node: a
    learner faster than the network still gets versions out.
    """

    def __init__(self, bridge: str, node: str, part_bytes: int = PART_BYTES) -> None:
        self._bridge, self._part_bytes = bridge, part_bytes
        self._outward: Outward | None = None
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
        if self._outward is None:
            self._outward = Outward(self._bridge, self._part_bytes)
        self._send(self._outward)
        self._said.error = ""

    def failed(self, wrong: Exception) -> None:
        """Says why a step failed."""
        self._said.error = _first_line(wrong)
        log.exception("the weights of bridge %s do not go out, and are tried again", self._bridge)

    def close(self) -> None:
        """Leaves the bridge."""
        if self._outward is not None:
            self._outward.close()

    def _send(self, outward: Outward) -> None:
        newest = self._said.version = outward.version
        if wanting := [node for node in self._nodes.values() if self._wants(node, newest)]:
            with outward.read() as offer:
                self._offer(offer, wanting)
        for version in {id(each.version): each.version for each in self._sendings()}.values():
            if any(each.lacks_a_part() for each in self._of(version)):
                with outward.read() as offer:
                    self._go_on(offer, version)
        if not self._turn(_LOOK_S):
            outward.wait(newest, _IDLE_S)

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
                node.actor = make_inward(node.placed)
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
        node.sending, node.may_replace, node.again_s = None, True, _AGAIN_S

    def _failed(self, node: _Node, wrong: Exception) -> None:
        """A node did not take a version: it is asked again a little later, from the beginning."""
        node.sending = node.actor = None
        node.said.version = node.said.under_way = -1
        node.not_before = time.monotonic() + node.again_s
        node.again_s = min(2 * node.again_s, _AGAIN_MOST_S)
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
