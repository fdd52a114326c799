"""The lock of a slot, between the writer that has just published it and the readers that are woken for it."""

import numpy as np
import pytest

import shmbridge
from shmbridge.segments import locks
from shmbridge.weights import WeightsReader, WeightsWriter


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        yield writer, reader


def weights(value: float) -> list:
    return [("w", np.full((3, 5), value, np.float32))]


def test_the_bell_rings_when_the_slot_can_be_held(ends, monkeypatch) -> None:
    """A woken reader may take the writer's CPU, and could not hold the version before the writer frees the
    slot.
    """
    writer, reader = ends
    writer.publish(1, weights(1))
    found, unlock, bells = writer._versions, locks.unlock, []

    def noted(fd: int, byte: int) -> None:
        bells.append(found.bell)
        unlock(fd, byte)

    monkeypatch.setattr("shmbridge.weights.writer.unlock", noted)
    silent = found.bell
    writer.publish(2, weights(2))
    assert set(bells) == {silent}
    assert found.bell != silent
    assert reader.version == 2


def test_a_version_that_its_writer_keeps_locked_is_said_to_be_there(ends) -> None:
    writer, reader = ends
    writer.publish(1, weights(1))
    fd, byte = writer._versions.mapping.fd, locks.LockByte.FIRST_SLOT + writer._versions.latest[1]
    assert locks.lock_exclusive(fd, byte)  # as of a writer that was stopped before it let go
    with (
        pytest.raises(shmbridge.NotReady, match=r"version 1 .* is locked by its writer"),
        reader.lease(timeout_s=0.02),
    ):
        pass
    locks.unlock(fd, byte)
    with reader.lease() as lease:
        assert lease.version == 1
