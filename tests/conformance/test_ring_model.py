"""The compiled ring against its specification: every step is taken by both, and whatever can be seen must agree."""

import os

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

import shmbridge
from shmbridge import participation, segment
from shmbridge._ext import header, ring
from shmbridge.testing import RingModel

NOTHING_STAMPED = {
    "rows": 1, "columns": 0, "index_bytes": 0, "group_id_bytes": 0, "flags": 0, "tokens": 0, "min_policy_version": -1,
    "max_policy_version": -1, "t_created_ns": 0, "group_size": 1, "env_id": -1,
}  # fmt: skip


class Lane(RuleBasedStateMachine):
    """One lane, small enough that slots, bytes and gaps all run out."""

    @initialize(slots=st.sampled_from([1, 2, 4, 8]), lines=st.integers(4, 14))
    def open(self, slots: int, lines: int) -> None:
        self.bridge = f"model-{os.getpid()}"
        self.model = RingModel(slots, lines * 64)
        self.control = participation.open_control(self.bridge)
        *_, self.data_at, size = header.lane_geometry(lines * 64, slots)
        self.name, self.lane = segment.create_lane(self.bridge, size)
        header.format_lane(self.lane, lines * 64, slots, b"", 0, os.getpid(), 0, b"producer", b"")
        self.writer = ring.LaneWriter(self.lane, self.control.mapping)
        self.hub_side = segment.open_mapping(self.name)
        self.reader: ring.LaneReader | None = None
        self.leases: dict[int, ring.Lease] = {}
        self.views: dict[int, memoryview] = {}  # of records that were asked to be released
        self.payloads: dict[int, bytes] = {}
        self.claimed = False
        self.seed = 0

    def teardown(self) -> None:
        if not hasattr(self, "model"):
            return
        self.end_hub()
        del self.writer, self.lane, self.hub_side, self.control, self.reader
        assert not shmbridge.clean(self.bridge, dry_run=False).kept

    def end_hub(self) -> None:
        if self.reader is not None:
            self.reader.abandoned = True
        self.leases.clear()
        self.views.clear()
        self.reader = None

    def any_lease(self, data: st.DataObject) -> int:
        return data.draw(st.sampled_from(sorted(self.leases)), "sequence")

    # -- the producer -------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: not self.claimed)
    @rule(size=st.integers(1, 6 * 64))
    def claim(self, size: int) -> None:
        room = self.model.room_for(size)
        assert self.writer.claim(size) == room
        if room:
            memory = np.frombuffer(self.writer.claimed_memory(), np.uint8)
            data = np.frombuffer(memoryview(self.lane), np.uint8).ctypes.data + self.data_at
            assert len(memory) % 64 == 0
            self.model.claim(memory.ctypes.data - data, len(memory))
            assert size <= len(memory) < size + 64
            self.claimed = True

    @precondition(lambda self: self.claimed)
    @rule()
    def commit(self) -> None:
        memory = np.frombuffer(self.writer.claimed_memory(), np.uint8)
        self.seed += 1
        memory[:] = np.random.default_rng(self.seed).integers(0, 256, len(memory), np.uint8)
        payload = memory.tobytes()
        sequence = self.model.commit(payload)
        assert self.writer.commit(**NOTHING_STAMPED) == sequence
        self.payloads[sequence] = payload
        self.claimed = False

    @precondition(lambda self: self.claimed)
    @rule()
    def abort(self) -> None:
        np.frombuffer(self.writer.claimed_memory(), np.uint8)[:] = 0xEE
        self.writer.abort()
        self.model.abort()
        self.claimed = False

    @rule()
    def producer_counts_what_is_outstanding(self) -> None:
        assert self.writer.outstanding == self.model.unreleased

    # -- the hub ------------------------------------------------------------------------------------------------------------------

    @precondition(lambda self: self.reader is None)
    @rule()
    def hub_starts(self) -> None:
        self.reader = ring.LaneReader(self.hub_side, None)
        self.model.hub_starts()

    @precondition(lambda self: self.reader is not None)
    @rule()
    def hub_dies(self) -> None:
        self.end_hub()
        self.model.hub_dies()

    @precondition(lambda self: self.reader is not None)
    @rule()
    def take(self) -> None:
        lease, expected = self.reader.take(ring.Lease), self.model.take()
        assert (lease is None) == (expected is None)
        if lease is not None:
            assert (lease.sequence, lease.redelivered) == (expected.sequence, expected.redelivered)
            assert bytes(memoryview(lease)) == expected.payload
            self.leases[lease.sequence] = lease

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release(self, data) -> None:
        sequence = self.any_lease(data)
        self.leases.pop(sequence).release()
        self.model.release(sequence)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def let_go_without_release(self, data) -> None:
        sequence = self.any_lease(data)
        del self.leases[sequence]
        self.model.release(sequence)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_under_a_view(self, data) -> None:
        sequence = self.any_lease(data)
        lease = self.leases.pop(sequence)
        self.views[sequence] = memoryview(lease)
        lease.release()

    @precondition(lambda self: self.views)
    @rule(data=st.data())
    def drop_the_view(self, data) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.views)), "sequence")
        del self.views[sequence]
        self.model.release(sequence)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def abandon(self, data) -> None:
        sequence = self.any_lease(data)
        self.leases.pop(sequence).abandon()
        self.model.abandon(sequence)

    # -- what can be seen -----------------------------------------------------------------------------------------------------------

    @invariant()
    def words_agree(self) -> None:
        if not hasattr(self, "model"):
            return
        words = header.lane_counters(self.lane)
        assert (words["tail"], words["head"]) == (self.model.tail, self.model.head)
        assert header.undelivered(self.lane) == self.model.unreleased
        if self.reader is not None:
            assert (self.reader.waiting, self.reader.held) == (self.model.waiting, self.model.held)

    @invariant()
    def held_records_are_untouched(self) -> None:
        for sequence, lease in getattr(self, "leases", {}).items():
            assert bytes(memoryview(lease)) == self.payloads[sequence]
        for sequence, view in getattr(self, "views", {}).items():
            assert bytes(view) == self.payloads[sequence]


TestLane = Lane.TestCase
TestLane.settings = settings(
    max_examples=80, stateful_step_count=60, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck)
)
