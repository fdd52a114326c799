"""An iteration over batches is ended from outside: by a close in a handler, in a child of fork, or when it is
collected.
"""

import contextlib
import gc
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator

import pytest

import shmbridge
from shmbridge.batch import Batch
from shmbridge.hub import Prefetcher


@pytest.fixture
def closing() -> Iterator[Callable[[shmbridge.Consumer], Callable[[], None]]]:
    """Call it with a consumer; the function it returns makes a signal handler close that consumer, once."""
    before = signal.getsignal(signal.SIGUSR1)

    def make(consumer: shmbridge.Consumer) -> Callable[[], None]:
        def close(*_: object) -> None:
            signal.signal(signal.SIGUSR1, before)
            consumer.close()

        signal.signal(signal.SIGUSR1, close)
        return lambda: signal.raise_signal(signal.SIGUSR1)

    yield make
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("hold", ["step", "gather", "caller"])
def test_a_close_during_a_gather_ends_the_iteration_and_releases_nothing(
    producer, make_consumer, closing, hold
) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(2)])
    hub = make_consumer()
    close = closing(hub)

    def make(groups, layout) -> Batch:
        batch = Batch(groups, layout)
        close()
        return batch

    assert list(hub.batches(groups=1, prefetch=0, hold=hold, make=make)) == []
    gc.collect()
    assert [record._sequence for record in make_consumer().poll()] == [0, 1]


@pytest.mark.parametrize("hold", ["step", "gather", "caller"])
def test_a_close_when_a_batch_gathered_ahead_is_taken_releases_nothing(
    producer, make_consumer, closing, monkeypatch, hold
) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(2)])
    hub, take = make_consumer(), Prefetcher.next
    close = closing(hub)

    def taken(ahead: Prefetcher, timeout_s: float | None = None) -> Batch | None:
        batch = take(ahead, timeout_s)
        close()
        return batch

    monkeypatch.setattr(Prefetcher, "next", taken)
    assert list(hub.batches(groups=1, prefetch=1, hold=hold)) == []
    gc.collect()
    assert [record._sequence for record in make_consumer().poll()] == [0, 1]


# -- groups that come back when it is closed
# --------------------------------------------------------------------------------------


def test_groups_put_back_after_close_are_the_next_consumers(producer, make_consumer) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(3)])
    hub = make_consumer()
    groups = hub.take_groups(groups=2)
    hub.close()
    with pytest.raises(shmbridge.ConsumerTaken):
        make_consumer()
    hub.put_back(groups)
    assert [record._sequence for record in make_consumer().poll()] == [0, 1, 2]
    assert len(groups) == 2


def test_a_close_while_batches_gathered_ahead_come_back_leaves_the_bridge(
    producer, make_consumer, closing, monkeypatch, until
) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(3)])
    hub, stop = make_consumer(), Prefetcher.stop
    iteration = hub.batches(groups=1, prefetch=2)
    next(iteration).release()
    until(lambda: hub._hub.iterations._prefetcher._ready.qsize() == 2)
    close = closing(hub)

    def stopped(ahead: Prefetcher) -> list[Batch]:
        left = stop(ahead)
        monkeypatch.setattr(Prefetcher, "stop", stop)
        close()
        return left

    monkeypatch.setattr(Prefetcher, "stop", stopped)
    assert list(hub.batches(groups=1, prefetch=0)) == []
    assert [record._sequence for record in make_consumer().poll()] == [1, 2]


# -- a child of fork
# ------------------------------------------------------------------------------------------------------------


def in_child(*asked: Callable[[], object]) -> None:
    """Each raises Closed or answers in a child of fork, and none hangs there."""
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(20)
        failed = 1
        try:
            for ask in asked:
                with contextlib.suppress(shmbridge.Closed):
                    ask()
            failed = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(failed)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.timeout(120)
@pytest.mark.parametrize("timeout_s", [0.2, None])
@pytest.mark.parametrize("prefetch", [0, 1])
def test_an_iteration_does_not_go_on_in_a_forked_child(producer, consumer, prefetch, timeout_s) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(2)])
    iteration = consumer.batches(groups=1, prefetch=prefetch, timeout_s=timeout_s)
    fresh = consumer.batches(groups=1, prefetch=prefetch, timeout_s=timeout_s)
    batch = next(iteration)

    def go_on(batches: Iterator[Batch]) -> None:
        with pytest.raises(shmbridge.Closed):
            next(batches)

    in_child(lambda: go_on(iteration), lambda: go_on(fresh))
    batch.release()
    assert next(iteration).tokens.tolist() == [1]


def test_queues_and_lanes_answer_a_forked_child_without_a_fault(producer, consumer) -> None:
    producer.put_many([{"tokens": [[number]]} for number in range(3)])
    groups = consumer.take_groups(groups=1)
    (lane,) = consumer._lanes
    reader = lane.reader

    def all_nothing() -> None:
        assert (reader.waiting, reader.undelivered, reader.wanted_bytes, reader.quarantined) == (
            0,
            0,
            0,
            False,
        )
        assert not reader.has_room_for(1)

    assert consumer.queue.groups() == 2
    in_child(
        consumer.queue.groups,
        all_nothing,
        reader.ring,
        lambda: reader.quarantine(1),
        lambda: consumer.take_groups(groups=1),
        lambda: consumer.put_back(groups),
        consumer.stats,
        consumer.close,
    )
    assert (reader.waiting, reader.quarantined, consumer.stats()["discarded_total"]) == (2, False, 0)
    consumer.put_back(groups)
    assert [record._sequence for group in consumer.take_groups(groups=3) for record in group.records] == [
        0,
        1,
        2,
    ]


def test_a_forked_child_waits_for_no_lock_of_a_thread_that_is_not_there(producer, consumer) -> None:
    producer.put({"tokens": [[1]]})
    groups, held, over = consumer.take_groups(groups=1), threading.Event(), threading.Event()

    def hold() -> None:
        with consumer._closing.whole:
            held.set()
            over.wait(60)

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert held.wait(10)
        in_child(
            lambda: consumer.put_back(groups),
            lambda: consumer.take_groups(groups=1),
            lambda: next(consumer.batches(groups=1)),
        )
    finally:
        over.set()
        holder.join()


# -- a close that is owed
# ---------------------------------------------------------------------------------------------------------


def test_an_iteration_that_another_thread_collects_does_not_close_for_a_handler(
    producer, make_consumer, monkeypatch
) -> None:
    """In the thread that gathers ahead, close() would wait for itself."""
    producer.put_many([{"tokens": [[number]]} for number in range(2)])
    hub = make_consumer()
    iteration = hub.batches(groups=1, prefetch=0)
    batch, closed_by = next(iteration), []
    close = hub._closing.close
    monkeypatch.setattr(
        hub._closing, "close", lambda: closed_by.append(threading.current_thread()) or close()
    )
    hub._closing.owed = True
    other = threading.Thread(target=iteration.close)
    other.start()
    other.join()
    assert closed_by == []
    hub._closing.close_if_owed()
    assert set(closed_by) == {threading.main_thread()}
    del batch
