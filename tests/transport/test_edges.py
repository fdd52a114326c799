"""Regression tests of edge cases: each of these once broke a lane, a loop or a process."""

import asyncio
import os
import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge.segments import open_mapping

LOSSY = {"tokens": [[5, 6]], "masks": [[-100, 7]], "scores": [1.0]}


def fill(producer) -> int:
    """Puts until the lane is full; how many went in."""
    count = 0
    with pytest.raises(shmbridge.LaneFull):
        while True:
            producer.put({"tokens": [np.arange(2000)]}, timeout_s=0)
            count += 1
    return count


@pytest.mark.parametrize("components", [{}, {"": 1.0}])
def test_maps_without_keys_are_legal(producer, consumer, components) -> None:
    producer.put({"tokens": [[1]], "reward_components": [components]})
    assert consumer.get(timeout_s=5)["reward_components"] == [components]


def test_a_lane_that_has_room_again_is_not_stuck(make_producer, consumer) -> None:
    producer = make_producer(on_full="raise")
    fill(producer)
    for record in consumer.poll():
        record.release()
    del record
    iterator = consumer.batches(groups=2, prefetch=0)
    producer.put({"tokens": [[1]]})
    began = time.monotonic()

    def second() -> None:
        time.sleep(1.6)  # longer than a full lane needs to count as stuck
        producer.put({"tokens": [[2]]})

    thread = threading.Thread(target=second)
    thread.start()
    assert len(next(iterator)) == 2
    assert time.monotonic() - began > 1.5
    thread.join()


def test_lossy_masks_keep_their_deadline(producer, consumer) -> None:
    fill(producer)
    began = time.monotonic()
    with pytest.raises(shmbridge.LaneFull):
        producer.put(LOSSY | {"tokens": [list(range(2000))], "masks": [[7] * 2000]}, timeout_s=0.2)
    assert time.monotonic() - began < 5


async def test_a_row_that_grows_while_it_waits_is_refused_and_nobody_else_suffers(
    make_producer, consumer
) -> None:
    producer = make_producer()
    count = fill(producer)
    row = list(range(2000))
    waiting = asyncio.ensure_future(producer.put_async({"tokens": [row]}))
    await asyncio.sleep(0)
    row.extend(range(400_000))
    for record in consumer.poll():
        record.release()
    del record
    with pytest.raises(shmbridge.InvalidRecord):
        await waiting
    assert producer.put({"tokens": [[1]]}) == count
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [1]


def test_everything_says_closed_in_a_forked_child(producer, consumer) -> None:
    asks = [
        producer.stats,
        lambda: producer.policy_version,
        lambda: producer.paused,
        lambda: producer.put({"tokens": [[1]]}),
        lambda: consumer.policy_version,
        consumer.pause,
        consumer.poll,
        lambda: consumer.publish_policy_version(1),
    ]
    child = os.fork()
    if child == 0:
        failed = 0
        for ask in asks:
            try:
                ask()
                failed += 1
            except shmbridge.Closed:
                pass
        os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_quarantined_lane_says_so_to_its_producer_and_is_counted_once(
    bridge, make_producer, make_consumer
) -> None:
    producer, consumer = make_producer(), make_consumer()
    producer.put_many([{"tokens": [[1]]}] * 3)
    np.frombuffer(memoryview(open_mapping(producer.lane_name)), "<u8", 1, 0x200)[0] = 1 << 40
    assert consumer.poll() == []
    with pytest.raises(shmbridge.LaneQuarantined):
        producer.put({"tokens": [[1]]})
    before = consumer.stats()["discarded_total{corrupt}"]
    consumer.close()
    assert make_consumer().stats()["discarded_total{corrupt}"] == before


def test_counters_at_close_say_what_the_next_consumer_will_get(bridge, producer, make_consumer) -> None:
    producer.put_many([{"tokens": [[n]]} for n in range(3)])
    consumer = make_consumer()
    iterator = consumer.batches(groups=2, prefetch=1)
    next(iterator).release()
    iterator.close()
    consumer.close()
    assert (consumer.stats()["released_total"], consumer.stats()["held"]) == (2, 1)
    assert [record["tokens"].values.tolist() for record in make_consumer().poll()] == [[2]]


def test_a_claim_still_open_at_close_is_given_up(producer, consumer) -> None:
    with pytest.raises(shmbridge.Closed), producer.claim(1, {"tokens": [1]}) as slot:
        slot["tokens"][:] = 1
        producer.close()
    assert consumer.poll() == []
