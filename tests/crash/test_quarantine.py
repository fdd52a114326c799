"""A lane with garbage in it: what is thrown away with it is counted, record by record."""

import struct

from shmbridge import segment
from shmbridge._ext import header

SLOT_BYTES, SEQUENCE_AT = 128, 8  # layout.h


def test_every_record_of_a_quarantined_lane_is_counted(bridge, make_producer, make_consumer):
    """One of four was released, the second is garbage: produced = released + held + discarded."""
    producer = make_producer(on_full="raise")
    for _ in range(4):
        producer.put({"tokens": [[1, 2]]})
    consumer = make_consumer()
    consumer.get(5).release()
    mapping = segment.open_mapping(producer.lane_name)
    memory, (_, slots_at, *_) = memoryview(mapping), header.lane_geometry(producer.lane_bytes, 64)
    (place,) = [
        at for at in range(slots_at, slots_at + 64 * SLOT_BYTES, SLOT_BYTES) if struct.unpack_from("<QQ", memory, at) == (1, 1)
    ]  # generation 1, sequence 1
    struct.pack_into("<Q", memory, place + SEQUENCE_AT, 999)
    del memory, mapping
    assert consumer.poll() == []
    stats = consumer.stats()
    assert stats["lanes_quarantined"] == 1
    assert stats["released_total"] == 1
    assert stats["held"] + stats["discarded_total"] == 3
