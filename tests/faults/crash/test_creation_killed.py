"""A process that creates or sweeps a segment is killed, stopped or overtaken at every step: the next start
works like the first.
"""

import signal
import time

import pytest

import shmbridge
from shmbridge.segments import lane_names, sweep_bridge
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault


def one_record_through(make_producer, make_consumer, roles, take) -> None:
    producer = make_producer(producer_id="next", on_full="raise")
    consumer = make_consumer()
    producer.put(roles.pattern("next", 0), group_id=0)
    assert take(consumer, {"next": 1}) == {"next": [(0, False)]}
    producer.close()
    consumer.close()


@pytest.mark.parametrize("label", faults.CREATING_CONTROL + faults.CREATING_LANE + faults.SWEEPING)
def test_a_creator_that_is_killed_alone_leaves_room_for_the_next(
    label, faulty, make_producer, make_consumer, roles, take, segments
):
    """Alone on the bridge; the next start takes over what is there and leaves nothing."""
    faulty("enter", fault=Fault(label)).end_on_fault()
    began = time.monotonic()
    one_record_through(make_producer, make_consumer, roles, take)
    assert time.monotonic() - began < 5, "nobody waits for the dead"
    assert segments() == []


@pytest.mark.parametrize("label", faults.CREATING_LANE + faults.SWEEPING)
def test_a_creator_killed_on_a_bridge_in_use_disturbs_nobody(
    label, faulty, make_producer, make_consumer, roles, take, segments
):
    """Hub and another producer notice nothing; the next start removes the remains."""
    consumer, bystander = make_consumer(), make_producer(producer_id="bystander", on_full="raise")
    role = ("attend",) if label in faults.SWEEPING else ("produce", "victim", 1)
    child = faulty(*role, fault=Fault(label))
    if label in faults.SWEEPING:
        child.until("ready")
        child.tell()
    child.end_on_fault()
    bystander.put(roles.pattern("bystander", 0), group_id=0)
    assert take(consumer, {"bystander": 1}) == {"bystander": [(0, False)]}
    make_producer().close()
    assert lane_names(consumer.bridge) == [bystander.lane_name]
    bystander.close()
    consumer.close()
    assert segments() == []


def test_the_hub_is_killed_while_it_buries_a_lane(
    faulty, make_producer, make_consumer, roles, take, segments
):
    """Its death watch was about to unlink: the next start does it."""
    dead = faulty("produce", "dead", 1)
    assert dead.end() == 0
    faulty("consume", 1, fault=Fault("segment.unlinking")).end_on_fault()
    one_record_through(make_producer, make_consumer, roles, take)
    assert segments() == []


@pytest.mark.parametrize("label", faults.CREATING_CONTROL)
def test_a_creator_stopped_while_it_makes_the_control_segment_is_waited_for(label, faulty, segments):
    """A stopped creator is alive: others wait for it, and go on when it does."""
    first = faulty("enter", fault=Fault(label, 0, signal.SIGSTOP))
    first.wait_stopped()
    second = faulty("produce", "second", 0)
    first.go_on()
    assert (first.end(), second.end()) == (0, 0)
    assert segments() == []


@pytest.mark.parametrize("label", faults.CREATING_LANE)
def test_a_producer_stopped_while_it_makes_a_lane_succeeds_later(
    label, bridge, faulty, make_consumer, take, segments
):
    """A sweep may remove an unlocked name, never a locked one; the creator succeeds either way."""
    child = faulty("produce", "slow", 2, fault=Fault(label, 0, signal.SIGSTOP))
    child.wait_stopped()
    (name,) = lane_names(bridge)
    report = shmbridge.clean(bridge, dry_run=False)
    if label == "segment.created":
        assert report.removed == [name]
    else:
        assert report.kept[name] == "its producer is alive"
    consumer = make_consumer()
    child.go_on()
    assert take(consumer, {"slow": 2}) == {"slow": [(0, False), (1, False)]}
    assert child.end() == 0
    consumer.close()
    assert segments() == []


def test_two_sweepers_meet_at_one_lane(bridge, faulty, make_producer, make_consumer, roles, take, segments):
    """One holds the lock and is stopped: the other leaves the lane alone and does not wait; both leave a new
    lane alone.
    """
    faulty("produce", "victim", 1, fault=Fault("lane.after_magic")).end_on_fault()
    (name,) = lane_names(bridge)
    sweeper = faulty("sweep", fault=Fault("segment.unlinking", 0, signal.SIGSTOP))
    sweeper.wait_stopped()
    assert sweep_bridge(bridge).kept[name]
    producer = make_producer(producer_id="next", on_full="raise")
    consumer = make_consumer()
    sweeper.go_on()
    assert sweeper.line() == f"swept {name}"
    assert sweeper.end() == 0
    producer.put(roles.pattern("next", 0), group_id=0)
    assert take(consumer, {"next": 1}) == {"next": [(0, False)]}
    producer.close()
    consumer.close()
    assert segments() == []


def test_two_producers_that_leave_at_once_leave_nothing(bridge, faulty, make_producer, segments):
    """The first saw the second alive, and the second finds the first's lane locked by the first's own
    sweep.
    """
    child = faulty("attend", fault=Fault("segment.unlinking", 0, signal.SIGSTOP))
    child.until("ready")
    (theirs,) = lane_names(bridge)
    for _ in range(64):  # names are random: ours must come first in their sweep
        ours = make_producer()
        if ours.lane_name < theirs:
            break
        ours.close()
    child.tell()
    child.wait_stopped()
    ours.close()
    child.go_on()
    child.until("closed")
    assert segments() == [], "nobody takes part any more"


def test_many_sweepers_remove_many_dead_lanes(bridge, faulty, segments):
    victims = [
        faulty("produce", f"victim-{n}", 1, fault=Fault("lane.after_magic", 0, signal.SIGSTOP))
        for n in range(4)
    ]
    for victim in victims:
        victim.wait_stopped()
    for victim in victims:
        victim.kill()
    sweepers = [faulty("sweep") for _ in range(4)]
    assert [sweeper.end() for sweeper in sweepers] == [0] * 4
    removed = [
        name for sweeper in sweepers for line in sweeper.said for name in line.split()[1:] if ".l." in name
    ]
    assert len(removed) == len(set(removed)) == 4, "each lane is removed once"
    sweep_bridge(bridge)
    assert segments() == []


def test_undelivered_records_survive_every_sweep(
    bridge, faulty, make_producer, make_consumer, take, segments
):
    faulty("produce", "victim", 9, fault=Fault("producer.committed", 2)).end_on_fault()
    assert sweep_bridge(bridge).undelivered
    assert shmbridge.clean(bridge).undelivered, "a dry run says what would go"
    make_producer().close()
    (name,) = lane_names(bridge)
    assert sweep_bridge(bridge).kept[name] == "holds 3 undelivered records"
    consumer = make_consumer()
    assert take(consumer, {"victim": 3}) == {"victim": [(0, False), (1, False), (2, False)]}
    consumer.close()
    assert segments() == []


def test_clean_says_what_it_throws_away(bridge, faulty, segments):
    faulty("produce", "victim", 9, fault=Fault("producer.committed", 2)).end_on_fault()
    (name,) = lane_names(bridge)
    report = shmbridge.clean(bridge, dry_run=False)
    assert name in report.removed
    assert report.undelivered == {name: 3}
    assert segments() == []
