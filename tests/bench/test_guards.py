"""What must not become slow, as ratios within one run: never nanoseconds, for machines differ and neighbours are noisy.

Each guard takes the best of a few looks, as a neighbour only ever makes a look worse. A planted slow-down has to be noticed: that is a test, too.
"""

import time

import numpy as np
import pytest

import shmbridge
from shmbridge.bench.atropos_http import ratio_to_http
from shmbridge.bench.contract import Plan
from shmbridge.bench.figures import measure
from shmbridge.bench.groups import DTYPES, MIDDLE, make
from shmbridge.testing.fixtures import bridge

__all__ = ["bridge"]

LOOKS = 4
ARRAYS_OF_LIMIT = 0.7
LISTS_OVER_NUMPY = 5
LISTS_OVER_HTTP = 200

# Every producer measures its groups the careful way, as if nothing were common.
PLANTED = """
from shmbridge import outgoing
class Declines:
    def __init__(self, by_key): pass
    def plan(self, group, stamp, source): return None
outgoing.quick.Forms = Declines
"""


def best(look, enough):
    """The best of LOOKS looks, no more than are needed."""
    found = []
    while len(found) < LOOKS and (not found or max(found) < enough):
        found.append(look())
    return max(found)


def arrays_of_limit():
    return measure(Plan("ring", MIDDLE), seconds=0.2, rounds=5)["of_limit"]


def lists_over_numpy(producer, consumer):
    """CPU of making arrays of lists and putting those, over that of putting the lists."""
    lists = {name: rows for name, rows in make(MIDDLE, "lists").items() if name != "masks"}
    types = {name: DTYPES.get(name) for name in lists}

    def as_arrays():
        return {name: [np.array(row, types[name]) for row in rows] if types[name] else np.array(rows) for name, rows in lists.items()}

    def spent(put):
        times = []
        for _ in range(5):
            began = time.process_time()
            for _ in range(10):
                put()
            times.append(time.process_time() - began)
            for record in consumer.poll():
                record.release()
        return min(times)

    return spent(lambda: producer.put(as_arrays())) / spent(lambda: producer.put(lists))


@pytest.fixture
def ends(bridge):
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="16M") as producer:
        yield producer, consumer


def test_arrays_are_near_the_limit() -> None:
    assert best(arrays_of_limit, ARRAYS_OF_LIMIT) >= ARRAYS_OF_LIMIT


def test_lists_are_far_ahead_of_the_way_through_numpy(ends) -> None:
    assert best(lambda: lists_over_numpy(*ends), LISTS_OVER_NUMPY) >= LISTS_OVER_NUMPY


@pytest.mark.timeout(300)
def test_lists_are_far_ahead_of_the_rollout_server() -> None:
    assert best(lambda: ratio_to_http(3.0), LISTS_OVER_HTTP) >= LISTS_OVER_HTTP


def test_the_guard_of_arrays_notices_a_slow_down(tmp_path, monkeypatch) -> None:
    (tmp_path / "sitecustomize.py").write_text(PLANTED)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert best(arrays_of_limit, ARRAYS_OF_LIMIT) < ARRAYS_OF_LIMIT
