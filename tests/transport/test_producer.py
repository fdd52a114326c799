"""The producer's end: results of put, waiting, counters, and leaving."""

import os
import re
import threading
import time

import numpy as np
import pyarrow as pa
import pytest

import shmbridge

GROUP = {"tokens": [[1, 2, 3], [4]], "score": [1.0, 0.0]}
BIG = {"tokens": [np.arange(3000)]}  # five of them fill a lane of 64 KiB


def fill(producer: shmbridge.Producer) -> int:
    count = 0
    while producer.stats()["lane_free_bytes"] > 13_000:
        producer.put(BIG)
        count += 1
    return count


def dropped(producer) -> dict[str, float]:
    return {
        name[14:-1]: value
        for name, value in producer.stats().items()
        if name.startswith("dropped_total{") and value
    }


def test_put_counts_sequences_from_zero(producer) -> None:
    assert [producer.put(GROUP) for _ in range(3)] == [0, 1, 2]
    assert producer.put_many([GROUP, GROUP], group_id="g") == [3, 4]
    stats = producer.stats()
    assert (stats["records_total"], stats["tokens_total"], stats["held"]) == (5, 20, 5)


def test_group_identity_and_split_are_carried(producer, consumer) -> None:
    producer.put(GROUP, group_id=17, group_size=8, split="eval")
    producer.put(GROUP)
    producer.put(GROUP)
    first, second, third = (consumer.get(timeout_s=5).meta for _ in range(3))
    assert (first.group_id, first.group_size, first.split) == ("17", 8, "eval")
    assert (second.group_size, second.split) == (2, "train")
    assert second.group_id != third.group_id
    assert first.producer_id == producer.producer_id


def test_a_producers_id_is_what_was_given_and_its_incarnation(make_producer, consumer) -> None:
    first, second = make_producer(producer_id="env1"), make_producer(producer_id="env1")
    for each in (first, second):
        each.put(GROUP)
    keys = {(record.meta.producer_id, record.meta.sequence) for record in consumer.poll()}
    assert keys == {(first.producer_id, 0), (second.producer_id, 0)}
    assert len(keys) == 2
    assert first.producer_id == f"env1-{first.lane_name[-16:]}"
    assert re.fullmatch(rf"gsm8k-{os.getpid()}-[0-9a-f]{{16}}", make_producer(env_name="gsm8k").producer_id)


@pytest.mark.parametrize("given", ["x" * 64, "é" * 32, "a\0b", 5, b"env"], ids=repr)
def test_an_id_that_would_not_arrive_whole_is_refused(bridge, given) -> None:
    with pytest.raises(ValueError, match=r"producer_id") as caught:
        shmbridge.Producer(bridge, lane_bytes="64K", producer_id=given)
    if given == "é" * 32:
        assert "64 bytes" in str(caught.value)
    assert shmbridge.list_bridges() == [] or bridge not in {info.name for info in shmbridge.list_bridges()}


def test_the_longest_id_arrives_whole(make_producer, consumer) -> None:
    producer = make_producer(producer_id="é" * 31 + "x", lane_bytes="64K")
    producer.put(GROUP)
    assert (
        consumer.get(timeout_s=5).meta.producer_id
        == producer.producer_id
        == "é" * 31 + "x-" + producer.lane_name[-16:]
    )


def test_the_current_policy_version_is_stamped_unless_another_is_given(producer, consumer) -> None:
    producer.put(GROUP)
    consumer.publish_policy_version(4)
    assert producer.policy_version == 4
    producer.put(GROUP)
    producer.put(GROUP, policy_version=2)
    producer.put(GROUP, policy_version=(1, 3))
    versions = [
        (record.meta.min_policy_version, record.meta.max_policy_version) for record in consumer.poll()
    ]
    assert versions == [(-1, -1), (4, 4), (2, 2), (1, 3)]


def test_a_full_lane_raises_and_commits_nothing(producer, consumer) -> None:
    count = fill(producer)
    with pytest.raises(shmbridge.LaneFull):
        producer.put(BIG)
    assert len(consumer.poll()) == count
    assert dropped(producer) == {}


def test_a_full_lane_names_the_consumer_that_holds_it(producer, make_consumer) -> None:
    fill(producer)
    with pytest.raises(shmbridge.LaneFull, match="no consumer is alive"):
        producer.put(BIG)
    consumer = make_consumer()
    with pytest.raises(
        shmbridge.LaneFull, match=r"consumer pid \d+ is alive and has not released \d records"
    ):
        producer.put(BIG)
    consumer.pause()
    with pytest.raises(shmbridge.LaneFull, match="paused by the consumer"):
        producer.put(BIG)


def test_drop_counts_and_returns_none(make_producer, consumer) -> None:
    producer = make_producer(on_full="drop")
    count = fill(producer)
    assert producer.put(BIG) is None
    assert producer.put_many([BIG, BIG]) == [None, None]
    assert dropped(producer) == {"full": 3}
    records = consumer.poll()
    assert len(records) == count
    assert consumer.stats()["dropped_total"] == 3
    for record in records:
        record.release()
    del record, records
    assert producer.put(BIG) == count


def test_block_waits_until_the_timeout_and_says_how_long(make_producer) -> None:
    producer = make_producer()
    fill(producer)
    began = time.monotonic()
    with pytest.raises(shmbridge.LaneFull, match=r"after 0\.1 s"):
        producer.put(BIG, timeout_s=0.1)
    assert time.monotonic() - began >= 0.1
    assert producer.stats()["wait_s"] >= 0.09
    with pytest.raises(shmbridge.LaneFull):
        producer.put(BIG, timeout_s=0)


def test_block_goes_on_as_soon_as_there_is_room(make_producer, consumer) -> None:
    producer = make_producer()
    count = fill(producer)
    records = consumer.poll()
    timer = threading.Timer(0.05, lambda: [record.release() for record in records])
    timer.start()
    assert producer.put(BIG, timeout_s=10) == count
    timer.join()
    assert producer.stats()["late_wakes_total"] == 0


def test_lossy_masks_respect_timeout_and_drop_policy_when_the_lane_is_full(make_producer) -> None:
    lossy = {"tokens": [list(range(1000, 1900))], "masks": [[7] * 900], "scores": [1.0]}
    for on_full in ("block", "raise", "drop"):
        with make_producer(on_full=on_full) as producer:
            while producer.stats()["lane_free_bytes"] > 6000:
                producer.put({"tokens": [list(range(900))]})
            if on_full == "drop":
                assert producer.put(lossy) is None
                assert dropped(producer) == {"full": 1}
            else:
                with pytest.raises(shmbridge.LaneFull):
                    producer.put(lossy, timeout_s=0.1)


def test_a_pause_holds_put_back_and_its_end_lets_it_go(make_producer, consumer, until) -> None:
    producer = make_producer()
    consumer.pause()
    assert producer.paused
    with pytest.raises(shmbridge.LaneFull, match="paused"):
        producer.put(GROUP, timeout_s=0.05)
    thread = threading.Thread(target=lambda: producer.put(GROUP, timeout_s=10))
    thread.start()
    until(lambda: producer.stats()["wait_s"] > 0)
    assert consumer.poll() == []
    consumer.resume()
    thread.join()
    assert len(consumer.poll()) == 1


def test_draining_takes_nothing_new(make_producer, consumer) -> None:
    producer = make_producer()
    producer.put(GROUP)
    consumer.drain()
    with pytest.raises(shmbridge.BridgeDraining):
        producer.put(GROUP)
    assert len(consumer.poll()) == 1


def test_draining_frees_a_producer_that_waits(make_producer, consumer) -> None:
    producer = make_producer()
    fill(producer)
    threading.Timer(0.05, consumer.drain).start()
    with pytest.raises(shmbridge.BridgeDraining):
        producer.put(BIG, timeout_s=10)


def test_close_leaves_committed_records(make_producer, consumer) -> None:
    producer = make_producer()
    producer.put(GROUP)
    producer.close()
    producer.close()
    assert consumer.get(timeout_s=5)["score"].tolist() == [1.0, 0.0]
    for forbidden in (lambda: producer.put(GROUP), lambda: producer.claim(1, {"tokens": [1]})):
        with pytest.raises(shmbridge.Closed):
            forbidden()
    assert producer.stats()["records_total"] == 1


def test_close_with_drain_waits_for_the_release(make_producer, consumer) -> None:
    producer = make_producer()
    producer.put(GROUP)
    with pytest.raises(shmbridge.LaneFull, match=producer.producer_id):
        producer.close(drain=True, timeout_s=0.05)
    other = make_producer()
    other.put(GROUP)
    records = [consumer.get(timeout_s=5) for _ in range(2)]
    threading.Timer(0.05, lambda: [record.release() for record in records]).start()
    other.close(drain=True, timeout_s=10)


def test_leaving_removes_an_empty_lane(make_producer, segments) -> None:
    producer = make_producer()
    assert len(segments()) == 2
    producer.close()
    assert segments() == []


def test_a_record_of_half_a_lane_is_too_big_and_says_what_would_do(producer, consumer) -> None:
    with pytest.raises(
        shmbridge.RecordTooBig, match=r"39\.\d KiB \(1 row, 10000 tokens\).*64 KiB.*lane_bytes="
    ):
        producer.put({"tokens": [np.arange(10_000)]})
    assert producer.put(GROUP) == 0
    assert dropped(producer) == {"invalid": 1}


@pytest.mark.parametrize(
    "options",
    [
        {"policy_version": 2**70},
        {"policy_version": (1,)},
        {"policy_version": [1, 2]},
        {"policy_version": (5, 2)},
        {"group_size": 2**40},
        {"group_size": 1},
        {"group_id": "\ud800"},
        {"group_id": "x" * 5000},
        {"split": "test"},
    ],
    ids=str,
)
def test_stamps_that_cannot_be_are_refused_and_the_producer_goes_on(producer, consumer, options) -> None:
    with pytest.raises(shmbridge.InvalidRecord):
        producer.put(GROUP, **options)
    assert producer.put(GROUP) == 0
    assert len(consumer.poll()) == 1


def test_a_schema_extends_the_columns(make_producer, make_consumer) -> None:
    schema = pa.schema([("entropy", pa.list_(pa.float32())), ("level", pa.int16())])
    producer, consumer = make_producer(schema=schema), make_consumer()
    producer.put({"tokens": [[1, 2]], "entropy": [[0.5]], "level": [7]})
    record = consumer.get(timeout_s=5)
    assert record["entropy"][0].tolist() == [0.5]
    assert record["level"].tolist() == [7]


def test_stats_may_be_asked_from_another_thread_while_putting(make_producer, consumer) -> None:
    producer, stop = make_producer(lane_bytes="256K"), threading.Event()

    def ask() -> None:
        while not stop.is_set():
            assert producer.stats()["held"] >= 0

    def eat() -> None:
        while not stop.is_set():
            for record in consumer.poll():
                values = record["tokens"].values
                assert (values == values[0]).all()
                record.release()

    threads = [threading.Thread(target=each) for each in (ask, eat)]
    for thread in threads:
        thread.start()
    end, number = time.monotonic() + 1.0, 0
    try:
        while time.monotonic() < end:
            producer.put({"tokens": [np.full(number % 700 + 1, number, np.int32)]}, timeout_s=5)
            number += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    for record in consumer.poll():
        record.release()
        del record
    assert producer.stats()["lane_free_bytes"] == producer.lane_bytes


@pytest.mark.parametrize("wrong", ["on_full", "lane_bytes", "bridge"])
def test_arguments_that_cannot_be_leave_nothing_behind(bridge, segments, wrong) -> None:
    arguments = (
        {"on_full": "wait"} if wrong == "on_full" else {"lane_bytes": "lots"} if wrong == "lane_bytes" else {}
    )
    with pytest.raises(ValueError):
        shmbridge.Producer("no spaces" if wrong == "bridge" else bridge, **arguments)
    assert segments() == []


def test_too_little_memory_is_an_error_at_start_that_leaves_nothing(bridge, segments) -> None:
    with pytest.raises(shmbridge.ShmTooSmall, match=r"900 TiB.*free"):
        shmbridge.Producer(bridge, lane_bytes="900T")
    assert segments() == []


def test_a_lane_out_of_slots_says_so(make_producer) -> None:
    producer = make_producer(on_full="raise")
    with pytest.raises(shmbridge.LaneFull, match=r"[1-9]\S* KiB of 64 KiB free, 0 of \d+ slots"):
        for _ in range(100):
            producer.put({"tokens": [[1]]})
