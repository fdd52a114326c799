"""Taking records from an event loop."""

import asyncio
import threading
import time

import pytest

import shmbridge
from shmbridge.segments import Joined


def numbers(records) -> list[int]:
    return [int(record["tokens"].values[0]) for record in records]


async def test_get_async_waits_without_blocking_the_loop(producer, consumer) -> None:
    ticks = 0

    async def tick() -> None:
        nonlocal ticks
        while True:
            ticks += 1
            await asyncio.sleep(0.005)

    ticking = asyncio.create_task(tick())
    threading.Timer(0.1, lambda: producer.put({"tokens": [[5]]})).start()
    assert numbers([await consumer.get_async(timeout_s=10)]) == [5]
    ticking.cancel()
    assert ticks > 5


async def test_get_async_without_a_record_raises(consumer) -> None:
    with pytest.raises(shmbridge.ConsumerEmpty):
        await consumer.get_async(timeout_s=0.05)


async def test_a_cancelled_get_async_does_not_delay_the_next(consumer) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.get_async(), 0.05)
    began = time.monotonic()
    with pytest.raises(shmbridge.ConsumerEmpty):
        await consumer.get_async(timeout_s=0.1)
    assert time.monotonic() - began < 0.6


async def test_a_cancelled_get_async_takes_nothing_with_it(producer, consumer) -> None:
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(consumer.get_async(), 0.05)
    producer.put({"tokens": [[5]]})
    assert numbers([await consumer.get_async(timeout_s=5)]) == [5]


async def test_async_iteration_ends_when_drained(producer, consumer) -> None:
    for number in range(3):
        producer.put({"tokens": [[number]]})
    consumer.drain()
    assert [int(record["tokens"].values[0]) async for record in consumer] == [0, 1, 2]


async def test_async_iteration_ends_on_close(producer, consumer) -> None:
    producer.put({"tokens": [[1]]})
    async for record in consumer:
        assert numbers([record]) == [1]
        consumer.close()


async def test_close_frees_a_get_async_that_waits(consumer) -> None:
    task = asyncio.create_task(consumer.get_async())
    await asyncio.sleep(0.05)
    consumer.close()
    with pytest.raises(shmbridge.Closed):
        await asyncio.wait_for(task, 5)


async def test_close_in_a_thread_frees_a_get_async_that_waits(consumer) -> None:
    task = asyncio.create_task(consumer.get_async())
    await asyncio.sleep(0.05)
    await asyncio.to_thread(consumer.close)
    with pytest.raises(shmbridge.Closed):
        await asyncio.wait_for(task, 5)


def test_one_loop_after_another(producer, consumer) -> None:
    for number in range(3):
        threading.Timer(0.05, lambda n=number: producer.put({"tokens": [[n]]})).start()
        assert numbers([asyncio.run(consumer.get_async(timeout_s=10))]) == [number]
    assert consumer.stats()["late_wakes_total"] == 0


async def test_all_that_wait_in_a_loop_are_woken(producer, consumer) -> None:
    tasks = [asyncio.create_task(consumer.get_async(timeout_s=10)) for _ in range(3)]
    await asyncio.sleep(0.05)
    for number in range(3):
        producer.put({"tokens": [[number]]})
    assert sorted(numbers(await asyncio.gather(*tasks))) == [0, 1, 2]


async def test_a_get_beside_a_get_async_does_not_make_it_deaf(producer, consumer) -> None:
    task = asyncio.create_task(consumer.get_async(timeout_s=10))
    await asyncio.sleep(0.05)
    with pytest.raises(shmbridge.ConsumerEmpty):
        consumer.get(timeout_s=0.05)
    threading.Timer(0.1, lambda: producer.put({"tokens": [[5]]})).start()
    assert numbers([await task]) == [5]
    assert consumer.stats()["late_wakes_total"] == 0


async def test_a_wait_in_a_loop_counts_as_wait(consumer) -> None:
    with pytest.raises(shmbridge.ConsumerEmpty):
        await consumer.get_async(timeout_s=0.1)
    assert consumer.stats()["wait_s"] >= 0.09


async def test_a_lane_that_goes_while_a_get_async_waits_is_not_looked_at_again(
    make_producer, consumer
) -> None:
    stays, goes = make_producer(), make_producer()
    consumer.poll()
    waiting = asyncio.create_task(consumer.get_async(timeout_s=10))
    await asyncio.sleep(0)
    with pytest.raises(shmbridge.ConsumerEmpty):
        consumer.get(timeout_s=0.01)  # takes over the watch of lanes
    goes.close()
    while consumer.stats()["lanes_live"] + consumer.stats()["lanes_dead"] > 1:
        time.sleep(0.01)  # the loop stands still meanwhile
        consumer.poll()
    time.sleep(1.1)  # past the tick, after which the waiter checks the lanes it watched
    await asyncio.sleep(0.05)
    stays.put({"tokens": [[1]]})
    (await waiting).release()


@pytest.mark.parametrize("raised", [RuntimeError("can't start new thread"), KeyboardInterrupt()])
def test_a_wait_that_could_not_start_its_thread_once_sleeps_the_next_time(
    raised, consumer, monkeypatch
) -> None:
    def refuse(_: Joined) -> None:
        monkeypatch.undo()
        raise raised

    monkeypatch.setattr(Joined, "start", refuse)
    with pytest.raises(type(raised)):
        asyncio.run(consumer.get_async(timeout_s=0.1))
    used = time.process_time()
    with pytest.raises(shmbridge.ConsumerEmpty):
        asyncio.run(consumer.get_async(timeout_s=0.5))
    assert time.process_time() - used < 0.2


async def test_a_closed_consumer_that_waited_in_a_loop_lets_the_bridge_go_with_its_last_view(
    bridge, producer, make_consumer
) -> None:
    first = make_consumer()
    threading.Timer(0.05, lambda: producer.put({"tokens": [[5]]})).start()
    record = await first.get_async(timeout_s=10)
    view = record["tokens"].values
    first.close()
    with pytest.raises(shmbridge.ConsumerTaken):
        shmbridge.Consumer(bridge)
    del record, view
    make_consumer().close()
