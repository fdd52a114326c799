"""Tickets to begin a group: who gets one, when it is returned, and the limit on groups of producers that
never ask.
"""

import asyncio
import threading
import time

import pytest

import shmbridge
from shmbridge.segments import tickets_held


def group(number: int = 0, rows: int = 1) -> dict:
    return {"tokens": [[number]] * rows}


def full(producer: shmbridge.Producer) -> bool:
    """Returns whether the producer may begin no group now."""
    try:
        producer.begin_group(timeout_s=0.2).end()
    except shmbridge.NotAdmitted:
        return True
    return False


def test_everybody_may_begin_without_a_limit(producer, consumer) -> None:
    consumer.publish_policy_version(7)
    tickets = [producer.begin_group(timeout_s=5) for _ in range(40)]
    assert {ticket.policy_version for ticket in tickets} == {7}
    assert consumer.stats()["groups_running"] == 40
    for ticket in tickets:
        ticket.end()
    assert consumer.stats()["groups_running"] == 0
    assert consumer.stats()["groups_begun_total"] == 40


def test_a_limit_counts_what_is_generated_over_all_producers(make_producer, limited) -> None:
    one, other, consumer = make_producer(), make_producer(), limited(1, 2)
    tickets = [producer.begin_group(timeout_s=5) for producer in (one, other, one, other)]
    assert (consumer.stats()["groups_running"], consumer.stats()["groups_limit"]) == (4, 4)
    with pytest.raises(
        shmbridge.NotAdmitted, match="4 groups are being generated and 0 wait or are trained with, of 4"
    ):
        one.begin_group(timeout_s=0)
    tickets.pop().end()
    one.begin_group(timeout_s=5).end()


def test_a_group_that_was_put_counts_until_its_step_is_over(producer, limited) -> None:
    """A group counts also while it is trained with; room comes with the next version, not with the batch."""
    consumer = limited(0, 2)
    for number in range(2):
        with producer.begin_group(timeout_s=5) as ticket:
            producer.put(group(number), policy_version=ticket.policy_version)
    assert full(producer)
    batches = consumer.batches(groups=2, prefetch=0)
    next(batches)
    assert full(producer)
    consumer.publish_policy_version(1)
    assert producer.begin_group(timeout_s=5).policy_version == 1
    batches.close()


def test_a_step_that_publishes_nothing_makes_room_when_the_next_batch_is_asked_for(producer, limited) -> None:
    """Otherwise a learner that publishes every second step would wait for groups that may not begin."""
    consumer = limited(0, 1)
    done = threading.Event()

    def generate() -> None:
        for number in range(3):
            with producer.begin_group(timeout_s=20) as ticket:
                producer.put(group(number), policy_version=ticket.policy_version)
        done.set()

    thread = threading.Thread(target=generate)
    thread.start()
    batches = consumer.batches(groups=1, prefetch=0, timeout_s=20)
    for _ in range(3):
        next(batches)
    assert done.wait(5)
    thread.join()
    batches.close()


@pytest.mark.parametrize("prefetch", [0, 2])
def test_batches_formed_ahead_count(producer, limited, prefetch, until) -> None:
    consumer = limited(1, 1)
    batches = consumer.batches(groups=1, prefetch=prefetch, timeout_s=20)
    for number in range(2):
        producer.put(group(number))
    next(batches)
    assert full(producer)
    consumer.publish_policy_version(1)
    producer.begin_group(timeout_s=5).end()
    batches.close()


def test_a_discarded_group_makes_room(producer, limited) -> None:
    """Put under an old version by a producer that did not ask, it is discarded at the consumer and counted,
    and takes no place.
    """
    consumer = limited(0, 1)
    consumer.publish_policy_version(5)
    producer.put(group(), policy_version=4)
    assert full(producer)
    assert consumer.take_groups(groups=1, timeout_s=0.1) is None
    assert consumer.stats()["discarded_total{stale}"] == 1
    producer.begin_group(timeout_s=5).end()


def test_a_group_that_is_given_up_makes_room(producer, limited) -> None:
    limited(0, 1)
    with pytest.raises(RuntimeError, match="sampling failed"), producer.begin_group(timeout_s=5):
        raise RuntimeError("sampling failed")
    ticket = producer.begin_group(timeout_s=5)
    del ticket
    producer.begin_group(timeout_s=5).end()


def test_a_closed_producers_tickets_come_back(make_producer, limited) -> None:
    """They do so also if its lane stays for its records."""
    limited(0, 2)
    leaving, waiting = make_producer(), make_producer()
    ticket = leaving.begin_group(timeout_s=5)
    leaving.put(group())
    assert full(waiting)
    leaving.close()
    waiting.begin_group(timeout_s=5).end()
    ticket.end()


def test_begin_group_waits_for_a_consumer(producer, make_consumer) -> None:
    with pytest.raises(shmbridge.NoConsumer, match="no consumer is alive"):
        producer.begin_group(timeout_s=0.05)
    got = []
    thread = threading.Thread(target=lambda: got.append(producer.begin_group(timeout_s=20)))
    thread.start()
    make_consumer()
    thread.join()
    assert len(got) == 1


def test_a_pause_holds_groups_back_and_a_drain_is_an_error(producer, consumer) -> None:
    consumer.pause()
    with pytest.raises(shmbridge.NotAdmitted, match="paused"):
        producer.begin_group(timeout_s=0.1)
    consumer.resume()
    producer.begin_group(timeout_s=5).end()
    consumer.drain()
    with pytest.raises(shmbridge.BridgeDraining):
        producer.begin_group(timeout_s=5)


def test_the_next_consumer_counts_the_tickets_of_the_last(producer, limited) -> None:
    first = limited(0, 2)
    ticket = producer.begin_group(timeout_s=5)
    producer.put(group())
    first.close()
    limited(0, 2)
    assert full(producer)
    ticket.end()
    producer.begin_group(timeout_s=5).end()


async def test_tasks_wait_without_blocking_the_loop(producer, limited) -> None:
    consumer = limited(0, 2)
    tickets = [await producer.begin_group_async(timeout_s=5) for _ in range(2)]
    waiting = [asyncio.create_task(producer.begin_group_async(timeout_s=20)) for _ in range(3)]
    began = time.monotonic()
    await asyncio.sleep(0.05)
    assert time.monotonic() - began < 1.0
    waiting.pop(0).cancel()
    for ticket in tickets:
        ticket.end()
    for task in waiting:
        (await task).end()
    with pytest.raises(shmbridge.NotAdmitted):
        holding = [await producer.begin_group_async(timeout_s=5) for _ in range(2)]
        await producer.begin_group_async(timeout_s=0.1)
    assert len(holding) == 2
    assert consumer.stats()["groups_running"] == 2


def test_a_producer_asks_one_question_at_a_time(producer, limited) -> None:
    limited(0, 1)
    ticket = producer.begin_group(timeout_s=5)
    thread = threading.Thread(target=lambda: producer.begin_group(timeout_s=20).end())
    thread.start()
    while not producer._tickets._asking.locked():
        time.sleep(0.001)
    with pytest.raises(shmbridge.ClaimOpen, match="asks for a ticket already"):
        producer.begin_group(timeout_s=5)
    ticket.end()
    thread.join()


def test_a_promise_that_is_not_taken_up_is_forgotten(bridge, make_producer, limited) -> None:
    """An answer that never arrived: the place is reserved for a second, then free for others; for this
    producer it is free at once.
    """
    from shmbridge.control.messages import BeginGroup, Full, MayBegin
    from shmbridge.control.server import ControlClient

    limited(0, 1)
    producer, other = make_producer(), make_producer()
    with ControlClient(bridge, role="test", name="t") as client:
        assert isinstance(client.request(BeginGroup(producer.lane_name, 0)), MayBegin)
        assert isinstance(client.request(BeginGroup(producer.lane_name, 0, wait=False)), MayBegin)
        assert isinstance(client.request(BeginGroup(other.lane_name, 0, wait=False)), Full)
    other.begin_group(timeout_s=5).end()


def test_an_answer_of_a_hub_that_is_gone_counts_for_nothing(producer, make_consumer) -> None:
    from shmbridge.control.messages import MayBegin

    epoch = make_consumer().hub_epoch
    now = time.monotonic_ns()
    assert producer._tickets._taken(MayBegin(epoch - 1, 0, now + 10**9)) is None
    assert producer._tickets._taken(MayBegin(epoch, 0, now - 1)) is None
    assert tickets_held(producer._lane.fd) == producer._tickets._held.count == 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"max_off_policy_steps": 1}, "without groups_per_step"),
        ({"max_off_policy_steps": -1, "groups_per_step": 2, "policy": "oldest"}, "max_off_policy_steps=-1"),
        ({"groups_per_step": 2}, "is for max_off_policy_steps"),
        ({"max_off_policy_steps": 1, "groups_per_step": 2}, 'policy="oldest"'),
    ],
)
def test_a_limit_that_could_not_be_kept_is_refused(make_consumer, options, said) -> None:
    with pytest.raises(ValueError, match=said):
        make_consumer(**options)


def test_batches_are_of_the_size_that_the_limit_is_for(limited) -> None:
    consumer = limited(1, 4)
    with pytest.raises(ValueError, match="groups_per_step=4"):
        consumer.batches(groups=8)
    with pytest.raises(ValueError, match="groups_per_step=4"):
        consumer.batches(rows=4)


def test_no_batch_is_staler_than_the_limit_whichever_producer_sent_it(producer, limited) -> None:
    consumer = limited(1, 1)
    consumer.publish_policy_version(9)
    for version in (7, 8, 9):
        producer.put(group(version), policy_version=version)
    batches = consumer.batches(groups=1, prefetch=0, timeout_s=5)
    assert [next(batches).tokens[0] for _ in range(2)] == [8, 9]
    assert consumer.stats()["discarded_total{stale}"] == 1
    batches.close()


def test_room_comes_when_all_learner_ranks_are_done(producer, limited, make_rank) -> None:
    consumer = limited(0, 2)
    consumer.serve_ranks(2, groups=2, prefetch=0)
    ranks = [make_rank(number, 2) for number in range(2)]
    for number in range(2):
        with producer.begin_group(timeout_s=5) as ticket:
            producer.put(group(number), policy_version=ticket.policy_version)
    shares = [rank.next_share(10) for rank in ranks]
    assert full(producer)
    assert consumer.stats()["staleness_groups_total{0}"] == 2
    consumer.publish_policy_version(1)
    shares[0].release()
    ranks[0].report_done()
    ticket = producer.begin_group(timeout_s=5)
    assert full(producer)
    shares[1].release()
    ranks[1].report_done()
    producer.begin_group(timeout_s=5).end()
    ticket.end()


def test_steps_that_are_not_published_use_places_up(producer, limited) -> None:
    """A group that begins under a version three steps old has three of its steps behind it."""
    consumer = limited(2, 1)
    for number in range(2):
        with producer.begin_group(timeout_s=5) as ticket:
            producer.put(group(number), policy_version=ticket.policy_version)
    batches = consumer.batches(groups=1, prefetch=0, timeout_s=5)
    next(batches)
    producer.begin_group(timeout_s=5).end()
    consumer.note_training_version(1)
    with pytest.raises(
        shmbridge.NotAdmitted, match="0 groups are being generated and 2 wait or are trained with, of 2"
    ):
        producer.begin_group(timeout_s=0)
    next(batches)
    assert producer.begin_group(timeout_s=5).policy_version == 0
    consumer.note_training_version(2)
    assert full(producer)
    with pytest.raises(
        ValueError,
        match="version 3 in training is 3 steps ahead of the published 0, and max_off_policy_steps=2",
    ):
        consumer.note_training_version(3)
    with pytest.raises(ValueError, match="version 1 is before 2"):
        consumer.note_training_version(1)
    consumer.publish_policy_version(3)
    tickets = [producer.begin_group(timeout_s=5) for _ in range(3)]
    assert {ticket.policy_version for ticket in tickets} == {3}
    batches.close()


def test_staleness_counts_steps_that_are_not_published(producer, limited) -> None:
    consumer = limited(1, 1)
    consumer.publish_policy_version(9)
    consumer.note_training_version(10)
    for version in (8, 9):
        producer.put(group(version), policy_version=version)
    batches = consumer.batches(groups=1, prefetch=0, timeout_s=5)
    assert next(batches).tokens[0] == 9
    stats = consumer.stats()
    assert (stats["discarded_total{stale}"], stats["staleness_max"], stats["policy_version"]) == (1, 1, 9)
    batches.close()
