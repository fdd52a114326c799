"""The lane protocol on two mappings of one segment: no names, no columns, no waiting for other processes."""

import gc
import os
import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext import lane as lane_writer
from shmbridge.segments import create_lane, open_control, open_mapping
from tests.transport.ext import commit_fields

FIELDS = commit_fields.FIELDS | {
    "tokens": 5,
    "min_policy_version": 3,
    "max_policy_version": 4,
    "t_created_ns": 7,
    "group_size": 2,
    "env_id": 9,
}
WORD = {"layout_version": 8, "slot_count": 32, "data_bytes": 72, "tail": 0x200, "space_waiting": 0x280}


@pytest.fixture
def lane(bridge):
    def make(slots: int = 4, lines: int = 8) -> SimpleNamespace:
        control = open_control(bridge)
        *places, size = header.lane_geometry(lines * 64, slots)
        name, mapping = create_lane(bridge, size)
        header.format_lane(mapping, lines * 64, slots, b"", 0, os.getpid(), 1, b"me", b"env")
        reader_side = open_mapping(name)
        writer = lane_writer.LaneWriter(mapping, control.mapping)
        return SimpleNamespace(
            writer=writer,
            mapping=mapping,
            other=reader_side,
            places=places,
            control=control,
            hub=lambda: lane_reader.LaneReader(reader_side, None),
        )

    return make


def put(writer: lane_writer.LaneWriter, payload: bytes = b"x", **fields: int) -> int:
    assert writer.claim(len(payload))
    writer.claimed_memory()[: len(payload)] = payload
    return writer.commit(**{**FIELDS, **fields})


def poke(mapping, at: int, value: int, dtype: str = "<u4") -> None:
    np.frombuffer(mapping, dtype, 1, at)[0] = value


def test_a_committed_record_is_seen_with_its_fields(lane) -> None:
    it = lane()
    assert put(it.writer, b"hello") == 0
    lease = it.hub().take(lane_reader.Lease)
    assert bytes(memoryview(lease))[:5] == b"hello"
    assert (lease._sequence, lease.rows, lease.token_count, lease._group_size, lease._env_id) == (
        0,
        1,
        5,
        2,
        9,
    )
    assert (lease._min_policy_version, lease._max_policy_version, lease._t_created_ns) == (3, 4, 7)
    assert 0 < lease._t_publish_ns <= time.monotonic_ns()


def test_one_open_claim_at_a_time(lane) -> None:
    it = lane()
    it.writer.claim(1)
    with pytest.raises(RuntimeError, match="open"):
        it.writer.claim(1)


def test_commit_without_a_claim_is_an_error(lane) -> None:
    with pytest.raises(RuntimeError, match="no open claim"):
        lane().writer.commit(**FIELDS)


def test_head_is_stored_before_the_record_is_handed_out(lane) -> None:
    it = lane()
    hub, heads = it.hub(), []

    class Spy(lane_reader.Lease):
        def __init_subclass__(cls) -> None: ...

    for _ in range(3):
        put(it.writer)
    for sequence in range(3):
        lease = hub.take(Spy)
        heads.append(header.lane_counters(it.mapping)["head"])
        assert lease._sequence == sequence
        lease.release()
    assert heads == [1, 2, 3]


def test_release_is_idempotent_and_out_of_order(lane) -> None:
    it = lane(slots=2, lines=2)
    hub = it.hub()
    for _ in range(20):
        put(it.writer)
        put(it.writer)
        first, second = hub.take(lane_reader.Lease), hub.take(lane_reader.Lease)
        for lease in (second, first, second, first):
            lease.release()
    assert (hub.held, it.writer.outstanding, it.writer.free_bytes) == (0, 0, 128)


def test_a_late_second_release_does_not_free_the_slots_next_record(lane) -> None:
    it = lane(slots=1, lines=1)
    hub = it.hub()
    put(it.writer)
    old = hub.take(lane_reader.Lease)
    old.release()
    put(it.writer)
    old.release()
    del old
    assert it.writer.outstanding == 1


def test_the_buffer_of_a_lease_is_read_only_and_ends_with_it(lane) -> None:
    it = lane()
    put(it.writer)
    lease = it.hub().take(lane_reader.Lease)
    assert memoryview(lease).readonly
    lease.release()
    with pytest.raises(BufferError, match="ended"):
        memoryview(lease)


def test_a_lease_in_a_collected_cycle_is_handed_out_again(lane) -> None:
    it = lane()
    hub = it.hub()
    for _ in range(2):
        put(it.writer)
    for _ in range(5):
        holder = SimpleNamespace(lease=hub.take(lane_reader.Lease))
        assert (holder.lease._sequence, holder.lease._redelivered) == (0, False)
        holder.myself = holder
        del holder
        gc.collect()
        assert (hub.held, hub.waiting, it.writer.outstanding) == (0, 2, 2)


def test_reader_and_lease_in_one_collected_cycle_end_in_peace(child) -> None:
    process = child(
        """
import gc
import shmbridge
for _ in range(20):
    producer, consumer = shmbridge.Producer(bridge, lane_bytes="64K"), shmbridge.Consumer(bridge)
    producer.put({"tokens": [[1, 2, 3]]})
    class Holder: ...
    holder = Holder()
    holder.me, holder.producer, holder.consumer = holder, producer, consumer
    holder.reader, holder.record = consumer.get(timeout_s=5)._lane_reader, None
    producer.put({"tokens": [[1]]})
    holder.record = consumer.get(timeout_s=5)
    consumer.close()
    producer.close()
    del holder, producer, consumer
    gc.collect()
print("ready")
"""
    )
    assert process.wait(10) == 0


def test_leases_may_end_on_any_thread(lane) -> None:
    it = lane(slots=8, lines=8)
    hub = it.hub()
    for _ in range(8):
        put(it.writer)
    leases = [hub.take(lane_reader.Lease) for _ in range(8)]
    threads = [threading.Thread(target=lease.release) for lease in leases]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (hub.held, it.writer.outstanding) == (0, 0)


def test_wait_space_returns_when_the_hub_releases(lane, until) -> None:
    it = lane(slots=1, lines=1)
    hub = it.hub()
    put(it.writer)
    lease = hub.take(lane_reader.Lease)
    assert not it.writer.claim(1)
    words = memoryview(it.other)
    thread = threading.Thread(target=lambda: (until(lambda: words[WORD["space_waiting"]]), lease.release()))
    thread.start()
    deadline = time.monotonic() + 5
    while not it.writer.claim(1):
        assert time.monotonic() < deadline
        it.writer.wait_space(10**9)
    thread.join()


def test_wait_space_ends_at_its_timeout_and_not_before(lane) -> None:
    it = lane(slots=1, lines=1)
    put(it.writer)
    assert it.writer.wait_space(5_000_000) >= 5_000_000
    assert it.writer.wait_space(0) == 0
    assert header.lane_counters(it.mapping)["late_wakes"] == 0


@pytest.mark.parametrize(
    ("at", "value", "what"),
    [
        (WORD["layout_version"], 99, "layout version 99, this build reads 2"),
        (WORD["slot_count"], 3, "3 slots"),
        (WORD["slot_count"], 1 << 12, "geometry"),
        (WORD["data_bytes"], 1 << 31, "data bytes"),
        (0, 0xBAD, "no lane"),
    ],
)
def test_a_header_that_cannot_be_is_refused(lane, at, value, what) -> None:
    it = lane()
    poke(it.mapping, at, value)
    with pytest.raises(header.LaneCorrupt, match=what):
        it.hub()


@pytest.mark.parametrize(
    "field", ["ring entry", "slot sequence", "extent place", "extent size", "index size", "tail"]
)
def test_garbage_in_a_lane_is_noticed_before_it_is_used(lane, field) -> None:
    it = lane()
    hub = it.hub()
    put(it.writer)
    ring_at, slots_at, _, _ = it.places
    slot = slots_at + 128 * int(np.frombuffer(it.mapping, "<u4", 1, ring_at)[0])
    at, value, dtype = {
        "ring entry": (ring_at, 77, "<u4"),
        "slot sequence": (slot + 8, 5, "<u8"),
        "extent place": (slot + 16, 1 << 40, "<u8"),
        "extent size": (slot + 24, 1 << 40, "<u8"),
        "index size": (slot + 92, 1 << 20, "<u4"),
        "tail": (WORD["tail"], 1 << 30, "<u8"),
    }[field]
    poke(it.mapping, at, value, dtype)
    with pytest.raises(header.LaneCorrupt):
        hub.take(lane_reader.Lease)
    assert hub.held == 0


def test_a_column_table_that_changed_while_the_lane_was_opened_is_noticed(lane) -> None:
    hub = lane().hub()
    with pytest.raises(header.LaneCorrupt, match="column table has changed"):
        hub.describe(None, bytes(64), ("tokens",), (np.dtype("int32"),))
    with pytest.raises(ValueError, match="1 names and 0 types for 0 columns"):
        hub.describe(None, b"", ("tokens",), ())


@pytest.mark.parametrize(("sequence", "what"), [(1 << 40, "a slot says record"), (1, "both say record 1")])
def test_a_hub_that_starts_misses_no_scribbled_slot(lane, sequence, what) -> None:
    """Its record must not vanish silently."""
    it = lane()
    put(it.writer)
    put(it.writer)
    poke(it.mapping, it.places[1] + 8, sequence, "<u8")
    with pytest.raises(header.LaneCorrupt, match=what):
        it.hub()
