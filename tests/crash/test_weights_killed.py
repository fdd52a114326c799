"""The writer of the weights is killed at every step, or a reader with a lease: the last whole version stays, the next writer goes on."""

import time

import numpy as np
import pytest

from shmbridge.errors import WeightsBusy
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault
from shmbridge.weights import WeightsReader, WeightsWriter


def newest(reader: WeightsReader) -> int:
    """The version leased, if every value of every tensor says it."""
    with reader.lease(timeout_s=5) as lease:
        for tensor in lease.tensors.values():
            assert np.all(tensor == lease.version)
        return lease.version


STEPS = [(label, skip) for label in faults.WEIGHTS for skip in (0, 3) if not (label == "weights.before_magic" and skip)]


@pytest.mark.parametrize(("label", "skip"), STEPS)
def test_writer_killed(label, skip, bridge, faulty, roles, segments):
    with WeightsReader(bridge) as reader:
        faulty("write_weights", 1, 9, fault=Fault(label, skip)).end_on_fault()
        whole = skip + (label == "weights.committed")
        assert reader.version == (whole or None)
        if whole:
            assert newest(reader) == whole
        began = time.monotonic()
        with WeightsWriter(bridge) as writer:
            for version in (whole + 1, whole + 2, whole + 3):
                writer.publish(version, roles.weights(version))
                assert newest(reader) == version
        assert time.monotonic() - began < 5, "nobody waits for the dead"
    assert segments() == []


def test_writer_killed_alone_leaves_its_version_to_the_next(bridge, faulty, roles, segments):
    """Nobody else takes part: what is left is taken over, and gone after the last leaves."""
    child = faulty("write_weights", 1, 2)
    child.until("done")
    child.kill()
    with WeightsWriter(bridge) as writer:
        assert writer.last_version == 2
        writer.publish(3, roles.weights(3))
    assert segments() == []


def test_reader_killed_with_a_lease(bridge, faulty, roles, segments):
    """While it lives the writer may not pass its slot; its death frees it."""
    with WeightsWriter(bridge) as writer:
        writer.publish(1, roles.weights(1))
        child = faulty("hold_weights")
        child.until("holds 1")
        writer.publish(2, roles.weights(2))
        with pytest.raises(WeightsBusy):
            writer.publish(3, roles.weights(3), timeout_s=0.05)
        child.kill()
        writer.publish(3, roles.weights(3), timeout_s=2)
        with WeightsReader(bridge) as reader:
            assert newest(reader) == 3
    assert segments() == []
