"""Two threads of one process at the same moment: each test holds one of them at the place in question while
the other goes on.
"""

import asyncio
import contextlib
import gc
import os
import queue
import threading
import time
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace

import pytest

import shmbridge
from shmbridge.control import messages
from shmbridge.control.server import ControlClient, ControlServer
from shmbridge.hub import BatchFormer, Hub, HubLane, HubState, LaneSet, LoopBell, Prefetcher, Waiting
from shmbridge.segments import MemoryUse, threads
from shmbridge.testing import wait_until

RUN = shmbridge.Run(batch_size=1)


def group(number: int = 1) -> dict:
    return {"tokens": [[number]]}


class Meanwhile:
    """Runs an action in another thread on the first call; waits until it ends or waits for the caller."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._thread = threading.Thread(target=call, daemon=True)

    def __call__(self) -> None:
        if self._thread.ident is None:
            self._thread.start()
            self._thread.join(0.3)

    def ends(self) -> bool:
        self._thread.join(10)
        return not self._thread.is_alive()


def after(monkeypatch: pytest.MonkeyPatch, of: type, name: str, then: Callable[[], object]) -> None:
    """Patches a method or property: its caller runs `then` before it gets the result."""
    before = getattr(of, name)

    def called(*args):
        answer = (before.fget if isinstance(before, property) else before)(*args)
        then()
        return answer

    monkeypatch.setattr(of, name, property(called) if isinstance(before, property) else called)


def test_a_lane_adopted_between_two_looks_is_not_overlooked(make_producer, consumer, monkeypatch) -> None:
    adopts, go_on, adopt, has_new = (
        threading.Event(),
        threading.Event(),
        LaneSet._adopt_one,
        LaneSet._has_new_lanes,
    )

    def slowly(*args) -> None:
        adopts.set()
        assert go_on.wait(10)
        adopt(*args)

    def once_adopted(lanes: LaneSet) -> bool:
        if threading.current_thread() is threading.main_thread():
            go_on.set()
            wait_until(lambda: not lanes.turns.has_new_lanes)
        return has_new.fget(lanes)

    monkeypatch.setattr(LaneSet, "_adopt_one", slowly)
    producer = make_producer()
    assert adopts.wait(10)
    producer.put(group())
    monkeypatch.setattr(LaneSet, "_has_new_lanes", property(once_adopted))
    assert consumer.get(timeout_s=0).meta.sequence == 0


def test_counters_of_a_lane_that_is_just_buried_are_not_missing(make_producer, consumer) -> None:
    buries, go_on = threading.Event(), threading.Event()

    class Gone(Counter):
        def update(self, *counters) -> None:
            if counters != (None,):
                buries.set()
                assert go_on.wait(10)
            super().update(*counters)

    consumer._lanes._gone = Gone()
    producer = make_producer()
    producer.put(group())
    consumer.get(timeout_s=5).release()
    producer.close()
    assert buries.wait(10)
    threading.Timer(0.3, go_on.set).start()
    assert (consumer.stats()["records_total"], consumer.stats()["released_total"]) == (1, 1)


def test_two_threads_that_publish_a_version_do_not_take_it_back(consumer, monkeypatch) -> None:
    other = Meanwhile(lambda: consumer.publish_policy_version(7))
    after(monkeypatch, HubState, "policy_version", other)
    consumer.publish_policy_version(5)
    assert other.ends()
    assert consumer.policy_version == 7


def test_the_step_is_of_one_run_while_another_is_announced(make_consumer, producer, monkeypatch) -> None:
    """Otherwise an environment that asks at that moment may find its run finished."""
    consumer = make_consumer(policy="atropos", run=RUN)
    for number in range(2):
        producer.put(group(number))
    batches = consumer.batches(prefetch=0)
    for _ in range(2):
        next(batches)
    told: list[int] = []
    after(monkeypatch, BatchFormer, "steps", Meanwhile(lambda: told.append(consumer.current_step)))
    consumer.announce_run(shmbridge.Run(batch_size=1, starting_step=100))
    batches.close()
    assert told == [2]
    assert consumer.current_step == 100


def test_look_again_finds_its_descriptor_while_the_control_plane_closes(bridge, hub, monkeypatch) -> None:
    server, write = ControlServer(bridge, hub), os.eventfd_write
    closing = Meanwhile(server.close)

    def slowly(fd: int, value: int) -> None:
        if fd == server._again.fd:
            closing()
        write(fd, value)

    monkeypatch.setattr(os, "eventfd_write", slowly)
    server.look_again()
    assert closing.ends()


def test_stats_beside_close_are_those_of_before(producer, consumer, monkeypatch) -> None:
    producer.put(group())
    closing = Meanwhile(consumer.close)
    after(monkeypatch, MemoryUse, "of", closing)
    before = consumer.stats()
    assert closing.ends()
    assert (before["records_total"], before["held"]) == (1, 1)
    assert consumer.stats()["held"] == 1


def test_shares_that_ranks_have_not_read_are_still_held_when_the_hub_closes(
    producer, consumer, until
) -> None:
    for number in range(4):
        producer.put(group(number))
    server = consumer.serve_ranks(1, groups=2)
    until(lambda: server.stats()["ranks_steps_open"] == 2)
    consumer.close()
    stats = consumer.stats()
    assert (stats["records_total"], stats["held"], stats["released_total"]) == (4, 4, 0)


@pytest.mark.parametrize(
    "take", [list, lambda hub: list(hub.batches(groups=1, prefetch=0))], ids=["records", "batches"]
)
@pytest.mark.parametrize(
    "place", [(HubState, "check_open"), (Waiting, "drained")], ids=["check_open", "drained"]
)
def test_an_iteration_ends_wherever_another_thread_closes(consumer, monkeypatch, take, place) -> None:
    closing = Meanwhile(consumer.close)
    after(monkeypatch, *place, closing)
    assert take(consumer) == []
    assert closing.ends()


@pytest.mark.parametrize("place", ["_stop_forming", "stats"])
def test_two_threads_and_a_handler_may_close_at_once(consumer, monkeypatch, place) -> None:
    """A SIGTERM handler may close a consumer that is being closed."""
    ended: list[None] = []
    other = Meanwhile(lambda: ended.append(consumer.close()))
    after(monkeypatch, Hub, place, lambda: (other(), consumer.close()))
    consumer.close()
    assert other.ends()
    assert ended == [None]
    with shmbridge.Consumer(consumer.bridge):
        pass


def test_get_says_closed_wherever_another_thread_closes(consumer, monkeypatch) -> None:
    after(monkeypatch, shmbridge.Consumer, "_take", Meanwhile(consumer.close))
    with pytest.raises(shmbridge.Closed):
        consumer.get(timeout_s=5)


async def test_get_async_says_closed_wherever_another_thread_closes(consumer, monkeypatch) -> None:
    after(monkeypatch, LoopBell, "_listen", Meanwhile(consumer.close))
    with pytest.raises(shmbridge.Closed):
        await consumer.get_async(timeout_s=5)


def test_the_end_of_gathering_ahead_waits_for_no_batch_that_another_thread_took() -> None:
    class Taken(queue.Queue):
        def empty(self) -> bool:
            empty = super().empty()
            Meanwhile(self.get)()
            return empty

    ahead = Prefetcher(1, lambda stop: None)
    ahead.start()
    ahead._ready = Taken()
    ahead._ready.put(None)
    ending = Meanwhile(ahead.stop)
    ending()
    assert ending.ends()


def quickest(attempt: Callable[[], None]) -> float:
    """Returns the seconds of the quickest of three: a lost wake delays each by a tick of a second, a stalled
    machine not all of them.
    """
    took = []
    for _ in range(3):
        began = time.monotonic()
        attempt()
        took.append(time.monotonic() - began)
    return min(took)


def test_a_drain_between_a_look_and_the_sleep_after_it_is_heard(make_consumer, monkeypatch) -> None:
    def iterate() -> None:
        with make_consumer() as consumer, monkeypatch.context() as patched:
            after(patched, Waiting, "drained", Meanwhile(consumer.drain))
            assert list(consumer) == []

    assert quickest(iterate) < 0.8


def test_the_end_of_a_pause_between_a_look_and_the_sleep_after_it_is_heard(
    make_producer, consumer, monkeypatch, until
) -> None:
    producer = make_producer()
    until(lambda: consumer.stats()["lanes_live"] == 1)

    def put() -> None:
        consumer.pause()
        with monkeypatch.context() as patched:
            after(patched, shmbridge.Producer, "_is_paused", Meanwhile(consumer.resume))
            producer.put(group())

    assert quickest(put) < 0.8


def test_a_producer_that_is_about_to_sleep_does_not_hold_up_close(make_producer, consumer, until) -> None:
    """put_async waits in a thread, and the caller of close() may be an event loop."""

    def close() -> None:
        producer = make_producer()
        until(lambda: producer.producer_id in consumer._lanes.live_producers())  # adopted, which rings
        lock, closing = producer._one_sleeper, Meanwhile(producer.close)

        class Held:
            def acquire(self, **options: bool) -> bool:
                closing()
                return lock.acquire(**options)

            release = lock.release

        producer._one_sleeper = Held()
        asyncio.run(asyncio.wait_for(producer._sleeper.call(lambda: producer._sleep(5.0)), 10))
        assert closing.ends()

    assert quickest(close) < 0.8


def test_room_that_is_made_while_it_is_looked_for_is_no_sizing_error(
    make_producer, consumer, monkeypatch
) -> None:
    """A lane of three records: two are in the batch that its holder releases at that moment, one waits for
    another.
    """
    producer = make_producer()
    records = {"tokens": [range(4500)]}
    putting = Meanwhile(lambda: [producer.put(records) for _ in range(4)])
    putting()
    batches = consumer.batches(groups=2, hold="caller", timeout_s=10)
    first, letting_go, starves = next(batches), threading.Event(), HubLane.waits_for_space

    def starved(lane: HubLane) -> bool:
        if answer := starves.fget(lane):
            first.release()
            letting_go.set()
        return answer

    monkeypatch.setattr(HubLane, "waits_for_space", property(starved))
    assert letting_go.wait(10)
    next(batches).release()
    batches.close()
    assert putting.ends()


def test_a_hub_that_is_just_starting_takes_a_policy_version(bridge, limited, monkeypatch) -> None:
    """Its control plane answers before its constructor has returned."""
    made, answers = ControlServer.__init__, []

    def made_and_asked(*args, **options) -> None:
        made(*args, **options)
        with ControlClient(bridge, role="test", name="t") as client:
            answers.append(client.request(messages.SetPolicyVersion(3)))

    monkeypatch.setattr(ControlServer, "__init__", made_and_asked)
    assert (limited().policy_version, answers) == (3, [messages.Ack()])


def test_an_iteration_collected_by_the_thread_that_gathers_ahead_loses_nothing(producer, consumer) -> None:
    """A collection runs wherever memory is asked for: here while the next batch is formed, whose lock is
    held.
    """
    batches = [consumer.batches(groups=1, prefetch=1, timeout_s=10)]
    batches.append(batches)
    producer.put(group(1))
    next(batches[0]).release()
    collected = threading.Event()

    def collect(_: object) -> bool:
        gc.collect()
        collected.set()
        return True

    consumer.screen(collect)
    del batches
    producer.put(group(2))
    assert collected.wait(10)
    again = consumer.batches(groups=1, prefetch=0, timeout_s=10)
    assert next(again).tokens.tolist() == [2]
    again.close()


def test_an_interrupt_during_the_start_of_a_thread_leaves_none_that_cannot_begin(
    producer, make_consumer, monkeypatch, until
) -> None:
    """The interrupt may come while Thread.start holds the lock that the new thread needs first."""
    consumer, wait = make_consumer(), threading.Event.wait
    producer.put(group())

    def interrupted(event: threading.Event, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            return wait(event, timeout)
        event._cond.acquire()
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, contextlib.suppress(KeyboardInterrupt):
        patched.setattr(threading.Event, "wait", interrupted)
        next(consumer.batches(groups=1, prefetch=1, timeout_s=5))
    consumer.close()
    until(lambda: not [each for each in threading.enumerate() if each.name == "shmbridge-prefetch"])


@pytest.mark.parametrize("thread", ["prefetch", "control plane", "death watch"])
def test_a_close_that_is_interrupted_can_be_finished(producer, make_consumer, until, thread) -> None:
    """Otherwise the bridge is taken until this process ends."""
    consumer = make_consumer()
    producer.put(group())
    with pytest.raises(shmbridge.ConsumerEmpty):
        next(consumer.batches(groups=2, prefetch=1, timeout_s=0.01))

    class Interrupted(queue.SimpleQueue):
        def get(self, **_):
            life._ended = ended
            raise KeyboardInterrupt

    def interrupted() -> None:
        del joined.join
        raise KeyboardInterrupt

    if thread == "prefetch":
        life = consumer._hub.iterations._prefetcher._thread._life
        ended, life._ended = life._ended, Interrupted()
    else:
        joined = (consumer._hub.server if thread == "control plane" else consumer._lanes._watch)._thread
        joined.join = interrupted
    with pytest.raises(KeyboardInterrupt):
        consumer.close()
    consumer.close()
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("shmbridge-")])
    assert make_consumer().get(timeout_s=5).meta.sequence == 0


def events() -> list[str]:
    """The open descriptors that are of no file, such as those that wake threads."""
    links = [f"/proc/self/fd/{each}" for each in os.listdir("/proc/self/fd")]
    return sorted(
        link for link in links if os.path.lexists(link) and os.readlink(link).startswith("anon_inode:")
    )


# which one, of those that are started
STARTED = {"death watch": 1, "control plane": 2, "bell": 3, "ranks": 4}


@pytest.mark.parametrize("thread", STARTED)
def test_an_interrupt_as_a_thread_of_the_hub_is_started_leaves_nothing(
    producer, make_consumer, monkeypatch, until, thread
) -> None:
    """The interrupt comes while the starting thread waits until the new one runs."""
    producer.put(group())
    before, started, start = events(), [], threads.start_apart

    async def waits(hub: shmbridge.Consumer) -> None:
        (await hub.get_async()).release()
        with pytest.raises(shmbridge.ConsumerEmpty):
            await hub.get_async(0.01)

    class Interrupted(queue.SimpleQueue):
        def get(self):
            raise KeyboardInterrupt

    def interrupted(which: threading.Thread, failed: object) -> None:
        started.append(which.name)
        if len(started) == STARTED[thread]:
            owner = which._target.__self__
            owner._begun = Interrupted()
        start(which, failed)

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(threads, "start_apart", interrupted)
        with make_consumer() as hub:
            asyncio.run(waits(hub))
            hub.serve_ranks(1, groups=1)
    assert len(started) == STARTED[thread]
    until(lambda: not [each for each in threading.enumerate() if each.name.startswith("shmbridge-")])
    until(lambda: events() == before)
    producer.put(group())
    make_consumer().get(timeout_s=5).release()


def test_a_handler_during_the_check_for_two_threads_does_not_wait_for_itself(monkeypatch) -> None:
    """It calls the object whose check it interrupts, in the same thread."""
    calls: list[str] = []

    class Owner:
        def get(self) -> None:
            calls.append("get")

    def interrupted() -> int:
        monkeypatch.setattr(threads, "threading", threading)
        owner.get()
        return threading.get_ident()

    monkeypatch.setenv("SHMBRIDGE_DEBUG", "1")
    owner = Owner()
    threads.watch_threads(owner, "the owner", ("get",))
    monkeypatch.setattr(threads, "threading", SimpleNamespace(get_ident=interrupted))
    calling = threading.Thread(target=owner.get, daemon=True)
    calling.start()
    calling.join(10)
    assert calls == ["get", "get"]
