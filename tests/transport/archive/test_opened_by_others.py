"""Finished parts open in datasets, polars and duckdb, with nothing of ours; so does a part in progress."""

import pytest

import shmbridge
from shmbridge.archive.recorder import Recorder
from shmbridge.testing.fixtures import known_groups


@pytest.fixture
def folder(tmp_path, make_consumer, make_producer):
    """Five known groups in two parts, with a map and a list of lists."""
    consumer, producer = (
        make_consumer(tap=Recorder(tmp_path, rotate_bytes=20_000)),
        make_producer(lane_bytes="1M"),
    )
    for group in known_groups(seed=2):
        group.put(producer)
        for record in consumer.poll():
            record.release()
    producer.put(
        {
            "tokens": [[1, 2]],
            "loss_mask": [[0, 1]],
            "reward_components": [{"style": 0.5, "right": 1.0}],
            "distill_token_ids": [[[1, 2], [3]]],
            "messages": [[{"role": "user", "content": "hello"}]],
        },
        group_id="last",
        split="eval",
    )
    for record in consumer.poll():
        record.release()
    consumer.close()
    assert len(list(tmp_path.glob("*.parquet"))) > 1
    return tmp_path


ROWS = 21


def test_datasets(folder, tmp_path_factory, monkeypatch):
    datasets = pytest.importorskip("datasets")
    cache = str(tmp_path_factory.mktemp("cache"))
    data = datasets.load_dataset("parquet", data_files=f"{folder}/*.parquet", split="train", cache_dir=cache)
    assert data.num_rows == ROWS
    last = data[ROWS - 1]
    assert last["tokens"] == [1, 2]
    assert last["reward_components"] == [{"key": "style", "value": 0.5}, {"key": "right", "value": 1.0}]
    assert last["advantages"] is None


def test_polars(folder):
    polars = pytest.importorskip("polars")
    data = polars.read_parquet(f"{folder}/*.parquet")
    assert data.height == ROWS
    assert data.filter(polars.col("split") == "eval")["tokens"].to_list() == [[1, 2]]
    assert data["group_id"].n_unique() == 6
    lazy = polars.scan_parquet(f"{folder}/*.parquet").group_by("group_id").agg(polars.col("score").mean())
    assert lazy.collect().height == 6


def test_duckdb(folder):
    duckdb = pytest.importorskip("duckdb")
    data = duckdb.connect().sql(
        f"select group_id, len(tokens) from '{folder}/*.parquet' where split = 'eval'"
    )
    assert data.fetchall() == [("last", 2)]


def test_the_part_in_progress(tmp_path, make_consumer, make_producer):
    polars = pytest.importorskip("polars")
    consumer, producer = make_consumer(tap=Recorder(tmp_path)), make_producer(lane_bytes="1M")
    producer.put({"tokens": [[1, 2], [3]], "loss_mask": [[0, 1], [1]]})
    with consumer.get(5):
        data = polars.read_ipc_stream(tmp_path / "part-000000.arrows")
    assert data["tokens"].to_list() == [[1, 2], [3]]


def test_the_same_columns_in_every_part(folder):
    import pyarrow.parquet as pq

    schemas = [pq.read_schema(path) for path in sorted(folder.glob("*.parquet"))]
    assert all(schema.equals(schemas[0]) for schema in schemas)
    assert set(shmbridge.TRAJECTORY_SCHEMA.names) < set(schemas[0].names)
