"""Versions of one bridge's weights rise, whatever happens to their segments."""

import numpy as np
import posix_ipc
import pytest

import shmbridge
from shmbridge.segments import open_control, segment
from shmbridge.weights import WeightsReader, WeightsWriter


def model(name: str, version: int) -> list:
    return [(name, np.full(8, version, np.float32))]


@pytest.fixture
def reader(bridge):
    """A participant, so that the bridge lasts."""
    with WeightsReader(bridge) as reader:
        yield reader


def test_a_writer_of_another_model_that_never_publishes_leaves_the_last_version(bridge, reader):
    with WeightsWriter(bridge) as writer:
        writer.publish(7, model("a", 7))
    with (
        WeightsWriter(bridge) as writer,
        pytest.raises(ZeroDivisionError),
        writer.fill(8, [("b", "float32", (8,))]),
    ):
        raise ZeroDivisionError
    assert reader.version is None
    with WeightsWriter(bridge) as writer:
        assert writer.last_version == 7
        for version in (0, 7):
            with pytest.raises(ValueError, match="is not after 7"):
                writer.publish(version, model("b", version))
        writer.publish(8, model("b", 8))
        assert (writer.last_version, reader.version) == (8, 8)


def test_a_model_that_no_mount_could_hold_leaves_the_one_that_is_there(bridge, reader):
    with WeightsWriter(bridge) as writer:
        writer.publish(7, model("a", 7))
    with WeightsWriter(bridge) as writer:
        with (
            pytest.raises(shmbridge.ShmTooSmall, match="weights segment"),
            writer.fill(8, [("b", "float32", (1 << 44,))]),
        ):
            pytest.fail("it fits")
        assert reader.copy()[0] == writer.last_version == 7
        for version in (8, 9):
            writer.publish(version, model("a", version))
            assert reader.copy()[0] == version


def test_a_writer_of_another_model_without_memory_leaves_the_last_version(bridge, reader, monkeypatch):
    """The last version may be the same writer's; that writer has no segment from then on."""
    with WeightsWriter(bridge) as writer:
        writer.publish(7, model("a", 7))
    with WeightsWriter(bridge) as writer:
        with monkeypatch.context() as little, pytest.raises(shmbridge.ShmTooSmall):
            little.setattr(segment.locks, "memory_headroom", lambda: (0, "this test"))
            writer.publish(8, model("b", 8))
        assert reader.version is None
        assert writer.last_version == 7
        with pytest.raises(ValueError, match="is not after 7"):
            writer.publish(7, model("a", 7))
        writer.publish(8, model("a", 8))
        assert reader.version == 8


@pytest.mark.parametrize("of", ["a", "b"])
def test_a_writer_that_was_there_before_does_not_go_below_one_that_came_and_went(bridge, reader, of):
    """It found no segment at its start; the present one holds the other's version, which stays."""
    with WeightsWriter(bridge) as early:
        with WeightsWriter(bridge) as other:
            other.publish(7, model("a", 7))
        assert early.last_version is None
        for version in (3, 7):
            with pytest.raises(ValueError, match="is not after 7"):
                early.publish(version, model(of, version))
        assert reader.version == 7
        early.publish(8, model(of, 8))
        assert reader.version == 8


def test_a_writer_that_was_overtaken_while_it_made_its_segment_says_so(bridge, reader, monkeypatch):
    """Between its removal of the old segment and its own, others publish a version and replace that one's
    segment, too.
    """
    with WeightsWriter(bridge) as writer:
        writer.publish(3, model("a", 3))
    slow = WeightsWriter(bridge)
    create = segment.create_weights

    def create_late(*arguments):
        monkeypatch.undo()
        with WeightsWriter(bridge) as other:
            other.publish(7, model("b", 7))
        with (
            WeightsWriter(bridge) as another,
            pytest.raises(ZeroDivisionError),
            another.fill(8, [("c", "float32", (8,))]),
        ):
            raise ZeroDivisionError
        posix_ipc.unlink_shared_memory(segment.weights_name(bridge))
        return create(*arguments)

    monkeypatch.setattr("shmbridge.weights.table.create_weights", create_late)
    with slow:
        with pytest.raises(ValueError, match="version 4 is not after 7"):
            slow.publish(4, model("d", 4))
        assert reader.version is None
        slow.publish(8, model("d", 8))
        assert reader.version == 8


def test_the_floor_is_the_bridge_s(bridge):
    """The last participant removes it: a later bridge of that name begins with any version."""
    for name in ("a", "b"):
        with WeightsWriter(bridge) as writer:
            writer.publish(7, model(name, 7))
        with WeightsWriter(bridge) as writer:
            assert writer.last_version is None
            writer.publish(3, model("c", 3))


def test_the_floor_is_lowered_by_nobody(bridge, reader):
    control = open_control(bridge)
    for version, expected in ((0, 0), (7, 7), (3, 7), (8, 8)):
        control.raise_weights_floor(version)
        assert control.weights_floor == expected
    with WeightsWriter(bridge) as writer:
        assert writer.last_version == 8


@pytest.mark.parametrize("version", [0, (1 << 60) - 2])
def test_the_lowest_and_the_highest_version_are_kept(bridge, reader, version):
    with WeightsWriter(bridge) as writer:
        writer.publish(version, model("a", 1))
    with (
        WeightsWriter(bridge) as writer,
        pytest.raises(ZeroDivisionError),
        writer.fill(version + 1, [("b", "float32", (8,))]),
    ):
        raise ZeroDivisionError
    with WeightsWriter(bridge) as writer:
        assert writer.last_version == version
