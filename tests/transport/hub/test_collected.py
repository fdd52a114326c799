"""A consumer that nobody holds is collected: its bridge is free, its records go back un-released."""

import asyncio
import gc
import os
import threading
import time
import weakref

import pytest

import shmbridge

GROUP = {"tokens": [[1, 2, 3], [4, 5]], "score": [1.0, 0.5], "prompt_length": [0, 0]}


def own_threads(bridge: str) -> list[str]:
    names = ("shmbridge-deathwatch", f"shmbridge-control-{bridge}", f"shmbridge-ranks-{bridge}")
    return [thread.name for thread in threading.enumerate() if thread.name in names]


def has_consumer(bridge: str) -> bool:
    return any(each.consumer_pid is not None for each in shmbridge.list_bridges() if each.name == bridge)


def in_use(bridge: str, hub: shmbridge.Consumer, how: str) -> list[object]:
    """Uses a consumer in one way; returns what the user keeps of it, never the consumer."""
    if how == "get":
        hub.get(5)
    elif how == "iteration":
        next(iter(hub))
    elif how == "batches":
        next(hub.batches(groups=1, prefetch=2, timeout_s=5))
    elif how == "stats":
        hub.stats()
    elif how == "async":
        asyncio.run(taken(hub))
    elif how == "ranks":
        hub.serve_ranks(1, groups=1)
    elif how == "queue":
        return [hub.queue]
    return []


async def taken(hub: shmbridge.Consumer) -> None:
    record = await hub.get_async(5)
    with pytest.raises(shmbridge.ConsumerEmpty):
        await hub.get_async(0.05)
    del record


@pytest.mark.parametrize("how", ["fresh", "get", "iteration", "batches", "stats", "async", "ranks", "queue"])
def test_a_dropped_consumer_frees_the_bridge_and_loses_nothing(bridge, producer, make_consumer, how):
    producer.put(GROUP)
    hub = shmbridge.Consumer(bridge)
    kept, gone = in_use(bridge, hub, how), weakref.ref(hub)
    del hub
    gc.collect()
    assert gone() is None
    assert own_threads(bridge) == []
    records = make_consumer().poll()
    assert [record.meta.sequence for record in records] == [0]
    del kept


def test_a_batch_or_an_iteration_in_use_keeps_its_consumer(bridge, producer, make_consumer):
    producer.put_many([GROUP] * 2)
    batches = shmbridge.Consumer(bridge).batches(groups=1, timeout_s=5)
    gc.collect()
    assert len(next(batches)) == 2
    assert len(next(batches)) == 2
    del batches
    gc.collect()
    assert len(make_consumer().poll()) == 1  # the first was released by the next step, the second by nobody


def test_ranks_keep_their_consumer(bridge, producer, make_rank):
    producer.put(GROUP)
    server = shmbridge.Consumer(bridge).serve_ranks(1, groups=1)
    gc.collect()
    assert len(next(make_rank().batches(timeout_s=5))) == 2
    assert server.stats()["ranks_live"] == 1
    del server


def test_a_view_outlives_the_collected_consumer(bridge, producer, make_consumer):
    producer.put(GROUP)
    hub = shmbridge.Consumer(bridge)
    tokens = hub.get(5)["tokens"]
    del hub
    gc.collect()
    assert tokens.values.tolist() == [1, 2, 3, 4, 5]
    with pytest.raises(shmbridge.ConsumerTaken, match="this very process"):
        shmbridge.Consumer(bridge)
    assert tokens.values.tolist() == [1, 2, 3, 4, 5]
    del tokens
    assert [record.meta.redelivered for record in make_consumer().poll()] == [True]


def test_collected_in_a_cycle_by_another_thread(bridge, producer, make_consumer):
    producer.put(GROUP)
    hub = shmbridge.Consumer(bridge)
    record = hub.get(5)
    cycle: list[object] = [hub, record]
    cycle.append(cycle)
    del hub, record, cycle
    other = threading.Thread(target=gc.collect)
    other.start()
    other.join(20)
    assert own_threads(bridge) == []
    assert len(make_consumer().poll()) == 1


def test_collected_while_its_own_locks_are_held(bridge, producer, make_consumer, until):
    """The collector may run in any line of a call that holds a part but not the consumer."""
    producer.put(GROUP)
    hub = shmbridge.Consumer(bridge)
    lock = hub._closing.whole
    began = time.monotonic()
    with lock:
        del hub
        gc.collect()
        assert time.monotonic() - began < 4  # it waits 5 s where it may
    until(lambda: own_threads(bridge) == [] and not has_consumer(bridge))
    assert len(make_consumer().poll()) == 1


def test_collected_in_a_child_of_fork_leaves_the_parents_alone(bridge, producer):
    hub = shmbridge.Consumer(bridge)
    pid = os.fork()
    if pid == 0:
        del hub
        gc.collect()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    producer.put(GROUP)
    hub.get(5).release()
    assert len(own_threads(bridge)) == 2
    hub.close()


def test_closed_consumers_are_collected_too(bridge):
    with shmbridge.Consumer(bridge) as hub:
        gone = weakref.ref(hub)
    del hub
    gc.collect()
    assert gone() is None
