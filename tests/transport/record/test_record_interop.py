"""A record in other libraries, by Arrow's C interface: values in place, leases kept."""

import subprocess
import sys

import numpy as np
import pyarrow as pa
import pytest

import shmbridge

GROUP = {
    "tokens": [[1, 2, 3], [4]],
    "advantages": [[0.5, 1.0, 1.5], [2.0]],
    "score": [1.0, 0.0],
    "reward_components": [{"x": 1.0}, {}],
    "messages": ['["hi"]', "[]"],
}


@pytest.fixture
def held(producer):
    return lambda: producer.stats()["held"]


@pytest.fixture
def record(producer, consumer):
    def one(group=GROUP, **options) -> shmbridge.Record:
        producer.put(group, **options)
        return consumer.get(timeout_s=5)

    return one


@pytest.mark.parametrize(
    "take", [pa.record_batch, pa.table, lambda it: pa.RecordBatchReader.from_stream(it).read_all()]
)
def test_pyarrow_takes_a_record_as_it_is(record, take) -> None:
    it = record(group_id="g")
    taken = take(it)
    assert taken.to_pydict() == it.to_arrow().to_pydict()
    assert taken.schema.metadata[b"group_id"] == b"g"
    column = taken["tokens"]
    values = (column.chunk(0) if isinstance(column, pa.ChunkedArray) else column).values
    assert np.shares_memory(values.to_numpy(), np.frombuffer(memoryview(it), np.uint8))


def test_a_requested_schema_is_cast_to_or_refused(record) -> None:
    it = record({"tokens": [[1]], "score": [1.5]})
    wanted = pa.schema([("tokens", pa.list_(pa.int64())), ("score", pa.float32())])
    cast = pa.RecordBatch._import_from_c_capsule(*it.__arrow_c_array__(wanted.__arrow_c_schema__()))
    assert (cast.schema.types, cast.to_pydict()) == (wanted.types, {"tokens": [[1]], "score": [1.5]})
    with pytest.raises(ValueError):
        it.__arrow_c_array__(pa.schema([("tokens", pa.binary())]).__arrow_c_schema__())


def test_nulls_arrive_as_nulls(record) -> None:
    polars = pytest.importorskip("polars")
    it = record({"tokens": [[1], [2]], "score": [None, 1.0], "advantages": [[1.0], None]})
    assert polars.DataFrame(it).to_dict(as_series=False) == {
        "tokens": [[1], [2]],
        "score": [None, 1.0],
        "advantages": [[1.0], None],
    }


def test_a_polars_frame_holds_the_lease_until_it_is_dropped(record, held) -> None:
    pytest.importorskip("polars")
    it = record()
    frame = it.to_polars()
    it.release()
    del it
    assert held() == 1
    assert frame["tokens"].to_list() == GROUP["tokens"]
    assert frame["score"].sum() == 1.0
    del frame
    assert held() == 0


def test_arithmetic_of_polars_leaves_the_lane_as_it_is(record) -> None:
    """Polars may compute in place in memory that only one series holds; a lane's it must not."""
    polars = pytest.importorskip("polars")
    it = record()
    series = polars.DataFrame(it)["score"]
    series = series * 2 + 1
    assert series.to_list() == [3.0, 1.0]
    series = polars.DataFrame(it)["score"]
    series[0] = 77.0
    assert not polars.DataFrame(it)["score"].to_numpy().flags.writeable
    tokens = (
        polars.DataFrame(it).lazy().select(polars.col("tokens").list.eval(polars.element() + 1)).collect()
    )
    assert tokens["tokens"].to_list() == [[2, 3, 4], [5]]
    assert it["score"].tolist() == GROUP["score"]
    assert [row.tolist() for row in it["tokens"]] == GROUP["tokens"]


def test_duckdb_queries_a_record_by_its_variable(record, held) -> None:
    duckdb = pytest.importorskip("duckdb")
    it = record()
    with duckdb.connect() as database:
        assert database.sql("select sum(score), max(len(tokens)) from it").fetchall() == [(1.0, 3)]
        database.register("records", it)
        for _ in range(2):
            assert database.sql("select count(*) from records").fetchall() == [(2,)]
    it.release()
    del it, database
    assert held() == 0


def test_after_release_there_is_nothing_to_export(record) -> None:
    it = record()
    it.release()
    for export in (it.__arrow_c_array__, it.__arrow_c_stream__, it.to_polars):
        with pytest.raises(shmbridge.LeaseReleased, match="after release"):
            export()


def test_rows_of_unequal_length_have_no_arrow_form(record) -> None:
    it = record({"tokens": [[1, 2], [3]], "score": [1.0]}, foreign=True)
    assert it.meta.uneven
    for export in (it.to_arrow, it.__arrow_c_array__, it.__arrow_c_stream__, it.to_polars):
        with pytest.raises(ValueError, match="rows of unequal length"):
            export()


CULPRIT = """
import ctypes, shmbridge, sys
record = shmbridge.Consumer(sys.argv[1]).get(5)
address = record.to_arrow()["advantages"].values.buffers()[1].address
print(ctypes.cast(address, ctypes.POINTER(ctypes.c_float))[0], flush=True)
ctypes.memset(address, 255, 4)
print("wrote", flush=True)
"""


def test_a_write_to_the_memory_of_an_export_changes_no_record(bridge, producer, make_consumer) -> None:
    """A library that ignores that Arrow is read-only dies of SIGSEGV."""
    producer.put(GROUP)
    ended = subprocess.run([sys.executable, "-c", CULPRIT, bridge], capture_output=True, text=True)
    assert (ended.stdout, ended.returncode) == ("0.5\n", -11), ended.stderr
    with make_consumer().get(1) as record:
        assert record.meta.redelivered
        assert record["advantages"].values.tolist() == [0.5, 1.0, 1.5, 2.0]


def test_lists_of_a_record_as_lists_padded_and_in_arrow(record) -> None:
    it = record({"tokens": [[1, 2, 3], [4]], "advantages": [[0.5, 1.0, 1.5], None]})
    tokens, advantages = it.tokens, it.advantages
    assert tokens.tolist() == [[1, 2, 3], [4]]
    assert advantages.tolist() == [[0.5, 1.0, 1.5], None]
    assert tokens.to_padded(-1).tolist() == [[1, 2, 3], [4, -1, -1]]
    assert (advantages.to_padded().tolist(), advantages.to_padded().dtype) == (
        [[0.5, 1.0, 1.5], [0.0] * 3],
        np.float32,
    )
    assert tokens.to_padded().flags.writeable
    for column in (tokens, advantages):
        assert column.to_arrow().to_pylist() == pa.array(column).to_pylist() == column.tolist()
    assert np.shares_memory(tokens.to_arrow().values.to_numpy(), tokens.values)


def test_lists_of_lists_as_lists_and_in_arrow(record) -> None:
    ids = [[[1, 2], [3, 4], []], [[5]]]
    column = record({"tokens": [[1, 2, 3], [4]], "distill_token_ids": ids}).distill_token_ids
    assert column.tolist() == column.to_arrow().to_pylist() == pa.array(column).to_pylist() == ids
    one = record({"tokens": [[1], [2]], "distill_token_ids": [[[7]], None]}).distill_token_ids
    assert one.tolist() == one.to_arrow().to_pylist() == [[[7]], None]


def test_the_lists_of_a_batch_have_the_same_forms(record, consumer, producer) -> None:
    producer.put({"tokens": [[1, 2], [3]], "step_rewards": [[0.5, 1.0], []], "step_ends": [[1, 2], []]})
    batch = next(consumer.batches(groups=1, timeout_s=5))
    assert batch.step_rewards.tolist() == [[0.5, 1.0], []]
    assert batch.step_ends.to_padded(-1).tolist() == [[1, 2], [-1, -1]]


def test_arrow_of_a_list_keeps_the_lease(record, held) -> None:
    it = record()
    array = it.tokens.to_arrow()
    it.release()
    del it
    assert (held(), array.to_pylist()) == (1, [[1, 2, 3], [4]])
    del array
    assert held() == 0
