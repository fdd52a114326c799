"""The process that puts records of another node, or that removes its lane, is killed at every step: what the
bridge has of that node is known exactly, so that none comes twice and none is left out.
"""

import pickle
import signal
from pathlib import Path

import pytest

import shmbridge
from shmbridge.record import memory_of, table_of
from shmbridge.segments import lane_names, newest_relayed, read_receipts, sweep_bridge
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault

STEPS = faults.BEFORE_COMMIT + faults.NOTING_ORIGIN + faults.AFTER_COMMIT
REMOVING = faults.RECEIPTS + faults.SWEEPING


@pytest.fixture
def record(bridge, tmp_path) -> Path:
    """A file with a record's memory, the table of its lane, the words of its slot."""
    with (
        shmbridge.Producer(f"{bridge}-a", lane_bytes="64K") as producer,
        shmbridge.Consumer(f"{bridge}-a") as consumer,
    ):
        producer.put({"tokens": [list(range(500))], "prompt_length": [0]})
        with consumer.get(timeout_s=5) as it:
            memory = memory_of(it)
            path = tmp_path / "record"
            path.write_bytes(pickle.dumps((bytes(memory.memory), table_of(it), memory.words)))
            del memory
    return path


def known(roles, count: int) -> dict[str, tuple[str, int]]:
    """What must be known once so many records were committed."""
    return {"source": ("env-2", roles.there(count - 1))} if count else {}


@pytest.mark.parametrize("skip", [0, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", STEPS)
def test_a_relay_is_killed_with_no_consumer_there(
    label, skip, bridge, record, faulty, make_consumer, roles, until, segments
):
    child = faulty("relay", record, fault=Fault(label, skip))
    child.tell("\n" * 8)
    child.end_on_fault()
    count = skip + (label in faults.AFTER_COMMIT)
    assert newest_relayed(bridge) == known(roles, count)
    with make_consumer() as consumer:
        for number in range(count):
            with consumer.get(timeout_s=5) as it:
                assert it.meta.origin.sequence == roles.there(number)
        assert consumer.poll() == []
        until(lambda: lane_names(bridge) == [])
        assert newest_relayed(bridge) == known(roles, count)
    shmbridge.clean(bridge, dry_run=False)
    assert segments() == []


@pytest.mark.parametrize("skip", [1, pytest.param(4, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", STEPS)
def test_a_relay_is_killed_while_its_records_are_released(
    label, skip, bridge, record, faulty, make_consumer, roles, until
):
    """Every record has the slot of the one before: while it is written, no slot says what came last."""
    consumer = make_consumer()
    child = faulty("relay", record, fault=Fault(label, skip))
    count = skip + (label in faults.AFTER_COMMIT)
    for number in range(skip + 1):
        child.tell()
        if number < count:
            with consumer.get(timeout_s=20) as it:
                assert (it.meta.origin.sequence, it._slot) == (roles.there(number), 0)
    child.end_on_fault()
    assert newest_relayed(bridge) == known(roles, count)
    until(lambda: lane_names(bridge) == [])
    assert newest_relayed(bridge) == known(roles, count)


@pytest.mark.parametrize("label", STEPS)
def test_a_relay_stopped_at_a_step_is_looked_at(label, bridge, record, faulty, make_consumer, roles, until):
    consumer = make_consumer()
    child = faulty("relay", record, fault=Fault(label, 1, signal.SIGSTOP))
    child.tell()
    with consumer.get(timeout_s=20):
        pass
    child.tell()
    child.wait_stopped()
    assert newest_relayed(bridge) == known(roles, 1 + (label in faults.AFTER_COMMIT))
    child.go_on()
    child.until(f"put {roles.there(1)}")
    child.process.stdin.close()
    assert child.end() == 0
    assert newest_relayed(bridge) == known(roles, 2)


@pytest.fixture
def dead_lane(bridge, record, faulty) -> str:
    """A dead relay's lane of three records that nobody has taken."""
    child = faulty("relay", record, fault=Fault("producer.woken_hub", 2))
    child.tell("\n" * 2)
    child.end_on_fault()
    (name,) = lane_names(bridge)
    return name


@pytest.mark.parametrize("label", REMOVING)
def test_who_removes_the_lane_is_killed(label, bridge, dead_lane, faulty, roles, segments):
    """The hub at first, then a sweeper, at the same step; the third does it."""
    faulty("release_all", 3, fault=Fault(label)).end_on_fault()
    assert newest_relayed(bridge) == known(roles, 3)
    faulty("sweep", fault=Fault(label)).end_on_fault()
    assert newest_relayed(bridge) == known(roles, 3)
    assert lane_names(bridge) == [dead_lane]
    assert dead_lane in sweep_bridge(bridge).removed
    assert len(read_receipts(bridge)) == 1
    assert newest_relayed(bridge) == known(roles, 3)
    shmbridge.clean(bridge, dry_run=False)
    assert segments() == []


@pytest.mark.parametrize("label", REMOVING)
def test_who_removes_the_lane_is_stopped(label, bridge, dead_lane, faulty, roles):
    """Another one leaves the lane alone, and the receipt, however little of it there is."""
    faulty("release_all", 3, fault=Fault(label)).end_on_fault()
    child = faulty("sweep", fault=Fault(label, 0, signal.SIGSTOP))
    child.wait_stopped()
    assert len(read_receipts(bridge)) == (label != "receipt.created")
    assert sweep_bridge(bridge).kept[dead_lane]
    assert newest_relayed(bridge) == known(roles, 3)
    child.go_on()
    assert child.end() == 0
    assert lane_names(bridge) == []
    assert newest_relayed(bridge) == known(roles, 3)
