"""An interrupt while a lane is adopted leaves no lane that is never read or never removed."""

import time

import pytest

from shmbridge._ext.lane import LanePoller
from shmbridge.segments import DeathWatch


class Stop(Exception):
    pass


@pytest.mark.parametrize("call", ["turns", "_watch"], ids=["before it is taken from", "before it is watched"])
def test_a_lane_interrupted_in_adoption_is_taken_from_and_buried(
    make_producer, make_consumer, monkeypatch, call
) -> None:
    hub, producer = make_consumer(), make_producer()
    producer.put({"tokens": [[7]]})
    lanes = hub._lanes
    real, interrupted = getattr(lanes, call), []

    class Once:
        """The real method, with an interrupt at its first call."""

        def __getattr__(self, name):
            if name in ("add", "watch") and not interrupted:
                interrupted.append(name)
                raise Stop
            return getattr(real, name)

        def __setattr__(self, name, value) -> None:
            setattr(real, name, value)

    assert isinstance(real, LanePoller | DeathWatch)
    monkeypatch.setattr(lanes, call, Once())
    with pytest.raises(Stop):
        while not interrupted:
            lanes.turns.arrivals ^= 1
            lanes.adopt()
    with hub.get(5) as record:
        assert record["tokens"][0].tolist() == [7]
    del record
    producer.close()
    end = time.monotonic() + 10
    while len(lanes) and time.monotonic() < end:
        time.sleep(0.01)
    assert len(lanes) == 0
