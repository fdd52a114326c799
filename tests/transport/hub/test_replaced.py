"""Consumer(replace=True) closes an earlier consumer of this process; live views are named."""

import gc

import pytest

import shmbridge

GROUP = {
    "tokens": [[1, 2, 3], [4, 5]],
    "score": [1.0, 0.5],
    "advantages": [[0.0] * 3, [1.0] * 2],
    "prompt_length": [0, 0],
}


def test_replace_closes_the_earlier_consumer(producer, make_consumer):
    producer.put(GROUP)
    earlier = make_consumer()
    assert earlier.get(5).meta.sequence == 0
    again = make_consumer(replace=True)
    with pytest.raises(shmbridge.Closed):
        earlier.poll()
    assert [record.meta.redelivered for record in again.poll()] == [True]
    with pytest.raises(shmbridge.ConsumerTaken, match=r"this very process.*replace=True"):
        make_consumer()


def test_replace_without_an_earlier_one(make_consumer):
    assert make_consumer(replace=True).poll() == []


def test_replace_ends_an_iteration(producer, make_consumer):
    producer.put_many([GROUP] * 3)
    batches = make_consumer().batches(groups=1, timeout_s=5)
    next(batches)
    again = make_consumer(replace=True)
    assert list(batches) == []
    assert [record.meta.sequence for record in again.poll()] == [0, 1, 2]


def test_replace_never_touches_another_process(bridge, child):
    process = child(
        "import shmbridge\nhub = shmbridge.Consumer(bridge)\nprint('ready', flush=True)\ninput()\nhub.poll()"
    )
    with pytest.raises(shmbridge.ConsumerTaken, match=f"pid {process.pid}"):
        shmbridge.Consumer(bridge, replace=True)
    process.stdin.write("\n")
    process.stdin.flush()
    assert process.wait(20) == 0


def test_living_views_are_counted_by_column(bridge, producer, make_consumer):
    producer.put_many([GROUP] * 2)
    earlier = make_consumer()
    first, second = earlier.poll()
    views = [first["tokens"], first["tokens"], second["advantages"].values, second["score"]]
    del first, second
    with pytest.raises(shmbridge.ConsumerTaken) as taken:
        make_consumer(replace=True)
    assert "2 of its records" in str(taken.value)
    assert "1 of advantages, 1 of score, 2 of tokens" in str(taken.value)
    assert "%reset -f out" in taken.value.hint
    del views[0], taken
    gc.collect()
    with pytest.raises(shmbridge.ConsumerTaken, match="1 of advantages, 1 of score, 1 of tokens"):
        make_consumer(replace=True)
    views.clear()
    gc.collect()
    assert len(make_consumer(replace=True).poll()) == 2


def test_records_without_views_go_back(producer, make_consumer):
    producer.put_many([GROUP] * 3)
    earlier = make_consumer()
    batch = next(earlier.batches(groups=1, timeout_s=5))
    earlier.close()
    with pytest.raises(
        shmbridge.ConsumerTaken, match="1 of its records are still referred to, with views: none"
    ):
        make_consumer()
    again = make_consumer(replace=True)
    batch.release()  # of a lease that has ended: no word
    assert [(record.meta.sequence, record.meta.redelivered) for record in again.poll()] == [
        (0, True),
        (1, False),
        (2, False),
    ]
    assert again.stats()["released_total"] == 0


@pytest.mark.parametrize("earlier_is", ["held", "dropped"])
def test_replaced_once_the_views_are_gone_whatever_else_is_held(producer, make_consumer, earlier_is, caplog):
    """A loop variable keeps a batch, and with it the lane's lock, after a view made the first try fail."""
    producer.put_many([GROUP] * 3)
    bridge = make_consumer().bridge
    earlier = make_consumer(replace=True)
    batch = next(earlier.batches(groups=1, prefetch=0, timeout_s=5))
    view = earlier.get(5)["tokens"]
    with pytest.raises(shmbridge.ConsumerTaken, match="1 of tokens"):
        shmbridge.Consumer(bridge, replace=True)
    if earlier_is == "dropped":
        earlier = None
        gc.collect()
    del view
    gc.collect()
    with shmbridge.Consumer(bridge, replace=True) as again:
        assert [record.meta.sequence for record in again.poll()] == [0, 1, 2]
    assert "is refused" not in caplog.text
    del batch, earlier


def test_a_buffer_of_a_record_counts_as_a_view(producer, make_consumer):
    producer.put(GROUP)
    earlier = make_consumer()
    memory = memoryview(earlier.get(5))
    with pytest.raises(shmbridge.ConsumerTaken, match="views: 1 of all"):
        make_consumer(replace=True)
    memory.release()
    assert len(make_consumer(replace=True).poll()) == 1
