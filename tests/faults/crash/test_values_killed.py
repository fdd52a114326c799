"""A process that writes or clears a segment of values is killed or stopped at every step: what was committed
stays, what was not never existed.
"""

import signal

import numpy as np
import pytest

from shmbridge.segments import (
    MOUNT,
    read_values_head,
    release_values,
    sweep_bridge,
    value_names,
    write_values,
)
from shmbridge.testing import faults
from shmbridge.testing.faults import Fault


def bytes_of(name: str) -> bytes:
    head = read_values_head(name)
    assert head is not None
    return (MOUNT / name[1:]).read_bytes()[head.data_at : head.size]


@pytest.mark.parametrize("label", faults.STORING)
def test_a_writer_killed_at_any_step(label, bridge, faulty):
    """The first put is whole; the second is there whole if it was committed, or swept by the next start."""
    child = faulty("store_values", 2, fault=Fault(label, 1))
    child.end_on_fault()
    first = child.said[0].split()[1]
    assert bytes_of(first) == bytes(4096)
    sweep_bridge(bridge)
    left = value_names(bridge)
    assert first in left
    assert len(left) == (2 if label == "values.committed" else 1)
    assert all(len(set(bytes_of(name))) == 1 for name in left)
    for name in left:
        assert release_values(name, range(4))
    sweep_bridge(bridge)
    assert value_names(bridge) == []


@pytest.mark.parametrize("label", faults.STORING[1:3])
def test_a_stopped_writer_is_alive(label, bridge, faulty):
    child = faulty("store_values", 1, fault=Fault(label, 0, signal.SIGSTOP))
    child.wait_stopped()
    (name,) = value_names(bridge)
    assert sweep_bridge(bridge, with_records=True).kept[name] == "it is being written"
    child.go_on()
    child.until("done")
    assert bytes_of(name) == bytes(4096)
    child.tell()
    assert child.end() == 0


@pytest.mark.parametrize("label", faults.CLEARING)
def test_who_clears_is_killed_before_the_unlink(label, bridge, faulty):
    """The last row is released, the name is still there: any start removes it."""
    name = write_values(bridge, np.arange(3), b"", [(0, [b"abc"])])
    faulty("release_values", name, 0, 2, fault=Fault(label, 2)).end_on_fault()
    assert value_names(bridge) == [name]
    assert name in sweep_bridge(bridge).removed


def test_two_clear_at_once_and_one_is_stopped(bridge, faulty):
    """Nobody waits: the other one releases its own rows, and whoever comes last removes the name."""
    name = write_values(bridge, np.arange(4), b"", [(0, [b"abcd"])])
    slow = faulty("release_values", name, 0, 1, fault=Fault("values.released", 1, signal.SIGSTOP))
    slow.wait_stopped()
    assert release_values(name, [2, 3])
    slow.go_on()
    assert slow.end() == 0
    assert value_names(bridge) == []
