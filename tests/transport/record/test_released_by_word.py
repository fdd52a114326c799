"""A record is released only explicitly: every way to take one, every way to leave it
(docs/reference/releases.md).
"""

import _thread
import asyncio
import contextlib
import gc
import logging
import random
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest

import shmbridge
from shmbridge import errors
from shmbridge.hub import BatchFormer, LaneSet

PUT = 4
PATIENCE_S = 1.0


class Stop(Exception):
    pass


@dataclass(frozen=True)
class Way:
    """One row of the table: a way to take items from a hub, and which of them a step releases by itself."""

    name: str
    items: Callable[[shmbridge.Consumer], Iterator[Any]]
    # What releases an item. "step": the next step; "gather": its hand-out; "word": only its own release()
    releases: str

    def released(self, items: int) -> list[int]:
        """Returns the records that the steps have released when `items` items have been handed out."""
        return list(range({"step": items - 1, "gather": items, "word": 0}[self.releases]))


def each_get(hub):
    while True:
        yield hub.get(PATIENCE_S)


def each_get_async(hub):
    loop = asyncio.new_event_loop()
    while True:
        yield loop.run_until_complete(hub.get_async(5))


def each_async_for(hub):
    loop, records = asyncio.new_event_loop(), aiter(hub)
    while True:
        yield loop.run_until_complete(anext(records))


def each_group(hub):
    while True:
        for group in hub.take_groups(groups=1, timeout_s=PATIENCE_S) or ():
            yield GroupInHand(group)


class GroupInHand:
    def __init__(self, group) -> None:
        self.records = group.records

    def release(self) -> None:
        for record in self.records:
            record.release()


def batches_of(**options: Any) -> Callable[[shmbridge.Consumer], Iterator[Any]]:
    return lambda hub: hub.batches(groups=1, timeout_s=PATIENCE_S, **options)


WAYS = [
    Way("get", each_get, "word"),
    Way("get_async", each_get_async, "word"),
    Way("poll", lambda hub: iter(hub.poll()), "word"),
    Way("for", iter, "step"),
    Way("async for", each_async_for, "step"),
    *(
        Way(
            f"batches {hold} {prefetch}",
            batches_of(hold=hold, prefetch=prefetch),
            {"caller": "word"}.get(hold, hold),
        )
        for hold in ("step", "gather", "caller")
        for prefetch in (0, 2)
    ),
    Way("take_groups", each_group, "word"),
]
RANK_HOLDS = {"step": "step", "gather": "gather", "caller": "word"}
ways = pytest.mark.parametrize("way", WAYS, ids=[way.name for way in WAYS])


@pytest.fixture
def left(bridge, make_producer, make_consumer) -> Callable[[], list[int]]:
    """Returns the records that the next consumer gets again."""
    producer = make_producer()
    for number in range(PUT):
        producer.put({"tokens": [[number]]})

    def take() -> list[int]:
        gc.collect()
        hub = make_consumer()
        return [record._sequence for record in hub.poll()]

    return take


def without(*released: int) -> list[int]:
    return [number for number in range(PUT) if number not in released]


# -- one test per column of the table
# ---------------------------------------------------------------------------------------------


@ways
def test_an_items_own_release_releases_it(way, make_consumer, left) -> None:
    with make_consumer() as hub:
        for number, item in enumerate(way.items(hub)):
            item.release()
            if number == 1:
                break
    assert left() == without(0, 1)


@ways
def test_a_step_releases_what_the_last_one_yielded_or_nothing(way, make_consumer, left) -> None:
    with make_consumer() as hub:
        items = way.items(hub)
        in_hand = [next(items) for _ in range(3)]
        released = way.released(3)
        assert hub.stats()["held"] == PUT - len(released)
        del in_hand, items
    assert left() == without(*released)


@ways
@pytest.mark.parametrize("end", ["break", "exception", "exception caught outside", "close", "with"])
def test_leaving_a_loop_releases_nothing(way, end, make_consumer, left) -> None:
    with contextlib.suppress(Stop), make_consumer() as hub:
        with contextlib.suppress(Stop) if end == "exception caught outside" else contextlib.nullcontext():
            for number, _item in enumerate(way.items(hub)):
                if number == 1 and end.startswith("exception"):
                    raise Stop
                if number == 1:
                    break
        if end == "close":
            hub.close()
        elif end == "break":
            del _item
            gc.collect()
            assert hub.stats()["held"] == PUT - len(way.released(2))
    _item = None
    assert left() == without(*way.released(2))


@pytest.mark.parametrize("way", [way for way in WAYS if way.name != "take_groups"], ids=lambda way: way.name)
def test_an_items_own_with_block_releases_unless_an_exception_leaves_it(way, make_consumer, left) -> None:
    with make_consumer() as hub:
        items = way.items(hub)
        with next(items):
            pass
        with pytest.raises(Stop), next(items):
            raise Stop
        del items
    assert left() == without(0, *way.released(2))


# -- ranks
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["break", "exception", "close", "with", "word", "share"])
@pytest.mark.parametrize("hold", RANK_HOLDS)
def test_a_rank_is_done_by_a_word_only(hold, end, make_consumer, make_rank, left) -> None:
    hub = make_consumer()
    hub.serve_ranks(1, groups=1, prefetch=2)
    rank, released = make_rank(), Way("", iter, RANK_HOLDS[hold]).released(2)
    if end == "exception":
        with pytest.raises(Stop), rank:
            for number, _batch in enumerate(rank.batches(timeout_s=5, hold=hold)):
                if number == 1:
                    raise Stop
    elif end == "share":
        released = [0]
        with rank.next_share(5):
            pass
        with pytest.raises(Stop), rank.next_share(5):
            raise Stop
    else:
        with rank:
            for number, batch in enumerate(rank.batches(timeout_s=5, hold=hold)):
                if end == "word":
                    batch.release()
                if number == 1:
                    break
            if end == "word":
                released = [0, 1]
            if end == "close":
                rank.close()
            if end == "break":
                del batch
    gc.collect()
    rank.close()
    hub.close()
    assert left() == without(*released)


# -- leases that the garbage collector ends
# -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", [way for way in WAYS if "batches" not in way.name], ids=lambda way: way.name)
def test_records_that_nobody_looked_at_are_handed_out_again_next(
    way, make_consumer, left, caplog, recwarn
) -> None:
    hub = make_consumer()
    items = way.items(hub)
    first = next(items)
    del first, items
    gc.collect()
    with caplog.at_level(logging.WARNING):
        again = hub.get(5)
    assert (again._sequence, again._redelivered) == (0, False)
    assert (hub.stats()["leases_dropped_total"], hub.stats()["leases_returned_total"] > 0) == (0, True)
    said = [str(each.message) for each in recwarn if "dropped without release" in str(each.message)]
    assert len(said) == 1
    assert said[0] in caplog.text
    assert {"for": "`for record in consumer`", "async for": "`async for record"}.get(
        way.name, way.name + "()"
    ) in said[0]
    assert "release()" in said[0]


def test_a_list_that_an_exception_ends_comes_again_in_order(make_consumer, left) -> None:
    hub = make_consumer()
    records = hub.poll()
    records.pop(1).release()
    records.pop(0).meta  # noqa: B018, a look
    del records
    gc.collect()
    assert [record._sequence for record in hub.poll()] == [2, 3]


@pytest.mark.parametrize(
    "look",
    [
        lambda r: r.meta,
        lambda r: r["tokens"],
        lambda r: memoryview(r).nbytes,
        lambda r: r.to_arrow().num_rows,
    ],
)
def test_records_that_were_looked_at_stay_until_taken_back(make_consumer, left, look, caplog) -> None:
    hub = make_consumer()
    record = hub.get(5)
    look(record)
    del record
    gc.collect()
    with pytest.warns(ResourceWarning, match=r"get\(\).*stays un-released"):
        second = hub.get(5)
    stats = hub.stats()
    assert (second._sequence, stats["leases_dropped_total"], stats["held"]) == (1, 1, PUT)
    assert hub.take_back_dropped() == 1
    again = hub.get(5)
    assert (again._sequence, again._redelivered, again["tokens"][0].tolist()) == (0, True, [0])
    again.release()
    second.release()
    assert [record._sequence for record in hub.poll()] == [2, 3]


def test_a_batch_that_was_dropped_is_taken_back_whole(make_consumer, left) -> None:
    hub = make_consumer()
    for _batch in hub.batches(groups=2, prefetch=0):
        break
    del _batch
    assert (hub.stats()["leases_dropped_total"], hub.take_back_dropped()) == (2, 2)
    with next(hub.batches(groups=2, prefetch=0, timeout_s=5)) as batch:
        assert [meta.sequence for meta in batch.meta] == [0, 1]
        assert all(meta.redelivered for meta in batch.meta)
    assert hub.stats()["held"] == 2


def test_a_record_that_is_dropped_in_another_thread_wakes_the_hub(
    bridge, make_consumer, make_producer
) -> None:
    make_producer().put({"tokens": [[1]]})
    hub = make_consumer()
    hands = [hub.get(5)]
    threading.Timer(0.1, hands.clear).start()
    began = time.monotonic()
    hub.get(10).release()
    assert time.monotonic() - began < 0.9  # a tick is a second


def test_a_full_lane_and_a_stuck_batch_name_the_count(make_producer, make_consumer, bridge) -> None:
    producer, hub = make_producer(on_full="raise"), make_consumer()
    with pytest.raises(errors.LaneFull):
        while True:
            producer.put({"tokens": [[1] * 1000]})
    for record in hub.poll():
        assert record.meta
    del record
    with pytest.raises(errors.LaneFull, match=r"\d+ of them dropped without release.*take_back_dropped"):
        producer.put({"tokens": [[1] * 1000]})
    with (
        pytest.raises(errors.ConsumerEmpty, match="were dropped without release"),
        pytest.warns(ResourceWarning),
    ):
        hub.get(0)
    (info,) = [info for info in shmbridge.list_bridges() if info.name == bridge]
    assert info.lanes[0].dropped == info.lanes[0].held > 0
    with pytest.raises(errors.BatchTooBig, match=r"\d+ were dropped without release"):
        next(hub.batches(groups=2, prefetch=0, timeout_s=20))


def test_a_process_that_exits_releases_nothing(bridge, left, child) -> None:
    process = child("""
import os, shmbridge
consumer = shmbridge.Consumer(bridge)
first, rest = consumer.get(5), consumer.poll()
first.meta
if os.fork() == 0:
    del first, rest
    os._exit(0)
os.wait()
assert consumer.stats()["held"] == 4
print("ready", flush=True)
raise SystemExit(0)
""")
    assert process.wait(30) == 0
    assert left() == without()


# -- interrupts
# ------------------------------------------------------------------------------------------------------------

takes_the_alarm = pytest.mark.timeout(120, method="thread")  # the other method is this signal


def test_the_log_line_of_a_loss_is_written_where_no_signal_handler_raises(
    make_producer, make_consumer, monkeypatch
) -> None:
    """Before Python 3.13 an interrupt may keep a log handler's lock: the thread that forms batches ahead
    would wait for it for ever.
    """
    logged_in = []
    monkeypatch.setattr(
        logging.getLogger("shmbridge.record.record"),
        "warning",
        lambda *_: logged_in.append(threading.current_thread()),
    )
    make_producer().put({"tokens": [[1]]})
    hub = make_consumer()
    hub.get(5)
    with pytest.warns(ResourceWarning, match=r"get\(\) handed out was dropped"):
        hub.get(5).release()
    (thread,) = logged_in
    assert thread is not threading.main_thread()


def test_a_loss_is_said_though_logging_hangs(make_producer, make_consumer, monkeypatch) -> None:
    """Logging hangs for every other thread once the program's own logging was interrupted."""
    stuck = threading.Event()
    monkeypatch.setattr(logging.getLogger("shmbridge.record.record"), "warning", lambda *_: stuck.wait(60))
    monkeypatch.setattr("shmbridge.record.record._LOG_S", 0.05)
    make_producer().put({"tokens": [[1]]})
    hub = make_consumer()
    hub.get(5)
    with pytest.warns(ResourceWarning, match=r"get\(\) handed out was dropped"):
        hub.get(5).release()
    assert not stuck.is_set()
    stuck.set()


@pytest.mark.parametrize("of", ["the thread", "the one that starts it"])
def test_a_loss_is_said_also_where_no_thread_can_be_had(
    make_producer, make_consumer, monkeypatch, caplog, of
) -> None:
    """Otherwise get() would raise a bare RuntimeError because of a log line."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    make_producer().put({"tokens": [[1]]})
    hub = make_consumer()
    hub.get(5)
    monkeypatch.setattr(
        *((threading.Thread, "start") if of == "the thread" else (_thread, "start_new_thread")), refuse
    )
    with pytest.warns(ResourceWarning, match=r"get\(\) handed out was dropped"):
        record = hub.get(5)
    monkeypatch.undo()
    record.release()
    assert "get() handed out was dropped" in caplog.text


def interrupted(take: Callable[[], None], times: int, rng: random.Random) -> None:
    """Runs `take` with a raising signal after a random time, again and again."""

    armed = False

    def handler(*_: object) -> None:
        nonlocal armed
        # A destructor swallows what is raised in it. In Python 3.13 the jump back of a `while` is outside its
        # `try` (python/cpython#130279): a handler that interrupts a handler there would raise past it.
        if armed and sys._getframe(1).f_code.co_name not in ("__del__", "handler", "interrupted"):
            armed = False
            raise Stop

    before, hook = signal.signal(signal.SIGALRM, handler), sys.unraisablehook
    # pytest's hook keeps an exception that a destructor swallowed: its traceback would keep the records alive
    sys.unraisablehook = lambda _: None
    try:
        for _ in range(times):
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-6, 2e-3), 1e-3)
            armed = True
            try:
                while armed:
                    take()
            except Stop:
                pass
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        sys.unraisablehook = hook


@takes_the_alarm
@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(
    "way",
    [way for way in WAYS if "gather" not in way.name and "async" not in way.name],
    ids=lambda way: way.name,
)
def test_records_that_an_interrupt_loses_come_again(way, make_producer, make_consumer) -> None:
    """Every record not released here is there for the next consumer; a missing one was noted as done."""
    producer, hub, done = make_producer(lane_bytes="4M"), make_consumer(), set()
    total = 400
    for number in range(total):
        producer.put({"tokens": [[number]]})

    def take() -> None:
        for item in way.items(hub):
            for record in getattr(item, "records", [item]):
                done.add(record._sequence)
            item.release()
            if len(done) % 16 == 0:
                return
        time.sleep(0)

    interrupted(take, 25, random.Random(7))
    gc.collect()
    hub.close()
    gc.collect()
    again = [record._sequence for record in make_consumer().poll(total)]
    assert again == sorted(again)
    assert done | set(again) == set(range(total))


@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_handler_closes_while_a_batch_is_formed(
    bridge, make_producer, make_consumer, monkeypatch, prefetch
) -> None:
    """The handler comes as a formed batch is about to be handed out: it closes, and the batch stays here."""
    producer, hub = make_producer(), make_consumer()
    for number in range(4):
        producer.put({"tokens": [[number]]})
    before = signal.signal(signal.SIGUSR1, lambda *_: hub.close())
    begin, came = BatchFormer.begin_step, []

    def interrupted(former, groups) -> bool:
        came.append(groups)
        signal.raise_signal(signal.SIGUSR1)
        return begin(former, groups)

    try:
        batches = hub.batches(groups=1, prefetch=prefetch, timeout_s=10)
        monkeypatch.setattr(BatchFormer, "begin_step", interrupted)
        seen = list(batches)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert (len(came), seen) == (1, [])
    came.clear()
    assert [record._sequence for record in make_consumer().poll()] == [0, 1, 2, 3]


def test_a_handler_closes_while_lanes_are_adopted(bridge, make_producer, make_consumer, monkeypatch) -> None:
    hub, real = make_consumer(), LaneSet._adopt
    before = signal.signal(signal.SIGUSR1, lambda *_: hub.close())

    def adopt(lanes, strict) -> None:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(signal.SIGUSR1)
        real(lanes, strict)

    try:
        monkeypatch.setattr(LaneSet, "_adopt", adopt)
        hub._lanes.turns.arrivals ^= 1
        assert hub.poll() == []
    finally:
        signal.signal(signal.SIGUSR1, before)
        monkeypatch.undo()
    with pytest.raises(errors.Closed):
        hub.get(1)
    make_consumer()


@takes_the_alarm
@pytest.mark.parametrize("prefetch", [0, 1])
def test_a_handler_that_closes_at_any_time_never_hangs(prefetch, make_producer, make_consumer) -> None:
    producer, rng = make_producer(lane_bytes="4M"), random.Random(11)
    for number in range(200):
        producer.put({"tokens": [[number]]})
    seen: list[int] = []
    for _ in range(10):
        hub = make_consumer()
        before = signal.signal(signal.SIGALRM, lambda *_, hub=hub: hub.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-4, 5e-3))
            for batch in hub.batches(groups=1, prefetch=prefetch, timeout_s=5):
                seen += [record._sequence for record in batch.records]
                batch.release()
        except (errors.Closed, errors.ConsumerEmpty):
            pass
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        hub.close()
        batch = None  # it keeps the hub's lock, if it was held when the handler came
        gc.collect()
    assert seen == list(range(len(seen)))


# -- a run that says its words
# ------------------------------------------------------------------------------------------------------

RECORDS = 10_000
REPEATS = {"async for", "batches step 0", "batches gather 2", "batches caller 0"}  # of a way that always runs


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, id=way.name, marks=[pytest.mark.long] if way.name in REPEATS else []) for way in WAYS],
)
def test_ten_thousand_records_pass_and_no_lease_is_dropped(way, make_producer, make_consumer) -> None:
    producer, hub = make_producer(lane_bytes="4M"), make_consumer()
    seen = 0
    while seen < RECORDS:
        for _ in range(500):
            producer.put({"tokens": [[1]]}, timeout_s=10)
        items = many(way)(hub)
        end = seen + 500
        while seen < end:
            item = next(items)
            seen += (
                len(item.records)
                if hasattr(item, "records") and item.records
                else getattr(item, "group_count", 1)
            )
            item.release()
        items.close() if hasattr(items, "close") else None
    stats = hub.stats()
    assert (seen, stats["leases_dropped_total"], stats["leases_returned_total"], stats["held"]) == (
        RECORDS,
        0,
        0,
        0,
    )


@pytest.mark.parametrize("hold", RANK_HOLDS)
def test_ten_thousand_records_pass_a_rank_and_no_lease_is_dropped(
    hold, make_producer, make_consumer, make_rank
) -> None:
    producer, hub = make_producer(lane_bytes="4M"), make_consumer()
    hub.serve_ranks(1, groups=100, prefetch=1)
    seen = 0
    with make_rank() as rank:
        batches = rank.batches(timeout_s=10, hold=hold)
        for first in range(0, RECORDS, 100):
            for _ in range(100):
                producer.put({"tokens": [[1]]}, timeout_s=10)
            batch = next(batches)
            assert [meta.sequence for meta in batch.meta] == list(range(first, first + 100))
            seen += len(batch)
            if hold == "caller":
                batch.release()
        batch.release()
        batches.close()
    hub.close()
    stats = hub.stats()
    assert (seen, stats["leases_dropped_total"], stats["leases_returned_total"]) == (RECORDS, 0, 0)


def many(way: Way) -> Callable[[shmbridge.Consumer], Iterator[Any]]:
    """The same way, with batches of a hundred where it forms batches."""
    if way.name.startswith("batches"):
        _, hold, prefetch = way.name.split()
        return lambda hub: hub.batches(groups=100, timeout_s=5, hold=hold, prefetch=int(prefetch))
    return (
        (lambda hub: (record for _ in iter(int, 1) for record in hub.poll()))
        if way.name == "poll"
        else way.items
    )
