"""LanePoller takes records of many lanes in turn: it is fair, survives lanes that come, go or hold garbage,
and loses no record.
"""

import os
import time
from collections.abc import Iterator

import numpy as np
import pytest

from shmbridge._ext import header
from shmbridge._ext import lane as lane_reader
from shmbridge._ext import lane as lane_writer
from shmbridge._ext.lane import LanePoller
from shmbridge.segments import create_lane, open_control
from shmbridge.testing import wait_until
from tests.transport.ext.commit_fields import FIELDS

TAIL_AT = 0x200


class Bridge:
    """Lanes of up to 16 records; `env_id` of a record says which lane it is from."""

    def __init__(self, bridge: str) -> None:
        self.bridge, self.control, self.told = bridge, open_control(bridge), []
        self.mappings, self.writers, self.readers = [], [], []

    def turns(self, lanes: int, cls: type = lane_reader.Lease) -> LanePoller:
        made = LanePoller(cls, self.control.mapping, self.tell, self.control.arrivals)
        for _ in range(lanes):
            made.add(self.lane())
        return made

    def tell(self, reader: lane_reader.LaneReader, why: str) -> None:
        self.told.append((self.readers.index(reader), why))

    def lane(self) -> lane_reader.LaneReader:
        _, mapping = create_lane(self.bridge, header.lane_geometry(16 * 64, 16)[-1])
        header.format_lane(mapping, 16 * 64, 16, b"", 0, os.getpid(), 0, b"", b"")
        self.mappings.append(mapping)
        self.writers.append(lane_writer.LaneWriter(mapping, self.control.mapping))
        self.readers.append(lane_reader.LaneReader(mapping, None))
        return self.readers[-1]

    def put(self, *lanes: int) -> None:
        for lane in lanes:
            assert self.writers[lane].claim(1)
            self.writers[lane].commit(**FIELDS | {"env_id": lane})

    def spoil(self, lane: int) -> None:
        np.frombuffer(self.mappings[lane], "<u8", 1, TAIL_AT)[0] = 1 << 40


@pytest.fixture
def on(bridge: str) -> Iterator[Bridge]:
    made = Bridge(bridge)
    yield made
    vars(made).clear()


def lanes_of(leases: list[lane_reader.Lease]) -> list[int]:
    """Returns the lanes of these records; releases them."""
    for lease in leases:
        if lease is not None:
            lease.release()
    return [lease._env_id for lease in leases]


def test_the_poller_takes_one_of_each_lane_and_then_the_next(on) -> None:
    turns = on.turns(3)
    on.put(0, 0, 0, 0, 1, 2, 2)
    assert lanes_of(turns.poll(99)) == [0, 1, 2, 0, 2, 0, 0]


@pytest.mark.parametrize("at_a_time", [1, 2, 3])
def test_the_turn_goes_on_where_it_stopped(on, at_a_time) -> None:
    turns = on.turns(3)
    on.put(*[0, 1, 2] * 4)
    seen = []
    while got := [turns.take()] if at_a_time == 1 else turns.poll(at_a_time):
        if got == [None]:
            break
        seen += lanes_of(got)
    assert seen == [0, 1, 2] * 4


def test_a_lane_that_goes_takes_nobodys_turn(on) -> None:
    turns = on.turns(4)
    on.put(*range(4), *range(4))
    assert lanes_of(turns.poll(2)) == [0, 1]
    turns.remove(on.readers[0])
    turns.remove(on.readers[0])
    turns.remove(on.readers[2])
    assert lanes_of(turns.poll(99)) == [3, 1, 3]
    turns.add(on.lane())
    on.put(4)
    assert lanes_of(turns.poll(99)) == [4]


def test_the_last_lane_goes_while_it_is_its_turn(on) -> None:
    turns = on.turns(2)
    on.put(0, 0)
    assert lanes_of([turns.take()]) == [0]
    turns.remove(on.readers[1])
    assert lanes_of([turns.take()]) == [0]
    turns.remove(on.readers[0])
    assert turns.take() is None
    assert turns.poll(9) == []


def test_garbage_among_lanes_costs_nobody_else_anything(on) -> None:
    turns = on.turns(3)
    on.put(*[0, 1, 2] * 2)
    assert lanes_of(turns.poll(3)) == [0, 1, 2]
    on.spoil(1)
    assert lanes_of(turns.poll(99)) == [0, 2]
    assert [lane for lane, _ in on.told] == [1]
    assert "more than 16 slots" in on.told[0][1]
    on.put(0, 2)
    assert lanes_of(turns.poll(99)) == [0, 2]
    assert len(on.told) == 1


def test_a_lane_that_could_not_be_reported_is_looked_at_again(on) -> None:
    turns = LanePoller(
        lane_reader.Lease,
        on.control.mapping,
        lambda *_: on.told.append(0) or 1 // (len(on.told) - 1),
        on.control.arrivals,
    )
    turns.add(on.lane())
    on.spoil(0)
    with pytest.raises(ZeroDivisionError):
        turns.take()
    assert turns.take() is None
    assert on.told == [0, 0]


def test_lack_of_memory_during_a_poll_loses_nothing(on) -> None:
    class Scarce(lane_reader.Lease):
        left = 2

        def __new__(cls) -> "Scarce":
            cls.left -= 1
            if cls.left < 0:
                raise MemoryError
            return super().__new__(cls)

    turns = on.turns(2, Scarce)
    on.put(0, 1, 0, 1)
    first = turns.poll(99)
    assert lanes_of(first) == [0, 1]
    with pytest.raises(MemoryError):
        turns.poll(99)
    assert header.lane_counters(on.mappings[0])["head"] == 1
    Scarce.left = 9
    assert sorted((lease._env_id, lease._sequence) for lease in turns.poll(99)) == [(0, 1), (1, 1)]


def test_the_poller_takes_nothing_before_a_look_at_lanes_that_arrived(on) -> None:
    turns = on.turns(1)
    on.put(0, 0)
    on.control.announce_lane()
    assert turns.take() is None
    assert turns.poll(1) == []
    assert lanes_of([turns.take(anyway=True), *turns.poll(1, anyway=True)]) == [0, 0]
    on.put(0)
    turns.arrivals = on.control.arrivals
    assert lanes_of([turns.take()]) == [0]


def test_a_closed_poller_gives_nothing_and_keeps_nothing(on) -> None:
    turns = on.turns(1)
    on.put(0)
    turns.close()
    assert turns.take(anyway=True) is None
    assert turns.poll(1, anyway=True) == []


def test_a_forked_child_takes_nothing(on) -> None:
    turns = on.turns(1)
    on.put(0)
    child = os.fork()
    if child == 0:
        os._exit(0 if turns.take() is None and turns.poll(9, anyway=True) == [] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert lanes_of(turns.poll(9)) == [0]


def test_the_time_from_commit_to_hand_out_is_counted_once_per_record(on) -> None:
    turns = on.turns(2)
    on.put(0, 0, 1)
    until = time.monotonic_ns() + 3_000_000
    wait_until(lambda: time.monotonic_ns() > until)  # all three have waited for more than 2^11 us
    first = [turns.take(), *turns.poll(9)]
    counts, ns = on.control.latency
    assert (sum(counts), sum(counts[:12])) == (3, 0)
    assert 3 * 3_000_000 < ns < 3 * sum(2**power * 1000 * count for power, count in enumerate(counts))
    del first  # nobody looked at them: they are handed out again
    again = turns.poll(9)
    assert [lease._redelivered for lease in again] == [False] * 3
    assert sorted(lanes_of(again)) == [0, 0, 1]
    assert on.control.latency == (counts, ns)


def test_of_records_taken_one_by_one_without_a_wait_every_eighth_is_counted(on) -> None:
    turns = on.turns(1)
    on.put(*[0] * 9)
    lanes_of([turns.take() for _ in range(9)])
    assert sum(on.control.latency[0]) == 2
    for waits in range(3):
        assert turns.take() is None
        on.put(0)
        lanes_of([turns.take()])
        assert sum(on.control.latency[0]) == 3 + waits
