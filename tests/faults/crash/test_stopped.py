"""A process stopped at any step is alive: no other takes its place, the others go on, and when it continues
nothing is lost, doubled or torn.

SIGSTOP at every label of the producer and of the hub; the hub's while it serves ranks are in
test_rank_killed.py.
"""

import signal
from pathlib import Path

import pytest

import shmbridge
from shmbridge.segments import lane_names
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

COUNT = 4  # records that fill a lane of 64 KiB
MANY = 9
# by a hub that only takes and releases; one that ends: test_hub_killed.py
NEVER_PASSED = (
    faults.SERVING_RANKS
    + faults.GRANTING_TICKETS
    + faults.QUARANTINING
    + faults.STARTING_RUN
    + faults.ENDING_HUB
)
HUB = [label for label in faults.LABELS["hub"] if label not in NEVER_PASSED]
# those: test_tickets_killed.py, test_relay_killed.py
OF_OTHERS = faults.ASKING_FOR_TICKETS + faults.NOTING_ORIGIN
PRODUCER = [label for label in faults.LABELS["producer"] if label not in OF_OTHERS]


def stop(label: str, skip: int) -> Fault:
    return Fault(label, skip, signal.SIGSTOP)


class Taken:
    """Everything a consumer was handed, each record checked and released at once."""

    def __init__(self, consumer: shmbridge.Consumer, roles) -> None:
        self.consumer, self.roles = consumer, roles
        self.sequences: dict[str, list[int]] = {}

    def until(self, producer: str, count: int) -> None:
        """Takes whatever comes until `count` records of one producer have come."""
        while len(self.sequences.get(producer, [])) < count:
            with self.consumer.get(10) as record:
                assert not record.meta.redelivered, record
                self.sequences.setdefault(self.roles.given(record.meta.producer_id), []).append(
                    self.roles.check(record)
                )

    def no_more(self) -> None:
        late = self.consumer.poll()
        assert not late, f"nobody has put these: {late}"


def skip_of(label: str) -> int:
    """Lanes and waits are passed once or from the fifth record on; a put is stopped in the third."""
    return 2 if label in faults.BEFORE_COMMIT + faults.AFTER_COMMIT else 0


@pytest.mark.parametrize("label", PRODUCER)
def test_a_producer_is_stopped(label, faulty, make_producer, make_consumer, roles, segments):
    """Records of the others keep coming, and others start; its own come once it goes on."""
    consumer, bystander = make_consumer(), make_producer(producer_id="bystander", on_full="raise")
    taken = Taken(consumer, roles)
    child = faulty("produce", "stopped", MANY, fault=stop(label, skip_of(label)))
    child.wait_stopped()
    newcomer = make_producer(producer_id="newcomer", on_full="raise")
    for sequence in range(3):
        for other in (bystander, newcomer):
            other.put(roles.pattern(other.producer_id, sequence), group_id=sequence)
            taken.until(roles.given(other.producer_id), sequence + 1)
    assert consumer.stats()["lanes_dead"] == 0, "a stopped producer is alive"
    before = len(taken.sequences.get("stopped", []))
    assert before < MANY, "it was stopped before its end"
    child.go_on()
    taken.until("stopped", MANY)
    assert child.end() == 0
    taken.no_more()
    assert taken.sequences == {"stopped": [*range(MANY)], "bystander": [0, 1, 2], "newcomer": [0, 1, 2]}
    for other in (bystander, newcomer):
        other.close()
    stats = consumer.stats()
    assert stats["records_total"] == stats["released_total"] == MANY + 6
    consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", HUB)
def test_a_hub_is_stopped(label, faulty, make_producer, make_consumer, roles, segments):
    """No other process becomes the hub; a producer gets its lane and then waits; taken and remaining records
    together are all records.
    """
    producer = make_producer(producer_id="p", on_full="raise")
    if label not in faults.HUB_SLEEPING:
        put_until_full(producer, roles, 0)
    child = faulty(
        "consume", COUNT, 0, fault=stop(label, 1 if label in faults.TAKING + faults.RELEASING else 0)
    )
    child.wait_stopped()
    with pytest.raises(shmbridge.ConsumerTaken):
        make_consumer()
    count = put_until_full(producer, roles, producer.stats()["records_total"])
    with pytest.raises(shmbridge.LaneFull, match="is alive and has not released"):
        producer.put(roles.pattern("p", count), group_id=count)
    child.go_on()
    child.until("done")
    assert [line for line in child.said if line.startswith("got ")] == [
        f"got p {sequence} False" for sequence in range(COUNT)
    ]
    child.tell()
    assert child.end() == 0
    taken = Taken(make_consumer(), roles)
    producer.put(roles.pattern("p", count), group_id="after")
    taken.until("p", count + 1 - COUNT)
    taken.no_more()
    assert taken.sequences == {"p": [*range(COUNT, count + 1)]}
    producer.close()
    taken.consumer.close()
    assert segments() == []


def put_until_full(producer: shmbridge.Producer, roles, first: int) -> int:
    """Puts until there is no room; the sequence of what did not fit."""
    for sequence in range(int(first), int(first) + 3 * COUNT):
        try:
            producer.put(roles.pattern("p", sequence), group_id=sequence)
        except shmbridge.LaneFull:
            return sequence
    raise AssertionError("the lane is never full")


@pytest.mark.parametrize("label", faults.CREATING_CONTROL)
def test_the_first_of_a_bridge_is_stopped(label, bridge, faulty, make_consumer, roles, segments, until):
    """Others wait for it: none makes a second control segment, and none joins an incomplete one."""
    first = faulty("produce", "first", 2, fault=stop(label, 0))
    first.wait_stopped()
    second = faulty("produce", "second", 2)
    # it is about to join
    until(lambda: "_ext/lane." in Path(f"/proc/{second.pid}/maps").read_text(), 20)
    with pytest.raises(AssertionError, match="printed nothing"):
        second.line(timeout_s=0.5)
    assert lane_names(bridge) == []
    first.go_on()
    assert (first.end(), second.end()) == (0, 0)
    taken = Taken(make_consumer(), roles)
    taken.until("first", 2)
    taken.until("second", 2)
    taken.no_more()
    assert taken.sequences == {"first": [0, 1], "second": [0, 1]}
    taken.consumer.close()
    assert segments() == []


@pytest.mark.parametrize("label", faults.SWEEPING)
def test_a_sweeper_is_stopped(label, faulty, make_producer, make_consumer, roles, segments):
    """It holds the lock of a dead lane, which no other process needs."""
    faulty("produce", "dead", 1, fault=Fault("lane.after_magic")).end_on_fault()
    sweeper = faulty("sweep", fault=stop(label, 0))
    sweeper.wait_stopped()
    taken, producer = Taken(make_consumer(), roles), make_producer(producer_id="p", on_full="raise")
    for sequence in range(3):
        producer.put(roles.pattern("p", sequence), group_id=sequence)
        taken.until("p", sequence + 1)
    sweeper.go_on()
    assert sweeper.end() == 0
    producer.close()
    taken.no_more()
    taken.consumer.close()
    assert segments() == []
