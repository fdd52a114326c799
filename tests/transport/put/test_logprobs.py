"""Log-probabilities that are none: one rule, whatever form they are put in, and wherever they come from."""

import asyncio
import json
import math
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.record import check_of
from shmbridge.schema import LOGPROBS, is_logprob, recorded_logprobs

HIGHEST = float(np.float32(1e-3))
ROUND = [0.0, -1.0, -512.0, -700.0, -9997.99, -9998.0, -9999.0, 1e-7, 1e-3, 1.0, 3e38, -3e38]
EDGES = [
    float(np.nextafter(np.float32(value), np.float32(way)))
    for value in ROUND
    for way in (value, -math.inf, math.inf)
]
ODD = [-0.0, 1e-45, -1e-45, 1e-38, math.inf, -math.inf, math.nan]
NANS = np.array([0x7FC00001, 0xFFC00000, 0x7F800001, 0xFF812345], np.uint32).view(np.float32)


def wanted(values) -> list[int]:
    """The bits that a lane must have, by the rule in words; one kind of NaN, and -0.0 stays."""
    found = []
    for value in values:
        value = math.nan if value is None else float(np.float32(value))
        none = not -9998.0 < value <= HIGHEST  # NaN is nowhere
        kept = math.nan if none else 0.0 if value > 0.0 else value
        found.append(int(np.float32(kept).view(np.uint32)))
    return found


def bits(array) -> list[int]:
    return np.asarray(array, np.float32).view(np.uint32).tolist()


def none_of(values) -> int:
    return sum(math.isnan(value) for value in np.array(wanted(values), np.uint32).view(np.float32))


def test_the_rule_over_its_edges() -> None:
    grid = np.concatenate([np.array(EDGES + ODD, np.float32), NANS])
    for times in (1, 7, 1000):  # shorter than one vector, with a rest, and several chunks
        values = np.tile(grid, times)
        assert bits(recorded_logprobs(values)) == wanted(grid) * times
        np.testing.assert_array_equal(is_logprob(values), ~np.isnan(recorded_logprobs(values)))
    for value in grid:  # each alone among usual ones
        values = np.full(64, -0.5, np.float32)
        values[37] = value
        assert bits(recorded_logprobs(values)) == wanted(values)
    with np.errstate(over="ignore"):
        tensors = [torch.from_numpy(grid).to(dtype) for dtype in (torch.float32, torch.float64)]
    for tensor in tensors:
        assert is_logprob(tensor).tolist() == is_logprob(grid).tolist()


def arrow(rows) -> pa.Array:
    return pa.array(
        [[None if each is None else float(each) for each in row] for row in rows], pa.list_(pa.float32())
    )


def flat(rows, dtype) -> tuple:
    return np.concatenate([np.array(row, dtype) for row in rows]), np.array([len(row) for row in rows])


FORMS = {
    "lists": list,
    "tuples": lambda rows: tuple(map(tuple, rows)),
    "arrays": lambda rows: [np.array(row, np.float32) for row in rows],
    "arrays of doubles": lambda rows: [np.array(row, np.float64) for row in rows],
    "steps of arrays": lambda rows: [np.repeat(np.array(row, np.float32), 2)[::2] for row in rows],
    "other byte order": lambda rows: [np.array(row, ">f4") for row in rows],
    "tensors": lambda rows: [
        torch.tensor([math.nan if each is None else each for each in row]) for row in rows
    ],
    "flat": lambda rows: flat(rows, np.float32),
    "flat doubles": lambda rows: flat(rows, np.float64),
    "arrow": arrow,
}
VALUES = st.sampled_from([*EDGES, *ODD, None]) | st.floats(-20.0, 0.0, width=32)
ROWS = st.lists(st.lists(VALUES, min_size=1, max_size=40), min_size=1, max_size=4)
QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("foreign", [False, True])
@pytest.mark.parametrize("form", FORMS)
@QUICK
@given(rows=ROWS)
def test_each_form_of_put_stores_and_counts_the_same(producer, consumer, form, foreign, rows) -> None:
    before = producer.stats()["logprobs_unrecorded_total"]
    group = {"tokens": [[1] * len(row) for row in rows], "scores": [0.0] * len(rows)}
    group |= dict.fromkeys(LOGPROBS, FORMS[form](rows))
    if form == "arrow":
        group = pa.RecordBatch.from_pydict(group)
    producer.put(group, foreign=foreign)
    every = [value for row in rows for value in row]
    with consumer.get(timeout_s=10) as record:
        for name in LOGPROBS:
            assert bits(record[name].values) == wanted(every), name
        served = record.to_scored_data()
        assert [each for row in served["ref_logprobs"] for each in row] == [
            1.0 if math.isnan(value) else value for value in record["ref_logprobs"].values.tolist()
        ]
        assert served["inference_logprobs"] == served["ref_logprobs"]
    assert producer.stats()["logprobs_unrecorded_total"] - before == 2 * none_of(every)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_long_rows_into_memory_that_is_cold_and_then_warm(make_producer, consumer, dtype) -> None:
    producer, draw = make_producer(lane_bytes="4M"), np.random.default_rng(5)
    for odd in (0, 3, 9000):
        values = -draw.random(9000)
        values[draw.choice(9000, odd, replace=False)] = draw.choice([*ROUND, math.nan], odd)
        values = values.astype(dtype)
        group = {"tokens": [[1] * 4500] * 2, "inference_logprobs": (values, [4500, 4500])}
        for _ in range(3):
            producer.put(group)
            with consumer.get(timeout_s=10) as record:
                assert bits(record["inference_logprobs"].values) == wanted(values)


def test_a_claim_is_marked_before_it_is_committed(producer, consumer) -> None:
    values = np.array([*EDGES, *ODD, -0.25], np.float32)
    with producer.claim(2, {name: [len(values) - 2, 2] for name in ("tokens", *LOGPROBS)}) as slot:
        slot["tokens"][:] = 1
        for name in LOGPROBS:
            slot[name][:] = values
    with consumer.get(timeout_s=10) as record:
        for name in LOGPROBS:
            assert bits(record[name].values) == wanted(values)
            assert record.row_checks(name).tolist() == [check_of(name, row) for row in record[name]]
    assert producer.stats()["logprobs_unrecorded_total"] == 2 * none_of(values)
    with pytest.raises(ZeroDivisionError), producer.claim(1, {"tokens": [1], "ref_logprobs": [1]}) as slot:
        slot["ref_logprobs"][:] = 1.0
        raise ZeroDivisionError
    assert producer.stats()["logprobs_unrecorded_total"] == 2 * none_of(values)


def test_other_columns_keep_what_they_had(producer, consumer) -> None:
    group = {"tokens": [[1, 2]], "token_rewards": [[1.0, -9999.0]], "distill_logprobs": [[[1.0], [-9999.0]]]}
    producer.put(group)
    with consumer.get(timeout_s=10) as record:
        assert record["token_rewards"].tolist() == [[1.0, -9999.0]]
        assert record["distill_logprobs"].tolist() == [[[1.0], [-9999.0]]]
    for column, value in (("token_rewards", None), ("ref_logprobs", "text")):
        with pytest.raises(shmbridge.InvalidRecord) as caught:
            producer.put({"tokens": [[1, 2]], column: [[1.0, value]]})
        assert (caught.value.column, caught.value.row, caught.value.position) == (column, 0, 1)


def test_put_async_does_the_same(producer, consumer) -> None:
    asyncio.run(producer.put_async({"tokens": [[1, 2, 3]], "inference_logprobs": [[None, 1e-7, -9999]]}))
    with consumer.get(timeout_s=10) as record:
        assert bits(record["inference_logprobs"].values) == wanted([None, 1e-7, -9999])


OTHER = """
import sys, shmbridge
with shmbridge.Producer(sys.argv[1], env_name="code") as producer:
    producer.put({"tokens": [[1, 2, 3]], "inference_logprobs": [[1.0, -9999.0, -0.5]]})
"""


def test_each_environment_has_its_count(bridge, make_producer, make_consumer) -> None:
    consumer, math_env = make_consumer(), make_producer(env_name="math")
    subprocess.run([sys.executable, "-c", OTHER, bridge], check=True, timeout=60)
    math_env.put(
        {"tokens": [[1, 2]], "inference_logprobs": [[1.0, -1.0]], "ref_logprobs": [[None, math.inf]]}
    )
    command = [sys.executable, "-m", "shmbridge", "top", bridge, "--json", "--once"]
    said = json.loads(subprocess.run(command, capture_output=True, check=True, timeout=60).stdout)
    assert {lane["env_name"]: lane["logprobs_unrecorded"] for lane in said["lanes"]} == {"code": 2, "math": 3}
    assert consumer.stats()["logprobs_unrecorded_total"] == 5


def test_a_lane_of_an_older_producer_is_served_by_the_same_rule(producer, consumer) -> None:
    with producer.claim(1, {"tokens": [6], "inference_logprobs": [6]}) as slot:
        slot["tokens"][:], (view) = 1, slot["inference_logprobs"]
    view[:] = [1.0, -9999.0, math.inf, 1e-7, -0.5, math.nan]  # as one that wrote them as they came
    with consumer.get(timeout_s=10) as record:
        assert record.to_scored_data()["inference_logprobs"] == [[1.0, 1.0, 1.0, 0.0, -0.5, 1.0]]
