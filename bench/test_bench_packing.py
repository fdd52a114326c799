"""The cost of a value from a Python list into the lane, beside other conversions of that list.

One process, one thread.

Lists whose objects lie in the order they were made in, of SOURCES groups in turn. The cost of a column is
that of a `put` with it, less that of one without it (tokens from arrays); medians of rounds. Method:
bench/README.md.
"""

import json
import os
import statistics
import time

import numpy as np
import pytest

import shmbridge
from shmbridge.bench.checked_rows import put_ratios
from shmbridge.bench.groups import MIDDLE, SEED, SOURCES, make

ARRAYS = [make(MIDDLE, "row_arrays", SEED + n) for n in range(SOURCES)]
LISTS = [make(MIDDLE, "lists", SEED + n) for n in range(SOURCES)]
TOKENS = [{"tokens": group["tokens"]} for group in ARRAYS]


def with_column(name):
    return [tokens | {name: group[name]} for tokens, group in zip(TOKENS, LISTS, strict=True)]


def listed(groups):
    return [{name: group[name] for name in ("tokens", "masks") if name in group} for group in groups]


CASES = {
    "ints": ([{"tokens": group["tokens"]} for group in LISTS], TOKENS),
    "floats": (with_column("inference_logprobs"), TOKENS),
    "floats that must be finite": (with_column("advantages"), TOKENS),
    "masks, folded": (listed(LISTS), [{"tokens": group["tokens"]} for group in LISTS]),
}
OTHERS = {
    "ints by np.array": lambda group: [np.array(row, np.int32) for row in group["tokens"]],
    "floats by np.array": lambda group: [np.array(row, np.float32) for row in group["advantages"]],
    "ints by json": lambda group: json.dumps(group["tokens"]),
    "floats by json": lambda group: json.dumps(group["advantages"]),
}


@pytest.fixture
def spent():
    """Median nanoseconds a group of calls over all groups in turn."""
    name = f"bench-packing-{os.getpid()}"
    with shmbridge.Consumer(name) as consumer, shmbridge.Producer(name) as producer:

        def look(groups, rounds, call=producer.put):
            times = []
            for _ in range(rounds):
                began = time.perf_counter_ns()
                for _ in range(8):
                    for group in groups:
                        call(group)
                times.append((time.perf_counter_ns() - began) / 8 / len(groups))
                for record in consumer.poll(1000):
                    record.release()
            return statistics.median(times)

        yield look
    shmbridge.clean(name, dry_run=False)


def note(benchmark, per_operation, label, ns):
    benchmark.extra_info.update({"label": label, "ns_per_value": ns / MIDDLE.tokens, "values": MIDDLE.tokens})
    per_operation([ns / 1e9])


@pytest.mark.benchmark(group="packing")
@pytest.mark.parametrize("case", CASES)
def test_put_from_lists(benchmark, per_operation, spent, quick, case):
    with_it, without = CASES[case]
    rounds = 10 if quick else 40
    took = benchmark.pedantic(lambda: spent(with_it, rounds) - spent(without, rounds), rounds=1)
    note(benchmark, per_operation, case, took)


@pytest.mark.benchmark(group="packing")
@pytest.mark.parametrize("case", OTHERS)
def test_other_ways(benchmark, per_operation, spent, case):
    took = benchmark.pedantic(lambda: spent(LISTS, 3, OTHERS[case]), rounds=1)
    note(benchmark, per_operation, case, took)


@pytest.mark.benchmark(group="checked rows")
def test_checks_of_rows(benchmark, per_operation, quick):
    """`put` from arrays with checks of one row in N, over that without any."""
    rounds = 20 if quick else 100
    found = benchmark.pedantic(lambda: put_ratios((1, 8, 16, 32, 64), MIDDLE, rounds=rounds), rounds=1)
    per_operation(operations=rounds)
    ratios = {f"1 row in {every}": ratio for every, ratio in found.items()}
    benchmark.extra_info.update({"label": "`put` with checks over without", **ratios})
