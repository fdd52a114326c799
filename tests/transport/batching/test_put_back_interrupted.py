"""An exception of a signal handler ends `put_back` anywhere, and it is called again: every record comes, and
none comes twice.
"""

import contextlib
from collections import Counter

import pytest
from interrupts import Stop, raising_at

import shmbridge

MODULES = ("shmbridge.hub.former", "shmbridge.record.record", "shmbridge.segments.threads")
EVENTS = ("line", "return")
GROUPS = 4


@pytest.mark.parametrize("policy", ["fair", "oldest", "atropos"])
def test_a_put_back_that_is_repeated_queues_no_group_twice(make_producer, make_consumer, policy) -> None:
    producer = make_producer()
    hub = make_consumer(policy=policy, run=shmbridge.Run(batch_size=GROUPS))
    at, came = 0, True
    while came:
        at += 1
        put = [producer.put({"tokens": [[1]]}) for _ in range(GROUPS)]
        groups = hub.take_groups(groups=GROUPS, timeout_s=5)
        with raising_at(at, MODULES, EVENTS) as has_come, contextlib.suppress(Stop):
            hub.put_back(groups)
        came = has_come()
        if came:
            hub.put_back(groups)
        del groups
        got: Counter[int] = Counter()
        while (again := hub.take_groups(groups=GROUPS)) is not None:
            for record in [record for group in again for record in group.records]:
                got[record._sequence] += 1
                record.release()
        assert got == Counter(put), f"interrupted at {at}"
    assert at > 10


def test_a_put_back_that_is_repeated_after_close_gives_the_bridge_up(make_producer, make_consumer) -> None:
    """It does so even while the error is kept, whose traceback holds the interrupted call."""
    producer = make_producer()
    producer.put_many([{"tokens": [[number]]} for number in range(GROUPS)])
    at, errors = 0, [Stop()]
    while errors:
        at, errors = at + 1, []
        hub = make_consumer()
        groups = hub.take_groups(groups=GROUPS, timeout_s=5)
        hub.close()
        with raising_at(at, MODULES, EVENTS):
            try:
                hub.put_back(groups)
            except Stop as error:
                errors.append(error)
        hub.put_back(groups)
        with make_consumer() as successor:
            assert [record._sequence for record in successor.poll()] == list(range(GROUPS)), (
                f"interrupted at {at}"
            )
    assert at > 10


def test_groups_that_are_given_twice_in_one_call_wait_once(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(), make_consumer()
    producer.put({"tokens": [[1]]})
    groups = consumer.take_groups(groups=1, timeout_s=5)
    consumer.put_back(groups + groups)
    (group,) = consumer.take_groups(groups=1, timeout_s=5)
    assert consumer.take_groups(groups=1) is None
    group.records[0].release()
