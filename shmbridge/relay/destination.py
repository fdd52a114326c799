"""The relay of the learner's node: asks other nodes for records, puts them into lanes here, a lane a source.

What is committed here is known from the lanes themselves, and from the receipts of lanes that are gone: a
relay that begins again asks for what is newer. Order is kept per source: one number says what is here.
"""

import contextlib
import logging
import secrets
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Self

import numpy as np

from shmbridge import Producer
from shmbridge._ext import header
from shmbridge.config import Run
from shmbridge.control import messages
from shmbridge.control.client import ControlClient
from shmbridge.errors import (
    BridgeDraining,
    InvalidRecord,
    LaneFull,
    LaneQuarantined,
    LaneRemoved,
    RecordTooBig,
    RelayTaken,
    SchemaMismatch,
    ShmBridgeError,
    ShmPermission,
)
from shmbridge.put.relayed import LaneOrigin, RelayedRecord
from shmbridge.relay.wire import MOST_BYTES, Ask, Parcel, SentRecord, SourceLane, State
from shmbridge.schema import STANDARD, Columns, arrow_field
from shmbridge.segments import inventory, locks, membership, receipts, segment
from shmbridge.segments.locks import LockByte
from shmbridge.sizing import SMALLEST_LANE

log = logging.getLogger(__name__)

_RECORDS_IN_A_LANE = 8  # of the size of its first one, at least
_AGAIN_S = 1.0  # after a lane could not be opened
_BLOCKED_S = 0.25  # a node whose lanes are full is asked again after that, or when one has room
_LOOK_S = 0.1
_RUN_S = 1.0
_ANSWER_S = 0.2
_TIDY_S = 5.0
_WAIT_S = 0.25


@dataclass(slots=True, eq=False)
class _Lane:
    """The lane here of one producer on another node, and its records that have no room yet."""

    node: str
    source: SourceLane
    producer: Producer | None = None
    waiting: deque[RelayedRecord] = field(default_factory=deque)
    waiting_bytes: int = 0
    not_before: float = 0.0  # when to try again to open it

    def free(self) -> int | None:
        """Bytes that may be sent for it; None before it has a producer."""
        if self.producer is None:
            return None
        return self.producer.free_bytes - self.waiting_bytes

    def forget_waiting(self) -> None:
        """Drops what waits: its source sends it again."""
        self.waiting.clear()
        self.waiting_bytes = 0


@dataclass(slots=True, eq=False)
class _Node:
    """One source: its session, the asks that are on their way, and what it last said."""

    name: str
    session: str
    asked: int = 0
    asks: deque[Ask] = field(default_factory=deque)
    refused: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    state: State | None = None
    heard_s: float = 0.0
    brought: int = 0  # bytes of the last parcel
    blocked_until: float = 0.0
    blocked_free: int = 0
    counts: Counter[str] = field(default_factory=Counter)


class Destination:
    """Puts the records of other nodes into lanes of a bridge here; a context manager. One thread at a time.

    A caller sends what `ask` returns, hands the answers to `accept` in the order of the asks, or says `lost`,
    and calls `work` often. `stats` is for any thread.

    Args:
        bridge: name of the bridge here.
        lane_bytes: of each lane; a lane of the source that is smaller has as much here.
        max_bytes: of a parcel.
        max_staleness: groups that are more versions behind are discarded at the source; None: none is.
        wait_s: longest wait of a source for a first record.

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
    ) -> None:
        self.bridge, self.lane_bytes, self.max_bytes = bridge, lane_bytes, max_bytes
        self._max_staleness, self._wait_s = max_staleness, wait_s
        self._control = membership.open_control(bridge)
        try:
            _refuse_a_second(bridge)
            # Producer id -> its node, and the sequence there of its last record that is committed here.
            self._newest = receipts.newest_relayed(bridge)
        except BaseException:
            membership.leave(self._control.mapping.fd, bridge)
            raise
        self._earlier = set(self._newest)  # sources whose lanes are those of an earlier relay
        self._lanes: dict[str, _Lane] = {}
        self._nodes: dict[str, _Node] = {}
        self._counts: Counter[str] = Counter()
        self._run: tuple[Run | None, int] = None, 0  # and its step
        self._tidied_s, self._run_s = time.monotonic(), 0.0
        self._look()
        self._closed = False

    # -- asking

    def ready(self, node: str) -> bool:
        """Whether it is worth asking a node now: two asks are on their way at most, one if it had nothing."""
        there = self._nodes.get(node)
        if there is None or there.state is None:
            return there is None or not there.asks
        if len(there.asks) >= (2 if there.brought else 1):
            return False
        return time.monotonic() >= there.blocked_until or self._free(node) > there.blocked_free

    def ask(self, node: str) -> Ask:
        """Returns the next ask for a node; whatever answers it goes to `accept` or is `lost`."""
        there = self._nodes.get(node)
        if there is None:
            there = self._nodes[node] = _Node(node, secrets.token_hex(8))
        control, credits = self._control, {}
        for producer_id, lane in self._lanes.items():
            if lane.node == node and (free := lane.free()) is not None:
                on_their_way = sum(ask.credits.get(producer_id, 0) for ask in there.asks)
                # Half for the first ask, so that the second has some, too.
                room = free - on_their_way
                credits[producer_id] = max(room if there.asks else -(-room // 2), 0)
            elif lane.node == node and lane.waiting:
                credits[producer_id] = 0
        ask = Ask(
            there.session,
            there.asked,
            {name: newest for name, (at, newest) in self._newest.items() if at == node},
            dict(there.refused),
            credits,
            self.lane_bytes // 2,
            int(control.policy_version),
            bool(control.paused),
            bool(control.draining),
            self.max_bytes,
            self._wait_s,
            self._max_staleness,
            *self._run,
        )
        there.asked += 1
        there.asks.append(ask)
        return ask

    def expects(self, node: str) -> bool:
        """Whether the session goes on in which the node was last asked: an answer is believed."""
        there = self._nodes.get(node)
        return there is not None and there.asked > 0

    def lost(self, node: str) -> None:
        """Notes that an ask of this node has no answer: what is un-acknowledged there will be sent again."""
        there = self._nodes.get(node)
        if there is None:
            return
        there.session, there.asked = secrets.token_hex(8), 0
        there.asks.clear()
        there.brought = 0
        for lane in self._lanes.values():
            if lane.node == node:
                lane.forget_waiting()
        self._counts["lost_asks_total"] += 1

    # -- accepting

    def accept(self, node: str, parcel: Parcel, requested_ns: int) -> int:
        """Puts a parcel's records, or keeps copies of those that have no room yet; returns its bytes.

        Args:
            node: where it came from.
            parcel: the answer to the oldest ask on its way. An answer to another one is not believed: `lost`.
            requested_ns: CLOCK_MONOTONIC of this node when that ask was sent.
        """
        there, state = self._nodes[node], parcel.state
        if state.session != there.session or not there.asks or there.asks[0].number != state.number:
            self.lost(node)
            return 0
        ask = there.asks.popleft()
        there.state, there.heard_s = state, time.monotonic()
        for producer_id, refused in ask.refused.items():  # it has heard of these
            there.refused[producer_id] = [each for each in there.refused[producer_id] if each not in refused]
            if not there.refused[producer_id]:
                del there.refused[producer_id]
        size = 0
        for record in parcel.records:
            size += len(record.extent)
            self._accept(there, record, requested_ns + state.idle_ns)
        there.brought = size
        there.counts["bytes_total"] += size
        if state.blocked and not size:
            there.blocked_until, there.blocked_free = time.monotonic() + _BLOCKED_S, self._free(node)
        else:
            there.blocked_until = 0.0
        for producer_id in state.finished:
            self._finish(producer_id, node)
        return size

    def _accept(self, there: _Node, sent: SentRecord, requested_ns: int) -> None:
        producer_id = sent.lane.producer_id
        lane = self._lanes.get(producer_id)
        if lane is None:
            lane = self._lanes[producer_id] = _Lane(there.name, sent.lane)
        newest = self._newest.get(producer_id)
        if newest is not None and sent.sequence <= newest[1]:
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
            lane.waiting.append(replace(record, extent=np.array(sent.extent)))  # lets go of the parcel
            lane.waiting_bytes += len(sent.extent)

    def _put(self, lane: _Lane, record: RelayedRecord) -> bool:
        """Commits a record, or counts it as refused; returns False if it has to wait."""
        producer_id = lane.source.producer_id
        try:
            if lane.producer is None and not self._open(lane, len(record.extent)):
                return False
            assert lane.producer is not None
            lane.producer.put(record, timeout_s=0)
        except (LaneFull, BridgeDraining):
            return False
        except RecordTooBig:
            self._grow(lane)
            return False
        except (LaneQuarantined, LaneRemoved) as wrong:
            log.error("%s", wrong)
            self._let_go(lane)
            return False
        except (InvalidRecord, SchemaMismatch) as wrong:
            log.error("record %d of %s on %s is refused: %s", record.sequence, producer_id, lane.node, wrong)
            there = self._nodes[lane.node]
            there.refused.setdefault(producer_id, []).append((record.sequence, wrong.code))
            there.counts[f"refused_total{{{wrong.code}}}"] += 1
            return True
        self._newest[producer_id] = lane.node, record.sequence
        self._nodes[lane.node].counts["relayed_total"] += 1
        return True

    # -- lanes

    def _open(self, lane: _Lane, size: int) -> bool:
        """Opens the lane of a source; returns False if that must be tried again. Raises SchemaMismatch.

        While the hub has not taken all of an earlier lane, a record in another one could overtake it.
        """
        source, newest = lane.source, self._newest.get(lane.source.producer_id)
        if time.monotonic() < lane.not_before or source.producer_id in self._untaken:
            return False
        wanted = max(min(self.lane_bytes, source.lane_bytes), _RECORDS_IN_A_LANE * size, SMALLEST_LANE)
        try:
            lane.producer = self._producer(source, lane.node, wanted, None if newest is None else newest[1])
        except SchemaMismatch:
            raise
        except ShmBridgeError as wrong:
            log.error("no lane for %s of %s: %s", source.producer_id, lane.node, wrong)
            lane.not_before = time.monotonic() + _AGAIN_S
            return False
        if newest is not None:  # which the new lane's header says, too
            self._remove_receipts(source.producer_id, newest[1])
        return True

    def _producer(self, source: SourceLane, node: str, lane_bytes: int, newest: int | None) -> Producer:
        import pyarrow as pa

        own = [arrow_field(each) for each in Columns.decode(source.table).order if each.name not in STANDARD]
        return Producer(
            self.bridge,
            source.env_name,
            lane_bytes,
            schema=pa.schema(own) if own else None,
            producer_id=source.producer_id.rpartition("-")[0][:63] or None,
            origin=LaneOrigin(node, source.producer_id, newest),
        )

    def _grow(self, lane: _Lane) -> None:
        """Gives up a lane that is too small for its next record, once all its records are released: the next
        lane is larger, and none of its records overtakes one of this lane.
        """
        if lane.producer is not None and not lane.producer.held:
            self._let_go(lane)

    def _let_go(self, lane: _Lane) -> None:
        if lane.producer is not None:
            with contextlib.suppress(ShmBridgeError):
                lane.producer.close()
            lane.producer = None
            self._earlier.add(lane.source.producer_id)
            self._look()

    def _finish(self, producer_id: str, node: str) -> None:
        """Closes the lane of a source that is gone, and whose records are all here."""
        lane = self._lanes.get(producer_id)
        if lane is not None and lane.waiting:
            return  # it is named again
        if producer_id in self._earlier:
            receipts.close_origin(self.bridge, producer_id)
        if lane is not None and lane.producer is not None:
            with contextlib.suppress(ShmBridgeError):
                lane.producer.close_origin()
            lane.producer.close()
        for table in (self._lanes, self._newest):
            table.pop(producer_id, None)
        self._earlier.discard(producer_id)
        self._remove_receipts(producer_id, None)

    def _remove_receipts(self, producer_id: str, newest: int | None) -> None:
        """Removes receipts of a source, up to a sequence, or all."""
        receipts.remove(
            self.bridge,
            lambda each: each.producer_id == producer_id and (newest is None or each.sequence <= newest),
        )

    def work(self) -> int:
        """Puts records that had no room, as far as they have some now; returns how many. Never blocks."""
        placed = 0
        for lane in list(self._lanes.values()):
            while lane.waiting and self._put(lane, lane.waiting[0]):
                lane.waiting_bytes -= len(lane.waiting.popleft().extent)
                placed += 1
        now = time.monotonic()
        if self._untaken and now - self._looked_s > _LOOK_S:
            self._look()
        if now - self._run_s > _RUN_S:
            self._run_s = now
            self._run = _run_of(self.bridge, self._control) or self._run
        if now - self._tidied_s > _TIDY_S:
            self._tidied_s = now
            for receipt in receipts.read_all(
                self.bridge
            ):  # of an earlier relay's lanes, which are removed late
                self._newest.setdefault(receipt.producer_id, (receipt.node, receipt.sequence))
        return placed

    def _look(self) -> None:
        """Looks which sources have records in earlier lanes that the hub has not taken."""
        own = {lane.producer.lane_name for lane in self._lanes.values() if lane.producer is not None}
        self._untaken = _untaken(self.bridge, own)
        self._looked_s = time.monotonic()

    def _free(self, node: str) -> int:
        lanes = [lane for lane in self._lanes.values() if lane.node == node]
        return sum(max(lane.free() or 0, 0) for lane in lanes)

    def gone(self, node: str) -> tuple[int, int, float]:
        """Forgets a node that left; its lanes stay until their records are released.

        Returns how many records it had when it was last heard that were never put here, of how many lanes at
        least, and how many seconds ago that was. What its producers committed later is not among them.
        """
        there = self._nodes.pop(node, None)
        waiting = [len(lane.waiting) for lane in self._lanes.values() if lane.node == node and lane.waiting]
        for producer_id, lane in list(self._lanes.items()):
            if lane.node == node:
                self._let_go(lane)
                del self._lanes[producer_id]
        if there is None:
            return 0, 0, 0.0
        self._counts.update({name: count for name, count in there.counts.items() if name.endswith("}")})
        for name in ("relayed_total", "duplicates_total", "bytes_total"):
            self._counts[name] += there.counts[name]
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
            total.update(there.counts)
        lanes = list(self._lanes.values())
        return {
            **dict.fromkeys(("relayed_total", "duplicates_total", "bytes_total"), 0),
            **total,
            "lanes": len(lanes),
            "waiting": sum(len(lane.waiting) for lane in lanes),
            "waiting_bytes": sum(lane.waiting_bytes for lane in lanes),
        }

    def nodes(self) -> dict[str, dict[str, float]]:
        """Returns what is known of each node: counters here, its own by its last word, seconds since then.

        Never blocks; any thread.
        """
        found: dict[str, dict[str, float]] = {}
        for name, there in list(self._nodes.items()):
            about: dict[str, float] = {
                "relayed_total": 0,
                "duplicates_total": 0,
                "bytes_total": 0,
                **there.counts,
            }
            if there.state is not None:
                about |= {f"source_{key}": value for key, value in there.state.counters.items()}
                about |= {"pid": there.state.pid, "backlog": there.state.backlog}
                about["heard_s"] = time.monotonic() - there.heard_s
            found[name] = about
        return found

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
            self._let_go(lane)
        membership.leave(self._control.mapping.fd, self.bridge)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _refuse_a_second(bridge: str) -> None:
    """Raises RelayTaken while a process lives that puts records of other nodes."""
    for name in segment.lane_names(bridge):
        lane = inventory.lane_info(name)
        if lane is not None and lane.alive and lane.origin_node:
            raise RelayTaken(
                f"process {lane.pid} puts records of other nodes into bridge {bridge!r}",
                hint="one relay per bridge: end that one first, shmbridge relay --stop",
            )


def _untaken(bridge: str, own: set[str]) -> set[str]:
    """Returns the sources with records in lanes of earlier relays that no hub has taken yet."""
    found: set[str] = set()
    for name in segment.lane_names(bridge):
        if name in own:
            continue
        with contextlib.suppress(ShmPermission, header.LaneCorrupt):
            mapping = segment.open_mapping(name, readonly=True)
            said = None if mapping is None else header.read_lane(mapping)
            if mapping is not None and said is not None and said["origin_producer_id"]:
                words = header.lane_counters(mapping)
                if words["tail"] > words["head"] and not words["quarantined"]:
                    found.add(said["origin_producer_id"])
    return found


def _run_of(bridge: str, control: header.Control) -> tuple[Run | None, int] | None:
    """Returns the run that the learner has announced, and its step; None if no hub answers soon."""
    if not locks.is_locked(control.mapping.fd, LockByte.HUB):
        return None
    try:
        with ControlClient(bridge, role="relay", name="relay") as client:
            answer = client.request(messages.RunInfoRequest(), _ANSWER_S)
    except ShmBridgeError:
        return None
    return (answer.run, answer.current_step) if isinstance(answer, messages.RunInfo) else None
