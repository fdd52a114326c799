"""Memory of large arrays is reused, but never while anything still refers to it."""

import gc
import random
import threading

import numpy as np
import pytest

from shmbridge import batch
from shmbridge._ext.record import Pool

LARGE, BYTE = 1 << 20, np.dtype(np.uint8)


def place(array) -> int:
    return array.__array_interface__["data"][0]


@pytest.fixture
def pool() -> Pool:
    pool = Pool()
    pool.keep_bytes = 8 * LARGE
    return pool


def test_memory_of_a_dead_array_is_used_again(pool) -> None:
    array = pool.empty((LARGE,), BYTE)
    first = place(array)
    del array
    assert LARGE <= pool.spare_bytes <= 2 * LARGE
    again = pool.empty((2, LARGE // 16), np.dtype(np.float64))
    assert (place(again), pool.spare_bytes) == (first, 0)
    assert (again.shape, again.dtype, again.flags.writeable, again.flags.c_contiguous) == (
        (2, LARGE // 16),
        np.float64,
        True,
        True,
    )


@pytest.mark.parametrize(
    "view",
    [
        lambda array: array[LARGE // 2 :],
        lambda array: array.reshape(2, -1).T,
        lambda array: array.view(np.float32),
        memoryview,
        lambda array: np.frombuffer(array, np.int16),
        lambda array: pytest.importorskip("torch").from_numpy(array[5:]),
    ],
)
def test_memory_with_a_view_is_not_spare(pool, view) -> None:
    array = pool.empty((LARGE,), BYTE)
    kept = view(array)
    del array
    gc.collect()
    assert pool.spare_bytes == 0
    del kept
    gc.collect()
    assert pool.spare_bytes >= LARGE


def test_an_array_in_a_cycle_ends_with_it(pool) -> None:
    cycle = [pool.empty((LARGE,), BYTE)]
    cycle.append(cycle)
    del cycle
    gc.collect()
    assert pool.spare_bytes >= LARGE


def test_spare_memory_is_bounded_and_can_be_given_back(pool) -> None:
    arrays = [pool.empty((LARGE,), BYTE) for _ in range(100)]
    arrays.clear()
    assert 4 * LARGE <= pool.spare_bytes <= 8 * LARGE
    pool.keep_bytes = 0
    assert pool.spare_bytes == 0
    pool.empty((LARGE,), BYTE)
    assert pool.spare_bytes == 0
    pool.keep_bytes = 1 << 40
    arrays = [pool.empty((1 << 15,), BYTE) for _ in range(100)]
    arrays.clear()
    assert pool.spare_bytes <= 64 * (1 << 16)  # blocks, however small


def test_a_small_array_gets_no_block_of_a_large_one(pool) -> None:
    pool.empty((4 * LARGE,), BYTE)
    spare = pool.spare_bytes
    array = pool.empty((LARGE,), BYTE)
    assert pool.spare_bytes == spare
    del array


def test_a_pool_may_end_before_its_arrays() -> None:
    pool = Pool()
    array = pool.empty((LARGE,), BYTE)
    array[:] = 7
    del pool
    gc.collect()
    assert array.sum() == 7 * LARGE


def test_sizes_that_no_machine_has(pool) -> None:
    for shape in ((1 << 61,), (1 << 40, 1 << 40)):
        with pytest.raises((MemoryError, ValueError)):
            pool.empty(shape, np.dtype(np.float64))
    with pytest.raises(MemoryError):
        pool.empty((1 << 46,), np.dtype(np.float64))
    assert pool.empty((0, 1 << 40), BYTE).shape == (0, 1 << 40)


def test_threads_that_share_a_pool_never_share_memory(pool) -> None:
    """Each writes its own number into arrays that it keeps a while; no other number ever appears there."""
    wrong: list[str] = []

    def play(number: int) -> None:
        draw, kept = random.Random(number), []
        for _ in range(400):
            array = pool.empty((draw.choice([1 << 15, 1 << 16, 3 << 15]),), BYTE)
            array[:] = number
            kept.append(array[draw.randrange(100) :])
            del array
            if len(kept) > 6:
                seen = kept.pop(draw.randrange(len(kept)))
                if not (seen == number).all():
                    wrong.append(f"{number}: {np.unique(seen)}")

    threads = [threading.Thread(target=play, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("prefetch", [0, 2])
def test_arrays_that_a_learner_keeps_do_not_change(make_producer, consumer, prefetch) -> None:
    """One array of each batch, or a view of it, is kept for ever; the memory of the others goes to later
    batches.
    """
    producer, kept = make_producer(lane_bytes="4M"), []
    for number in range(24):
        producer.put(
            {
                "tokens": [np.full(20_000, number, np.int32)],
                "advantages": [np.full(20_000, number, np.float32)],
            }
        )
    consumer.drain()
    for step, made in enumerate(consumer.batches(groups=1, prefetch=prefetch)):
        assert made.tokens[0] == made.advantages[0] == step
        kept.append(made.tokens if step % 2 else made.advantages[7:])
    assert [np.unique(array).tolist() for array in kept] == [[number] for number in range(24)]


def test_closing_a_consumer_gives_spare_memory_back(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(lane_bytes="4M"), make_consumer()
    for _ in range(4):
        producer.put({"tokens": [np.zeros(100_000, np.int32)]})
    batches = consumer.batches(groups=1, prefetch=0)
    for _ in range(3):
        next(batches)
    batches.close()
    assert batch._POOL.spare_bytes >= 400_000
    consumer.close()
    assert batch._POOL.spare_bytes == 0
