"""A producer is killed at every step of a put: committed records arrive once and whole, the others never
existed.
"""

import os
import signal
import time
from pathlib import Path

import pytest

from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

STEPS = faults.BEFORE_COMMIT + faults.AFTER_COMMIT


def committed(label: str, skip: int) -> int:
    """Records that exist after a producer died at its pass number `skip` of this step."""
    return skip + (label in faults.AFTER_COMMIT)


@pytest.mark.parametrize("skip", [0, pytest.param(3, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", STEPS)
def test_a_producer_is_killed_with_no_consumer_there(
    label, skip, faulty, make_producer, make_consumer, take, roles, segments
):
    bystander = make_producer(producer_id="bystander")
    bystander.put(roles.pattern("bystander", 0), group_id=0)
    child = faulty("produce", "victim", 9, fault=Fault(label, skip))
    child.end_on_fault()
    assert child.said == ["ready", *(f"put {sequence}" for sequence in range(skip))]
    bystander.put(roles.pattern("bystander", 1), group_id=1)

    consumer = make_consumer()
    taken = take(consumer, {"victim": committed(label, skip), "bystander": 2})
    assert taken == {
        "victim": [(sequence, False) for sequence in range(committed(label, skip))],
        "bystander": [(0, False), (1, False)],
    }
    stats = consumer.stats()
    assert stats["records_total"] == stats["released_total"] == committed(label, skip) + 2
    assert stats["held"] == stats["discarded_total"] == 0
    bystander.close()
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", STEPS)
def test_a_producer_is_killed_while_a_consumer_reads(
    label, faulty, make_producer, make_consumer, roles, take, segments, until
):
    """On the sixth record: slots and extents have been used before."""
    consumer, bystander = make_consumer(), make_producer(producer_id="bystander", on_full="raise")
    child = faulty("produce", "victim", 99, fault=Fault(label, 5))
    taken = []
    for turn in range(committed(label, 5)):
        bystander.put(roles.pattern("bystander", turn), group_id=turn)
        taken += [take_one(consumer, roles), take_one(consumer, roles)]
    child.end_on_fault()
    assert sorted(taken) == sorted(
        (who, turn) for who in ("bystander", "victim") for turn in range(committed(label, 5))
    )
    # control, its socket's folder, the bystander's lane: the victim's is gone
    until(lambda: len(segments()) == 3, 1.0)
    bystander.put(roles.pattern("bystander", committed(label, 5)), group_id="after")
    assert take(consumer, {"bystander": 1}) == {"bystander": [(committed(label, 5), False)]}
    bystander.close()
    consumer.close()
    assert segments() == []


def take_one(consumer, roles) -> tuple[str, int]:
    with consumer.get(10) as record:
        assert not record.meta.redelivered
        return roles.given(record.meta.producer_id), roles.check(record)


@pytest.mark.parametrize("label", faults.WAITING_FOR_SPACE)
def test_a_producer_is_killed_as_it_begins_to_wait_for_room(label, faulty, make_consumer, take, segments):
    child = faulty("produce", "victim", 99, fault=Fault(label))
    child.end_on_fault()
    puts = sum(line.startswith("put ") for line in child.said)
    assert puts > 1
    consumer = make_consumer()
    assert take(consumer, {"victim": puts}) == {"victim": [(sequence, False) for sequence in range(puts)]}
    consumer.close()
    assert segments() == []


def test_a_producer_is_killed_in_its_sleep_on_a_full_lane(
    faulty, make_producer, make_consumer, take, segments, until
):
    child = faulty("produce", "victim", 99)
    child.until("put 3")
    until(lambda: Path(f"/proc/{child.pid}/stat").read_text().rpartition(")")[2].split()[0] == "S")
    child.kill()
    consumer = make_consumer()
    assert take(consumer, {"victim": 4}) == {"victim": [(sequence, False) for sequence in range(4)]}
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", faults.AFTER_COMMIT)
def test_a_record_committed_but_not_announced_wakes_the_sleeping_consumer(
    label, faulty, make_consumer, roles
):
    """The producer dies between its commit and its wake: its death must wake the consumer, not the tick."""
    consumer = make_consumer()
    child = faulty("produce_when_told", "victim", fault=Fault(label, 1))
    child.until("ready")
    child.tell()
    assert take_one(consumer, roles) == ("victim", 0)
    child.until("put 0")
    child.tell()
    assert take_one(consumer, roles) == ("victim", 1)
    child.end_on_fault()
    assert consumer.stats()["late_wakes_total"] == 0


def test_a_death_is_noticed_at_once_and_the_memory_comes_back(faulty, make_consumer, take, segments, until):
    consumer = make_consumer()
    waits = []
    for _ in range(5):
        child = faulty("produce_when_told", "victim")
        child.until("ready")
        until(lambda: consumer.poll() == [] and consumer.stats()["lanes_live"] == 1)
        before = len(segments())
        os.kill(child.pid, signal.SIGKILL)
        began = time.perf_counter()
        until(lambda before=before: len(segments()) == before - 1, 1.0, every_s=0.0005)
        waits.append(time.perf_counter() - began)
        assert consumer.stats()["lanes_live"] == 0
    print("death to memory back, ms:", *(f"{1e3 * each:.1f}" for each in sorted(waits)))
    assert min(waits) < 0.25, f"a pidfd tells at once, this took {sorted(waits)} s"


def test_a_consumer_asleep_hears_of_a_death(faulty, make_consumer, until):
    """finished producers are known without any tick: the dead lane counts as dead while get() sleeps."""
    consumer = make_consumer()
    child = faulty("produce_when_told", "victim")
    child.until("ready")
    child.tell()
    child.until("put 0")
    record = consumer.get(5)
    child.kill()
    began = time.perf_counter()
    until(lambda: consumer.stats()["lanes_dead"] == 1, 1.0)
    assert time.perf_counter() - began < 1
    assert consumer.stats()["held"] == 1
    record.release()
    # burying a lane whose last lease ended: a busy tick
    until(lambda: consumer.stats()["lanes_dead"] == 0, 1.0)


def test_sixteen_producers_and_every_other_one_is_killed(faulty, make_consumer, take, segments):
    """At sixteen different steps and records, a consumer reading all the while."""
    consumer = make_consumer()
    steps = [(STEPS[n % len(STEPS)], n % 6) for n in range(0, 16, 2)]
    victims = {
        f"victim-{n}": faulty("produce", f"victim-{n}", 12, fault=Fault(*step))
        for n, step in enumerate(steps)
    }
    others = {f"other-{n}": faulty("produce", f"other-{n}", 12) for n in range(8)}
    wanted = {name: committed(*step) for name, step in zip(victims, steps, strict=True)} | dict.fromkeys(
        others, 12
    )
    taken = take(consumer, wanted, timeout_s=30)
    assert taken == {name: [(sequence, False) for sequence in range(count)] for name, count in wanted.items()}
    for child in victims.values():
        child.end_on_fault()
    for child in others.values():
        assert child.end() == 0
    consumer.close()
    assert segments() == []
