"""From records to batches: whole groups, oldest first, leases until the step is done, no wait without end."""

import threading
import time

import numpy as np
import pytest

import shmbridge
from shmbridge._ext.record import Gather, TooManyTokens


def group(number: int, rows: int = 1) -> dict:
    return {"tokens": [[number]] * rows}


def firsts(batch) -> list[int]:
    return batch.tokens[batch.cu_seqlens[:-1]].tolist()


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_hold_every_group_once_in_order(make_producer, consumer, prefetch) -> None:
    producer = make_producer()
    for number in range(12):
        producer.put(group(number))
    consumer.drain()
    batches = [firsts(batch) for batch in consumer.batches(groups=3, prefetch=prefetch)]
    assert batches == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    assert consumer.stats()["batches_total"] == 4


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_rest_that_fills_no_batch_stays_for_the_next_consumer(
    make_producer, make_consumer, prefetch
) -> None:
    producer = make_producer()
    for number in range(5):
        producer.put(group(number))
    consumer = make_consumer()
    consumer.drain()
    assert [firsts(batch) for batch in consumer.batches(groups=3, prefetch=prefetch)] == [[0, 1, 2]]
    consumer.close()
    assert [record.meta.sequence for record in make_consumer().poll()] == [3, 4]


def test_batches_gathered_ahead_and_not_handed_out_are_still_held(producer, make_consumer, until) -> None:
    """Under "gather", too, a record is released when its batch is handed out; batches not handed out go to
    the next consumer.
    """
    consumer = make_consumer()
    for number in range(6):
        producer.put(group(number))
    batches = consumer.batches(groups=2, prefetch=2, hold="gather")
    assert firsts(next(batches)) == [0, 1]
    until(lambda: consumer.stats()["queue_groups"] == 0 and producer.stats()["held"] == 4)
    batches.close()
    consumer.close()
    assert firsts(next(make_consumer().batches(groups=4, prefetch=0))) == [2, 3, 4, 5]


def test_too_many_tokens_are_an_error_and_no_group_is_at_fault(producer, consumer, monkeypatch) -> None:
    """The groups wait in the queue again; fewer of them make a batch."""

    class Counts(Gather):
        def __init__(self, groups, padded, pool) -> None:
            if self.tokens > 3:
                raise TooManyTokens(self.tokens)

    monkeypatch.setattr("shmbridge.batch.Gather", Counts)
    for number in range(4):
        producer.put(group(number))
    with pytest.raises(shmbridge.BatchTooBig, match="4 groups has 4 tokens"):
        next(consumer.batches(groups=4, prefetch=0))
    batches = consumer.batches(groups=2, prefetch=0)
    assert [firsts(next(batches)) for _ in range(2)] == [[0, 1], [2, 3]]
    assert consumer.stats()["discarded_total"] == 0
    batches.close()


def test_fragments_become_one_group_again(producer, consumer) -> None:
    producer.put(group(1, rows=2), group_id="a", group_size=3)
    producer.put(group(5), group_id="whole")
    producer.put(group(2), group_id="a", group_size=3)
    batches = consumer.batches(groups=1, prefetch=0)
    assert firsts(next(batches)) == [5]
    batch = next(batches)
    assert firsts(batch) == [1, 1, 2]
    assert batch.group_index.tolist() == [0, 0, 0]
    batches.close()


def test_two_producers_may_use_the_same_group_id(make_producer, consumer) -> None:
    for number in range(2):
        make_producer().put(group(number), group_id="a", group_size=2)
    assert consumer.get(timeout_s=5).meta.group_id == "a"
    assert consumer.get(timeout_s=5).meta.group_id == "a"


def test_a_partial_group_is_discarded_after_its_deadline(producer, make_consumer) -> None:
    consumer = make_consumer(group_timeout_s=0.05)
    producer.put(group(1), group_id="a", group_size=2)
    threading.Timer(0.2, lambda: producer.put(group(5))).start()
    assert firsts(next(consumer.batches(groups=1, prefetch=0))) == [5]
    assert consumer.stats()["discarded_total{partial}"] == 1


def test_a_partial_group_of_a_producer_that_left_is_discarded(make_producer, consumer, until) -> None:
    leaving, staying = make_producer(), make_producer()
    leaving.put(group(1), group_id="a", group_size=2)
    leaving.close()
    batches = consumer.batches(groups=1, prefetch=1)
    threading.Timer(0.3, lambda: staying.put(group(5))).start()
    assert firsts(next(batches)) == [5]
    until(lambda: consumer.stats()["discarded_total{partial}"] == 1)
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_stale_groups_are_discarded_and_counted(producer, consumer, prefetch) -> None:
    for version in (0, 3, 4, 5):
        producer.put(group(version), policy_version=version)
    producer.put(group(9), policy_version=-1)
    consumer.publish_policy_version(5)
    consumer.drain()
    batches = [firsts(batch) for batch in consumer.batches(groups=1, max_staleness=1, prefetch=prefetch)]
    assert batches == [[4], [5], [9]]
    assert consumer.stats()["discarded_total{stale}"] == 2


def test_a_batch_that_grew_stale_while_it_waited_is_not_handed_out(producer, consumer, until) -> None:
    for number in range(4):
        producer.put(group(number), policy_version=0)
    batches = consumer.batches(groups=1, max_staleness=0, prefetch=2)
    assert firsts(next(batches)) == [0]
    until(lambda: consumer.stats()["queue_groups"] <= 1)
    consumer.publish_policy_version(1)
    producer.put(group(9), policy_version=1)
    assert firsts(next(batches)) == [9]
    assert consumer.stats()["discarded_total{stale}"] == 3
    assert consumer.stats()["batches_total"] == consumer.current_step == 2
    batches.close()


def test_groups_put_back_stale_while_the_bridge_drains_are_cut(producer, consumer, monkeypatch) -> None:
    """Before the end is declared there is a pause in which puts under way commit; stale groups put back
    during it make no batch.
    """
    producer.put({"tokens": [[1]]}, policy_version=0)
    taken = consumer.take_groups(groups=1, max_staleness=0, timeout_s=5)
    consumer.publish_policy_version(1)
    consumer.drain()
    drained = consumer._waiting.drained

    def returned_meanwhile() -> bool:
        consumer.put_back(taken)
        return drained()

    monkeypatch.setattr(consumer._waiting, "drained", returned_meanwhile)
    assert consumer.take_groups(groups=1, max_staleness=0, timeout_s=5) is None
    assert consumer.stats()["discarded_total{stale}"] == 1


def test_fresh_groups_of_stale_batches_are_batched_although_the_bridge_is_drained(
    producer, consumer, until
) -> None:
    """They are batched also if the thread that forms ahead has found the end already."""
    for number, version in enumerate((0, 0, 0, 1, 0, 1)):
        producer.put(group(number), policy_version=version)
    consumer.publish_policy_version(0)
    consumer.drain()
    batches = consumer.batches(groups=2, max_staleness=0, prefetch=4)
    assert firsts(next(batches)) == [0, 1]
    until(lambda: not any(thread.name == "shmbridge-prefetch" for thread in threading.enumerate()))
    consumer.publish_policy_version(1)
    assert [firsts(batch) for batch in batches] == [[3, 5]]
    assert (consumer.stats()["discarded_total{stale}"], consumer.stats()["held"]) == (2, 0)


def test_the_oldest_version_of_a_group_decides(producer, consumer) -> None:
    producer.put(group(1), group_id="a", group_size=2, policy_version=5)
    producer.put(group(2), group_id="a", group_size=2, policy_version=(1, 5))
    producer.put(group(3), policy_version=5)
    consumer.publish_policy_version(5)
    assert firsts(next(consumer.batches(groups=1, max_staleness=2, prefetch=0))) == [3]
    assert consumer.stats()["discarded_total{stale}"] == 2


@pytest.mark.parametrize("on_full", ["block", "raise", "drop"])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_batch_that_can_never_fit_is_an_error_with_the_numbers(
    make_producer, consumer, on_full, prefetch
) -> None:
    producer, stop = make_producer(on_full=on_full), threading.Event()

    def put_on() -> None:
        while not stop.is_set():
            try:
                producer.put({"tokens": [np.arange(3000)]}, timeout_s=0.5)
            except shmbridge.LaneFull:
                stop.wait(0.01)
            except shmbridge.BridgeDraining:
                return

    def give_up() -> None:
        if not stop.wait(3):
            consumer.drain()

    threads = [threading.Thread(target=put_on), threading.Thread(target=give_up)]
    for thread in threads:
        thread.start()
    try:
        with pytest.raises(shmbridge.BatchTooBig, match=r"50 groups.*complete.*KiB"):
            next(consumer.batches(groups=50, prefetch=prefetch), None)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_slow_environment_is_no_sizing_error(producer, consumer) -> None:
    producer.put(group(1))
    threading.Timer(1.6, lambda: producer.put(group(2))).start()
    assert firsts(next(consumer.batches(groups=2, prefetch=0))) == [1, 2]


def test_close_ends_an_iteration_that_waits(consumer) -> None:
    closing = threading.Timer(0.1, consumer.close)
    closing.start()
    began = time.monotonic()
    assert list(consumer.batches(groups=2)) == []
    closing.join()
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "options",
    [
        {"groups": 0},
        {"rows": 0},
        {"prefetch": -1},
        {"max_staleness": -1},
        {"timeout_s": -1},
        {"layout": "ragged"},
        {"hold": "ever"},
    ],
    ids=str,
)
def test_arguments_are_checked_at_once(consumer, options) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        consumer.batches(**options)


@pytest.mark.parametrize("prefetch", [0, 1])
def test_groups_that_are_screened_out_are_in_no_batch_and_are_released_and_counted(
    producer, consumer, prefetch
) -> None:
    for number in range(6):
        producer.put(group(number), split="eval" if number % 3 == 1 else "train")
    consumer.drain()
    seen = []

    def keep(whole) -> bool:
        seen.append((whole.records[0].meta.split, whole.records[0]["tokens"].values.tolist()))
        return whole.records[0].meta.split == "train"

    consumer.screen(keep)
    assert [firsts(batch) for batch in consumer.batches(groups=2, prefetch=prefetch)] == [[0, 2], [3, 5]]
    assert [tokens for split, tokens in seen if split == "eval"] == [[1], [4]]
    stats = consumer.stats()
    assert (stats["screened_total"], stats["released_total"], stats["held"], stats["discarded_total"]) == (
        2,
        6,
        0,
        0,
    )


def test_a_screen_that_raises_ends_the_batches_and_loses_nothing(producer, make_consumer) -> None:
    for number in range(4):
        producer.put(group(number))
    consumer = make_consumer()

    def keep(whole) -> bool:
        raise RuntimeError("screen")

    consumer.screen(keep)
    with pytest.raises(RuntimeError, match="screen"):
        next(consumer.batches(groups=2, prefetch=0))
    assert consumer.stats()["queue_groups"] == 4
    consumer.screen(None)
    with next(consumer.batches(groups=2, prefetch=0)) as batch:
        assert firsts(batch) == [0, 1]
    consumer.close()
    assert firsts(next(make_consumer().batches(groups=2, prefetch=0))) == [2, 3]


@pytest.mark.parametrize("prefetch", [0, 1])
def test_batches_that_the_caller_holds_and_no_room_for_the_next_are_an_error(
    make_producer, consumer, prefetch
) -> None:
    """A caller that holds all the lanes' room would wait for ever for the next batch."""
    producer = make_producer(lane_bytes="64K")

    def put() -> None:
        for number in range(200):
            try:
                producer.put(group(number, rows=100), timeout_s=60.0)
            except shmbridge.ShmBridgeError:
                return

    putter = threading.Thread(target=put)
    putter.start()
    batches = consumer.batches(groups=8, prefetch=prefetch, hold="caller")
    held = []
    try:
        with pytest.raises(
            shmbridge.BatchTooBig, match=r"who waits for it holds \d+ records of batches before.*lane_bytes"
        ):
            for _ in range(25):
                held.append(next(batches))
        assert held
    finally:
        for batch in held:
            batch.release()
        consumer.drain()
        putter.join()


@pytest.mark.parametrize("other", ["batches", "take_groups"])
def test_an_iteration_that_another_supersedes_says_so(other, producer, consumer) -> None:
    """It must not look like the end of the records."""
    for number in range(6):
        producer.put({"tokens": [[number]]})
    first = consumer.batches(groups=1, timeout_s=5)
    seen = [next(first).groups[0].records[0].meta.sequence]
    if other == "batches":
        second = next(consumer.batches(groups=1, timeout_s=5))
        seen.append(second.groups[0].records[0].meta.sequence)
        second.release()
    else:
        (group,) = consumer.take_groups(groups=1, timeout_s=5)
        seen.append(group.records[0].meta.sequence)
        group.records[0].release()
    with pytest.raises(shmbridge.IterationOver, match="another of the same consumer has begun"):
        next(first)
    assert seen == [0, 1]
    rest = consumer.batches(groups=1, timeout_s=5)
    assert [next(rest).groups[0].records[0].meta.sequence for _ in range(4)] == [2, 3, 4, 5]


@pytest.mark.parametrize(
    "wrong",
    [
        {"timeout_s": "1"},
        {"timeout_s": float("nan")},
        {"prefetch": 10**9},
        {"prefetch": 1.5},
        {"prefetch": True},
    ],
)
def test_arguments_of_batches_that_are_no_numbers_are_named(wrong, consumer) -> None:
    (name,) = wrong
    with pytest.raises(shmbridge.BadArgument, match=f"{name}="):
        consumer.batches(groups=1, **wrong)
    if name == "timeout_s":
        with pytest.raises(shmbridge.BadArgument, match="timeout_s="):
            consumer.take_groups(groups=1, **wrong)
