"""Tickets under faults: interrupts and garbage collections, a producer that closes, hostile numbers, lanes
that no hub reads.
"""

import asyncio
import fcntl
import gc
import linecache
import os
import random
import signal
import struct
import sys
import threading
import time

import pytest

import shmbridge
from shmbridge.control import messages
from shmbridge.control.server import ControlClient, RequestRefused
from shmbridge.put import lane
from shmbridge.segments import locks
from shmbridge.testing import wait_until
from shmbridge.testing.faults import ASKING_FOR_TICKETS


def group(number: int = 0) -> dict:
    return {"tokens": [[number]]}


def held(producer: shmbridge.Producer) -> int:
    """A lane's tickets as another process sees them."""
    fd = os.open(f"/dev/shm{producer.lane_name}", os.O_RDWR)
    try:
        return locks.tickets_held(fd)
    finally:
        os.close(fd)


@pytest.mark.parametrize("label", ASKING_FOR_TICKETS)
def test_an_interrupt_while_a_ticket_is_shown_leaves_none(producer, limited, monkeypatch, label) -> None:
    limited(0, 1)

    def interrupt(passed: bytes) -> None:
        if passed == label.encode():
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(lane.header, "fault", interrupt)
        with pytest.raises(KeyboardInterrupt):
            producer.begin_group(timeout_s=5)
    assert held(producer) == 0
    producer.begin_group(timeout_s=5).end()


# Python drops an interrupt that comes while its own weak sets forget something.
@pytest.mark.filterwarnings("ignore:Exception ignored in. <function WeakSet")
@pytest.mark.timeout(120, method="thread")  # the other method is the signal that this test takes
def test_interrupts_at_any_moment_leave_nothing_behind(producer, limited) -> None:
    """No byte stays locked, no producer says that it is asking already, no half message is taken for the next
    one.
    """
    limited(0, 1)
    begun = interrupted = 0
    descriptors = len(os.listdir("/proc/self/fd"))
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        while begun < 50 or interrupted < 300:
            try:
                longest = 1e-3 if interrupted < 300 else 1e-2  # a busy machine begins none in a millisecond
                signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, longest))
                with producer.begin_group(timeout_s=20):
                    begun += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
            except KeyboardInterrupt:
                interrupted += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert held(producer) == 0
    producer.begin_group(timeout_s=5).end()
    gc.collect()
    # A thread of libzmq closes those of interrupted questions; an interrupt in pyzmq's Context() costs one.
    most = descriptors + 60 + interrupted // 25
    wait_until(lambda: len(os.listdir("/proc/self/fd")) < most)


@pytest.mark.parametrize("call", ["show", "give back"])
def test_a_collection_that_gives_one_back_meanwhile_leaves_the_bytes_in_a_row(
    producer, consumer, monkeypatch, call
) -> None:
    """A ticket in a cycle ends whenever Python collects, also between the count and the lock."""
    ends = producer.begin_group(timeout_s=5)
    stays = producer.begin_group(timeout_s=5)
    cycle: list = [producer.begin_group(timeout_s=5)]
    cycle.append(cycle)
    lock = locks._lock

    def collect_first(*arguments: int) -> bool:
        gc.collect()
        return lock(*arguments)

    gc.disable()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(locks, "_lock", collect_first)
            del cycle
            if call == "show":
                producer._tickets._taken(
                    messages.MayBegin(consumer.hub_epoch, 0, time.monotonic_ns() + 10**10)
                ).end()
            ends.end()
    finally:
        gc.enable()
    assert held(producer) == 1
    stays.end()
    assert held(producer) == 0


async def test_a_task_that_waits_while_the_producer_closes_gets_closed(make_producer, limited) -> None:
    """It raises Closed; it is not cancelled, since no caller asked for that."""
    limited(0, 1)
    holder, closing = make_producer(), make_producer()
    ticket = holder.begin_group(timeout_s=5)
    tasks = [asyncio.create_task(closing.begin_group_async()) for _ in range(2)]
    while not closing._tickets._asking.locked():
        await asyncio.sleep(0.001)
    await asyncio.sleep(0.05)
    closing.close()
    for task in tasks:
        with pytest.raises(shmbridge.Closed):
            await asyncio.wait_for(task, 10)
    assert closing._tickets._async_client is None
    ticket.end()
    with pytest.raises(shmbridge.Closed):
        await closing.begin_group_async(timeout_s=5)
    assert closing._tickets._async_client is None


def test_a_thread_that_waits_while_the_producer_closes_gets_closed(make_producer, limited) -> None:
    limited(0, 1)
    holder, closing = make_producer(), make_producer()
    ticket = holder.begin_group(timeout_s=5)
    met: list[BaseException] = []

    def ask() -> None:
        try:
            closing.begin_group()
        except BaseException as error:
            met.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    while not closing._tickets._asking.locked():
        time.sleep(0.001)
    time.sleep(0.05)
    closing.close()
    thread.join(10)
    assert [type(error) for error in met] == [shmbridge.Closed]
    ticket.end()


def test_a_ticket_that_comes_after_close_is_not_shown(producer, consumer) -> None:
    until_ns = time.monotonic_ns() + 10**10
    producer.close()
    assert producer._tickets._taken(messages.MayBegin(consumer.hub_epoch, 0, until_ns)) is None
    other = os.open(f"/proc/self/fd/{producer._lane.fd}", os.O_RDWR)
    assert locks.tickets_held(other) == 0
    os.close(other)


def test_a_producer_that_drains_gives_its_tickets_back_first(make_producer, limited) -> None:
    """Otherwise the release it waits for may never come: the batch lacks a group that none may begin."""
    consumer = limited(0, 2)
    leaving, other = make_producer(), make_producer()
    kept = leaving.begin_group(timeout_s=5)
    leaving.put(group())
    thread = threading.Thread(target=lambda: leaving.close(drain=True, timeout_s=20))
    thread.start()
    with other.begin_group(timeout_s=5):
        other.put(group(1))
    batches = consumer.batches(groups=2, prefetch=0, timeout_s=10)
    next(batches).release()
    thread.join(10)
    assert not thread.is_alive()
    kept.end()
    batches.close()


@pytest.mark.parametrize("running", [-1, locks.MOST_TICKETS, 10**15])
def test_a_number_of_tickets_that_no_lane_holds_is_refused(bridge, make_producer, limited, running) -> None:
    limited(0, 1)
    producer = make_producer()
    with (
        ControlClient(bridge, role="test", name="t") as client,
        pytest.raises(RequestRefused, match="tickets"),
    ):
        client.request(messages.BeginGroup(producer.lane_name, running))
    producer.begin_group(timeout_s=0.4).end()


@pytest.mark.parametrize(("start", "length"), [(0, 0), (locks.LockByte.FIRST_TICKET + 5, 0), (1, 1 << 40)])
def test_locks_that_no_producer_takes_are_counted_within_what_a_lane_can_hold(
    producer, start, length
) -> None:
    fd = os.open(f"/dev/shm{producer.lane_name}", os.O_RDWR)
    producer.close()
    fcntl.fcntl(fd, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, start, length, 0))
    other = os.open(f"/proc/self/fd/{fd}", os.O_RDWR)
    assert locks.tickets_held(other) == locks.MOST_TICKETS
    os.close(fd)
    assert locks.tickets_held(other) == 0
    os.close(other)


def test_as_many_tickets_as_a_lane_shows_are_the_most(producer, consumer, monkeypatch) -> None:
    monkeypatch.setattr(lane, "MOST_TICKETS", 2)
    two = [producer.begin_group(timeout_s=5) for _ in range(2)]
    with pytest.raises(shmbridge.NotAdmitted, match="holds 2 tickets"):
        producer.begin_group(timeout_s=5)
    two.pop().end()
    producer.begin_group(timeout_s=5).end()


def test_a_producer_whose_lane_is_quarantined_is_told(producer, limited) -> None:
    consumer = limited(0, 1)
    producer.put(group())
    for each in consumer._lanes:
        each.quarantine("a test says so")
    with pytest.raises(shmbridge.LaneQuarantined):
        producer.begin_group(timeout_s=5)


def test_a_producer_whose_lane_is_refused_is_told(producer, limited) -> None:
    consumer = limited(0, 1)
    producer.begin_group(timeout_s=5).end()
    consumer._lanes._lanes.pop(producer.lane_name)
    consumer._lanes.refused[producer.lane_name] = "a test says so"
    with pytest.raises(RequestRefused, match="is refused"):
        producer.begin_group(timeout_s=5)


def test_a_producer_whose_segments_were_removed_is_told(bridge, producer, make_consumer) -> None:
    """It does not go on asking a hub that shares none of them."""
    os.unlink(f"/dev/shm/shmbridge.{bridge}.c")
    os.unlink(f"/dev/shm{producer.lane_name}")
    consumer = make_consumer()
    with pytest.raises(shmbridge.NoConsumer, match="removed"):
        producer.begin_group(timeout_s=2)
    assert consumer.stats()["groups_begun_total"] <= 2


def test_every_question_is_asked_once(producer, make_producer, limited, monkeypatch) -> None:
    """A repeated question would void a promise whose answer is on its way and will be believed."""
    from shmbridge.control import server as control

    limited(0, 1)
    ticket = make_producer().begin_group(timeout_s=5)
    asked: list[int] = []

    monkeypatch.setattr(control.ControlServer, "_reply", _counting(control.ControlServer._reply, asked))
    with pytest.raises(shmbridge.NotAdmitted):
        producer.begin_group(timeout_s=1.7)
    ticket.end()
    assert len(asked) == len(set(asked)) > 2


def _counting(reply, asked: list[int]):
    def counted(server, peer: bytes, frames: list[bytes], came_s: float) -> None:
        if server._waiting.get(peer) != (frames, came_s):  # not looked at again by the server itself
            asked.append(messages.decode_request(frames)[0])
        reply(server, peer, frames, came_s)

    return counted


@pytest.mark.parametrize("others", ["talk", "are silent"])
def test_a_waiting_producer_is_looked_at_again(bridge, make_producer, limited, others) -> None:
    """A question asked only once is answered when a holder has given up."""
    limited(0, 1)
    holder, waiting = make_producer(), make_producer()
    ticket = holder.begin_group(timeout_s=5)
    stop = threading.Event()

    def talk() -> None:
        with ControlClient(bridge, role="test", name="talk") as client:
            while not stop.is_set():
                client.hello()

    talking = threading.Thread(target=talk if others == "talk" else stop.wait)
    talking.start()
    try:
        with ControlClient(bridge, role="test", name="t") as client:
            client.hello()
            client._socket.send_multipart(messages.encode(99, messages.BeginGroup(waiting.lane_name, 0)))
            assert not client._socket.poll(200)
            ticket.end()
            assert client._socket.poll(3_000)
            answer = messages.decode_answer(client._socket.recv_multipart())[1]
            assert isinstance(answer, messages.MayBegin)
    finally:
        stop.set()
        talking.join()


def test_a_waiting_producer_that_is_gone_is_not_looked_at_for_ever(
    bridge, make_producer, limited, monkeypatch, until
) -> None:
    """Most producers are waiting for a ticket when they are killed."""
    from shmbridge.control import server as control

    consumer = limited(0, 1)
    holder, gone = make_producer(), make_producer()
    ticket = holder.begin_group(timeout_s=5)
    monkeypatch.setattr(control, "_GONE_AFTER_S", 0.2)
    with ControlClient(bridge, role="test", name="t") as client:
        client.hello()
        client._socket.send_multipart(messages.encode(99, messages.BeginGroup(gone.lane_name, 0)))
        until(lambda: len(consumer._hub.server._waiting) == 1)
    gone.close()
    until(lambda: not consumer._hub.server._waiting)
    ticket.end()


def test_nothing_is_promised_to_the_dead(bridge, make_producer, limited, until) -> None:
    """A dead producer's lane may stay for its records, but no process will show a ticket there."""
    consumer = limited(1, 1)
    gone, other = make_producer(), make_producer()
    gone.put(group())
    until(lambda: len(consumer._lanes) == 2)
    gone.close()
    until(lambda: any(lane.dead for lane in consumer._lanes))
    with ControlClient(bridge, role="test", name="t") as client, pytest.raises(shmbridge.NoConsumer):
        client.request(messages.BeginGroup(gone.lane_name, 0), 0.3)
    other.begin_group(timeout_s=0.4).end()


def test_another_loop_asks_after_the_first_has_ended(producer, consumer) -> None:
    async def begin() -> int:
        with await producer.begin_group_async(timeout_s=5) as ticket:
            return ticket.policy_version

    assert [asyncio.run(begin()) for _ in range(3)] == [-1] * 3


def test_ranks_are_refused_batches_of_another_size_at_once(limited) -> None:
    consumer = limited(1, 4)
    with pytest.raises(ValueError, match="groups_per_step=4"):
        consumer.serve_ranks(2, groups=8)
    consumer.serve_ranks(2, groups=4)


def test_a_clock_ahead_of_the_consumers_is_named_as_the_reason(limited, make_producer, monkeypatch) -> None:
    limited()
    producer = make_producer()
    with monkeypatch.context() as patch:
        # as in a time namespace that is behind
        patch.setattr("shmbridge.hub.state.PROMISE_NS", -1_000_000 * 10**9)
        with pytest.raises(
            shmbridge.NotAdmitted,
            match=r"clock that is (1000000|999999) s ahead of its consumer's .*time namespace",
        ):
            producer.begin_group(timeout_s=20)
    with producer.begin_group(timeout_s=20):
        pass


class Stop(Exception):
    pass


@pytest.mark.timeout(120, method="thread")
async def test_a_task_that_an_exception_of_a_handler_ends_keeps_no_turn(producer, limited) -> None:
    """The exception comes at each line in turn, while the loop goes on: the next task is served."""
    limited(0, 1)

    async def interrupted_at(line: int) -> bool:
        left = line

        def trace(frame, event, _):
            nonlocal left
            if frame.f_globals.get("__name__") not in ("shmbridge.put.lane", "asyncio.timeouts"):
                return None
            words = linecache.getline(frame.f_code.co_filename, frame.f_lineno).split()
            if (
                event == "line"
                and not {"with", "finally:"} & set(words[:2])
                and frame.f_code.co_name != "_close_if_over"
            ):
                left -= 1
                if left == 0:
                    raise Stop
            return trace

        sys.settrace(trace)
        try:
            (await producer.begin_group_async(timeout_s=5)).end()
        except Stop:
            pass
        finally:
            sys.settrace(None)
        return left <= 0

    line = 1
    while await interrupted_at(line):
        with await producer.begin_group_async(timeout_s=5):
            line += 1
    assert line > 50
