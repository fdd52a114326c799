"""What is recorded and put again is the same to the bit: values, nulls, empties, lengths, versions."""

import shutil
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.archive.recorder import Recorder
from shmbridge.testing.fixtures import known_groups
from tests.transport.archive import recorded_groups as known


@pytest.fixture(scope="module")
def through(tmp_path_factory: pytest.TempPathFactory):
    """Puts groups, records them, puts the recording again; gives the contents of both. One bridge for all."""
    name, folder = known.fresh("archive"), tmp_path_factory.mktemp("archive")
    with (
        shmbridge.Consumer(name, schema=known.SCHEMA) as consumer,
        shmbridge.Producer(name, "env", "256K", on_full="raise", schema=known.SCHEMA) as producer,
    ):

        def go(puts, kind: str = "parquet", **options):
            shutil.rmtree(folder)
            for put in puts:
                put(producer)
            before = take(consumer)
            with Recorder(folder, format=kind, schema=known.SCHEMA, **options) as recorder:
                recorder.take(before)
            wanted = [known.contents(record) for record in before]
            for record in before:
                record.release()
            del before, record
            for record in read_archive(folder):
                known.put_again(record, producer)
            after = take(consumer)
            found = [known.contents(record) for record in after]
            for record in after:
                record.release()
            return wanted, found

        go.folder = folder
        yield go
    shmbridge.clean(name, dry_run=False)


def take(consumer) -> list[shmbridge.Record]:
    return consumer.poll()


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
@settings(
    max_examples=25,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(one=known.groups(), other=known.groups())
def test_every_kind_of_column_comes_back(through, kind, one, other):
    wanted, found = through([lambda p: p.put(one), lambda p: p.put(other, split="eval")], kind)
    assert found == wanted
    assert len(wanted) == 2


def test_known_groups_come_back(through):
    groups = known_groups(seed=5)
    wanted, found = through([group.put for group in groups])
    assert found == wanted
    assert len(wanted) == sum(len(group.fragments) for group in groups)


def test_uneven_groups_of_atropos_come_back(through):
    """Rows that do not fit the tokens, columns with other numbers of rows, unknown keys, kept masks."""
    group = {
        "tokens": [[1, 2, 3], [4, 5]],
        "masks": [[-100, 2, 3], [7, 5, 9]],
        "scores": [1.0, 2.0, 3.0],
        "advantages": [[0.5], [0.25, -0.0], [1.0]],
        "messages": [[{"role": "user", "content": "a"}], None],
        "distill_token_ids": [[[1], [2, 3]]],
        "env_id": 3,
        "unheard_of": {"a": 1},
    }
    wanted, found = through([lambda p: p.put(group, foreign=True)])
    assert found == wanted
    assert wanted[0]["meta"][3] == 3
    assert wanted[0]["meta"][5] is True


def test_nan_payloads_are_kept(through):
    bits = np.array([0x7FC00001, 0x7FC12345, 0xFFC00000, 0x7F800001, 0x80000000], np.uint32)
    group = {"tokens": [[1]] * 5, "temperature": bits.view(np.float32)}
    wanted, found = through([lambda p: p.put(group)])
    assert found == wanted
    assert np.frombuffer(found[0]["columns"]["temperature"][1], np.uint32).tolist() == bits.tolist()


def test_a_lane_with_more_columns_begins_a_new_part(tmp_path: Path, bridge: str):
    mine = pa.schema([("mine", pa.int16())])
    with (
        shmbridge.Consumer(bridge) as consumer,
        shmbridge.Producer(bridge) as plain,
        shmbridge.Producer(bridge, schema=mine) as own,
        Recorder(tmp_path) as recorder,
    ):
        plain.put({"tokens": [[1]]})
        with consumer.get(5) as record:
            recorder.take([record])
        own.put({"tokens": [[2]], "mine": [7]})
        with consumer.get(5) as record:
            recorder.take([record])
    assert [path.name for path in sorted(tmp_path.glob("*.parquet"))] == [
        "part-000000.parquet",
        "part-000001.parquet",
    ]
    first, second = read_archive(tmp_path)
    assert "mine" not in first.group.columns
    assert second.group.values["mine"].values.tolist() == [7]
