"""close() in a signal's handler, at every line of every call that takes a lock: it never waits for what it
interrupts.
"""

import asyncio
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

import shmbridge
from shmbridge import errors
from shmbridge.hub import RankServer
from shmbridge.segments import Joined, MemoryUse

# Locks whose holder never waits for anything that close() waits for, or that close() never takes.
ELSEWHERE = {
    ("ControlServer", "_closing"): "taken by close() alone, which a handler of its own thread leaves",
    ("Closing", "_closer"): "the closer's own",
    ("LoopBell", "_closing"): "an RLock whose holder sees that a handler has closed",
}
SIGNAL = signal.SIGUSR1


def put(consumer: shmbridge.Consumer, producer: shmbridge.Producer, count: int = 2) -> None:
    for number in range(count):
        producer.put({"tokens": [[number]]})


def put_back(consumer: shmbridge.Consumer) -> None:
    consumer.put_back(consumer.take_groups(groups=1, timeout_s=0) or [])


def adopts(call: Callable[[shmbridge.Consumer], object]) -> Callable[[shmbridge.Consumer], object]:
    def called(consumer: shmbridge.Consumer) -> object:
        consumer._lanes.turns.arrivals ^= 1
        return call(consumer)

    return called


def served(call: Callable[[RankServer], object]) -> Callable[[shmbridge.Consumer], object]:
    def called(consumer: shmbridge.Consumer) -> object:
        return call(consumer.serve_ranks(1, groups=1))

    return called


CALLS: dict[str, Callable[[shmbridge.Consumer], object]] = {
    "stats": lambda hub: hub.stats(),
    "get": adopts(lambda hub: hub.get(0)),
    "poll": adopts(lambda hub: hub.poll()),
    "for": adopts(lambda hub: next(iter(hub))),
    "publish": lambda hub: hub.publish_policy_version(3),
    "take_groups": lambda hub: hub.take_groups(groups=1, timeout_s=0),
    "put_back": put_back,
    "batches": lambda hub: next(hub.batches(groups=1, prefetch=0, timeout_s=0)),
    "serve_ranks": lambda hub: hub.serve_ranks(1, groups=1),
    "server.stats": served(lambda server: server.stats()),
    "server.idle": served(lambda server: server.idle),
    "server.wait": served(lambda server: server.wait(0)),
}


class AtLine:
    """Raises the signal at the line of that number, counting the lines in shmbridge and threading as each
    runs for the first time.

    With `after`, counts only lines after a function of that name is entered.
    """

    def __init__(self, number: int, after: str = "") -> None:
        self._number, self._after, self._lines, self.came = number, after, set[object](), False

    def __call__(self, frame: Any, event: str, _: Any) -> "AtLine | None":
        name = frame.f_globals.get("__name__", "")
        if not (
            name.startswith("shmbridge.")
            or name in ("threading", "contextlib", "concurrent.futures.thread", __name__)
        ):
            return None
        if self._after and self._after != frame.f_code.co_name:
            return self
        self._after = ""
        if event == "line" and not self.came:
            self._lines.add((frame.f_code, frame.f_lineno))
            if len(self._lines) > self._number:
                self.came = True
                sys.settrace(None)
                signal.raise_signal(SIGNAL)
        return self


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.timeout(120, method="thread")
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_a_handler_may_close_at_any_line_of_a_call(name, bridge, make_producer, monkeypatch) -> None:
    monkeypatch.setattr(MemoryUse, "of", lambda *_: {})  # reads a long file each time
    call, producer, options = CALLS[name], make_producer(), {}
    if name == "publish":
        options = {"policy": "oldest", "max_off_policy_steps": 1, "groups_per_step": 1}
    line, before = 0, signal.getsignal(SIGNAL)
    try:
        while True:
            consumer = shmbridge.Consumer(bridge, **options)
            if not producer.stats()["held"]:
                put(consumer, producer)
            closed_in_handler = []
            signal.signal(SIGNAL, lambda *_, hub=consumer, noted=closed_in_handler: noted.append(hub.close()))
            at = AtLine(line)
            in_hand: list[object] = []
            sys.settrace(at)
            try:
                in_hand.append(call(consumer))
            except (errors.Closed, errors.ConsumerEmpty, StopIteration):
                pass
            finally:
                sys.settrace(None)
            if at.came and not consumer._closing.over:  # an iteration that was interrupted as it handed out
                assert name in ("batches", "for"), line
                in_hand.clear()
                consumer.close()
            assert at.came == (closed_in_handler == [None])
            if not at.came:
                consumer.close()
                break
            assert consumer._closing.over, line
            assert not [
                each.name for each in threading.enumerate() if each.name.startswith("shmbridge-ranks")
            ], line
            signal.signal(SIGNAL, signal.SIG_DFL)
            in_hand.clear()  # a record in hand keeps the bridge
            del consumer
            line += 1
    finally:
        sys.settrace(None)
        signal.signal(SIGNAL, before)
    assert line > 5, "the call's lines were gone through"


def closes_in_handler(consumer: shmbridge.Consumer, call: Callable[[], object]) -> object:
    """Returns the result of a call that itself raises the signal, whose handler closes."""
    before = signal.signal(SIGNAL, lambda *_: consumer.close())
    try:
        return call()
    finally:
        signal.signal(SIGNAL, before)


@pytest.mark.timeout(60, method="thread")
def test_a_wait_for_the_ranks_ends_when_a_handler_closes(consumer) -> None:
    """The signal comes where the wait holds the lock and is about to free it."""
    server = consumer.serve_ranks(1, groups=1)
    wait = server._dealer._change.wait

    def interrupted(timeout: float | None = None) -> bool:
        if threading.current_thread() is threading.main_thread():
            signal.raise_signal(SIGNAL)
        return wait(timeout)

    server._dealer._change.wait = interrupted
    assert closes_in_handler(consumer, server.wait) is False
    assert consumer._closing.over


def test_an_owed_close_hands_nothing_more_out(consumer, producer) -> None:
    """Otherwise a loop over a busy bridge would never see the close."""
    put(consumer, producer, 8)
    records, taken = iter(consumer), []
    taken.append(next(records))
    real = consumer._closing.close_if_owed
    # the interrupted call ended just before the owed close
    consumer._closing.close_if_owed = lambda: None
    with consumer._closing.whole:
        closes_in_handler(consumer, lambda: signal.raise_signal(SIGNAL))
    consumer._closing.close_if_owed = real
    assert not consumer._closing.over
    taken += records
    assert len(taken) == 1
    with pytest.raises(errors.Closed):
        consumer.get(0)
    assert consumer.stats()["held"] == 7  # a step releases the record of the one before


def batch_of(hold: str) -> Callable[[shmbridge.Consumer], object]:
    def called(consumer: shmbridge.Consumer) -> object:
        # an iteration that ends would close
        return next(batches := consumer.batches(groups=1, prefetch=0, hold=hold, timeout_s=0)), batches

    return called


@pytest.mark.parametrize(
    ("call", "after"),
    [
        (adopts(lambda hub: hub.get(0)), "_take"),
        (adopts(lambda hub: hub.poll() or None), "poll"),
        (batch_of("step"), "iterate"),
        (batch_of("gather"), "iterate"),
        (batch_of("caller"), "iterate"),
        (lambda hub: hub.take_groups(groups=1, timeout_s=0), "take_groups"),
    ],
    ids=["get", "poll", "step", "gather", "caller", "take_groups"],
)
@pytest.mark.timeout(120, method="thread")
def test_a_call_that_owes_a_close_hands_nothing_out(bridge, make_producer, monkeypatch, call, after) -> None:
    monkeypatch.setattr(MemoryUse, "of", lambda *_: {})
    producer, line, owed, closed = make_producer(), 0, 0, 0
    before = signal.getsignal(SIGNAL)
    try:
        while True:
            consumer = shmbridge.Consumer(bridge)
            put(consumer, producer, 2 - int(producer.stats()["held"]))
            found: list[bool] = []
            signal.signal(
                SIGNAL, lambda *_, hub=consumer, found=found: found.append(hub.close() or hub._closing.owed)
            )
            at, handed_out = AtLine(line, after), None
            sys.settrace(at)
            try:
                handed_out = call(consumer)
            except (errors.Closed, errors.ConsumerEmpty, StopIteration):
                pass
            finally:
                sys.settrace(None)
            assert not (handed_out and found == [True]), f"line {line}"
            assert handed_out or producer.stats()["held"] == 2
            owed, closed = owed + (found == [True]), closed + (found == [False])
            del handed_out
            consumer.close()
            del consumer
            if not at.came:
                break
            line += 1
    finally:
        sys.settrace(None)
        signal.signal(SIGNAL, before)
    assert closed > 3
    assert owed > 3 or after not in ("_take", "poll")  # those adopt lanes, under a lock; forming has none


def test_an_owed_close_is_not_paid_by_a_thread_that_it_joins(consumer, producer, until) -> None:
    put(consumer, producer, 1)
    taken = consumer.take_groups(groups=1, timeout_s=5)
    control = Joined(lambda: consumer.publish_policy_version(1), "a thread")
    with consumer._closing.whole:
        closes_in_handler(consumer, lambda: signal.raise_signal(SIGNAL))
        control.start()
        control.join()
        assert consumer.policy_version == 1
    assert not consumer._closing.over
    consumer.put_back(taken)
    assert consumer._closing.over


def locks_of(part: object, seen: set[int]) -> Iterator[tuple[str, str, Any]]:
    """Class, name and lock of every lock that is an attribute of a consumer's part."""
    if id(part) in seen:
        return
    seen.add(id(part))
    if isinstance(part, (list, tuple, set, dict)):
        for each in part.values() if isinstance(part, dict) else part:
            yield from locks_of(each, seen)
    elif type(part).__module__.startswith("shmbridge."):
        for name, value in getattr(part, "__dict__", {}).items():
            if isinstance(value, (type(threading.Lock()), type(threading.RLock()), threading.Condition)):
                yield type(part).__name__, name, value
            else:
                yield from locks_of(value, seen)


async def test_close_asks_for_the_owner_of_every_lock(limited, producer) -> None:
    consumer = limited(1)
    with contextlib.suppress(errors.ConsumerEmpty):
        await consumer.get_async(0.01)
    with contextlib.suppress(errors.ConsumerEmpty):
        next(consumer.batches(groups=1, prefetch=1, timeout_s=0.01))
    consumer.serve_ranks(1, groups=1)
    found = {(owner, name): lock for owner, name, lock in locks_of(consumer, set())}
    assert ELSEWHERE.keys() < found.keys()
    assert len(found) >= len(ELSEWHERE) + 7
    for place, lock in found.items():
        if place not in ELSEWHERE:
            assert isinstance(lock, (type(threading.RLock()), threading.Condition)), place
            with lock:
                assert consumer._closing.lock_is_mine, place
        assert not consumer._closing.lock_is_mine, place


@pytest.mark.timeout(120, method="thread")
def test_a_handler_may_close_a_producer_at_any_line_of_a_put_that_waits(make_producer) -> None:
    line, came, before = 0, True, signal.getsignal(SIGNAL)
    try:
        while came:
            producer, at = make_producer(), AtLine(line, after="_put_later")
            while producer.stats()["lane_free_bytes"] > 13_000:
                producer.put({"tokens": [range(3000)]})
            signal.signal(SIGNAL, lambda *_, closing=producer: closing.close())

            async def put(producer: shmbridge.Producer = producer, at: AtLine = at) -> object:
                task = asyncio.create_task(producer.put_async({"tokens": [range(3000)]}))
                until_s = time.monotonic() + 0.05
                while not at.came and time.monotonic() < until_s:
                    await asyncio.sleep(0.001)
                sys.settrace(None)
                producer.close()
                (outcome,) = await asyncio.gather(task, return_exceptions=True)
                return outcome

            sys.settrace(at)
            try:
                outcome = asyncio.run(put())
            finally:
                sys.settrace(None)
            came = at.came
            assert isinstance(outcome, errors.Closed), (line, outcome)
            assert producer.stats()["dropped_total{cancelled}"] == 1, line
            line += 1
    finally:
        sys.settrace(None)
        signal.signal(SIGNAL, before)
    assert line > 10
