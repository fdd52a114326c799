"""A quarantined lane counts each of its records once, wherever a handler or another thread looks or
interrupts.
"""

import sys
from collections.abc import Callable
from types import FrameType
from typing import Any

import numpy as np
import pytest

import shmbridge
from shmbridge.errors import Discard
from shmbridge.hub import lanes as adopted_lane
from shmbridge.segments import open_mapping

PUT = 4


class Stop(Exception):
    pass


@pytest.fixture
def filled(make_producer) -> shmbridge.Producer:
    producer = make_producer()
    for number in range(PUT):
        producer.put({"tokens": [[number]]})
    return producer


def spoil(producer: shmbridge.Producer, sequence: int) -> None:
    """Writes nonsense into the slot of a record; its generation is 1."""
    words = np.frombuffer(memoryview(open_mapping(producer.lane_name)), "<u8")
    (place,) = np.flatnonzero((words[:-1] == 1) & (words[1:] == sequence))
    words[place + 3] = 1 << 40  # bytes of its extent


def accounted(counters: dict[str, float]) -> bool:
    discarded = sum(value for key, value in counters.items() if key.startswith("discarded_total{"))
    return counters["records_total"] == counters["released_total"] + counters["held"] + discarded


def at_each_line(call: Callable[[], object], then: Callable[[int], object]) -> int:
    """Calls `then` before each line of shmbridge/hub/lanes.py in a call; returns the number of lines."""
    lines = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal lines
        if frame.f_code.co_filename != adopted_lane.__file__:
            return None
        if event == "line":
            lines += 1
            sys.settrace(None)
            then(lines - 1)
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(None)
    return lines


def test_a_lease_dropped_unread_after_the_quarantine_is_not_released(filled, make_consumer) -> None:
    consumer = make_consumer()
    record, other = consumer.get(5), consumer.get(5)
    spoil(filled, 2)
    assert consumer.poll() == []
    before = consumer.stats()
    del record
    after = consumer.stats()
    assert (after["held"], after["released_total"]) == (before["held"], before["released_total"]) == (2, 0)
    assert (after["leases_returned_total"], after["leases_dropped_total"]) == (0, 1)
    other.release()
    assert accounted(consumer.stats())
    assert consumer.stats()["released_total"] == 1


def test_the_counters_add_up_at_each_line_of_a_quarantine(filled, make_consumer) -> None:
    """The death watch may bury the lane, and count it, at any of them."""
    consumer = make_consumer()
    record = consumer.get(5)
    spoil(filled, 1)
    (lane,) = consumer._lanes
    seen: list[bool] = []
    assert at_each_line(consumer.poll, lambda _: seen.append(accounted(lane.counters()))) > 5
    assert all(seen)
    record.release()
    assert (consumer.stats()["discarded_total{corrupt}"], accounted(consumer.stats())) == (3, True)


def test_an_interrupt_at_any_line_of_a_quarantine_counts_nothing_twice(
    bridge, make_producer, make_consumer
) -> None:
    line, came = 0, True
    while came:
        producer, consumer = make_producer(), make_consumer()
        for number in range(PUT):
            producer.put({"tokens": [[number]]})
        consumer.get(5).release()
        spoil(producer, 1)
        came = False

        def interrupt(at: int, line: int = line) -> None:
            nonlocal came
            if at == line:
                came = True
                raise Stop

        try:
            at_each_line(consumer.poll, interrupt)
        except Stop:
            assert consumer.poll() == []
        stats = consumer.stats()
        assert (stats["lanes_quarantined"], stats["discarded_total{corrupt}"], accounted(stats)) == (
            1,
            3,
            True,
        ), line
        consumer.close()
        producer.close()
        shmbridge.clean(bridge, dry_run=False)
        line += 1
    assert line > 5


def test_the_next_consumer_counts_what_was_held_though_another_was_released_as_unreadable(
    filled, make_consumer
) -> None:
    consumer = make_consumer()
    consumer.get(5)._discard(Discard.CORRUPT)
    in_hand = [consumer.get(5), consumer.get(5)]
    spoil(filled, 3)
    assert consumer.poll() == []
    assert consumer.stats()["discarded_total{corrupt}"] == 2
    consumer.close()
    del in_hand
    stats = make_consumer().stats()
    assert (stats["discarded_total{corrupt}"], stats["held"], accounted(stats)) == (4, 0, True)
