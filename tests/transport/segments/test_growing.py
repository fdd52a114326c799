"""A segment mapped while its creator reserves it is not ready, whoever maps it; one that has fewer bytes
than it says is garbage.
"""

import os
import struct

import numpy as np
import pytest

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext import weights as versions
from shmbridge._ext.header import Mapping
from shmbridge.segments import lane_header, lane_info, segment
from shmbridge.watch import snapshot
from shmbridge.watch.observer import Observer
from shmbridge.weights import WeightsReader, WeightsWriter

GROUP = {"tokens": [[1, 2, 3]], "loss_mask": [[0, 1, 1]], "scores": [1.0]}
SIZES = [header.control_bytes, 24 << 10, 48 << 10, 96 << 10]  # of a lane that has 100 KiB in all


@pytest.fixture
def early(monkeypatch):
    """Has the next mapping of a segment end after so many bytes, as if the segment had had no more."""

    def arm(size: int) -> None:
        real, left = segment.map_now, [size]

        def map_now(file, name, *, readonly=False, minimum=1):
            if not left:
                return real(file, name, readonly=readonly, minimum=minimum)
            size = left.pop()
            return segment.map_segment(file, size, name, readonly=readonly) if size >= minimum else None

        for where in ("segments.segment", "segments.membership", "weights.writer"):
            monkeypatch.setattr(f"shmbridge.{where}.map_now", map_now)

    return arm


@pytest.mark.parametrize("size", SIZES)
def test_a_lane_mapped_before_it_was_whole_is_not_ready(producer, size):
    producer.put(GROUP)
    file = segment.open_segment(producer.lane_name)
    assert size < os.fstat(file.fd).st_size
    early = Mapping(file, size, True)
    assert header.read_lane(early) is None
    assert (header.load(early), header.undelivered(early), header.unreleased(early)) == ({}, 0, [])
    assert (header.newest_origin(early), header.releases(early)) == (None, (0, 0))
    whole = segment.map_now(file, producer.lane_name, readonly=True)
    assert header.read_lane(whole)["producer_id"] == producer.producer_id
    assert header.undelivered(whole) == 1


@pytest.mark.parametrize("size", SIZES)
def test_a_consumer_takes_from_it_when_it_looks_again(producer, make_consumer, early, size):
    producer.put(GROUP)
    early(size)
    consumer = make_consumer()
    assert (len(consumer._lanes), consumer.stats()["lanes_refused"]) == (0, 0)
    consumer._lanes.adopt()
    record = consumer.get(timeout_s=5)
    assert record.meta.producer_id == producer.producer_id
    record.release()


@pytest.mark.parametrize("size", SIZES)
def test_an_observer_reads_it_when_it_looks_again(producer, early, size):
    producer.put(GROUP)
    early(size)
    with Observer(producer.bridge) as observer:
        assert observer.unreadable == {}
        (record,) = observer.poll()
        assert record.meta.producer_id == producer.producer_id
        assert observer.unreadable == {}


@pytest.mark.parametrize("size", SIZES)
def test_nobody_who_looks_at_it_says_that_it_is_garbage(producer, early, size):
    producer.put(GROUP)
    early(size)
    seen = snapshot.look(producer.bridge)
    assert (seen.lanes, seen.unreadable) == ([], {})
    early(size)
    assert lane_header(producer.lane_name) is None
    early(size)
    assert lane_info(producer.lane_name).records == 0
    assert lane_info(producer.lane_name).records == 1


def test_a_lane_that_says_more_bytes_than_it_has_is_garbage(make_producer, consumer):
    more, cut = make_producer(), make_producer()
    for producer in (more, cut):
        producer.put(GROUP)
    lane = segment.open_mapping(more.lane_name)
    (says,) = _where(memoryview(lane)[: header.control_bytes], struct.pack("Q", lane.size))
    memoryview(lane)[says : says + 8] = struct.pack("Q", lane.size + 4096)
    os.truncate(segment.MOUNT / cut.lane_name[1:], 48 << 10)
    assert consumer.poll() == []
    assert set(consumer._lanes.refused_lanes()) == {more.lane_name, cut.lane_name}
    with Observer(consumer.bridge) as observer:
        assert set(observer.unreadable) == {more.lane_name, cut.lane_name}
    with pytest.raises(header.LaneCorrupt):
        lane_reader.LaneReader(lane, consumer._lanes._control.mapping)


def _where(memory, word: bytes) -> list[int]:
    return [at for at in range(0, len(memory), 8) if memory[at : at + 8] == word]


@pytest.mark.parametrize("size", [versions.header_bytes, 3 * 4096])
def test_weights_mapped_before_they_were_whole_are_not_ready(bridge, early, size):
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(3, [("tensor", np.arange(3000))])
        early(size)
        assert reader.version is None
        assert reader.version == 3


@pytest.mark.parametrize("size", [versions.header_bytes, 3 * 4096])
def test_a_writer_uses_weights_that_were_not_whole_when_it_first_mapped_them(bridge, early, size):
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(3, [("first", np.arange(3000)), ("second", np.zeros(3))])
        inode = _inode(bridge)
        early(size)
        with WeightsWriter(bridge) as writer:
            assert writer.last_version == 3
            writer.publish(4, [("second", np.ones(3))], changed_only=True)
        assert _inode(bridge) == inode
        version, tensors = reader.copy()
        assert (version, tensors["first"][-1], tensors["second"][0]) == (4, 2999, 1)


def _inode(bridge: str) -> int:
    return os.stat(segment.MOUNT / segment.weights_name(bridge)[1:]).st_ino
