"""Tickets when their holder, or the hub that granted them, is killed or stopped: none is lost, and no more
are held than the limit says.
"""

import signal

import pytest

import shmbridge
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault


def is_full(producer: shmbridge.Producer) -> bool:
    try:
        producer.begin_group(timeout_s=0.2).end()
    except shmbridge.NotAdmitted:
        return True
    return False


@pytest.mark.parametrize("label", [*faults.ASKING_FOR_TICKETS, None])
def test_the_tickets_of_a_killed_holder_come_back(label, limited, faulty, make_producer):
    """On the way to its last ticket, or with all of them."""
    consumer = limited(0, 2)
    holder = faulty("begin", "victim", 2, fault=None if label is None else Fault(label, 1))
    if label is None:
        holder.until("holds 2")
        holder.kill()
    else:
        holder.end_on_fault()
    other = make_producer()
    tickets = [other.begin_group(timeout_s=10) for _ in range(2)]
    assert is_full(other)
    assert consumer.stats()["groups_running"] == len(tickets) == 2


def test_the_tickets_of_a_stopped_holder_stay(limited, faulty, make_producer):
    """It is alive: its group may still come, and does."""
    consumer = limited(0, 1)
    holder = faulty("begin", "victim", 1)
    holder.until("holds 1")
    holder.process.send_signal(signal.SIGSTOP)
    holder.wait_stopped()
    other = make_producer()
    assert is_full(other)
    holder.go_on()
    holder.tell()
    holder.until("put 0")
    assert is_full(other)
    batches = consumer.batches(groups=1, prefetch=0, timeout_s=10)
    next(batches)
    consumer.publish_policy_version(1)
    other.begin_group(timeout_s=10).end()
    batches.close()


def test_the_next_hub_counts_what_is_held_and_what_was_put(limited, faulty, make_producer):
    hub = faulty("limit", 0, 3)
    hub.until("ready")
    holder = faulty("begin", "victim", 2)
    holder.until("holds 2")
    holder.tell()
    holder.until("put 0")
    hub.kill()
    limited(0, 3)
    other = make_producer()
    ticket = other.begin_group(timeout_s=10)
    assert is_full(other)
    holder.kill()
    other.begin_group(timeout_s=10).end()
    ticket.end()


@pytest.mark.parametrize("label", faults.GRANTING_TICKETS)
def test_a_hub_killed_before_it_answers_has_granted_nothing(label, limited, faulty, make_producer):
    hub = faulty("limit", 0, 1, fault=Fault(label))
    hub.until("ready")
    holder = faulty("begin", "victim", 1)
    hub.end_on_fault()
    limited(0, 1)
    holder.until("holds 1")
    assert is_full(make_producer())


@pytest.mark.parametrize("label", faults.ASKING_FOR_TICKETS)
def test_a_ticket_of_a_hub_that_died_meanwhile_is_asked_for_again(label, limited, faulty, make_producer):
    """The producer is stopped after its answer came; another hub comes and gives the only place away. Two are
    never held.
    """
    hub = faulty("limit", 0, 1)
    hub.until("ready")
    late = faulty("begin", "victim", 1, fault=Fault(label, 0, signal.SIGSTOP))
    late.wait_stopped()
    hub.kill()
    consumer = limited(0, 1)
    other = make_producer()
    if label == "ticket.granted":
        ticket = other.begin_group(timeout_s=10)
        late.go_on()
        assert is_full(other)
        assert consumer.stats()["groups_running"] == 1
        assert "holds 1" not in late.said
        ticket.end()
    else:
        assert is_full(other)  # the lane shows it
        late.go_on()
    late.until("holds 1")
    assert is_full(other)


def test_a_ticket_that_was_granted_long_ago_is_asked_for_again(limited, faulty, make_producer):
    """The hub lives; its promise to the stopped producer has expired, and another producer has the place."""
    consumer = limited(0, 1)
    late = faulty("begin", "victim", 1, fault=Fault("ticket.granted", 0, signal.SIGSTOP))
    late.wait_stopped()
    other = make_producer()
    ticket = other.begin_group(timeout_s=10)
    late.go_on()
    assert is_full(other)
    assert consumer.stats()["groups_running"] == 1
    ticket.end()
    late.until("holds 1")
