"""A batch in other libraries: one row per trajectory in Arrow and polars, named tensors in torch."""

import gc

import numpy as np
import pyarrow as pa
import pytest

import shmbridge

FULL = {
    "tokens": [[1, 2, 3], [4]],
    "loss_mask": [[0, 1, 1], [1]],
    "advantages": [[0.5, 1.0, 1.5], [2.0]],
    "score": [1.0, None],
    "step_rewards": [[0.25, 0.75], []],
    "distill_token_ids": [[[1], [2, 3], []], [[4]]],
    "reward_components": [{"x": 1.0}, {}],
    "instance_id": ["a", "b"],
    "is_last": [True, False],
}
BARE = {"tokens": [[5, 6]], "score": [3.0]}
EXPECTED = {
    "tokens": [[1, 2, 3], [4], [5, 6]],
    "loss_mask": [[0, 1, 1], [1], [0, 0]],
    "advantages": [[0.5, 1.0, 1.5], [2.0], None],
    "score": [1.0, None, 3.0],
    "step_rewards": [[0.25, 0.75], [], None],
    "distill_token_ids": [[[1], [2, 3], []], [[4]], None],
    "reward_components": [[("x", 1.0)], [], None],
    "instance_id": ["a", "b", None],
    "is_last": [True, False, None],
}


@pytest.fixture(params=["packed", "padded"])
def layout(request):
    return request.param


@pytest.fixture
def batch_of(producer, consumer, layout):
    """Call it with groups for one batch of them, held until released."""

    def make(*groups, **options):
        for number, each in enumerate(groups):
            producer.put(each, group_id=f"g{number}", policy_version=number, **options)
        return next(consumer.batches(groups=len(groups), layout=layout, prefetch=0, hold="caller"))

    return make


def test_arrow_has_every_column_and_null_where_a_row_lacks_it(batch_of) -> None:
    batch = batch_of(FULL, BARE)
    table = batch.to_arrow(meta=False)
    assert isinstance(table, pa.RecordBatch)
    assert table.to_pydict() == EXPECTED
    for name in table.schema.names:
        assert table.schema.field(name).type == shmbridge.TRAJECTORY_SCHEMA.field(name).type
    batch.release()


def test_arrow_says_where_each_row_came_from(batch_of, producer) -> None:
    batch = batch_of(FULL, BARE)
    rows = batch.to_arrow().to_pydict()
    assert rows.items() >= EXPECTED.items()
    assert rows["group_index"] == [0, 0, 1]
    assert rows["group_id"] == ["g0", "g0", "g1"]
    assert rows["min_policy_version"] == [0, 0, 1]
    assert rows["producer_id"] == [batch.meta[0].producer_id] * 3
    assert rows["env_id"] == [None] * 3
    assert rows["split"] == ["train"] * 3
    assert rows["redelivered"] == [False] * 3
    batch.release()


def test_the_arrow_rows_are_the_batchs_own_and_hold_no_lease(batch_of, producer, layout) -> None:
    batch = batch_of(FULL)
    rows = batch.to_arrow()
    assert np.shares_memory(rows["tokens"].values.to_numpy(), batch.tokens) == (layout == "packed")
    batch.release()
    assert producer.stats()["held"] == 0
    assert batch.to_arrow().equals(rows)
    del batch
    gc.collect()
    assert rows["tokens"].to_pylist() == FULL["tokens"]


@pytest.mark.parametrize(
    "take",
    [pa.record_batch, pa.table, lambda batch: pa.RecordBatchReader.from_stream(batch).read_all()],
    ids=["array", "table", "stream"],
)
def test_pyarrow_takes_a_batch_as_it_is(batch_of, take) -> None:
    batch = batch_of(FULL, BARE)
    assert take(batch).to_pydict() == batch.to_arrow().to_pydict()
    batch.release()


def test_polars_and_duckdb_read_a_batch(batch_of) -> None:
    polars, duckdb = pytest.importorskip("polars"), pytest.importorskip("duckdb")
    batch = batch_of(FULL, BARE)
    frame = batch.to_polars()
    assert frame["tokens"].to_list() == EXPECTED["tokens"]
    assert frame["advantages"].to_list() == EXPECTED["advantages"]
    assert frame.equals(polars.DataFrame(batch))
    with duckdb.connect() as database:
        found = database.sql("select group_id, sum(len(tokens)) from batch group by 1 order by 1").fetchall()
    assert found == [("g0", 4), ("g1", 2)]
    batch.release()


def test_a_column_named_as_a_fact_of_the_row_is_refused(bridge, make_producer, make_consumer) -> None:
    schema = pa.schema([("split", pa.int32())])
    make_producer(schema=schema).put({"tokens": [[1]], "split": [7]})
    with next(make_consumer(schema=schema).batches(groups=1, prefetch=0, hold="caller")) as batch:
        assert batch.to_arrow(meta=False)["split"].to_pylist() == [7]
        with pytest.raises(shmbridge.SchemaMismatch, match=r"'split'.*meta=False"):
            batch.to_arrow()


def test_rows_that_do_not_fit_their_tokens_are_null(batch_of) -> None:
    batch = batch_of(
        {"tokens": [[1, 2], [3]], "inference_logprobs": [[-1.0, -2.0], [-3.0, -4.0]]}, foreign=True
    )
    assert batch.uneven["inference_logprobs"].tolist() == [False, True]
    assert batch.to_arrow()["inference_logprobs"].to_pylist() == [[-1.0, -2.0], None]
    batch.release()


def test_columns_in_place_are_not_exported_silently(producer, consumer, layout) -> None:
    producer.put(BARE)
    whole = next(consumer.batches(groups=1, layout=layout, prefetch=0, hold="caller"))
    batch = shmbridge.Batch(whole.groups, layout, in_place=("tokens",))
    for export in (batch.to_arrow, batch.to_torch):
        with pytest.raises(ValueError, match="tokens stay in place"):
            export()
    whole.release()


def test_torch_gets_copies_by_name(batch_of, layout) -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(FULL, BARE)
    tensors = batch.to_torch()
    assert set(tensors) == {
        *("tokens", "loss_mask", "has_loss_mask", "lengths", "cu_seqlens", "position_ids", "group_index"),
        *("policy_version", "redelivered", "advantages", "has_advantages", "score", "has_score"),
        *("step_rewards", "step_rewards_lengths", "has_step_rewards", "is_last", "has_is_last"),
        *("distill_token_ids", "distill_token_ids_lengths", "distill_token_ids_inner_lengths"),
        "has_distill_token_ids",
    }
    types = {"tokens": torch.int32, "loss_mask": torch.uint8, "advantages": torch.float32}
    assert {name: tensors[name].dtype for name in types} == types
    assert tensors["score"].dtype == torch.float64
    assert tensors["is_last"].dtype == torch.bool
    assert tensors["tokens"].shape == ((6,) if layout == "packed" else (3, 3))
    assert tensors["policy_version"].tolist() == [0, 0, 1]
    assert tensors["has_score"].tolist() == [True, False, True]
    before = batch.tokens.copy()
    for tensor in tensors.values():
        tensor.zero_()
    assert np.array_equal(batch.tokens, before)
    assert batch.lengths.tolist() == [3, 1, 2]
    batch.release()


def test_torch_takes_a_device(batch_of) -> None:
    torch = pytest.importorskip("torch")
    batch = batch_of(FULL)
    assert {each.device for each in batch.to_torch("meta").values()} == {torch.device("meta")}
    batch.release()
