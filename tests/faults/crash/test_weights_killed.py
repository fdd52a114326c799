"""The writer of the weights is killed at every step, or a rank that writes a part, or a reader with a lease:
the last version stays.
"""

import itertools
import json
import signal
import time

import numpy as np
import pytest

from shmbridge.errors import FillingOver, WeightsBusy, WeightsMismatch
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter


def newest(reader: WeightsReader) -> int:
    """The version leased, if every value of every tensor says it."""
    with reader.lease(timeout_s=5) as lease:
        for tensor in lease.tensors.values():
            assert np.all(tensor == lease.version)
        return lease.version


def values(reader: WeightsReader) -> list[int]:
    """Returns the newest version, and the value of each of its tensors if all elements agree."""
    with reader.lease(timeout_s=5) as lease:
        assert all(len(np.unique(tensor)) == 1 for tensor in lease.tensors.values())
        return [lease.version, *(int(tensor.flat[0]) for tensor in lease.tensors.values())]


def specs(roles) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, "float32", tensor.shape) for name, tensor in roles.weights(0)]


STEPS = [("weights.created", 0)]
STEPS += [
    (label, skip)
    for label in faults.WEIGHTS
    for skip in (0, 3)
    if not (label == "weights.before_magic" and skip)
]
SAFE = {"weights.committed"}


@pytest.mark.parametrize(("label", "skip"), STEPS)
def test_writer_killed(label, skip, bridge, faulty, roles, segments):
    with WeightsReader(bridge) as reader:
        faulty("write_weights", 1, 9, fault=Fault(label, skip)).end_on_fault()
        whole = skip + (label in SAFE)
        assert reader.version == (whole or None)
        if whole:
            assert newest(reader) == whole
            assert np.all(reader.copy()[1]["second"] == whole)
        began = time.monotonic()
        with WeightsWriter(bridge) as writer:
            for version in (whole + 1, whole + 2, whole + 3):
                writer.publish(version, roles.weights(version))
                assert newest(reader) == version
        assert time.monotonic() - began < 5, "nobody waits for the dead"
    assert segments() == []


@pytest.mark.parametrize(
    "successor",
    [
        "the old model",
        *(pytest.param(other, marks=pytest.mark.long) for other in ("the killed one's", "a third")),
    ],
)
@pytest.mark.parametrize("label", faults.WEIGHTS_REPLACING + faults.WEIGHTS)
def test_writer_of_another_model_killed(label, successor, bridge, faulty, roles, segments):
    """Wherever it is killed, the next one's versions are above all that readers have seen, and each of them
    is noticed.
    """
    models = {
        "the old model": roles.weights,
        "the killed one's": roles.other_weights,
        "a third": roles.third_weights,
    }
    given = models[successor]
    with WeightsReader(bridge) as reader, WeightsReader(bridge) as other:
        with WeightsWriter(bridge) as writer:
            for version in (7, 8):
                writer.publish(version, roles.weights(version))
        assert (reader.wait(None, timeout_s=5), newest(other)) == (8, 8)
        faulty("write_other_weights", 9, 9, fault=Fault(label)).end_on_fault()
        last = 9 if label in SAFE else 8
        assert reader.version in {last, None}, "an old version, or none: never a lower one"
        if label == "weights.floor_raised":
            assert reader.version == last, "its segment goes only once it is noted"
        with WeightsWriter(bridge) as writer:
            assert writer.last_version == last
            for version in (0, last - 1, last):
                with pytest.raises(ValueError, match=f"is not after {last}"):
                    writer.publish(version, given(version))
                with pytest.raises(ValueError, match=f"is not after {last}"), writer.fill(version, []):
                    pytest.fail("it is open")
            if reader.version is None:
                with pytest.raises(WeightsMismatch, match="no version yet"):
                    writer.publish(last + 1, given(last + 1)[:1], changed_only=True)
            for version in (last + 1, last + 2):
                writer.publish(version, given(version))
                assert (reader.wait(version - 1, timeout_s=5), newest(other)) == (version, version)
    assert segments() == []


def test_versions_rise_over_any_number_of_killed_writers(bridge, faulty, roles):
    """Models in turns, each killed in the midst of replacing the last one's segment: the highest version is
    remembered.
    """
    steps = faults.WEIGHTS_REPLACING[1:] + faults.WEIGHTS[:2]
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(4, roles.weights(4))
        for label, role in zip(
            steps, itertools.cycle(["write_other_weights", "write_weights"]), strict=False
        ):
            faulty(role, 5, 5, fault=Fault(label)).end_on_fault()
            assert reader.version is None
            with WeightsWriter(bridge) as writer:
                assert writer.last_version == 4


CHANGED_STEPS = [(label, 2 * skip) for label in faults.WEIGHTS_TENSORS for skip in range(1, 5)]
CHANGED_STEPS += [(label, skip + 1) for label, skip in CHANGED_STEPS]
CHANGED_STEPS += [(label, skip) for label in faults.WEIGHTS[1:] for skip in range(1, 5)]


# One filling of each kind for every change, the others for make test-long.
@pytest.mark.parametrize(
    ("label", "skip"),
    [pytest.param(label, skip, marks=[pytest.mark.long] * (skip > 3)) for label, skip in CHANGED_STEPS],
)
def test_writer_of_changed_tensors_killed(label, skip, bridge, faulty, roles):
    """A tensor in the torn slot never counts as unchanged: the next writer gives one, and the other has the
    last version's value.
    """
    with WeightsReader(bridge) as reader:
        faulty("write_changed_weights", fault=Fault(label, skip)).end_on_fault()
        whole = (skip // 2 if label in faults.WEIGHTS_TENSORS else skip) + (label in SAFE)
        assert whole >= 1
        is_given = [max(v for v in range(1, whole + 1) if v == 1 or v % 2 == row) for row in (0, 1)]
        assert values(reader) == [whole, *is_given]
        with WeightsWriter(bridge) as writer:
            for version, row in ((whole + 1, whole % 2), (whole + 2, whole % 2), (whole + 3, 1 - whole % 2)):
                writer.publish(version, [roles.weights(version)[row]], changed_only=True)
                is_given[row] = version
                assert values(reader) == [version, *is_given]


@pytest.mark.parametrize("skip", [0, pytest.param(2, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", faults.WEIGHTS[1:] + faults.WEIGHTS_FILLING)
def test_writer_killed_while_ranks_write(label, skip, bridge, faulty, roles):
    """Its ranks live on: they are refused, and the next writer fills with them."""
    part = faulty("write_parts")
    part.until("ready")
    with WeightsReader(bridge) as reader:
        child = faulty("fill_weights", 1, 9, fault=Fault(label, skip))
        ticket = None
        while (line := child.line()) is not None:
            if line.startswith("{"):
                ticket = line
                part.tell(ticket)
                part.until(f"wrote {json.loads(ticket)['version']}")
                child.tell()
        child.end_on_fault()
        whole = skip + (label in SAFE)
        assert reader.version == (whole or None)
        if ticket is not None:
            part.tell(ticket)
            part.until(f"refused {json.loads(ticket)['version']}")
        with WeightsWriter(bridge) as writer:
            for version in (whole + 1, whole + 2):
                with writer.fill(version, specs(roles)) as filling:
                    filling.write(*roles.weights(version)[0])
                    part.tell(json.dumps(filling.ticket))
                    part.until(f"wrote {version}")
                assert newest(reader) == version


@pytest.mark.parametrize("skip", [0, pytest.param(1, marks=pytest.mark.long)])
@pytest.mark.parametrize("label", faults.WEIGHTS_PARTS)
def test_rank_killed(label, skip, bridge, faulty, roles):
    """In its first half or its second: uncounted bytes are reported as missing, by name, and nothing is
    published.
    """

    def fill(version: int, fault: Fault | None) -> None:
        part = faulty("write_parts", fault=fault)
        part.until("ready")
        with writer.fill(version, specs(roles)) as filling:
            filling.write(*roles.weights(version)[0])
            part.tell(json.dumps(filling.ticket))
            part.end_on_fault() if fault else part.until(f"wrote {version}")

    with WeightsReader(bridge) as reader, WeightsWriter(bridge) as writer:
        fill(1, None)
        if (label, skip) == ("weights.part_counted", 1):
            fill(2, Fault(label, skip))  # it had written everything
            assert newest(reader) == 2
        else:
            with pytest.raises(WeightsMismatch, match="of tensor 'second' were written"):
                fill(2, Fault(label, skip))
            assert newest(reader) == 1
        fill(3, None)
        assert newest(reader) == 3


@pytest.mark.parametrize("label", faults.WEIGHTS_PARTS)
def test_nobody_shares_a_slot_with_a_rank_that_is_stopped(label, bridge, faulty, roles):
    """Neither its own writer commits, nor does a later one begin, while it is stopped in the middle of a
    write; its later write harms none.
    """
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(1, roles.weights(1))
            part = faulty("write_parts", fault=Fault(label, 0, signal.SIGSTOP))
            part.until("ready")
            with (
                pytest.raises(WeightsBusy, match="a rank has been writing"),
                writer.fill(2, specs(roles), timeout_s=0.05) as filling,
            ):
                filling.write(*roles.weights(2)[0])
                part.tell(json.dumps(filling.ticket))
                part.wait_stopped()
            assert newest(reader) == 1
        with WeightsWriter(bridge) as writer:
            with pytest.raises(WeightsBusy, match="a rank has been writing"):
                writer.publish(2, roles.weights(2), timeout_s=0.05)
            assert newest(reader) == 1
            part.go_on()
            part.until("refused 2")  # its second half, and in the first case its first
            for version in (2, 3):
                writer.publish(version, roles.weights(version))
                assert newest(reader) == version


def test_a_version_whose_writer_died_before_it_rang_is_found(bridge, faulty, roles):
    """A waiting reader looks again without a ring, and counts that."""
    with WeightsReader(bridge) as reader, WeightsWriter(bridge) as writer:
        writer.publish(1, roles.weights(1))
        writer.close()
        child = faulty("write_weights", 2, 2, fault=Fault("weights.committed"))
        assert reader.wait(1, timeout_s=20) == 2
        child.end_on_fault()


def test_writer_killed_alone_leaves_its_version_to_the_next(bridge, faulty, roles, segments):
    """No other participant is there: the next writer takes the segment over, and it is gone after the last
    leaves.
    """
    child = faulty("write_weights", 1, 2)
    child.until("done")
    child.kill()
    with WeightsWriter(bridge) as writer:
        assert writer.last_version == 2
        writer.publish(3, roles.weights(3))
    assert segments() == []


@pytest.mark.parametrize("fault", [None, *(Fault(label) for label in faults.WEIGHTS_READING)])
def test_reader_killed_with_a_lease(fault, bridge, faulty, roles, segments):
    """While it lives the writer may not pass its slot; its death frees it."""
    with WeightsWriter(bridge) as writer:
        writer.publish(1, roles.weights(1))
        child = faulty("hold_weights", fault=fault)
        if fault is None:
            child.until("holds 1")
            writer.publish(2, roles.weights(2))
            with pytest.raises(WeightsBusy):
                writer.publish(3, roles.weights(3), timeout_s=0.05)
            child.kill()
        else:
            child.end_on_fault()
            writer.publish(2, roles.weights(2))
        writer.publish(3, roles.weights(3), timeout_s=2)
        with WeightsReader(bridge) as reader:
            assert newest(reader) == 3
    assert segments() == []


def test_a_dead_writers_ticket_is_refused_before_and_after_the_next_writer(bridge, faulty, roles):
    child = faulty("fill_weights", 1, 1)
    ticket = json.loads(child.line())
    with WeightsPart(bridge) as part, WeightsReader(bridge) as reader:
        name, tensor = roles.weights(1)[1]
        part.write(ticket, name, tensor)
        child.kill()
        with pytest.raises(FillingOver, match="its writer is dead"):
            part.write(ticket, name, tensor)
        with WeightsWriter(bridge) as writer:
            writer.publish(1, roles.weights(1))
            with pytest.raises(FillingOver):
                part.write(ticket, name, 9 * tensor)
            assert newest(reader) == 1
