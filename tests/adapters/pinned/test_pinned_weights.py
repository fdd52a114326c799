"""The weights segment registered with a device: once, with the right access, and let go in time."""

from __future__ import annotations

import logging

import numpy as np
import pytest
import torch

from shmbridge.consumers.learner.train.publishing import WeightsPublisher
from shmbridge.consumers.learner.world import World
from shmbridge.consumers.pinned import PinnedWeights
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

MODEL = {"a": np.arange(1000, dtype=np.float32), "b": np.ones((4, 5), np.float32)}


class Recorder:
    """A driver without a device; records its calls."""

    def __init__(self, refused=0):
        self.registered, self.refused, self.asked = {}, refused, 0

    def takes_read_only(self):
        return True

    def register(self, address, size, *, written=False):
        self.asked += 1
        assert address not in self.registered
        if not self.refused:
            self.registered[address] = size, written
        return self.refused

    def unregister(self, address):
        del self.registered[address]
        return 0


@pytest.fixture
def written(bridge):
    with WeightsWriter(bridge) as writer:
        writer.publish(0, MODEL.items())
        yield writer


@pytest.mark.parametrize(
    ("end", "is_written"), [(WeightsWriter, True), (WeightsPart, True), (WeightsReader, False)]
)
def test_the_device_may_write_the_memory_of_an_end_that_writes(bridge, end, is_written):
    """Read-only registration makes copies from the device fail, seen on an H100; a reader needs no more."""
    driver = Recorder()
    with WeightsWriter(bridge) as writer:
        one = writer if end is WeightsWriter else end(bridge)
        with writer.fill(0, [(name, "float32", each.shape) for name, each in MODEL.items()]) as filling:
            for name, each in MODEL.items():
                if end is WeightsPart:
                    one.write(filling.ticket, name, each, None)
                else:
                    filling.write(name, each)
        if end is WeightsReader:
            assert one.version == 0
        pinned = PinnedWeights(one, lambda: driver)
        pinned.pin("cuda")
        assert [flag for _, flag in driver.registered.values()] == [is_written]
        assert pinned.bytes == one.memory.nbytes
        pinned.close()
        assert driver.registered == {}
        assert pinned.bytes == 0
        one.close()


def test_a_segment_is_registered_once(written):
    driver = Recorder()
    pinned = PinnedWeights(written, lambda: driver)
    for version in range(1, 4):
        pinned.pin("cuda")
        written.publish(version, MODEL.items())
    assert driver.asked == 1
    pinned.close()
    pinned.close()


def test_nothing_is_registered_for_a_cpu_or_without_a_segment(bridge):
    looked = []
    with WeightsReader(bridge) as reader:
        pinned = PinnedWeights(reader, lambda: looked.append(1))
        pinned.pin("cuda")  # there is no segment yet
        pinned.pin("cpu")
        assert not looked
        assert pinned.bytes == 0
        pinned.close()


def test_another_segment_takes_the_place_of_the_first(bridge):
    driver = Recorder()
    with WeightsReader(bridge) as reader:
        pinned = PinnedWeights(reader, lambda: driver)
        with WeightsWriter(bridge) as writer:
            writer.publish(0, MODEL.items())
            assert reader.wait(None, 5.0) == 0
            pinned.pin("cuda")
            (first,) = driver.registered.items()
        with WeightsWriter(bridge) as writer:
            writer.publish(1, [("other", np.zeros(100_000, np.float32))])
            assert reader.wait(0, 5.0) == 1
            pinned.pin("cuda")
            (second,) = driver.registered.items()
        assert first != second
        assert pinned.bytes == second[1][0]
        pinned.close()
    assert driver.registered == {}


def test_what_is_refused_is_said_once_and_goes_the_slow_way(written, caplog):
    driver = Recorder(refused=2)
    pinned = PinnedWeights(written, lambda: driver)
    with caplog.at_level(logging.WARNING):
        for version in range(1, 4):
            pinned.pin("cuda")
            written.publish(version, MODEL.items())
        pinned.close()
    assert driver.asked == 1
    assert pinned.bytes == 0
    (line,) = [each.getMessage() for each in caplog.records]
    assert "CUDA (error 2)" in line
    assert written.bridge in line
    assert str(written.memory.nbytes) in line


def test_a_machine_without_a_driver_is_asked_once(written):
    looked = []
    pinned = PinnedWeights(written, lambda: looked.append(1))
    for _ in range(3):
        pinned.pin("cuda")
    assert len(looked) == 1
    assert pinned.bytes == 0


def test_the_learner_pins_where_its_model_is(written, monkeypatch):
    """On a CPU nothing; the same call for a model on a device registers the writer's memory."""
    asked = []
    monkeypatch.setattr(PinnedWeights, "pin", lambda self, device: asked.append(torch.device(device).type))
    model = torch.nn.Linear(3, 2)
    written.close()
    with WeightsWriter(written.bridge) as writer:
        publisher = WeightsPublisher(model, torch.float32, World(), writer, None)
        publisher.publish(1)
        publisher.close()
    assert asked == ["cpu"]
