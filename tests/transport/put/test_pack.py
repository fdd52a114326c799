"""Values of every form and type, put through a lane and read again."""

import os

import numpy as np
import pyarrow as pa
import pytest
import torch

import shmbridge

LISTS = [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]
FLOATS = [pa.float16(), pa.float32(), pa.float64()]
OWN = pa.schema(
    [(f"list_{kind}", pa.list_(kind)) for kind in [*LISTS, *FLOATS, pa.bool_()]]
    + [(f"one_{kind}", kind) for kind in LISTS]
)


@pytest.fixture(scope="module")
def through():
    """Puts a group and gives the record that comes out; one bridge for the whole file."""
    name = f"t-pack-{os.getpid()}"
    with (
        shmbridge.Consumer(name, schema=OWN) as consumer,
        shmbridge.Producer(name, lane_bytes="64K", on_full="raise", schema=OWN) as producer,
    ):
        handed_out: list[shmbridge.Record] = []

        def go(group, **options) -> shmbridge.Record:
            producer.put(group, **options)
            handed_out.append(consumer.get(timeout_s=5))
            return handed_out[-1]

        go.refuses = lambda group: _refuses(producer, consumer, group)
        go.end_test = lambda: [handed_out.pop().release() for _ in list(handed_out)]
        yield go
    shmbridge.clean(name, dry_run=False)


@pytest.fixture(autouse=True)
def _released(through):
    """Each test's records are released when it ends, however it ends."""
    yield
    through.end_test()


def _refuses(producer, consumer, group) -> shmbridge.InvalidRecord:
    with pytest.raises(shmbridge.InvalidRecord) as caught:
        producer.put(group)
    assert consumer.poll() == []
    return caught.value


def rows(record, name) -> list[list]:
    return [row.tolist() for row in record[name]]


def test_rows_come_out_as_they_went_in(through) -> None:
    """put_forms shows that every other form gives the same bytes."""
    record = through({"tokens": [[1, 2, 3], [4]]})
    assert rows(record, "tokens") == [[1, 2, 3], [4]]
    assert record["tokens"].lengths.tolist() == [3, 1]
    assert record["tokens"].values.dtype == np.int32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_tensors_of_every_float_type(through, dtype) -> None:
    values = torch.tensor([0.5, -2.0, 1.25], dtype=dtype, requires_grad=True)
    record = through({"tokens": [[1, 2, 3]], "advantages": [values], "token_rewards": values.reshape(1, 3)})
    assert rows(record, "advantages") == rows(record, "token_rewards") == [[0.5, -2.0, 1.25]]


def test_empty_rows_are_carried(through) -> None:
    record = through(
        {"tokens": [[], [7], []], "advantages": [[], [1.0], np.empty(0)], "trace_spans": [[], [], []]}
    )
    assert rows(record, "tokens") == [[], [7], []]
    assert rows(record, "advantages") == [[], [1.0], []]
    assert rows(record, "trace_spans") == [[], [], []]


@pytest.mark.parametrize("kind", LISTS, ids=str)
@pytest.mark.parametrize("form", [list, np.array, tuple], ids=["list", "array", "tuple"])
def test_integers_at_and_beyond_their_limits(through, kind, form) -> None:
    name, limits = f"list_{kind}", np.iinfo(kind.to_pandas_dtype())
    edge = [int(limits.min), 0, int(limits.max)]
    source = np.array(edge, limits.dtype) if form is np.array else form(edge)
    assert rows(through({"tokens": [[1]], name: [source]}), name) == [edge]
    for beyond in (int(limits.min) - 1, int(limits.max) + 1):
        if form is np.array and not -(2**63) <= beyond < 2**64:
            continue
        wrong = through.refuses({"tokens": [[1], [1]], name: [form([0]), form([0, beyond])]})
        assert (wrong.column, wrong.row) == (name, 1)


@pytest.mark.parametrize("kind", LISTS, ids=str)
def test_scalar_integers_at_and_beyond_their_limits(through, kind) -> None:
    name, limits = f"one_{kind}", np.iinfo(kind.to_pandas_dtype())
    edge = [int(limits.min), int(limits.max)]
    assert through({"tokens": [[1], [1]], name: edge})[name].tolist() == edge
    for beyond in (int(limits.min) - 1, int(limits.max) + 1):
        wrong = through.refuses({"tokens": [[1], [1]], name: [0, beyond]})
        assert (wrong.column, wrong.row) == (name, 1)


@pytest.mark.parametrize(
    "value", [2**31, -(2**31) - 1, 2**62, 2**64, 2**200, -(2**200), np.int64(2**31), np.uint64(2**63)]
)
def test_a_token_outside_int32_is_refused_with_its_place(through, value) -> None:
    wrong = through.refuses({"tokens": [[1, 2], [3, 4, value]]})
    assert (wrong.column, wrong.row, wrong.position) == ("tokens", 1, 2)
    assert str(int(value))[:10] in str(wrong)


@pytest.mark.parametrize("kind", [*LISTS, *FLOATS, pa.bool_()], ids=str)
def test_an_empty_row_fits_every_list_type(through, kind) -> None:
    name = f"list_{kind}"
    assert rows(through({"tokens": [[1], [2]], name: [[], [True]]}), name) == [[], [1]]


@pytest.mark.parametrize("value", [1.0, "7", None, [1], 1 + 0j, b"1", np.float32(3)])
def test_a_value_that_is_no_integer_is_no_token(through, value) -> None:
    wrong = through.refuses({"tokens": [[1], [2, value]]})
    assert (wrong.column, wrong.row, wrong.position) == ("tokens", 1, 1)


def test_integers_and_bools_become_floats(through) -> None:
    assert rows(through({"tokens": [[1, 2, 3]], "advantages": [[1, True, np.int8(-3)]]}), "advantages") == [
        [1.0, 1.0, -3.0]
    ]


@pytest.mark.parametrize("name", ["advantages", "token_rewards", "step_rewards"])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf"), 1e39, -3.5e38])
@pytest.mark.parametrize("form", [list, np.array], ids=["list", "array"])
def test_a_reward_that_is_not_finite_in_float32_is_refused(through, name, bad, form) -> None:
    wrong = through.refuses({"tokens": [[1, 2], [1, 2]], name: [form([0.0, 1.0]), form([0.5, bad])]})
    assert (wrong.column, wrong.row, wrong.position) == (name, 1, 1)


def test_the_flat_form_is_checked_like_rows(through) -> None:
    wrong = through.refuses({"tokens": [[1], [2, 3]], "advantages": (np.array([0.0, 1.0, np.nan]), [1, 2])})
    assert (wrong.column, wrong.row, wrong.position) == ("advantages", 1, 1)
    wrong = through.refuses({"tokens": (np.array([1, 2, 2**40]), [1, 2])})
    assert wrong.column == "tokens"


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("form", [list, np.array, torch.tensor], ids=["list", "array", "tensor"])
def test_a_score_that_is_not_finite_is_refused(through, bad, form) -> None:
    wrong = through.refuses({"tokens": [[1], [2], [3]], "score": form([0.0, bad, 1.0])})
    assert (wrong.column, wrong.row) == ("score", 1)


def test_the_largest_float32_is_finite(through) -> None:
    largest = float(np.finfo(np.float32).max)
    assert rows(through({"tokens": [[1, 2]], "advantages": [[largest, -largest]]}), "advantages") == [
        [largest, -largest]
    ]


def test_masks_beyond_a_byte_are_refused(through) -> None:
    assert through.refuses({"tokens": [[1]], "loss_mask": [[256]]}).column == "loss_mask"
    assert through.refuses({"tokens": [[1]], "loss_mask": [np.array([-1])]}).column == "loss_mask"
    assert rows(through({"tokens": [[1, 2]], "loss_mask": [np.array([True, False])]}), "loss_mask") == [
        [1, 0]
    ]


def test_scalars_keep_their_precision_and_their_nulls(through) -> None:
    record = through(
        {
            "tokens": [[1], [2], [3]],
            "score": [0.1, None, 1e-300],
            "temperature": np.float64([1, 0.7, 2]),
            "is_last": [True, False, True],
        }
    )
    assert record["score"].tolist() == [0.1, 0.0, 1e-300]
    assert record.valid("score").tolist() == [True, False, True]
    assert record["temperature"].tolist() == [1.0, np.float32(0.7), 2.0]
    assert record["is_last"].tolist() == [True, False, True]


def test_maps_texts_and_nested_lists(through) -> None:
    record = through(
        {
            "tokens": [[1, 2], [3, 4]],
            "reward_components": [{"format": 0.5, "länge": -1}, {}],
            "instance_id": ["ä", None],
            "routed_experts": [b"\0\1", b""],
            "distill_token_ids": [[[1, 2], []], [[3], [4, 5]]],
            "distill_logprobs": [[[-0.5, -1.5], []], [np.array([-2.0]), (-3, -4)]],
        }
    )
    assert record["reward_components"] == [{"format": 0.5, "länge": -1.0}, {}]
    assert record["instance_id"] == ["ä", None]
    assert record["routed_experts"] == [b"\0\1", b""]
    assert [[inner.tolist() for inner in row] for row in record["distill_token_ids"]] == [
        [[1, 2], []],
        [[3], [4, 5]],
    ]
    assert [[inner.tolist() for inner in row] for row in record["distill_logprobs"]] == [
        [[-0.5, -1.5], []],
        [[-2.0], [-3.0, -4.0]],
    ]


def test_a_map_value_that_is_not_finite_is_refused(through) -> None:
    wrong = through.refuses(
        {"tokens": [[1], [2]], "reward_components": [{"a": 1.0}, {"b": 1.0, "c": float("nan")}]}
    )
    assert (wrong.column, wrong.row) == ("reward_components", 1)


def test_arrow_batches_whole_sliced_and_large(through) -> None:
    batch = pa.record_batch(
        {
            "tokens": pa.array([[9], [1, 2], [], [3]], pa.list_(pa.int32())),
            "advantages": pa.array([[9], [0.5, 1.5], [], [-1]], pa.list_(pa.float32())),
            "score": pa.array([9, 1, None, None], pa.float64()),
            "instance_id": pa.array(["x", "a", None, "b"]),
        }
    )
    record = through(batch.slice(1))
    assert rows(record, "tokens") == [[1, 2], [], [3]]
    assert rows(record, "advantages") == [[0.5, 1.5], [], [-1.0]]
    assert record.valid("score").tolist() == [True, False, False]
    assert record["instance_id"] == ["a", None, "b"]
    large = pa.record_batch({"tokens": pa.array([[1, 2], [3]], pa.large_list(pa.int64()))})
    assert rows(through(large), "tokens") == [[1, 2], [3]]


def test_values_that_were_put_may_change_afterwards(through) -> None:
    tokens, scores = np.array([[1, 2]]), np.array([1.0])
    record = through({"tokens": tokens, "score": scores})
    tokens[:], scores[:] = 0, 0
    assert rows(record, "tokens") == [[1, 2]]
    assert record["score"].tolist() == [1.0]
