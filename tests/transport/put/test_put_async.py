"""Putting from an event loop: in order, without blocking the loop, and every group handed over is committed
or counted.
"""

import asyncio
import time
from contextlib import suppress

import numpy as np
import pytest

import shmbridge


def big(number: int = 0) -> dict:
    return {"tokens": [np.full(3000, number)], "score": [number]}


@pytest.fixture
def full(make_producer):
    """A blocking producer whose lane is full, and the number of records in it."""
    producer = make_producer()
    while producer.stats()["lane_free_bytes"] > 13_000:
        producer.put(big(99))
    return producer, producer.stats()["records_total"]


async def settle(tasks) -> list:
    await asyncio.sleep(0.02)
    return tasks


async def test_put_async_that_need_not_wait_is_a_put(producer, consumer) -> None:
    assert [await producer.put_async(big()) for _ in range(2)] == [0, 1]
    assert len(consumer.poll()) == 2


async def test_groups_come_in_the_order_of_the_calls(full, make_consumer) -> None:
    producer, count = full
    tasks = [asyncio.create_task(producer.put_async(big(number))) for number in range(8)]
    await settle(tasks)
    consumer, scores = make_consumer(), []
    while len(scores) < count + 8:
        record = await consumer.get_async(timeout_s=5)
        scores.append(float(record["score"][0]))
        record.release()
    assert scores[count:] == list(range(8))
    assert [await task for task in tasks] == [count + number for number in range(8)]


async def test_the_loop_goes_on_while_a_put_waits(full) -> None:
    producer, _ = full
    task = asyncio.create_task(producer.put_async(big(), timeout_s=0.3))
    gaps, last = [], time.monotonic()
    while not task.done():
        await asyncio.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    with pytest.raises(shmbridge.LaneFull):
        await task
    assert len(gaps) > 10


async def test_a_cancelled_put_is_still_committed(full, make_consumer) -> None:
    producer, count = full
    task = asyncio.create_task(producer.put_async(big(7)))
    await settle([task])
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    consumer = make_consumer()
    scores = []
    for _ in range(count + 1):
        record = await consumer.get_async(timeout_s=5)
        scores.append(float(record["score"][0]))
        record.release()
    assert scores[-1] == 7


async def test_a_put_that_runs_out_of_time_is_counted(full) -> None:
    producer, _ = full
    with pytest.raises(shmbridge.LaneFull):
        await producer.put_async(big(), timeout_s=0.05)
    assert producer.stats()["dropped_total{timeout}"] == 1


async def test_close_while_waiting_commits_or_counts_each(full, make_consumer) -> None:
    producer, count = full
    tasks = [asyncio.create_task(producer.put_async(big(number))) for number in range(3)]
    await settle(tasks)
    producer.close()
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(isinstance(result, shmbridge.Closed) for result in results)
    assert producer.stats()["dropped_total{cancelled}"] == 3
    assert len(make_consumer().poll()) == count


async def test_close_does_not_wait_for_a_put_that_waits(full) -> None:
    producer, _ = full
    waiting = asyncio.create_task(producer.put_async(big()))
    await asyncio.sleep(0.1)  # a thread sleeps for it by now, for a second
    began = time.monotonic()
    producer.close()
    assert time.monotonic() - began < 0.5
    with pytest.raises(shmbridge.Closed):
        await waiting


async def test_raise_and_drop_never_wait(make_producer) -> None:
    for on_full, expected in (("raise", shmbridge.LaneFull), ("drop", None)):
        with make_producer(on_full=on_full) as producer:
            while producer.stats()["lane_free_bytes"] > 13_000:
                producer.put(big())
            if expected is None:
                assert await producer.put_async(big()) is None
                assert producer.stats()["dropped_total{full}"] == 1
            else:
                with pytest.raises(expected):
                    await producer.put_async(big())


async def test_bad_groups_are_refused_at_once(full) -> None:
    producer, _ = full
    with pytest.raises(shmbridge.InvalidRecord):
        await producer.put_async({"tokens": []})
    with pytest.raises(shmbridge.InvalidRecord):
        await producer.put_async({"tokens": [[1]], "nonsense": [1]})


async def test_a_bad_value_found_late_does_not_stop_the_others(full, make_consumer) -> None:
    producer, count = full
    bad = asyncio.create_task(
        producer.put_async(
            {"tokens": [[1]], "advantages": [[float("nan")]]} | {"inference_logprobs": [[0.0]]}
        )
    )
    wide = {**big(1), "advantages": [np.full(3000, np.nan)]}
    worse, good = (
        asyncio.create_task(producer.put_async(wide)),
        asyncio.create_task(producer.put_async(big(2))),
    )
    await settle([bad, worse, good])
    consumer = make_consumer()
    for _ in range(count):
        (await consumer.get_async(timeout_s=5)).release()
    for task in (bad, worse):
        with pytest.raises(shmbridge.InvalidRecord):
            await task
    assert await good == count
    assert producer.stats()["dropped_total{invalid}"] == 2


async def test_masks_that_cannot_be_folded_never_block_the_loop(make_producer, consumer) -> None:
    producer = make_producer()
    while producer.stats()["lane_free_bytes"] > 6000:
        producer.put({"tokens": [list(range(900))]})
    lossy = {"tokens": [list(range(1000, 1900))], "masks": [[7] * 900], "scores": [1.0]}
    task = asyncio.create_task(producer.put_async(lossy))
    began = time.monotonic()
    await asyncio.sleep(0.01)
    assert time.monotonic() - began < 2
    for record in consumer.poll():
        record.release()
    assert await asyncio.wait_for(task, 5) is not None


async def test_draining_ends_the_wait(full, make_consumer) -> None:
    producer, _ = full
    task = asyncio.create_task(producer.put_async(big()))
    await settle([task])
    make_consumer().drain()
    with pytest.raises(shmbridge.BridgeDraining):
        await task
    assert producer.stats()["dropped_total{cancelled}"] == 1


def test_a_producer_may_outlive_its_event_loop(full) -> None:
    producer, _ = full

    async def several() -> list:
        return await asyncio.gather(
            *(producer.put_async(big(), timeout_s=0.05) for _ in range(3)), return_exceptions=True
        )

    for _ in range(2):
        assert all(isinstance(result, shmbridge.LaneFull) for result in asyncio.run(several()))
    assert producer.stats()["dropped_total{timeout}"] == 6


def test_a_loop_that_ends_while_a_put_waits_counts_it(full) -> None:
    producer, _ = full

    async def leave() -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(producer.put_async(big()), 0.05)

    asyncio.run(leave())
    producer.close()
    counted = sum(value for key, value in producer.stats().items() if key.startswith("dropped_total{"))
    assert counted == 1


async def test_a_group_whose_turn_comes_while_a_claim_is_open_waits_for_its_end(
    make_producer, consumer
) -> None:
    producer = make_producer()
    while producer.stats()["lane_free_bytes"] > 13_000:
        producer.put(big(99))
    held = consumer.poll()
    waiting = asyncio.create_task(producer.put_async(big(1)))
    await asyncio.sleep(0.02)
    with producer.claim(rows=1, lengths={"tokens": [3]}) as slot:
        slot["tokens"][:] = 7
        for record in held:
            record.release()
        del record, held
        await asyncio.sleep(0.1)
        assert not waiting.done()
    assert await waiting == slot.sequence + 1
    assert producer.stats()["dropped_total{cancelled}"] == 0
