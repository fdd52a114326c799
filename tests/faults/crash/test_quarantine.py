"""A lane with garbage in it: its discarded records are counted one by one, also when the consumer is killed
during the quarantine.
"""

import struct

import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.segments import open_mapping
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

SLOT_BYTES, EXTENT_BYTES_AT = 128, 24  # layout.h


def test_every_record_of_a_quarantined_lane_is_counted(bridge, make_producer, make_consumer):
    """One of four was released, the second is garbage: produced = released + held + discarded."""
    producer = make_producer(on_full="raise")
    for _ in range(4):
        producer.put({"tokens": [[1, 2]]})
    consumer = make_consumer()
    consumer.get(5).release()
    spoil(producer)
    assert consumer.poll() == []
    stats = consumer.stats()
    assert stats["lanes_quarantined"] == 1
    assert stats["released_total"] == 1
    assert stats["held"] + stats["discarded_total"] == 3


@pytest.mark.parametrize(("label", "lost"), [*zip(faults.QUARANTINING, (3, 4), strict=True)])
def test_a_hub_killed_as_it_quarantines_has_counted_all_or_nothing(
    label, lost, faulty, make_producer, make_consumer, roles
):
    """The first of four was handed out: it comes again, unless the lane was given up before."""
    producer = make_producer(producer_id="p", on_full="raise")
    for sequence in range(4):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    spoil(producer)
    faulty("consume", 4, 4, fault=Fault(label)).end_on_fault()
    for _ in range(2):
        with make_consumer() as consumer:
            assert [record.meta.sequence for record in consumer.poll()] == [0] * (4 - lost)
            stats = consumer.stats()
            assert (stats["discarded_total{corrupt}"], stats["held"], stats["released_total"]) == (
                lost,
                4 - lost,
                0,
            )
        lost = 4  # a later consumer takes no record of it


def spoil(producer: shmbridge.Producer) -> None:
    """Record 1 says that it is larger than its lane."""
    mapping = open_mapping(producer.lane_name)
    memory, (_, slots_at, *_) = memoryview(mapping), header.lane_geometry(producer.lane_bytes, 64)
    (place,) = [
        at
        for at in range(slots_at, slots_at + 64 * SLOT_BYTES, SLOT_BYTES)
        if struct.unpack_from("<QQ", memory, at) == (1, 1)
    ]  # generation 1, sequence 1
    struct.pack_into("<Q", memory, place + EXTENT_BYTES_AT, 1 << 40)
    del memory, mapping
