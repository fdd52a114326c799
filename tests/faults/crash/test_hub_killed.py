"""A consumer is killed at every step: the next one gets the un-released records, marked exactly where they
may have been handed out.
"""

import signal
from unittest.mock import ANY

import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.segments import open_mapping
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

COUNT = 4


@pytest.fixture
def filled(make_producer, roles):
    """A living producer with four records in its lane, which has no room for a fifth."""
    producer = make_producer(producer_id="p", on_full="raise")
    for sequence in range(COUNT):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    return producer


def expected(first: int, end: int, marked: int) -> list[tuple[int, bool]]:
    """Sequences first..end, redelivered below `marked`."""
    return [(sequence, sequence < marked) for sequence in range(first, end)]


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("label", faults.TAKING)
def test_a_hub_is_killed_while_taking(label, skip, filled, faulty, make_consumer, take, roles, segments):
    child = faulty("consume", COUNT, COUNT, fault=Fault(label, skip))
    child.end_on_fault()
    handed_out = skip + (label == "hub.marked")  # marked before it leaves: it may have been
    assert sum(line.startswith("got ") for line in child.said) == skip
    check_successor(filled, make_consumer, take, roles, segments, expected(0, COUNT, handed_out))


@pytest.mark.parametrize("skip", [0, 2])
@pytest.mark.parametrize("label", faults.RELEASING)
def test_a_hub_is_killed_while_releasing(label, skip, filled, faulty, make_consumer, take, roles, segments):
    """Last taken, first released: what is left is a prefix."""
    child = faulty("consume", COUNT, 0, fault=Fault(label, skip))
    child.end_on_fault()
    released = skip + (label == "hub.released")
    assert sum(line.startswith("released ") for line in child.said) == skip
    lane = open_mapping(filled.lane_name)
    assert header.releases(lane) == (skip, released), "at most one behind"
    check_successor(filled, make_consumer, take, roles, segments, expected(0, COUNT - released, COUNT))
    assert header.releases(lane) == (COUNT + 1, COUNT + 1), "the successor has counted it"


def check_successor(filled, make_consumer, take, roles, segments, wanted) -> None:
    consumer = make_consumer()
    stats = consumer.stats()
    assert (stats["records_total"], stats["held"], stats["released_total"]) == (
        COUNT,
        len(wanted),
        COUNT - len(wanted),
    )
    assert take(consumer, {"p": len(wanted)}) == {"p": wanted}
    filled.put(roles.pattern("p", COUNT), group_id="after")
    assert take(consumer, {"p": 1}) == {"p": [(COUNT, False)]}
    stats = consumer.stats()
    assert stats["records_total"] == stats["released_total"] == COUNT + 1
    filled.close()
    consumer.close()
    assert segments() == []


def test_a_hub_is_killed_with_leases_out_of_order(filled, faulty, make_consumer, take, roles, segments):
    """It took three of four and gave the third back."""
    child = faulty("consume", 3, 2)
    child.until("done")
    child.kill()
    consumer = make_consumer()
    assert take(consumer, {"p": 3}) == {"p": [(0, True), (1, True), (3, False)]}
    filled.close()
    consumer.close()
    assert segments() == []


def test_three_hubs_in_a_row_are_killed(filled, faulty, make_consumer, take, roles, segments):
    """Each takes a little more; nothing is lost and the marks only grow."""
    for skip in (0, 1, 2):
        faulty("consume", COUNT, COUNT, fault=Fault("hub.marked", skip)).end_on_fault()
    consumer = make_consumer()
    assert take(consumer, {"p": COUNT}) == {"p": expected(0, COUNT, 3)}
    filled.close()
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize(("label", "skip"), [("hub.locked", 0), ("hub.adopting", 0), ("hub.adopting", 1)])
def test_a_hub_is_killed_while_entering(label, skip, filled, faulty, make_consumer, take, roles, segments):
    """One lane has a living producer, one a dead one: both are there for the successor, nothing is marked."""
    assert label in faults.ENTERING_HUB
    dead = faulty("produce", "dead", 2)
    assert dead.end() == 0
    faulty("consume", 0, fault=Fault(label, skip)).end_on_fault()
    consumer = make_consumer()
    assert take(consumer, {"p": COUNT, "dead": 2}) == {"p": expected(0, COUNT, 0), "dead": expected(0, 2, 0)}
    filled.close()
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", faults.ENDING_HUB)
@pytest.mark.parametrize(
    ("how", "end"), [("get", "drop"), ("get", "close"), ("batches", "drop"), ("ranks", "drop")]
)
def test_a_hub_is_killed_at_its_end(label, how, end, filled, faulty, make_consumer, take, roles, segments):
    """By close(), or collected because nobody holds it: what it had not released comes again."""
    child = faulty("end_hub", how, end, fault=Fault(label))
    child.end_on_fault()
    assert "ended" not in child.said
    handed_out = 0 if how == "ranks" else 2
    wanted = expected(1, COUNT, handed_out) if handed_out else expected(0, COUNT, 0)
    if how != "get":  # threads took records ahead, how many is theirs
        wanted = [(sequence, marked or ANY) for sequence, marked in wanted]
    check_successor(filled, make_consumer, take, roles, segments, wanted)


def test_a_hub_that_has_left_is_stopped(filled, faulty, make_consumer, take, roles, segments):
    """The bridge is free before the collected hub has ended; it disturbs nobody afterwards."""
    child = faulty("end_hub", "get", "drop", fault=Fault("hub.left", signal_number=signal.SIGSTOP))
    child.wait_stopped()
    check_successor(filled, make_consumer, take, roles, segments, expected(1, COUNT, 2))
    child.go_on()
    child.until("ended")
    child.tell()
    assert child.end() == 0


@pytest.mark.parametrize("label", faults.HUB_SLEEPING)
def test_a_hub_is_killed_as_it_falls_asleep(
    label, faulty, make_producer, make_consumer, take, roles, segments
):
    faulty("consume", 1, fault=Fault(label)).end_on_fault()
    producer = make_producer(producer_id="p", on_full="raise")
    producer.put(roles.pattern("p", 0), group_id=0)
    consumer = make_consumer()
    assert take(consumer, {"p": 1}) == {"p": [(0, False)]}
    producer.close()
    consumer.close()
    assert segments() == []


def test_a_hub_is_killed_in_its_sleep(faulty, make_producer, make_consumer, take, roles, segments):
    """`hub_sleeping` stays set: a needless wake, nothing else."""
    child = faulty("consume", 1)
    child.until("ready")
    producer = make_producer(producer_id="p", on_full="raise")
    child.kill()
    for sequence in range(3):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
    consumer = make_consumer()
    assert take(consumer, {"p": 3}) == {"p": expected(0, 3, 0)}
    producer.close()
    consumer.close()
    assert segments() == []


def test_room_made_but_not_announced_reaches_the_sleeping_producer(faulty, make_consumer, take, segments):
    """The hub dies between release and wake, and no other comes: the producer finds the room by itself."""
    producer = faulty("produce", "p", 5)
    producer.until("put 3")  # full
    faulty("consume", 4, 0, fault=Fault("hub.released")).end_on_fault()
    producer.until("put 4", timeout_s=2)
    assert producer.end() == 0
    consumer = make_consumer()
    assert take(consumer, {"p": 4}) == {"p": [(0, True), (1, True), (2, True), (4, False)]}
    consumer.close()
    assert segments() == []


def test_a_producer_waits_for_the_next_consumer(faulty, make_consumer, take, segments):
    """Asleep on a full lane when the hub is killed with leases: the next one's releases wake it."""
    first = faulty("consume", 2, 2)
    first.until("ready")
    producer = faulty("produce", "p", 8)
    first.until("done")
    producer.until("put 3")
    first.process.send_signal(signal.SIGKILL)
    first.end()
    consumer = make_consumer()
    assert take(consumer, {"p": 8}) == {"p": expected(0, 8, 2)}
    assert producer.end() == 0
    consumer.close()
    assert segments() == []


def test_a_killed_consumer_is_replaced_at_once(faulty, make_consumer):
    """The lock goes with the process: no timeout is waited for."""
    child = faulty("consume", 1)
    child.until("ready")
    child.kill()
    assert make_consumer().hub_epoch == 2


@pytest.mark.parametrize("label", faults.STARTING_RUN)
@pytest.mark.parametrize("newest", [9, 8])
def test_a_learner_killed_as_it_starts_anew_gives_up_nothing_that_was_trained(
    label, newest, bridge, faulty, make_producer, make_consumer
):
    """Version 9 has a step of its own, 8 repeats the weights of 7."""
    producer = make_producer(producer_id="p")
    with make_consumer() as consumer:
        consumer.publish_policy_version(8, run_id="00000000000000aa", same_as=7)
        consumer.publish_policy_version(newest)
    faulty("start_run", newest + 1, "00000000000000bb", -1, fault=Fault(label)).end_on_fault()
    (left,) = (each for each in shmbridge.list_bridges() if each.name == bridge)
    assert left.policy_version == newest
    # the earlier start is forgotten first, so that the newest version counts as trained by itself
    assert left.trained_version == newest
    producer.close()
