"""The producer's private allocator, seen through claims: nothing overlaps, nothing is lost, neighbours grow
together again.
"""

import os
import random

import numpy as np
import pytest

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext import lane as lane_writer
from shmbridge.segments import create_lane, open_control
from tests.transport.ext.commit_fields import FIELDS

LINES = 32


class Lane:
    def __init__(self, bridge: str, lines: int = LINES) -> None:
        self.control = open_control(bridge)
        size = header.lane_geometry(lines * 64, 32)[-1]
        _, self.mapping = create_lane(bridge, size)
        header.format_lane(self.mapping, lines * 64, 32, b"", 0, os.getpid(), 0, b"", b"")
        self.writer = lane_writer.LaneWriter(self.mapping, self.control.mapping)
        self.hub = lane_reader.LaneReader(self.mapping, None)
        self.base = (
            np.frombuffer(self.mapping, np.uint8).ctypes.data + header.lane_geometry(lines * 64, 32)[3]
        )

    def put(self, lines: int) -> tuple[int, lane_reader.Lease] | None:
        if not self.writer.claim(lines * 64):
            return None
        at = np.frombuffer(self.writer.claimed_memory(), np.uint8).ctypes.data - self.base
        self.writer.commit(**FIELDS)
        return at // 64, self.hub.take(lane_reader.Lease)


@pytest.fixture
def make_lane(bridge):
    return lambda lines=LINES: Lane(bridge, lines)


def test_memory_goes_round_in_a_window_while_the_consumer_keeps_up(make_lane) -> None:
    lane = make_lane((64 << 20) // 64)
    places = []
    for _ in range(600):
        at, lease = lane.put((256 << 10) // 64)
        places.append(at)
        lease.release()
    first = places.index(0, 1)  # the second time at the lowest place
    assert places[:first] == [n * (256 << 10) // 64 for n in range(first)], "each behind the last"
    assert places == (places[:first] * 600)[:600]
    assert 4 <= first < 256, "more than a few, and not the whole lane"


def test_a_claim_without_room_in_the_window_goes_where_there_is_any(make_lane) -> None:
    lane = make_lane((64 << 20) // 64)
    held = [lane.put((1 << 20) // 64) for _ in range(31)]
    assert sorted(at for at, _ in held) == [n * (1 << 20) // 64 for n in range(31)]
    held[0][1].release()
    assert lane.put((1 << 20) // 64)[0] == 0


def test_the_lowest_place_that_fits_is_taken_once_the_end_was_reached(make_lane) -> None:
    lane = make_lane()
    places = [lane.put(lines) for lines in (4, 8, 4, 16)]
    assert [at for at, _ in places] == [0, 4, 12, 16]
    places[0][1].release()
    places[2][1].release()
    again = [lane.put(4), lane.put(4)]
    assert [at for at, _ in again] == [0, 12]


def test_neighbours_grow_together_in_any_order_of_release(make_lane) -> None:
    lane = make_lane()
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [0, 2, 1, 3], [1, 3, 0, 2], [2, 0, 3, 1]):
        leases = [lane.put(LINES // 4)[1] for _ in range(4)]
        for place in order:
            leases[place].release()
            assert lane.writer.free_bytes == 64 * LINES // 4 * (order.index(place) + 1)
        whole = lane.put(LINES)
        assert whole is not None
        assert whole[0] == 0
        whole[1].release()


def test_nothing_overlaps_and_nothing_is_lost_in_a_long_run(make_lane) -> None:
    lane = make_lane()
    draw = random.Random(11)
    live: dict[int, tuple[int, lane_reader.Lease]] = {}
    for _ in range(3000):
        if draw.random() < 0.55:
            lines = draw.randint(1, 9)
            found = lane.put(lines)
            if found is not None:
                at, lease = found
                assert all(at + lines <= other or other + size <= at for other, (size, _) in live.items())
                live[at] = (lines, lease)
            else:
                ends = [0, *(at + size for at, (size, _) in sorted(live.items()))]
                gaps = [start - end for start, end in zip([*sorted(live), LINES], ends, strict=True)]
                assert max(gaps) < lines, "there was a place"
        elif live:
            live.pop(draw.choice(sorted(live)))[1].release()
        assert lane.writer.free_bytes == 64 * (LINES - sum(size for size, _ in live.values()))
    for _, lease in live.values():
        lease.release()
    assert lane.put(LINES) is not None
