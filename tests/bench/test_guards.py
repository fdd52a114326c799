"""Guards against slowness, as ratios within one run: not as nanoseconds, since machines differ and neighbours
are noisy.

Each guard takes the best of a few looks, as a neighbour only ever makes a look worse.
"""

import statistics
import time
from contextlib import ExitStack

import numpy as np
import pytest

import shmbridge
from shmbridge.bench import baselines
from shmbridge.bench.atropos_http import ratio_to_http
from shmbridge.bench.checked_rows import put_ratios
from shmbridge.bench.contract import Plan
from shmbridge.bench.groups import DTYPES, MIDDLE, SEED, SOURCES, make
from shmbridge.record import DEFAULT_EVERY
from shmbridge.testing.fixtures import bridge

__all__ = ["bridge"]

LOOKS = 8
ROUNDS, GROUPS = 800, 4
ARRAYS_OF_LIMIT = 0.55
LISTS_OVER_NUMPY = 5
LISTS_OVER_HTTP = 200
UNCHECKED_OVER_CHECKED = 1 / 1.03  # `put` from arrays is at most 3 % slower with checks of rows


def best(look, enough):
    """Returns the best of at most LOOKS looks; stops early once one is good enough."""
    found = []
    while len(found) < LOOKS and (not found or max(found) < enough):
        found.append(look())
    return max(found)


def arrays_of_limit():
    """Write and read of a few groups, through the limit and through the ring in turn, in this thread alone.

    With two processes, a neighbour that takes one of two cores halves what waits for the other.
    """
    plan, groups = Plan("ring", MIDDLE), [make(MIDDLE, "arrays", SEED + number) for number in range(SOURCES)]
    spent: dict[str, list[float]] = {baselines.LIMIT: [], "ring": []}
    with ExitStack() as opened:
        ends = {}
        for name in spent:
            contender = baselines.load(name)
            reader = contender.Reader(plan)
            opened.callback(reader.close)
            writer = contender.Writer(reader.address, plan)
            opened.callback(writer.close)
            ends[name] = reader, writer, writer.prepare(groups)
        for _ in range(ROUNDS):
            for name, (reader, writer, prepared) in ends.items():
                began = time.process_time_ns()
                writer.write(prepared, GROUPS)
                reader.read(GROUPS)
                spent[name].append(time.process_time_ns() - began)
    return statistics.median(
        limit / ring for limit, ring in zip(spent[baselines.LIMIT], spent["ring"], strict=True)
    )


def lists_over_numpy(producer, consumer):
    """CPU of making arrays of lists and putting those, over that of putting the lists."""
    lists = {name: rows for name, rows in make(MIDDLE, "lists").items() if name != "masks"}
    types = {name: DTYPES.get(name) for name in lists}

    def as_arrays():
        return {
            name: [np.array(row, types[name]) for row in rows] if types[name] else np.array(rows)
            for name, rows in lists.items()
        }

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


def unchecked_over_checked():
    return 1 / put_ratios((DEFAULT_EVERY,), MIDDLE, rounds=60)[DEFAULT_EVERY]


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


def test_checks_of_rows_cost_next_to_nothing() -> None:
    assert best(unchecked_over_checked, UNCHECKED_OVER_CHECKED) >= UNCHECKED_OVER_CHECKED
