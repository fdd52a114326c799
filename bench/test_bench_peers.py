"""All contenders with the same groups, through the same memory, every byte read: the limit, the ring, and its
peers.
"""

import pytest

from shmbridge.bench import baselines
from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import LARGE, MIDDLE, SMALL

SLOW_TO_START = ("ray_actor", "transfer_queue_store")
IN_PLACE = (baselines.RING, "iceoryx", "numpy_slots")
full = pytest.mark.full


def shapes():
    return [
        pytest.param(shape, id=str(shape), marks=() if shape is MIDDLE else full)
        for shape in (SMALL, MIDDLE, LARGE)
    ]


def contenders():
    return [pytest.param(name, marks=full if name in SLOW_TO_START else ()) for name in baselines.CONTENDERS]


@pytest.mark.benchmark(group="peers")
@pytest.mark.parametrize("shape", shapes())
def test_the_limit_in_a_lane_that_stays_in_the_cache(measured, shape):
    """The limit, going round in as little memory as the ring does while its consumer keeps up.

    Compared with its own limit.
    """
    measured(Plan("limit", shape, lane_bytes=max(4 << 20, 2 * shape.bytes)))


@pytest.mark.timeout(300)
@pytest.mark.benchmark(group="peers")
@pytest.mark.parametrize("contender", contenders())
@pytest.mark.parametrize("shape", shapes())
def test_peers(measured, shape, contender):
    measured(Plan(contender, shape))


@pytest.mark.benchmark(group="peers, a slower reader")
@pytest.mark.parametrize("contender", IN_PLACE)
@pytest.mark.parametrize("shape", shapes())
def test_peers_with_a_slower_reader(measured, shape, contender):
    """The reader sets the pace, as a consumer in Python does: what counts is where it finds the bytes."""
    measured(Plan(contender, shape, reads=8))
