"""A stopped process counts as alive; the children of a dead process do not keep it alive."""

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

import shmbridge
from shmbridge.segments import lane_names
from shmbridge.testing.faults import Fault


@pytest.mark.parametrize(
    "label", ["producer.claimed", "producer.body_written", "producer.before_tail", "producer.committed"]
)
def test_a_producer_stopped_in_mid_put_is_alive(
    label, bridge, faulty, make_producer, make_consumer, roles, take, segments
):
    consumer, bystander = make_consumer(), make_producer(producer_id="bystander", on_full="raise")
    child = faulty("produce", "stopped", 4, fault=Fault(label, 2, signal.SIGSTOP))
    child.wait_stopped()
    before = 2 + (label == "producer.committed")
    assert take(consumer, {"stopped": before}) == {
        "stopped": [(sequence, False) for sequence in range(before)]
    }
    report = shmbridge.clean(bridge, dry_run=False)
    assert not report.removed
    assert len(lane_names(bridge)) == 2
    bystander.put(roles.pattern("bystander", 0), group_id=0)
    assert take(consumer, {"bystander": 1}) == {"bystander": [(0, False)]}
    assert consumer.stats()["lanes_live"] == 2
    child.go_on()
    assert take(consumer, {"stopped": 4 - before}) == {
        "stopped": [(sequence, False) for sequence in range(before, 4)]
    }
    assert child.end() == 0
    bystander.close()
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", ["hub.read", "hub.marked", "hub.releasing", "hub.before_sleep"])
def test_a_stopped_consumer_is_alive(label, bridge, faulty, make_producer, make_consumer, roles, segments):
    """It cannot be replaced, and continues where it was."""
    producer = make_producer(producer_id="p", on_full="raise")
    child = faulty("consume", 1, fault=Fault(label, 0, signal.SIGSTOP))
    if label == "hub.before_sleep":
        child.wait_stopped()
    producer.put(roles.pattern("p", 0), group_id=0)
    if label != "hub.before_sleep":
        child.wait_stopped()
    with pytest.raises(shmbridge.ConsumerTaken, match=str(child.pid)):
        make_consumer()
    child.go_on()
    child.until("done")
    assert "got p 0 False" in child.said
    child.tell()
    assert child.end() == 0
    producer.close()
    assert segments() == []


@contextmanager
def ended(pid: int) -> Iterator[None]:
    """A grandchild that must not outlive the test."""
    try:
        yield
    finally:
        os.kill(pid, signal.SIGKILL)


def said_pid(child) -> int:
    while not (line := child.line()).startswith("child "):
        pass
    return int(line.split()[1])


@pytest.mark.parametrize("how", ["fork", "subprocess", "subprocess with inherited files"])
def test_a_child_left_behind_keeps_no_dead_producer_alive(how, faulty, make_consumer, take, segments, until):
    child = faulty("produce_and_fork", "parent", how)
    with ended(said_pid(child)):
        consumer = make_consumer()
        assert consumer.stats()["lanes_live"] == 1
        child.process.kill()
        child.process.wait()
        until(lambda: consumer.stats()["lanes_live"] == 0, 1.0)
        assert take(consumer, {"parent": 2}) == {"parent": [(0, False), (1, False)]}
        until(lambda: consumer.stats()["lanes_dead"] == 0, 1.0)
        consumer.close()
        assert segments() == []


@pytest.mark.parametrize("label", ["segment.created", "segment.locked", "segment.reserved", "control.locked"])
def test_a_child_forked_while_a_segment_is_made_keeps_nobody_alive(
    label, faulty, make_consumer, take, segments, until
):
    """Another thread may fork at any time: the descriptor must be known to the fork handler from the
    start.
    """
    child = faulty("fork_while_creating", "parent", fault=Fault(label, 0, signal.SIGUSR1))
    with ended(said_pid(child)):
        child.until("put 0")
        consumer = make_consumer()
        child.process.kill()
        child.process.wait()
        assert take(consumer, {"parent": 1}) == {"parent": [(0, False)]}
        until(lambda: consumer.stats()["lanes_dead"] == consumer.stats()["lanes_live"] == 0, 2.0)
        consumer.close()
        assert segments() == []
