"""Releases are counted where they happen, and the count agrees with the lane's slots unless a record was
lost.
"""

import random
import threading

import numpy as np
import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.segments import open_mapping

GROUP = {"tokens": [[1, 2, 3]]}
SLOT_WORDS = 16  # 64-bit words of a slot


def counted(producer: shmbridge.Producer) -> tuple[int, int]:
    return header.releases(open_mapping(producer.lane_name, readonly=True))


def scribbled(released: str) -> str:
    """Code of a child that adds to a lane's count of releases for ever."""
    return f"""
import numpy as np
from shmbridge.segments import segment
from shmbridge._ext import header
lane = segment.open_mapping({released!r})
words = np.frombuffer(memoryview(lane), "<u8")
at = 0x300 // 8 + len(header.lane_counters(lane)["discarded"]) + 2
print("ready", flush=True)
while True:
    words[at] += 1
"""


def lose(producer: shmbridge.Producer, sequence: int) -> None:
    """Frees a record's memory without a count, which no consumer does."""
    lane = open_mapping(producer.lane_name)
    words = np.frombuffer(memoryview(lane), "<u8")
    (slots,) = words[4:5].view("<u4")[:1]
    _, slots_at, released_at, *_ = header.lane_geometry(producer.lane_bytes, int(slots))
    for slot in range(slots):
        generation, number = words[slots_at // 8 + slot * SLOT_WORDS :][:2]
        if generation and number == sequence:
            words[released_at // 8 + slot] = generation


def test_the_count_is_what_the_slots_show_whatever_is_released_in_which_order(
    producer, make_consumer
) -> None:
    rng, held, released = random.Random(3), [], 0
    consumer = make_consumer()
    for step in range(500):
        if rng.random() < 0.6 and producer.stats()["held"] < 60:
            producer.put(GROUP)
        elif rng.random() < 0.5:
            held += consumer.poll(3)
        elif held:
            record = held.pop(rng.randrange(len(held)))
            record.release()
            record.release()
            released += 1
        assert counted(producer) == (released, released), step
    stats = consumer.stats()
    assert stats["records_total"] == stats["released_total"] + stats["held"]
    assert stats["released_total"] == released > 100


def test_a_release_on_another_thread_counts(producer, consumer) -> None:
    for _ in range(20):
        producer.put(GROUP)
    records = consumer.poll(20)
    threads = [threading.Thread(target=record.release) for record in records]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counted(producer) == (20, 20)


def test_discarded_records_are_not_said_to_be_released(producer, make_consumer) -> None:
    for _ in range(3):
        producer.put(GROUP)
    stats = make_consumer(resume="discard").stats()
    assert counted(producer) == (3, 3)
    assert (stats["records_total"], stats["released_total"], stats["discarded_total{resume}"]) == (3, 0, 3)


@pytest.mark.parametrize("successor", [False, True])
def test_a_planted_lost_record_is_found(bridge, producer, make_consumer, successor) -> None:
    """Its memory is freed and no reader saw it. No successor takes that for an uncounted release."""
    consumer = make_consumer()
    for _ in range(4):
        producer.put(GROUP)
    consumer.get(1).release()
    lose(producer, 2)
    if successor:
        consumer.close()
        consumer = make_consumer()
    assert counted(producer) == (1, 2)
    stats = consumer.stats()
    assert stats["released_total"] == 1
    (lane,) = next(info for info in shmbridge.list_bridges() if info.name == bridge).lanes
    assert (lane.released, lane.unaccounted) == (1, 1)


def test_a_lane_that_never_stands_still_is_looked_at_a_few_times_only(
    bridge, make_producer, child, until
) -> None:
    producer = make_producer(lane_bytes="64M")  # with slots enough that a look at all of them takes its time
    child(scribbled(producer.lane_name))
    until(lambda: counted(producer)[1] is None)
    until(
        lambda: (
            [
                lane.unaccounted
                for info in shmbridge.list_bridges()
                if info.name == bridge
                for lane in info.lanes
            ]
            == [None]
        )
    )


def test_a_new_producer_counts_nothing_in_the_lanes_of_others(make_producer, monkeypatch) -> None:
    """Reading a busy lane's counts would delay it, and it needs their columns only."""
    make_producer()
    monkeypatch.setattr(header, "releases", None)
    make_producer()


def test_a_record_committed_while_the_counters_are_read_is_in_all_of_them_or_none(
    producer, consumer, monkeypatch
) -> None:
    producer.put(GROUP)
    consumer.get(5).release()
    real, left = header.lane_counters, [None] * 2

    def put_meanwhile(lane) -> dict:
        words = real(lane)
        if left:
            left.pop()
            producer.put(GROUP)
        return words

    monkeypatch.setattr(header, "lane_counters", put_meanwhile)
    stats = consumer.stats()
    assert stats["records_total"] == stats["released_total"] + stats["held"] == 3
