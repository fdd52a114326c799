"""Waiting uses no CPU: consumers among idle producers, in a thread or a loop, and producers whose lane is
full.
"""

import asyncio
import time
from collections.abc import Callable

import pytest

import shmbridge

LOOK_S = 2.0
MOST = 0.01  # of a core; a loop that spins would use all of one
GROUP = {"tokens": [[1, 2, 3]]}


def share_of_a_core(wait: Callable[[], object]) -> float:
    """Returns the CPU time of this process, its threads included, per second while `wait` waits."""
    began, cpu = time.monotonic(), time.process_time()
    wait()
    return (time.process_time() - cpu) / (time.monotonic() - began)


def waits_for_nothing(consumer: shmbridge.Consumer, timeout_s: float) -> None:
    with pytest.raises(shmbridge.ConsumerEmpty):
        consumer.get(timeout_s)


def test_a_consumer_among_idle_producers(make_producer, consumer) -> None:
    _producers = [make_producer() for _ in range(16)]
    waits_for_nothing(consumer, 0.1)  # it adopts the lanes
    assert consumer.stats()["lanes_live"] == 16
    assert share_of_a_core(lambda: waits_for_nothing(consumer, LOOK_S)) < MOST
    assert consumer.stats()["late_wakes_total"] == 0


async def test_a_consumer_in_a_loop_among_idle_producers(make_producer, consumer) -> None:
    _producers = [make_producer() for _ in range(16)]
    with pytest.raises(shmbridge.ConsumerEmpty):
        await consumer.get_async(timeout_s=0.1)
    began, cpu = time.monotonic(), time.process_time()
    with pytest.raises(shmbridge.ConsumerEmpty):
        await consumer.get_async(timeout_s=LOOK_S)
    assert (time.process_time() - cpu) / (time.monotonic() - began) < MOST


def test_a_producer_whose_lane_is_full(make_producer, consumer) -> None:
    producer = make_producer(on_full="block")
    with pytest.raises(shmbridge.LaneFull):
        while True:
            producer.put(GROUP, timeout_s=0.01)

    def waits_for_room() -> None:
        with pytest.raises(shmbridge.LaneFull):
            producer.put(GROUP, timeout_s=LOOK_S)

    assert share_of_a_core(waits_for_room) < MOST


def test_a_put_async_into_a_full_lane(make_producer, consumer) -> None:
    producer = make_producer(on_full="block")

    async def fill() -> None:
        while True:
            await producer.put_async(GROUP, timeout_s=0.01)

    async def wait_for_room() -> None:
        with pytest.raises(shmbridge.LaneFull):
            await producer.put_async(GROUP, timeout_s=LOOK_S)

    with pytest.raises(shmbridge.LaneFull):
        asyncio.run(fill())
    assert share_of_a_core(lambda: asyncio.run(wait_for_room())) < MOST
