"""The relay of the learner's node: asks other nodes for records, puts them into lanes here, a lane a source.

What is committed here is known from the lanes themselves, and from the receipts of lanes that are gone: a
relay that begins again asks for what is newer. Order is kept per source: one number says what is here.
"""

import logging
import time
from collections import Counter
from typing import Self

from shmbridge.config import Run
from shmbridge.errors import InvalidRecord, LaneRefused, SchemaMismatch
from shmbridge.put import RelayedRecord
from shmbridge.relay.asked_node import TOTALS, AskedNode
from shmbridge.relay.bridge_here import HubSays, be_the_only_relay, untaken
from shmbridge.relay.committed import Committed
from shmbridge.relay.lane import RelayedLane
from shmbridge.relay.wire import MOST_BYTES, Ask, Parcel, SentRecord
from shmbridge.segments import close_origin, leave_bridge, open_control
from shmbridge.weights import WeightsReader

log = logging.getLogger(__name__)

_LOOK_S = 0.1
_RUN_S = 1.0
_WAIT_S = 0.25
_LITTLE = 64 << 10
_MOST_ASKS = 500  # a second, of nodes that have nothing


class Destination:
    """Puts the records of other nodes into lanes of a bridge here; a context manager. One thread at a time.

    A caller sends what `ask` returns, hands the answers to `accept` in the order of the asks, or says `lost`,
    and calls `work` often. `stats` is for any thread.

    Args:
        bridge: name of the bridge here.
        lane_bytes: of each lane; a lane of the source that is smaller has as much here.
        max_bytes: of a parcel.
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
            be_the_only_relay(bridge, self._control)
            self._here = Committed(bridge)
            self._weights = WeightsReader(bridge) if weights else None
        except BaseException:
            leave_bridge(self._control.mapping.fd, bridge)
            raise
        self._lanes: dict[str, RelayedLane] = {}
        self._nodes: dict[str, AskedNode] = {}
        self._counts: Counter[str] = Counter()
        self._run: tuple[Run | None, int] = None, 0  # and its step
        self._hub = HubSays(bridge, self._control)
        self._run_s = 0.0
        self._look()
        self._closed = False

    # -- asking

    def ready(self, node: str) -> bool:
        """Whether it is worth asking a node now: two asks are on their way at most, one if it had nothing."""
        there = self._nodes.get(node)
        if there is None or not there.is_ready():
            return there is None
        return time.monotonic() >= there.blocked_until or self._free(node) > there.blocked_free

    def ask(self, node: str) -> Ask:
        """Returns the next ask for a node; whatever answers it goes to `accept` or is `lost`.

        A node whose last answer brought nothing is asked for little, which needs no share of what may be on
        its way.
        """
        there = self._nodes.get(node)
        if there is None:
            there = self._nodes[node] = AskedNode(node)
            self._here.node_comes(node)
        control, committed, credits = self._control, {}, {}
        for producer_id, lane in self._lanes.items():
            if lane.node != node:
                continue
            committed[producer_id] = -1
            if (free := lane.free_bytes) is not None:
                room = free - sum(ask.credits.get(producer_id, 0) for ask in there.asks)
                # Half for the first ask, so that the second has some, too.
                credits[producer_id] = max(room if there.asks else -(-room // 2), 0)
        committed |= self._here.of_node(node)
        ask = Ask(
            there.session,
            there.asked,
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
        there.is_asked(ask)
        return ask

    def to_nudge(self) -> dict[str, tuple[str, int]]:
        """Returns the nodes whose sources may wait for records, and do not know what the learner says by now:
        with session and number of that ask.

        Each once: what answers then is followed by an ask that says it.
        """
        control = self._control
        says = int(control.policy_version), bool(control.paused), bool(control.draining), *self._run
        found = {node: there.to_nudge(says) for node, there in self._nodes.items()}
        return {node: ask for node, ask in found.items() if ask is not None}

    def expects(self, node: str) -> bool:
        """Whether the session goes on in which the node was last asked: an answer is believed."""
        there = self._nodes.get(node)
        return there is not None and there.asked > 0

    def lost(self, node: str) -> None:
        """Notes that an ask of this node has no answer: what is un-acknowledged there will be sent again."""
        there = self._nodes.get(node)
        if there is None:
            return
        there.lost()
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

        Whatever it raises, the node's asks are `lost` by then: none of the parcel's records is skipped.
        """
        try:
            return self._accepted(node, parcel, requested_ns)
        except BaseException:
            self.lost(node)
            raise

    def _accepted(self, node: str, parcel: Parcel, requested_ns: int) -> int:
        there, state = self._nodes[node], parcel.state
        if not there.answers(state):
            self.lost(node)
            return 0
        size = 0
        for record in parcel.records:
            size += len(record.extent)
            self._accept(there, record, requested_ns + state.idle_ns)
        there.has_brought(size, state, self._free(node))
        for producer_id in state.finished:
            self._finish(producer_id)
        return size

    def _accept(self, there: AskedNode, sent: SentRecord, requested_ns: int) -> None:
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
        if producer_id in self._untaken or not lane.open(size, newest):
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
        if self._untaken and now - self._looked_s > _LOOK_S:
            self._look()
        if now - self._run_s > _RUN_S:
            self._run_s = now
            self._hear_hub()
        self._here.tidy(set(self._nodes))
        return placed

    def _hear_hub(self) -> None:
        """Asks the learner's hub for its run, and which lanes it will not read."""
        said = self._hub.ask()
        if said is not None:
            self._run = said.run, said.current_step
        elif self._hub.is_there:
            return
        refused = {} if said is None else said.refused_lanes
        for producer_id, lane in self._lanes.items():
            names = (lane.name, *self._untaken.get(producer_id, ()))
            why, was = next((refused[name] for name in names if name in refused), ""), lane.unread
            lane.unread = why
            if why and not was:
                lane.wrong = str(lane.refusal())
                log.error("records of %s on %s are refused: %s", producer_id, lane.node, lane.wrong)

    def _look(self) -> None:
        """Looks which sources have records in earlier lanes that the hub has not taken."""
        self._untaken = untaken(self.bridge, {lane.name for lane in self._lanes.values()})
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
        """Returns what is known of each node: counters here, its own by its last word, seconds since then.

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
