"""The relay of the learner's node: pulls records from other nodes into lanes here, one lane per source.

What is committed here is known from the lanes themselves, and from the receipts of lanes that are gone: a
relay that begins again requests for what is newer. Order is kept per source: one number says what is here.
"""

import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from shmbridge import Producer
from shmbridge._ext import header
from shmbridge.config import Run
from shmbridge.control import ControlClient, messages
from shmbridge.errors import (
    BridgeDraining,
    InvalidRecord,
    LaneFull,
    LaneQuarantined,
    LaneRefused,
    LaneRemoved,
    RecordTooBig,
    RelayTaken,
    SchemaMismatch,
    ShmBridgeError,
    ShmPermission,
)
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.relay.wire import MOST_BYTES, PullReply, PullRequest, SentRecord, SourceLane, State
from shmbridge.schema import STANDARD, Columns, arrow_field
from shmbridge.segments import (
    LockByte,
    close_origin,
    is_locked,
    lane_info,
    lane_names,
    leave_bridge,
    lock_after,
    newest_relayed,
    open_control,
    open_mapping,
    read_receipts,
    remove_receipts,
)
from shmbridge.sizing import SMALLEST_LANE
from shmbridge.weights import WeightsReader

TOTALS = ("relayed_total", "duplicates_total", "bytes_total")
_BLOCKED_S = 0.25  # a node whose lanes are full is asked again after that, or when one has room
_IDLE_WAIT_S = 2.0  # of a source that had nothing for some time
_MOST_IDLE = 8
_ANSWER_S = 0.2
_REMOVING_S = 1.0  # longest that the removal of a dead lane takes
_LOOK_AGAIN_S = 0.01
_TIDY_S = 5.0
log = logging.getLogger(__name__)
_RECORDS = 8  # of the size of its first one, at least
_AGAIN_S = 1.0  # after it could not be opened
_LOOK_S = 0.1
_RUN_S = 1.0
_WAIT_S = 0.25
_LITTLE = 64 << 10
_MOST_ASKS = 500  # a second, of nodes that have nothing


class Turns:
    """Stride scheduling over nodes: the node whose bytes, divided by its weight, are fewest comes next.

    A node that comes late or was idle starts at the current virtual time, without credit for the past. Idle
    nodes may have one outstanding pull each, which reserves no bytes. One thread.

    Args:
        most_bytes: on their way at a time, over all nodes; at least one pull always is.
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._weights: dict[str, float] = {}
        self._passed: dict[str, float] = {}
        self._reserved: dict[str, deque[int]] = {}  # bytes of each turn under way, the oldest first
        self._idle: set[str] = set()
        self._now = 0.0  # where the node stood that had the last turn

    def add(self, node: str, weight: float = 1.0) -> None:
        """Gives a node turns from now on, or another weight."""
        if not weight > 0:
            raise ValueError(f"weight {weight!r} of node {node} is not above 0")
        self._weights[node] = weight
        if node not in self._passed:
            self._passed[node] = self._now
            self._reserved[node] = deque()
            self._idle.add(node)

    def remove(self, node: str) -> None:
        """Takes a node out, with all that is on its way from it."""
        for table in (self._weights, self._passed, self._reserved):
            table.pop(node, None)
        self._idle.discard(node)

    @property
    def reserved(self) -> int:
        """Bytes that may be on their way."""
        return sum(map(sum, self._reserved.values()))

    def next(self, ready: Iterable[str], size: int) -> str | None:
        """Returns the node that may send up to `size` bytes now, and reserves them; None if none may."""
        known = [node for node in ready if node in self._passed]
        for node in known:
            if node in self._idle and not self._reserved[node]:
                self._reserved[node].append(0)
                return node
        busy = [node for node in known if node not in self._idle]
        reserved = self.reserved
        if not busy or (reserved and reserved + size > self.most_bytes):
            return None
        node = min(busy, key=lambda each: (max(self._passed[each], self._now), each))
        self._now = max(self._passed[node], self._now)
        self._passed[node] = self._now + size / self._weights[node]
        self._reserved[node].append(size)
        return node

    def came(self, node: str, brought: int) -> None:
        """Ends the oldest turn of a node, which brought so many bytes: only those count."""
        if not self._reserved.get(node):
            return
        reserved = self._reserved[node].popleft()
        self._passed[node] += (brought - reserved) / self._weights[node]
        (self._idle.discard if brought else self._idle.add)(node)


@dataclass(slots=True, eq=False)
class PeerState:
    """A node with a source. `brought` are the bytes of its last reply; `idle` counts replies in a row after
    which it held nothing; `refused` goes into its next request.
    """

    name: str
    session: str = field(default_factory=lambda: secrets.token_hex(8))
    requested: int = 0
    requests: deque[PullRequest] = field(default_factory=deque)
    refused: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    state: State | None = None
    heard_s: float = 0.0
    brought: int = 0
    idle: int = 0
    notified: bool = False
    blocked_until: float = 0.0
    blocked_free: int = 0
    counts: Counter[str] = field(default_factory=Counter)

    def is_ready(self) -> bool:
        """Whether one more request may be on its way: two at most, one if the last answer brought nothing."""
        return len(self.requests) < (2 if self.brought and self.state is not None else 1)

    def wait_s(self, wait_s: float) -> float:
        """Returns how long its source waits for a first record: longer where nothing came for some time."""
        return min(wait_s * (1 << self.idle), _IDLE_WAIT_S)

    def is_sent(self, request: PullRequest) -> None:
        """Notes an outstanding request."""
        self.requested += 1
        self.notified = False
        self.requests.append(request)

    def to_notify(self, learner: tuple[object, ...]) -> tuple[str, int] | None:
        """Returns session and number of its newest request, once, if that is outdated."""
        if self.notified or not self.requests:
            return None
        request = self.requests[-1]
        if (request.version, request.paused, request.draining, request.run, request.step) == learner:
            return None
        self.notified = True
        return self.session, request.number

    def answers(self, state: State) -> bool:
        """Takes the source's state; returns False if it does not belong to the oldest request."""
        if state.session != self.session or not self.requests or self.requests[0].number != state.number:
            return False
        request = self.requests.popleft()
        self.state, self.heard_s = state, time.monotonic()
        for producer_id, refused in request.refused.items():  # acknowledged by this reply
            left = [each for each in self.refused.pop(producer_id, ()) if each not in refused]
            if left:
                self.refused[producer_id] = left
        return True

    def has_brought(self, size: int, state: State, free: int) -> None:
        """Notes the bytes of an answer; `free` bytes are in its lanes here."""
        self.brought = size
        # What it holds has to be acknowledged soon.
        self.idle = 0 if size or state.counters.get("held") else min(self.idle + 1, _MOST_IDLE)
        self.counts["bytes_total"] += size
        if state.blocked and not size:
            self.blocked_until, self.blocked_free = time.monotonic() + _BLOCKED_S, free
        else:
            self.blocked_until = 0.0

    def cancel(self) -> None:
        """Begins another session: no pull is outstanding."""
        self.session, self.requested, self.idle = secrets.token_hex(8), 0, 0
        self.requests.clear()
        self.brought = 0

    def about(self) -> dict[str, float]:
        """Returns local counters, last reported counters, and the age of that report. Any thread."""
        about: dict[str, float] = {**dict.fromkeys(TOTALS, 0), **self.counts}
        if self.state is not None:
            about |= {f"source_{key}": value for key, value in self.state.counters.items()}
            about |= {"pid": self.state.pid, "backlog": self.state.backlog}
            about["heard_s"] = time.monotonic() - self.heard_s
        return about


def lock_relay(bridge: str, control: header.Control) -> None:
    """Takes the lock of the bridge's relay, for as long as the control segment is open. Blocks for at most
    a second while a lane of a relay is locked: a process that removes a dead lane holds its lock meanwhile.

    Raises RelayTaken if a process lives that puts records of other nodes.
    """
    if not lock_after(lambda: 0, control.mapping.fd, LockByte.RELAY):
        raise RelayTaken(
            f"another process puts records of other nodes into bridge {bridge!r}",
            hint=f"one relay for a bridge: shmbridge relay --bridge {bridge} --stop",
        )
    until = time.monotonic() + _REMOVING_S
    for name in lane_names(bridge):
        while (lane := lane_info(name)) is not None and lane.alive and lane.origin_node:
            if time.monotonic() < until:
                time.sleep(_LOOK_AGAIN_S)
                continue
            raise RelayTaken(
                f"process {lane.pid} puts records of other nodes into bridge {bridge!r}",
                hint=f"one relay for a bridge: shmbridge relay --bridge {bridge} --stop",
            )


def lanes_with_backlog(bridge: str, own: Collection[str]) -> dict[str, list[str]]:
    """Returns the sources with records that no hub has taken yet in lanes which are not among `own`: a
    producer id -> those lanes.
    """
    found: dict[str, list[str]] = {}
    for name in lane_names(bridge):
        if name in own:
            continue
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = open_mapping(name, readonly=True)
            lane = None if mapping is None else header.read_lane(mapping)
            if mapping is not None and lane is not None and lane["origin_producer_id"]:
                words = header.lane_counters(mapping)
                if words["tail"] > words["head"] and not words["quarantined"]:
                    found.setdefault(lane["origin_producer_id"], []).append(name)
    return found


class HubStatus:
    """The learner's hub, queried over one control socket. One thread.

    Args:
        bridge: name of the bridge here.
        control: its control segment.
    """

    def __init__(self, bridge: str, control: header.Control) -> None:
        self._bridge, self._control = bridge, control
        self._client: ControlClient | None = None

    @property
    def is_alive(self) -> bool:
        """Whether a hub lives."""
        return is_locked(self._control.mapping.fd, LockByte.HUB)

    def run_info(self) -> messages.RunInfo | None:
        """Returns the run that the learner has announced, its step, and the lanes that its hub will not read.

        None if no hub answers soon. Blocks for a fifth of a second then.
        """
        if not self.is_alive:
            return None
        try:
            if self._client is None:
                self._client = ControlClient(self._bridge, role="relay", name="relay")
            answer = self._client.request(messages.RunInfoRequest(), _ANSWER_S)
        except ShmBridgeError:
            self.close()
            return None
        return answer if isinstance(answer, messages.RunInfo) else None

    def close(self) -> None:
        """Closes the socket. Idempotent."""
        client, self._client = self._client, None
        if client is not None:
            client.close()


class Committed:
    """The newest committed record of each source, and whose lanes are those of an earlier relay. One thread.

    In memory are the sources of nodes that are there. Those of other nodes are in lanes and receipts alone,
    and are read again when their node, or a record of theirs, comes.

    Raises ProcessLimit.
    """

    def __init__(self, bridge: str) -> None:
        self._bridge = bridge
        self._newest: dict[str, tuple[str, int]] = {}  # producer id -> its node, and a sequence there
        self._earlier: set[str] = set()
        self._read: dict[str, tuple[str, int]] | None = newest_relayed(bridge)
        self._tidied_s = time.monotonic()

    def __len__(self) -> int:
        return len(self._newest.keys() | self._earlier)

    def newest(self, producer_id: str) -> int | None:
        """Returns the sequence of a source's last record that is committed here; None if none is."""
        if producer_id not in self._newest and (found := self._lanes_and_receipts().get(producer_id)):
            self._recall(producer_id, found)
        known = self._newest.get(producer_id)
        return None if known is None else known[1]

    def of_node(self, node: str) -> dict[str, int]:
        """Returns the newest sequence of each source of a node."""
        return {producer_id: newest for producer_id, (at, newest) in self._newest.items() if at == node}

    def is_earlier(self, producer_id: str) -> bool:
        """Whether lanes of a source are those of an earlier relay, or were let go."""
        return producer_id in self._earlier

    def node_comes(self, node: str) -> None:
        """Reads what lanes and receipts say of the sources of a node."""
        for producer_id, found in self._lanes_and_receipts().items():
            if found[0] == node and producer_id not in self._newest:
                self._recall(producer_id, found)

    def note(self, producer_id: str, node: str, sequence: int) -> None:
        """Notes a commit; or that the source's node has this name by now."""
        self._newest[producer_id] = node, sequence

    def let_go(self, producer_id: str) -> None:
        """Notes that a lane of the source was closed: its end must be stored there, too."""
        self._earlier.add(producer_id)

    def node_leaves(self, node: str) -> None:
        """Forgets the sources of a node: all that is known of them stands in lanes and receipts."""
        for producer_id in self.of_node(node):
            self.forget(producer_id)
        self._read = None

    def forget(self, producer_id: str) -> None:
        """Forgets a source that is finished, or away."""
        self._newest.pop(producer_id, None)
        self._earlier.discard(producer_id)

    def finish(self, producer_id: str) -> None:
        """Forgets a source that will send nothing again, and removes its receipts."""
        self.forget(producer_id)
        if self._read is not None:
            self._read.pop(producer_id, None)
        self.remove_receipts(producer_id, None)

    def remove_receipts(self, producer_id: str, newest: int | None) -> None:
        """Removes receipts of a source, up to a sequence, or all."""
        remove_receipts(
            self._bridge,
            lambda each: each.producer_id == producer_id and (newest is None or each.sequence <= newest),
        )

    def tidy(self, is_there: set[str]) -> None:
        """Notes, now and then, the receipts of earlier relays' lanes that were removed late."""
        if time.monotonic() - self._tidied_s < _TIDY_S:
            return
        self._tidied_s, self._read = time.monotonic(), None
        for receipt in read_receipts(self._bridge):
            if receipt.node in is_there:
                self._newest.setdefault(receipt.producer_id, (receipt.node, receipt.sequence))

    def _recall(self, producer_id: str, found: tuple[str, int]) -> None:
        self._newest[producer_id] = found
        self._earlier.add(producer_id)

    def _lanes_and_receipts(self) -> dict[str, tuple[str, int]]:
        """What was read last; again, if a node has left since. What was put here since then is in memory."""
        if self._read is None:
            self._read = newest_relayed(self._bridge)
        return self._read


class RelayedLane:
    """The records of one source here, in their order, and those that have no room yet. One thread.

    Args:
        bridge: name of the bridge here.
        node: name of the source's node.
        source: what its records share.
        lane_bytes: most for the lane, unless a record needs more.
    """

    def __init__(self, bridge: str, node: str, source: SourceLane, lane_bytes: int) -> None:
        self.node, self.source = node, source
        self._bridge, self._lane_bytes = bridge, lane_bytes
        self._producer: Producer | None = None
        self._waiting: deque[RelayedRecord] = deque()
        self._not_before_s = 0.0
        self.waiting_bytes = 0
        self.unread = ""  # why the hub will not read it
        self.wrong = ""  # why its last record was refused, or it cannot be opened

    @property
    def name(self) -> str:
        """Name of its segment; "" before it is open."""
        return "" if self._producer is None else self._producer.lane_name

    @property
    def is_open(self) -> bool:
        """Whether it can take a record."""
        return self._producer is not None

    @property
    def free_bytes(self) -> int | None:
        """Bytes that may be sent for it, below 0 for too many; None before its size is known."""
        if self._producer is None:
            return 0 if self._waiting else None
        return self._producer.free_bytes - self.waiting_bytes

    # -- records

    @property
    def first_waiting(self) -> RelayedRecord | None:
        """The record that is put next, of those that had no room."""
        return self._waiting[0] if self._waiting else None

    @property
    def waiting(self) -> int:
        """How many records had no room."""
        return len(self._waiting)

    @property
    def newest_waiting(self) -> int:
        """The sequence at its source of the last record that had no room; -1 if none waits."""
        return self._waiting[-1].sequence if self._waiting else -1

    def keep(self, record: RelayedRecord) -> None:
        """Copies a record that has no room yet, so that its reply is let go."""
        extent = np.frombuffer(record.extent, np.uint8)
        self._waiting.append(replace(record, extent=extent.copy()))
        self.waiting_bytes += len(extent)

    def next_waiting(self) -> None:
        """The first waiting record is put, or refused."""
        self.waiting_bytes -= len(self._waiting.popleft().extent)

    def forget_waiting(self) -> None:
        """Drops what waits: its source sends it again."""
        self._waiting.clear()
        self.waiting_bytes = 0

    def put(self, record: RelayedRecord) -> bool:
        """Commits a record; returns False if it has to wait. Never blocks.

        Raises InvalidRecord, SchemaMismatch for what can never be put.
        """
        if self._producer is None:
            return False
        try:
            self._producer.put(record, timeout_s=0)
        except (LaneFull, BridgeDraining):
            return False
        except RecordTooBig:
            self.let_go()  # a larger one follows, once the hub has taken all of this one
            return False
        except (LaneQuarantined, LaneRemoved) as wrong:
            log.error("%s", wrong)
            self.let_go()
            return False
        return True

    def refusal(self) -> LaneRefused:
        """Returns the error for records of a lane that the hub will not read."""
        return LaneRefused(
            f"the consumer here reads nothing of the lane of {self.source.producer_id}: {self.unread}",
            hint="records before these are in the lane, for the next consumer; fix what it names",
        )

    # -- its producer

    def open(self, size: int, newest: int | None) -> bool:
        """Opens it for a record of so many bytes, after `newest`; returns False if that must be tried again.

        Raises SchemaMismatch.
        """
        if time.monotonic() < self._not_before_s:
            return False
        source = self.source
        lane_bytes = max(min(self._lane_bytes, source.lane_bytes), _RECORDS * size, SMALLEST_LANE)
        try:
            self._producer = self._opened(lane_bytes, newest)
        except SchemaMismatch:
            raise
        except ShmBridgeError as wrong:
            log.error("no lane for %s of %s: %s", source.producer_id, self.node, wrong)
            self._not_before_s = time.monotonic() + _AGAIN_S
            self.wrong = str(wrong)
            return False
        return True

    def _opened(self, lane_bytes: int, newest: int | None) -> Producer:
        import pyarrow as pa

        columns = Columns.decode(self.source.table).order
        own = [arrow_field(column) for column in columns if column.name not in STANDARD]
        return Producer(
            self._bridge,
            self.source.env_name,
            lane_bytes,
            schema=pa.schema(own) if own else None,
            producer_id=self.source.producer_id.rpartition("-")[0][:63] or None,
            origin=LaneOrigin(self.node, self.source.producer_id, newest),
        )

    def let_go(self) -> None:
        """Closes its producer; records and origin stay, and a next lane may follow. Idempotent."""
        producer, self._producer, self.unread = self._producer, None, ""
        if producer is not None:
            with contextlib.suppress(ShmBridgeError):
                producer.close()

    def finish(self) -> None:
        """Closes it: its source will send nothing again."""
        if self._producer is not None:
            with contextlib.suppress(ShmBridgeError):
                self._producer.close_origin()
        self.let_go()


class Destination:
    """Puts the records of other nodes into lanes of a bridge here; a context manager. One thread at a time.

    A caller sends what `request` returns, hands the replies to `accept` in the order of the requests, or
    calls `cancel`, and calls `work` often. `stats` is for any thread.

    Args:
        bridge: name of the bridge here.
        lane_bytes: of each lane; a lane of the source that is smaller has as much here.
        max_bytes: of a reply.
        max_staleness: groups that are more versions behind are discarded at the source; None: none is.
        wait_s: wait of a source for a first record; longer with more than 125 nodes, and, up to two seconds,
            where nothing came for some time.
        weights: whether a policy version waits at a source until its weights are whole there.

    Raises:
        RelayTaken: a living relay puts records of other nodes into the bridge.
        BadBridgeName, ShmPermission, ShmTooSmall, NotReady, LayoutMismatch.
    """

    def __init__(
        self,
        bridge: str,
        *,
        lane_bytes: int = 16 << 20,
        max_bytes: int = MOST_BYTES,
        max_staleness: int | None = None,
        wait_s: float = _WAIT_S,
        weights: bool = False,
    ) -> None:
        self.bridge, self.lane_bytes, self.max_bytes = bridge, lane_bytes, max_bytes
        self._max_staleness, self._wait_s = max_staleness, wait_s
        self._control = open_control(bridge)
        try:
            lock_relay(bridge, self._control)
            self._here = Committed(bridge)
            self._weights = WeightsReader(bridge) if weights else None
        except BaseException:
            leave_bridge(self._control.mapping.fd, bridge)
            raise
        self._lanes: dict[str, RelayedLane] = {}
        self._nodes: dict[str, PeerState] = {}
        self._counts: Counter[str] = Counter()
        self._run: tuple[Run | None, int] = None, 0  # and its step
        self._hub = HubStatus(bridge, self._control)
        self._run_s = 0.0
        self._look()
        self._closed = False

    # -- asking

    def ready(self, node: str) -> bool:
        """Whether a node may be pulled from: two requests at most are outstanding, one if it had nothing."""
        there = self._nodes.get(node)
        if there is None or not there.is_ready():
            return there is None
        return time.monotonic() >= there.blocked_until or self._free(node) > there.blocked_free

    def request(self, node: str) -> PullRequest:
        """Returns the next request for a node; its reply goes to `accept`, or it is `cancel`led.

        A node whose last answer brought nothing is asked for little, which needs no share of what may be on
        its way.
        """
        there = self._nodes.get(node)
        if there is None:
            there = self._nodes[node] = PeerState(node)
            self._here.node_comes(node)
        control, committed, credits = self._control, {}, {}
        for producer_id, lane in self._lanes.items():
            if lane.node != node:
                continue
            committed[producer_id] = -1
            if (free := lane.free_bytes) is not None:
                room = free - sum(request.credits.get(producer_id, 0) for request in there.requests)
                # Half for the first request, so that the second has some, too.
                credits[producer_id] = max(room if there.requests else -(-room // 2), 0)
        committed |= self._here.of_node(node)
        request = PullRequest(
            there.session,
            there.requested,
            committed,
            {producer_id: list(refused) for producer_id, refused in there.refused.items()},
            credits,
            self.lane_bytes // 2,
            int(control.policy_version),
            bool(control.paused),
            bool(control.draining),
            self.max_bytes if there.brought else min(_LITTLE, self.max_bytes),
            max(there.wait_s(self._wait_s), len(self._nodes) / _MOST_ASKS),
            self._max_staleness,
            *self._run,
            -1 if self._weights is None or (newest := self._weights.version) is None else newest,
        )
        there.is_sent(request)
        return request

    def to_notify(self) -> dict[str, tuple[str, int]]:
        """Returns the nodes with an outstanding pull whose version, pause or drain flag is outdated, by its
        session and number. Each once: the request after it has the new ones.
        """
        control = self._control
        learner = int(control.policy_version), bool(control.paused), bool(control.draining), *self._run
        found = {node: there.to_notify(learner) for node, there in self._nodes.items()}
        return {node: request for node, request in found.items() if request is not None}

    def in_session(self, node: str) -> bool:
        """Whether a reply of the node can still belong to the current session."""
        there = self._nodes.get(node)
        return there is not None and there.requested > 0

    def cancel(self, node: str) -> None:
        """Cancels a node's outstanding pulls: what is un-acknowledged there will be sent again."""
        there = self._nodes.get(node)
        if there is None:
            return
        there.cancel()
        for lane in self._lanes.values():
            if lane.node == node:
                lane.forget_waiting()
        self._counts["lost_asks_total"] += 1

    # -- accepting

    def accept(self, node: str, reply: PullReply, requested_ns: int) -> int:
        """Puts a reply's records, or keeps copies of those that have no room yet; returns its bytes.

        Args:
            node: where it came from.
            reply: to the oldest outstanding request. A reply to another one cancels the node's pulls.
            requested_ns: CLOCK_MONOTONIC of this node when that request was sent.

        On any exception the node's outstanding pulls are cancelled first: none of its records is skipped.
        """
        try:
            return self._accepted(node, reply, requested_ns)
        except BaseException:
            self.cancel(node)
            raise

    def _accepted(self, node: str, reply: PullReply, requested_ns: int) -> int:
        there, state = self._nodes[node], reply.state
        if not there.answers(state):
            self.cancel(node)
            return 0
        size = 0
        for record in reply.records:
            size += len(record.extent)
            self._accept(there, record, requested_ns + state.idle_ns)
        there.has_brought(size, state, self._free(node))
        for producer_id in state.finished:
            self._finish(producer_id)
        return size

    def _accept(self, there: PeerState, sent: SentRecord, requested_ns: int) -> None:
        producer_id = sent.lane.producer_id
        lane = self._lanes.get(producer_id)
        if lane is None:
            lane = RelayedLane(self.bridge, there.name, sent.lane, self.lane_bytes)
            self._lanes[producer_id] = lane
        newest = self._here.newest(producer_id)
        lane.node = there.name  # its node may have another name by now, and hears there what is committed
        if newest is not None:
            self._here.note(producer_id, there.name, newest)
            if sent.sequence <= newest:
                there.counts["duplicates_total"] += 1
                return
        if sent.sequence <= lane.newest_waiting:  # another relay there sends what it does not know to be here
            there.counts["duplicates_total"] += 1
            return
        record = RelayedRecord(
            sent.extent,
            sent.lane.table,
            sent.words,
            sent.min_policy_version,
            sent.max_policy_version,
            sent.sequence,
            sent.waited_ns,
            requested_ns,
        )
        if lane.waiting or not self._put(lane, record):
            lane.keep(record)

    def _put(self, lane: RelayedLane, record: RelayedRecord) -> bool:
        """Commits a record, or counts it as refused; returns False if it has to wait."""
        producer_id, there = lane.source.producer_id, self._nodes[lane.node]
        try:
            if lane.unread:
                raise lane.refusal()
            was_open = lane.is_open or self._open(lane, len(record.extent))
            if not lane.put(record):
                if was_open and not lane.is_open:  # it was given up
                    self._here.let_go(producer_id)
                    self._look()
                return False
        except (InvalidRecord, SchemaMismatch, LaneRefused) as wrong:
            if not isinstance(wrong, LaneRefused):  # which was said once
                log.error(
                    "record %d of %s on %s is refused: %s", record.sequence, producer_id, lane.node, wrong
                )
            lane.wrong = str(wrong)
            there.refused.setdefault(producer_id, []).append((record.sequence, wrong.code))
            there.counts[f"refused_total{{{wrong.code}}}"] += 1
            return True
        self._here.note(producer_id, lane.node, record.sequence)
        lane.wrong = ""
        there.counts["relayed_total"] += 1
        return True

    # -- lanes

    def _open(self, lane: RelayedLane, size: int) -> bool:
        """Opens a lane for a record of so many bytes; returns False if that must be tried again.

        While the hub has not taken all of an earlier lane, a record in another one could overtake it.
        """
        producer_id, newest = lane.source.producer_id, self._here.newest(lane.source.producer_id)
        if producer_id in self._backlog or not lane.open(size, newest):
            return False
        if newest is not None:  # which the new lane's header says, too
            self._here.remove_receipts(producer_id, newest)
        return True

    def _finish(self, producer_id: str) -> None:
        """Closes the lane of a source that is gone, and whose records are all here."""
        lane = self._lanes.get(producer_id)
        if lane is not None:
            if lane.waiting:
                return  # it is named again
            lane.finish()
        if self._here.is_earlier(producer_id) and not close_origin(self.bridge, producer_id):
            return
        self._lanes.pop(producer_id, None)
        self._here.finish(producer_id)

    def work(self) -> int:
        """Puts records that had no room, as far as they have some now; returns how many. Never blocks."""
        placed = 0
        for lane in list(self._lanes.values()):
            while (record := lane.first_waiting) is not None and self._put(lane, record):
                lane.next_waiting()
                placed += 1
        now = time.monotonic()
        if self._backlog and now - self._looked_s > _LOOK_S:
            self._look()
        if now - self._run_s > _RUN_S:
            self._run_s = now
            self._read_hub()
        self._here.tidy(set(self._nodes))
        return placed

    def _read_hub(self) -> None:
        """Reads from the learner's hub its run, and which lanes it will not read."""
        info = self._hub.run_info()
        if info is not None:
            self._run = info.run, info.current_step
        elif self._hub.is_alive:
            return
        refused = {} if info is None else info.refused_lanes
        for producer_id, lane in self._lanes.items():
            names = (lane.name, *self._backlog.get(producer_id, ()))
            why, was = next((refused[name] for name in names if name in refused), ""), lane.unread
            lane.unread = why
            if why and not was:
                lane.wrong = str(lane.refusal())
                log.error("records of %s on %s are refused: %s", producer_id, lane.node, lane.wrong)

    def _look(self) -> None:
        """Looks which sources have records in earlier lanes that the hub has not taken."""
        self._backlog = lanes_with_backlog(self.bridge, {lane.name for lane in self._lanes.values()})
        self._looked_s = time.monotonic()

    def _free(self, node: str) -> int:
        return sum(max(lane.free_bytes or 0, 0) for lane in self._lanes.values() if lane.node == node)

    def gone(self, node: str) -> tuple[int, int, float]:
        """Forgets a node that left; its lanes stay until their records are released.

        Returns how many records it had when it was last heard that were never put here, of how many lanes at
        least, and how many seconds ago that was. What its producers committed later is not among them.
        """
        there = self._nodes.pop(node, None)
        waiting = [lane.waiting for lane in self._lanes.values() if lane.node == node and lane.waiting]
        for producer_id, lane in list(self._lanes.items()):
            if lane.node == node:
                lane.let_go()
                del self._lanes[producer_id]
        self._here.node_leaves(node)
        self._look()
        if there is None:
            return 0, 0, 0.0
        self._counts.update(there.counts)
        if there.state is None:
            return 0, 0, 0.0
        never = there.state.backlog + sum(waiting)
        self._counts["never_relayed_total"] += never
        return never, max(there.state.backlog_lanes, len(waiting)), time.monotonic() - there.heard_s

    # -- state

    def stats(self) -> dict[str, float]:
        """Returns counters over all nodes, flat. Never blocks; any thread."""
        total = Counter(self._counts)
        for there in list(self._nodes.values()):
            total.update(dict(there.counts))  # another thread may add one meanwhile
        lanes = list(self._lanes.values())
        return {
            **dict.fromkeys(TOTALS, 0),
            **total,
            "lanes": len(lanes),
            "waiting": sum(lane.waiting for lane in lanes),
            "waiting_bytes": sum(lane.waiting_bytes for lane in lanes),
        }

    def nodes(self) -> dict[str, dict[str, float]]:
        """Returns for each node local counters, last reported counters, and the age of that report.

        Never blocks; any thread.
        """
        return {name: there.about() for name, there in list(self._nodes.items())}

    @property
    def waits(self) -> bool:
        """Whether records wait for room."""
        return any(lane.waiting for lane in self._lanes.values())

    def refusals(self) -> dict[str, str]:
        """Returns the sources whose last record was refused here, or has no lane, and why. Any thread."""
        return {
            f"{producer_id} on {lane.node}": lane.wrong
            for producer_id, lane in list(self._lanes.items())
            if lane.wrong
        }

    @property
    def policy_version(self) -> int:
        """The newest policy version that the learner has published, -1 before the first."""
        return int(self._control.policy_version)

    def close(self) -> None:
        """Leaves the bridge; committed records stay, those without room stay at their sources. Idempotent."""
        if self._closed:
            return
        self._closed = True
        for lane in self._lanes.values():
            lane.let_go()
        if self._weights is not None:
            self._weights.close()
        self._hub.close()
        leave_bridge(self._control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
