"""The lanes a consumer has adopted: found, checked, taken from in turn, buried when their producer is dead.

Knows lane segments, column agreement and deaths; knows nothing of batches, the control plane or who asks. Owned by the
consumer; `take` is for the consumer's thread, burying for the death watch's, everything else for any.
"""

import logging
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

from shmbridge import participation, segment
from shmbridge._ext import header, ring
from shmbridge._ext.mapping import Mapping
from shmbridge.config import format_size
from shmbridge.deathwatch import DeathWatch
from shmbridge.errors import SchemaMismatch
from shmbridge.reasons import Discard, Drop, labelled
from shmbridge.record import Lane, Record
from shmbridge.schema import Columns

log = logging.getLogger(__name__)


class AdoptedLane:
    """One lane: its reader, what it says of all its records, and whether its producer is dead or its words cannot be true."""

    __slots__ = ("_last_counters", "corrupt", "dead", "lane", "name", "reader", "size")

    def __init__(self, name: str, reader: ring.LaneReader, lane: Lane, size: int) -> None:
        self.name, self.reader, self.lane, self.size = name, reader, lane, size
        self.dead, self.corrupt = False, reader.quarantined
        self._last_counters: Counter[str] | None = None

    @property
    def producer_id(self) -> str:
        """Whose lane it is."""
        return self.lane.producer_id

    @property
    def waiting(self) -> int:
        """Records that can be taken."""
        return 0 if self.corrupt else self.reader.waiting

    @property
    def held(self) -> int:
        """Records taken and not yet released; a release that is put off counts as none."""
        return self.reader.held + self.reader.put_off

    @property
    def starves(self) -> bool:
        """Whether its producer asked for room in vain, and there is none yet."""
        wanted = self.reader.wanted_bytes
        return wanted > 0 and self.held > 0 and not self.reader.has_room_for(wanted)

    def take(self) -> Record | None:
        """The next record; None if there is none, or if the lane has just been quarantined."""
        if self.corrupt:
            return None
        try:
            record = self.reader.take(Record)
        except header.LaneCorrupt as wrong:
            self.quarantine()
            log.error("lane of producer %s is quarantined: %s", self.producer_id, str(wrong))  # a log that keeps it must not keep frames
            return None
        return None if record is None else record.bind(self.lane)

    def quarantine(self) -> None:
        """Takes nothing from the lane any more; what it held is counted, and its counters stand still."""
        waiting = self.reader.waiting
        self.reader.quarantine()
        self.reader.count_discard(Discard.CORRUPT, waiting if 0 < waiting <= self.reader.slot_count else 1)
        self.corrupt = True
        self._last_counters = self.counters()

    def counters(self) -> Counter[str]:
        """From the lane's own words."""
        if self._last_counters is not None:
            return Counter({**self._last_counters, "held": self.held})
        words = header.lane_counters(self.reader.lane)
        return Counter(
            {
                "records_total": words["tail"],
                "held": self.waiting + self.held,
                "tokens_total": words["tokens"],
                "bytes_total": words["bytes"],
                "producer_wait_ns": words["wait_ns"],
                "late_wakes_total": words["late_wakes"],
                "lane_bytes": self.size,
                **labelled("dropped_total", Drop, words["dropped"]),
                **labelled("discarded_total", Discard, words["discarded"]),
            }
        )


class LaneSet:
    """All adopted lanes of a bridge."""

    def __init__(self, bridge: str, control: header.Control, columns: Columns, limit: int) -> None:
        self.bridge, self.columns, self.limit = bridge, columns, limit
        self._control = control
        self._lanes: dict[str, AdoptedLane] = {}
        self.refused: set[str] = set()
        self._gone: Counter[str] = Counter()  # counters of lanes that are no more
        self._turn = 0
        self._crowded = False
        self.arrivals = control.arrivals
        self._ranks_before = False
        self._adopting = threading.Lock()
        self._watch = DeathWatch(self._on_death, self._look_round)

    def __iter__(self) -> Iterator[AdoptedLane]:
        """A snapshot: the death watch removes lanes meanwhile."""
        return iter(list(self._lanes.values()))

    def __len__(self) -> int:
        return len(self._lanes)

    # -- adopting -----------------------------------------------------------------------------------------------------------------

    def adopt(self, *, strict: bool = False) -> None:
        """Takes over every new lane there is room for, oldest first.

        A lane that disagrees on a column's type is refused and logged; with `strict` it is a SchemaMismatch.
        """
        with self._adopting:
            try:
                self._adopt(strict)
            except BaseException:
                self.arrivals = (self.arrivals - 1) & 0xFFFFFFFF  # what was not adopted is looked for again
                raise

    def _adopt(self, strict: bool) -> None:
        self.arrivals = self._control.arrivals  # before the names are listed: what comes later is looked for again
        found = []
        for name in segment.lane_names(self.bridge):
            if name not in self._lanes and name not in self.refused:
                mapping = segment.open_mapping(name, minimum=header.control_bytes)
                info = self._header(name, mapping) if mapping is not None else None
                if mapping is not None and info is not None:
                    found.append((info["created_ns"], name, mapping, info))
        for _, name, mapping, info in sorted(found, key=lambda each: each[:2]):
            if len(self._lanes) >= self.limit:
                self._say_crowded(len(found))
                return
            self._adopt_one(name, mapping, info, strict)
        self._crowded = False

    def _header(self, name: str, mapping: Mapping) -> dict[str, Any] | None:
        try:
            return header.read_lane(mapping)
        except header.LaneCorrupt as wrong:
            self._refuse(name, str(wrong))
            return None

    def _adopt_one(self, name: str, mapping: Mapping, info: dict[str, Any], strict: bool) -> None:
        try:
            columns = Columns.decode(info["columns"])
            here = f"in producer {info['producer_id']}"
            self.columns.check_agrees(columns, "in this consumer", here)
            for other in self:
                columns.check_agrees(other.lane.columns, here, f"in producer {other.producer_id}")
            reader = ring.LaneReader(mapping, self._control.mapping)
        except (SchemaMismatch, header.LaneCorrupt) as wrong:
            if strict and isinstance(wrong, SchemaMismatch):
                raise
            self._refuse(name, str(wrong))
            return
        reader.ranks_before = self._ranks_before
        self._lanes[name] = AdoptedLane(name, reader, Lane(info["producer_id"], info["env_name"], columns, name), mapping.size)
        reader.ring()  # a predecessor may have died between release and wake
        self._watch.watch(name, mapping, info["pid"], info["pid_namespace"])

    def _refuse(self, name: str, why: str) -> None:
        self.refused.add(name)
        log.error("lane %s is refused: %s", name, why)

    def _say_crowded(self, found: int) -> None:
        if not self._crowded:
            log.warning("bridge %r has %d lanes and %d more that wait for their turn: Consumer(lanes=)", self.bridge, self.limit, found)
        self._crowded = True

    # -- taking -------------------------------------------------------------------------------------------------------------------

    def take(self) -> Record | None:
        """The next record, one lane after the other; None if no lane has one."""
        if self._control.arrivals != self.arrivals:
            self.adopt()
        lanes = list(self)
        for offset in range(len(lanes)):
            place = (self._turn + offset) % len(lanes)
            record = lanes[place].take()
            if record is not None:
                self._turn = (place + 1) % len(lanes)
                return record
        return None

    def take_backlog(self) -> Iterator[Record]:
        """What was committed and un-released when these lanes were adopted."""
        for lane in self:
            for _ in range(lane.waiting):
                if (record := lane.take()) is not None:
                    yield record

    def readers(self) -> list[ring.LaneReader]:
        """Of the lanes to wait for."""
        return [lane.reader for lane in self if not lane.corrupt]

    def ring_all(self) -> None:
        """Wakes every producer that waits for room or for the end of a pause."""
        for lane in self:
            lane.reader.ring()

    # -- deaths -------------------------------------------------------------------------------------------------------------------

    def _on_death(self, name: str) -> None:
        """The lock is free: nothing more will be committed."""
        lane = self._lanes.get(name)
        if lane is not None:
            lane.dead = True
            self._control.ring()

    def _look_round(self) -> bool:
        """Adopts what came while the consumer was busy, removes dead lanes that hold nothing any more; whether any is left for later."""
        if self._control.arrivals != self.arrivals:
            self.adopt()
        if self._ranks_before:
            self._heed_ranks_before()
        left = self._ranks_before
        for lane in self:
            if lane.dead:
                left |= bool(lane.waiting or lane.held or not self._bury(lane))
        return left

    def look_for_ranks(self) -> None:
        """This hub's epoch has begun: from now on ranks of earlier ones are heeded, as long as there are any."""
        self._heed_ranks_before()
        self._watch.nudge()

    def _heed_ranks_before(self) -> None:
        """While a rank of an earlier hub lives, releases of what is redelivered are put off; once none does, they are done."""
        with self._adopting:
            self._ranks_before = participation.ranks_before(self._control)
            for lane in self:
                if self._ranks_before:
                    lane.reader.ranks_before = True
                else:
                    lane.reader.release_put_off()

    def _bury(self, lane: AdoptedLane) -> bool:
        counters = lane.counters()
        removed, reason, _ = participation.remove_lane(lane.name, with_records=lane.corrupt)
        if not (removed or reason == "gone already"):
            return False
        self._lanes.pop(lane.name, None)
        self._gone.update({key: value for key, value in counters.items() if key not in ("held", "lane_bytes")})
        self._control.announce_lane()  # there may be room for one that waits
        return True

    def finished_producers(self) -> set[str]:
        """Ids of the producers that will put nothing more and whose records are all taken."""
        return {lane.producer_id for lane in self if lane.dead and not lane.waiting} - {lane.producer_id for lane in self if not lane.dead}

    def busy_producers(self) -> set[str]:
        """Ids of the producers that have records nobody has taken yet."""
        return {lane.producer_id for lane in self if lane.waiting}

    @property
    def nothing_left(self) -> bool:
        """Whether nothing can be taken, nor could be if there were room for more lanes."""
        return not self._crowded and not any(lane.waiting for lane in self)

    # -- state --------------------------------------------------------------------------------------------------------------------

    @property
    def live(self) -> int:
        """Lanes whose producer lives."""
        return sum(not lane.dead for lane in self)

    @property
    def held(self) -> int:
        """Records taken and not yet released, over all lanes."""
        return sum(lane.held for lane in self)

    def stuck(self, held_here: int) -> str:
        """Why no lane can bring anything more until one of the caller's `held_here` records is released, or ""."""
        lanes = [lane for lane in self if not lane.corrupt]
        if all(lane.dead for lane in lanes):
            return ""
        if any(lane.waiting or not (lane.dead or lane.starves) for lane in lanes):
            return ""
        if self.held > held_here:  # somebody else holds leases, whose end makes room
            return ""
        size = format_size(sum(lane.reader.data_bytes for lane in lanes))
        wanted = format_size(max(lane.reader.wanted_bytes for lane in lanes))
        return f"{len(lanes)} lanes of {size} in all hold {self.held} records, and their producers have no room for {wanted} more"

    def counters(self) -> Counter[str]:
        """Summed over all lanes that there are and were."""
        total = Counter(self._gone)
        for lane in self:
            total.update(lane.counters())
        discarded = sum(value for key, value in total.items() if key.startswith("discarded_total"))
        total["released_total"] = total["records_total"] - total["held"] - discarded
        return total

    def abandon(self) -> None:
        """Leases that are still held end without release, whenever that is: the next consumer gets those records again."""
        for lane in self:
            lane.reader.abandoned = True

    def close(self) -> int:
        """Ends the death watch and lets go of all lanes; how many records are still leased. Views keep their lane.

        A release that is still put off is not done any more: the next consumer gets the record again.
        """
        self._watch.stop()
        held = sum(lane.reader.held for lane in self)
        self._lanes.clear()
        del self._control  # views, through their reader, are to be the last that keep it
        return held
