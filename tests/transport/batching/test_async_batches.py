"""`async for` over batches: never blocks the event loop; a cancelled step loses nothing."""

import asyncio
import threading
import time

import pytest

import shmbridge

GROUP = {"tokens": [[1, 2, 3], [4, 5]], "prompt_length": [0, 0]}


@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_come_and_the_loop_goes_on(producer, consumer, prefetch):
    async def read() -> tuple[list[int], int]:
        ticks, found = 0, []

        async def tick() -> None:
            nonlocal ticks
            while True:
                await asyncio.sleep(0.01)
                ticks += 1

        ticking = asyncio.create_task(tick())
        late = threading.Timer(0.5, producer.put_many, [[GROUP] * 2])
        late.start()
        async for batch in consumer.batches(groups=2, prefetch=prefetch, timeout_s=20):
            found.append(len(batch))
            consumer.drain()
        ticking.cancel()
        return found, ticks

    found, ticks = asyncio.run(read())
    assert found == [4]
    assert ticks > 10
    assert consumer.stats()["released_total"] == 2


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_cancelled_step_loses_nothing(producer, consumer, prefetch):
    async def read() -> list[int]:
        batches = consumer.batches(groups=1, prefetch=prefetch, timeout_s=20)
        for _ in range(5):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(batches), 0.01)
        producer.put_many([GROUP] * 6)
        found: list[int] = []
        while len(found) < 6:
            try:
                batch = await asyncio.wait_for(anext(batches), 0.0005)
            except TimeoutError:
                continue
            found += [meta.sequence for meta in batch.meta[::2]]
        return found

    assert asyncio.run(read()) == list(range(6))


def test_the_timeout_is_kept(consumer):
    async def read() -> None:
        began = time.monotonic()
        with pytest.raises(shmbridge.ConsumerEmpty, match=r"no batch of 1 group.* within 0.6 s"):
            await anext(consumer.batches(groups=1, timeout_s=0.6))
        assert 0.5 < time.monotonic() - began < 5

    asyncio.run(read())


def test_a_rank_too(producer, consumer, make_rank):
    consumer.serve_ranks(1, groups=1)
    rank = make_rank()

    async def read() -> int:
        threading.Timer(0.5, producer.put, [GROUP]).start()
        async for batch in rank.batches(timeout_s=20):
            consumer.drain()
            rows = len(batch)
        return rows

    assert asyncio.run(read()) == 2


def test_repr_and_close(producer, consumer):
    producer.put(GROUP)
    batches = consumer.batches(groups=1, timeout_s=5)
    assert "not begun" in repr(batches)
    next(batches)
    assert "1 handed out" in repr(batches)
    batches.close()
    assert "ended" in repr(batches)
    assert list(batches) == []
