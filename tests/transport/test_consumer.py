"""The hub: order, fairness, one hub at a time, records of a successor, and counts that add up."""

import contextlib
import os
import random
import sys
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.hub import LaneSet, Waiting
from shmbridge.segments import locks, open_mapping

GROUP = {"tokens": [[1, 2]]}


def numbered(number: int) -> dict:
    return {"tokens": [[number]]}


def numbers(records) -> list[int]:
    return [int(record["tokens"].values[0]) for record in records]


def test_records_come_in_order_per_producer(make_producer, consumer) -> None:
    producers = [make_producer() for _ in range(3)]
    for number in range(20):
        for place, producer in enumerate(producers):
            producer.put(numbered(100 * place + number))
    seen = numbers(consumer.poll())
    assert len(seen) == 60
    for place in range(3):
        assert [each for each in seen if each // 100 == place] == [
            100 * place + number for number in range(20)
        ]


def test_lanes_take_turns(make_producer, consumer) -> None:
    busy, quiet = make_producer(), make_producer()
    for number in range(30):
        busy.put(numbered(number))
    for number in range(3):
        quiet.put(numbered(100 + number))
    assert sum(number >= 100 for number in numbers(consumer.poll(max_records=6))) == 3


def test_poll_takes_at_most_what_is_asked_and_never_waits(producer, consumer) -> None:
    assert consumer.poll() == []
    for number in range(5):
        producer.put(numbered(number))
    assert numbers(consumer.poll(max_records=2)) == [0, 1]
    assert consumer.poll(max_records=0) == []
    assert numbers(consumer.poll()) == [2, 3, 4]


def first_step(hub) -> list:
    hub.drain()
    return [next(iter(hub))]


@pytest.mark.parametrize("take", [lambda hub: hub.poll(), lambda hub: [hub.get(timeout_s=0)], first_step])
def test_a_lane_that_the_death_watch_just_adopts_is_not_overlooked(
    make_producer, consumer, monkeypatch, take
) -> None:
    adopts, go_on, adopt = threading.Event(), threading.Event(), LaneSet._adopt_one

    def slowly(*args) -> None:
        adopts.set()
        assert go_on.wait(10)
        adopt(*args)

    monkeypatch.setattr(LaneSet, "_adopt_one", slowly)
    producer = make_producer()
    assert adopts.wait(10)
    producer.put(numbered(1))
    threading.Timer(0.3, go_on.set).start()
    assert numbers(take(consumer)) == [1]


def test_get_waits_for_a_record(producer, consumer) -> None:
    threading.Timer(0.05, lambda: producer.put(GROUP)).start()
    assert len(consumer.get(timeout_s=10)) == 1
    assert consumer.stats()["wait_s"] > 0
    assert consumer.stats()["late_wakes_total"] == 0


def test_one_python_call_stands_between_a_wake_and_the_record(producer, consumer) -> None:
    """After a sleep each takes several microseconds, which no count of instructions shows."""
    calls: list[str] = []

    def note(frame, event, argument) -> None:
        if event == "return" and frame.f_code is Waiting.wait.__code__:
            calls.clear()
        elif event == "call":
            calls.append(frame.f_code.co_name)

    threading.Timer(0.1, producer.put, [GROUP]).start()
    sys.setprofile(note)
    try:
        record = consumer.get(20.0)
    finally:
        sys.setprofile(None)
    record.release()
    assert calls == ["_take"]


def test_get_without_a_record_says_who_is_there(producer, consumer) -> None:
    consumer.poll()
    began = time.monotonic()
    with pytest.raises(shmbridge.ConsumerEmpty, match=r"within 0\.05 s; 1 of 1 lane has a living producer"):
        consumer.get(timeout_s=0.05)
    assert time.monotonic() - began >= 0.05
    with pytest.raises(shmbridge.ConsumerEmpty):
        consumer.get(timeout_s=0)


def test_either_end_may_come_first(make_producer, make_consumer) -> None:
    early = make_producer()
    early.put(numbered(1))
    consumer = make_consumer()
    late = make_producer()
    late.put(numbered(2))
    assert sorted(numbers(consumer.poll())) == [1, 2]


def test_a_second_consumer_is_refused_by_pid(bridge, consumer, child) -> None:
    with pytest.raises(shmbridge.ConsumerTaken, match="this very process"):
        shmbridge.Consumer(bridge)
    process = child(
        """
import shmbridge
try:
    shmbridge.Consumer(bridge)
except shmbridge.ConsumerTaken as taken:
    print("ready")
    print(taken)
"""
    )
    assert f"pid {os.getpid()}" in process.stdout.readline()


def test_iteration_ends_when_drained(producer, consumer) -> None:
    for number in range(3):
        producer.put(numbered(number))
    consumer.drain()
    assert numbers(consumer) == [0, 1, 2]


def test_iteration_ends_on_close(producer, consumer) -> None:
    producer.put(GROUP)
    seen = []
    for record in consumer:
        seen.append(len(record))
        consumer.close()
    assert seen == [1]


def test_a_closed_consumer_says_so(consumer) -> None:
    consumer.close()
    consumer.close()
    for forbidden in (
        consumer.poll,
        lambda: consumer.get(timeout_s=0),
        consumer.pause,
        consumer.resume,
        consumer.drain,
        lambda: consumer.policy_version,
        lambda: consumer.paused,
        lambda: consumer.draining,
        lambda: consumer.publish_policy_version(1),
        lambda: consumer.announce_run(shmbridge.Run()),
    ):
        with pytest.raises(shmbridge.Closed):
            forbidden()
    assert consumer.stats()["records_total"] == 0


def test_policy_versions_only_rise(producer, consumer) -> None:
    consumer.publish_policy_version(0)
    consumer.publish_policy_version(5)
    consumer.publish_policy_version(5)
    with pytest.raises(ValueError, match="4 is before 5"):
        consumer.publish_policy_version(4)
    assert producer.policy_version == 5


def test_a_successor_gets_what_was_not_released_with_exact_flags(make_producer, make_consumer) -> None:
    producer = make_producer()
    for number in range(6):
        producer.put(numbered(number))
    with pytest.raises(KeyboardInterrupt), make_consumer() as first:
        taken = [first.get(timeout_s=5) for _ in range(4)]
        taken[1].release()
        del taken[2]
        raise KeyboardInterrupt
    del taken
    second = make_consumer()
    records = second.poll()
    marks = [(record.meta.sequence, record.meta.redelivered) for record in records]
    assert marks == [(0, True), (2, True), (3, True), (4, False), (5, False)]
    producer.put(numbered(6))
    assert not second.get(timeout_s=5).meta.redelivered


def test_discard_drops_and_counts_what_was_left(make_producer, make_consumer) -> None:
    producer = make_producer()
    for number in range(3):
        producer.put(numbered(number))
    first = make_consumer()
    first.get(timeout_s=5)._abandon()
    first.close()
    second = make_consumer(resume="discard")
    producer.put(numbered(9))
    assert numbers(second.poll()) == [9]
    assert second.stats()["discarded_total{resume}"] == second.stats()["discarded_total"] == 3


def test_no_more_lanes_than_allowed_and_the_rest_in_turn(make_producer, make_consumer, until) -> None:
    consumer = make_consumer(lanes=2)
    producers = [make_producer() for _ in range(3)]
    for place, producer in enumerate(producers):
        producer.put(numbered(place))
    assert numbers(consumer.poll()) == [0, 1]
    producers[0].close()
    assert numbers([consumer.get(timeout_s=5)]) == [2]


def test_seventy_environments_are_all_taken_from_by_default(bridge, make_consumer) -> None:
    consumer = make_consumer()
    with contextlib.ExitStack() as stack:
        producers = [stack.enter_context(shmbridge.Producer(bridge, lane_bytes="64K")) for _ in range(70)]
        for place, producer in enumerate(producers):
            producer.put(numbered(place))
        seen = set()
        while len(seen) < 70:
            with consumer.get(timeout_s=10) as record:
                seen.update(numbers([record]))
        assert consumer.stats()["lanes_waiting"] == 0


def test_as_many_lanes_as_descriptors_allow(monkeypatch) -> None:
    def limited_to(count: int) -> int:
        monkeypatch.setattr(locks, "raise_descriptors", lambda: None)
        monkeypatch.setattr(locks.os, "listdir", lambda _: [*map(str, range(40))])  # its open files
        monkeypatch.setattr(locks.resource, "getrlimit", lambda _: (count, count))
        return locks.lanes_at_most()

    assert limited_to(1 << 20) == limited_to(locks.resource.RLIM_INFINITY) == 1024
    assert 300 < limited_to(1024) < 448
    assert limited_to(64) == 1


def test_stats_know_a_lane_before_anything_was_taken(make_producer, consumer, until) -> None:
    producer = make_producer()
    producer.put(GROUP)
    until(lambda: consumer.stats()["records_total"] == 1, timeout_s=1.5)
    assert consumer.stats()["lanes_live"] == 1


def test_nothing_is_lost_or_counted_twice(make_producer, make_consumer) -> None:
    draw = random.Random(5)
    producers = [make_producer(on_full="drop") for _ in range(3)]
    consumer, held = make_consumer(), []
    put = dropped = released = discarded = seen = 0
    delivered: dict[tuple[str, int], int] = {}
    for step in range(600):
        if draw.random() < 0.6:
            result = draw.choice(producers).put({"tokens": [np.arange(draw.randint(1, 4000))]})
            put, dropped = put + (result is not None), dropped + (result is None)
        elif draw.random() < 0.5:
            for record in consumer.poll(max_records=draw.randint(1, 4)):
                key = (record.meta.producer_id, record.meta.sequence)
                assert record.meta.redelivered == (key in delivered)
                delivered[key] = delivered.get(key, 0) + 1
                held.append(record)
                seen += 1
        elif held:
            record = held.pop(draw.randrange(len(held)))
            if draw.random() < 0.2:
                record._discard(0)
                discarded += 1
            else:
                record.release()
                released += 1
        if step % 97 == 96:
            for record in held:
                record._abandon()
            held.clear()
            del record
            consumer.close()
            consumer = make_consumer()
        stats = consumer.stats()
        assert stats["dropped_total"] == dropped
    unread = consumer.poll()
    stats = consumer.stats()
    assert (stats["records_total"], stats["released_total"], stats["discarded_total"]) == (
        put,
        released,
        discarded,
    )
    assert stats["held"] == len(held) + len(unread) == put - released - discarded
    assert dropped > 0


def test_garbage_among_lanes_is_said_once_and_the_records_before_it_come(
    make_producer, make_consumer, caplog
) -> None:
    first, bad, last = (make_producer() for _ in range(3))
    consumer = make_consumer()
    for number in range(3):
        for place, producer in enumerate((first, bad, last)):
            producer.put(numbered(10 * place + number))
    assert numbers(consumer.poll(max_records=4)) == [0, 10, 20, 1]
    np.frombuffer(memoryview(open_mapping(bad.lane_name)), "<u8", 1, 0x200)[0] = 1 << 40
    first.put(numbered(3))
    assert sorted(numbers(consumer.poll())) == [2, 3, 21, 22]
    with pytest.raises(shmbridge.ConsumerEmpty):
        consumer.get(timeout_s=0)
    assert [line for line in caplog.messages if "quarantined" in line] == [
        (
            f"lane of producer {bad.producer_id} is quarantined: tail {1 << 40} is {(1 << 40) - 1} past 1, "
            "more than 64 slots"
        )
    ]
    assert consumer.stats()["lanes_quarantined"] == 1


def test_garbage_found_while_a_backlog_is_discarded_is_counted_and_said_once(
    make_producer, make_consumer, caplog
) -> None:
    producer = make_producer()
    for number in range(3):
        producer.put(numbered(number))
    lane = open_mapping(producer.lane_name)
    words = np.frombuffer(memoryview(lane), "<u8")
    (place,) = np.flatnonzero((words[:-1] == 1) & (words[1:] == 1))  # generation 1, sequence 1
    words[place + 3] = 1 << 40  # bytes of its extent
    consumer = make_consumer(resume="discard")
    assert consumer.poll() == []
    stats = consumer.stats()
    assert (
        stats["lanes_quarantined"],
        stats["discarded_total{resume}"],
        stats["discarded_total{corrupt}"],
    ) == (1, 1, 2)
    assert header.lane_counters(lane)["quarantined"] == 2, "what the next consumer will see"
    assert sum("quarantined" in line for line in caplog.messages) == 1
