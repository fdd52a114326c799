"""Groups put back after the end was found come again; `make` has to make batches; a released batch is no
longer held.
"""

import threading

import pytest


def group(number: int) -> dict:
    return {"tokens": [[number]]}


def test_groups_put_back_after_the_end_was_found_are_handed_out(producer, consumer) -> None:
    """The end was found while gathering ahead; with the groups left then, the returned ones make a batch."""
    for number in range(3):
        producer.put(group(number))
    consumer.drain()
    batches = consumer.batches(groups=2, prefetch=1, hold="caller", timeout_s=10)
    first = next(batches)
    while consumer._hub.iterations._prefetcher._thread._life._runs_in:
        pass
    first.records = []
    first.groups[0].records[0].release()
    consumer.put_back(first.groups[1:])
    assert next(batches).tokens.tolist() == [1, 2]
    assert list(batches) == []


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("made", [None, "a string"])
def test_make_that_returns_no_batch_is_a_type_error(producer, consumer, prefetch, made) -> None:
    producer.put(group(1))
    batches = consumer.batches(groups=1, prefetch=prefetch, timeout_s=10, make=lambda groups, layout: made)
    with pytest.raises(TypeError, match="make"):
        next(batches)
    batches = consumer.batches(groups=1, prefetch=prefetch, timeout_s=10)
    assert next(batches).tokens.tolist() == [1]
    batches.close()


def test_a_batch_released_while_the_next_is_awaited_is_no_longer_its_holders(
    make_producer, consumer, until
) -> None:
    """A view of it keeps the room for a while, so there is no error that the next batch can never come."""
    producer = make_producer(lane_bytes="64K")
    most_of_half = {"tokens": [list(range(7_000))]}
    producer.put_many([most_of_half] * 2)
    batches = consumer.batches(groups=2, prefetch=1, hold="caller", timeout_s=20)
    first = next(batches)
    putting = threading.Thread(target=lambda: producer.put_many([most_of_half] * 2, timeout_s=20))
    putting.start()
    kept = [record["tokens"].values for record in first.records]
    threading.Timer(0.5, first.release).start()
    threading.Timer(2.5, kept.clear).start()
    assert next(batches).tokens.size == 14_000
    assert not kept
    putting.join()
    batches.close()
