"""Wherever a call is interrupted, no descriptor is closed twice: its number may belong to another thread by
then.
"""

import asyncio
import contextlib
import gc
import itertools
import os
import sys
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

import shmbridge
from shmbridge._ext.header import Descriptor
from shmbridge.segments import locks, membership, segment
from tests.transport import interrupts

WATCHED = {each.__file__ for each in (membership, locks, locks, membership, segment, segment)}


class Stop(Exception):
    pass


def test_a_descriptor_is_closed_once() -> None:
    ours = Descriptor(os.eventfd(0))
    number = ours.fd
    ours.close()
    other = os.eventfd(0)
    assert (other, ours.fd) == (number, -1)
    ours.close()
    del ours
    os.fstat(other)
    os.close(other)


def test_a_mapping_keeps_its_descriptor_open(bridge) -> None:
    name, created = segment.create_lane(bridge, 1 << 16)
    mapping = segment.open_mapping(name)
    number = mapping.fd
    os.fstat(number)
    del mapping
    with pytest.raises(OSError):
        os.fstat(number)
    segment.unlink_segment(created.fd, name)


def interrupt_at(call: Callable[[], object], number: int) -> list[int] | None:
    """Raises at one bytecode of the modules above; returns files opened in the meantime, as by another
    thread.

    None if the call ended before.
    """
    seen, opened = 0, []

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal seen
        if frame.f_code.co_filename not in WATCHED:
            return None
        frame.f_trace_opcodes = True
        if seen > number:
            opened.append(os.eventfd(0))
        if event == "opcode":
            seen += 1
            if seen == number + 1:
                raise Stop
        return trace

    sys.settrace(trace)
    try:
        call()
    except Stop:
        pass
    finally:
        sys.settrace(None)
    return opened if seen > number else None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # in a finalizer
@pytest.mark.parametrize("what", ["create", "open", "remove", "enter", "engine folder"])
def test_descriptors_are_not_closed_twice_wherever_an_interrupt_comes(what, bridge) -> None:
    def open_and_forget() -> None:
        name, mapping = segment.create_lane(bridge, 1 << 16)
        if what == "open":
            segment.open_mapping(name)
        del mapping
        membership.remove_lane(name)

    calls: dict[str, Callable[[], object]] = {
        "create": lambda: segment.create_lane(bridge, 1 << 16),
        "open": open_and_forget,
        "remove": open_and_forget,
        "enter": lambda: membership.open_control(bridge),
        "engine folder": lambda: membership.EngineFolder(bridge).remove(),
    }
    number = 0
    while (opened := interrupt_at(calls[what], number)) is not None:
        for each in opened:
            os.close(each)  # OSError: the interrupted call has
        number += 1
    assert number > 100
    membership.sweep_bridge(bridge, with_records=True)


def test_a_bell_that_is_dropped_gives_its_number_to_nobody_while_its_thread_writes(
    consumer, producer
) -> None:
    """Otherwise a record's ring would be written into another file."""

    async def hang() -> int:
        with contextlib.suppress(shmbridge.ConsumerEmpty):
            await consumer.get_async(timeout_s=0.2)
        number = consumer._waiting._loop_bell._event.fd
        asyncio.get_running_loop().remove_reader(number)
        return number

    number = asyncio.run(hang())
    relay = consumer._waiting._loop_bell._relay
    consumer._waiting._loop_bell = None  # the state after an interrupt before it is noted
    gc.collect()
    os.fstat(number)
    consumer._waiting._sleep.stop_relay()
    relay.join()


def test_the_living_consumer_is_named_with_many_descriptors_open(bridge, consumer) -> None:
    opened = [os.eventfd(0) for _ in range(1100)]
    try:
        with pytest.raises(shmbridge.ConsumerTaken, match=f"pid {os.getpid()}"):
            shmbridge.Consumer(bridge)
    finally:
        for each in opened:
            os.close(each)


@pytest.mark.parametrize("pid", [1 << 40, (1 << 22) + 1])
def test_a_holder_that_cannot_be_has_ended(pid) -> None:
    assert locks._has_ended(pid)


def test_an_error_as_the_bridge_is_entered_holds_no_lock(bridge, monkeypatch) -> None:
    def interrupt(label: bytes) -> None:
        if label == b"control.locked":
            monkeypatch.undo()
            raise KeyboardInterrupt

    monkeypatch.setattr(membership.header, "fault", interrupt)
    with pytest.raises(KeyboardInterrupt) as kept:
        shmbridge.Producer(bridge)
    shmbridge.Producer(bridge).close()
    assert kept.value is not None


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def test_a_consumer_interrupted_as_it_is_made_leaves_the_bridge_free(
    bridge, no_collection, monkeypatch
) -> None:
    def interrupted() -> None:
        raise Stop

    with monkeypatch.context() as patch:
        patch.setattr("shmbridge.hub.hub.MemoryUse", interrupted)
        with pytest.raises(Stop):
            shmbridge.Consumer(bridge)
    shmbridge.Consumer(bridge).close()


def test_a_consumer_that_is_refused_leaves_no_descriptor_open(bridge, no_collection, producer) -> None:
    def open_now() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = open_now()
    for _ in range(3):
        with pytest.raises(ValueError, match="lanes"):
            shmbridge.Consumer(bridge, lanes=0)
    assert open_now() == before


def test_the_probe_for_descriptors_leaves_none_open_when_interrupted(no_collection) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for number in itertools.count(1):
        at_a_line = interrupts.raising_at(number, {locks.__name__})
        with at_a_line as came, contextlib.suppress(interrupts.Stop):
            locks.check_descriptors(8, "a test")
        if not came():
            break
    assert len(os.listdir("/proc/self/fd")) == before
    assert number > 2
