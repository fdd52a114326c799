"""The compiled ring under test: lanes in real shared memory, the writer and the reader of `_ext.lane` at
their ends, within one process.

Knows segments and the ring; the lanes' round robin and the counts of a quarantine are written out here as in
shmbridge.hub.lanes, since only the ring is tested. A producer or hub that dies is one whose object is
dropped: kills of processes are the crash tests'.
"""

import os
import struct
from dataclasses import dataclass

import numpy as np

import shmbridge
from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext import lane as lane_writer
from shmbridge.errors import Discard
from shmbridge.segments import create_lane, open_control, open_mapping

_SLOT_BYTES = 128
_SLOT = struct.Struct("<QQQQ")  # generation, sequence, extent_at, extent_bytes; layout.h
_ABORTED = 0xEE


@dataclass(frozen=True, slots=True)
class Seen:
    """A record as a hub gets it, and whether an earlier hub may have handed it out."""

    lane: int
    sequence: int
    payload: bytes
    redelivered: bool


@dataclass(frozen=True, slots=True)
class Words:
    """The words of one lane, readable at any time. The last two are the present hub's, 0 without one."""

    committed: int  # records; the next sequence
    head: int  # every sequence below may have been handed out
    unreleased: int  # committed, and not released: what the lane still stores
    discarded: int  # released unread, or lost to a quarantine
    quarantined: bool
    waiting: int  # can be taken
    held: int  # taken, its lease not ended


class CompiledRing:
    """A bridge of this process' own, with lanes of any size.

    Lanes are numbered from 0; a record is known by lane and sequence. A claim gives its place in the data
    area. The words are those of docs/adr/0001-lanes.md.
    """

    def __init__(self, lane_count: int, slots: int, data_bytes: int) -> None:
        self.lane_count, self.slots, self.data_bytes = lane_count, slots, data_bytes
        self.bridge = f"conformance-{os.getpid()}-{os.urandom(3).hex()}"
        self._control = open_control(self.bridge)
        self._lanes = [_Lane(self.bridge, slots, data_bytes, self._control) for _ in range(lane_count)]
        self._leases: dict[tuple[int, int], lane_reader.Lease] = {}
        self._views: dict[tuple[int, int], memoryview] = {}  # of leases that were asked to end
        self._turn = 0

    def claim(self, lane: int, size: int) -> int | None:
        return self._lanes[lane].claim(size)

    def commit(self, lane: int, payload: bytes) -> int:
        writer = self._lanes[lane].writer
        writer.claimed_memory()[:] = payload
        return writer.commit(
            rows=1,
            columns=0,
            index_bytes=0,
            group_id_bytes=0,
            flags=0,
            tokens=0,
            min_policy_version=-1,
            max_policy_version=-1,
            t_created_ns=0,
            group_size=1,
            env_id=-1,
        )

    def abort(self, lane: int) -> None:
        memory = self._lanes[lane].writer.claimed_memory()
        memory[:] = bytes([_ABORTED]) * len(memory)
        del memory
        self._lanes[lane].writer.abort()

    def producer_dies(self, lane: int) -> None:
        del self._lanes[lane].writer

    def hub_starts(self) -> None:
        for lane in self._lanes:
            lane.reader = lane_reader.LaneReader(lane.hub_side, None)

    def hub_dies(self) -> None:
        for lane in self._lanes:
            if lane.reader is not None:
                lane.reader.abandoned = True
            lane.reader = None
        self._leases.clear()
        self._views.clear()

    def take(self) -> Seen | None:
        for offset in range(self.lane_count):
            number = (self._turn + offset) % self.lane_count
            lease = self._lanes[number].take()
            if lease is not None:
                self._turn = (number + 1) % self.lane_count
                self._leases[number, lease._sequence] = lease
                return Seen(number, lease._sequence, bytes(memoryview(lease)), lease._redelivered)
        return None

    def read(self, lane: int, sequence: int) -> bytes:
        view = self._views.get((lane, sequence))
        return bytes(memoryview(self._leases[lane, sequence]) if view is None else view)

    def release(self, lane: int, sequence: int) -> None:
        self._leases.pop((lane, sequence)).release()

    def abandon(self, lane: int, sequence: int) -> None:
        """Alternates between abandon() and dropping the object: take() has looked at it, so either leaves it
        to the next hub.
        """
        lease = self._leases.pop((lane, sequence))
        if sequence % 2:
            lease._abandon()

    def discard(self, lane: int, sequence: int) -> None:
        self._leases.pop((lane, sequence))._discard(Discard.STALE)

    def release_under_view(self, lane: int, sequence: int) -> None:
        """Asks for the end of a lease while a view is kept: it ends with `drop_view`."""
        lease = self._leases.pop((lane, sequence))
        self._views[lane, sequence] = memoryview(lease)
        lease.release()

    def drop_view(self, lane: int, sequence: int) -> None:
        del self._views[lane, sequence]

    def words(self, lane: int) -> Words:
        return self._lanes[lane].words()

    def damage(self, lane: int) -> None:
        """A buggy peer writes nonsense over the slot of the record that the lane would hand out next."""
        self._lanes[lane].damage()

    def close(self) -> None:
        self.hub_dies()
        self._lanes.clear()
        del self._control
        report = shmbridge.clean(self.bridge, dry_run=False)
        assert not report.kept, f"left behind: {report.kept}"


class _Lane:
    """One lane and its two ends."""

    def __init__(self, bridge: str, slots: int, data_bytes: int, control: header.Control) -> None:
        _, self.slots_at, self.released_at, self.data_at, size = header.lane_geometry(data_bytes, slots)
        self.slots = slots
        self.name, self.mapping = create_lane(bridge, size)
        header.format_lane(self.mapping, data_bytes, slots, b"", 0, os.getpid(), 0, b"producer", b"")
        self.writer = lane_writer.LaneWriter(self.mapping, control.mapping)
        hub_side = open_mapping(self.name)
        assert hub_side is not None
        self.hub_side = hub_side
        self.reader: lane_reader.LaneReader | None = None

    def claim(self, size: int) -> int | None:
        if not self.writer.claim(size):
            return None
        memory, whole = (
            np.frombuffer(self.writer.claimed_memory(), np.uint8),
            np.frombuffer(memoryview(self.mapping), np.uint8),
        )
        return int(memory.ctypes.data - whole.ctypes.data) - self.data_at

    def take(self) -> lane_reader.Lease | None:
        assert self.reader is not None
        if self.reader.quarantined:
            return None
        try:
            return self.reader.take(lane_reader.Lease)
        except header.LaneCorrupt:
            self.reader.quarantine(self.reader.waiting)
            return None

    def words(self) -> Words:
        counted = header.lane_counters(self.mapping)
        quarantined = bool(counted["quarantined"])
        waiting = 0 if self.reader is None or quarantined else self.reader.waiting
        held = 0 if self.reader is None else self.reader.held
        discarded = sum(counted["discarded"]) + counted["quarantined"]
        return Words(
            counted["tail"],
            counted["head"],
            header.undelivered(self.mapping),
            discarded,
            quarantined,
            waiting,
            held,
        )

    def damage(self) -> None:
        """An extent that is not on a line, in the oldest slot that is not released and not leased out."""
        memory = memoryview(self.mapping)
        waiting = []
        for number in range(self.slots):
            at = self.slots_at + number * _SLOT_BYTES
            generation, sequence, *_ = _SLOT.unpack_from(memory, at)
            (released,) = struct.unpack_from("<Q", memory, self.released_at + 8 * number)
            if generation != released:
                waiting.append((sequence, at))
        assert self.reader is not None
        sequence, at = sorted(waiting)[-self.reader.waiting]
        struct.pack_into("<Q", memory, at + 16, 1)
