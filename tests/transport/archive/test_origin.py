"""Recordings keep where a relay brought a record from; files of builds that knew no relay can be read."""

from pathlib import Path

import pyarrow as pa
import pyarrow.ipc
import pytest

import shmbridge
from shmbridge.archive.folder import copy_folder, read_archive
from shmbridge.archive.format import ORIGIN
from shmbridge.archive.recorder import Recorder
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.record import memory_of, table_of


@pytest.fixture
def relayed(make_producer, make_consumer, bridge):
    """A consumer with a record that was put here, and the same as if a relay had brought it."""
    consumer = make_consumer()
    make_producer().put({"tokens": [[1, 2], [3]], "score": [0.5, 1.0]})
    with consumer.get(5) as record:
        there, table = memory_of(record), table_of(record)
        versions = there.min_policy_version, there.max_policy_version
        again = RelayedRecord(
            bytes(there.memory), table, there.words, *versions, sequence=41, waited_ns=7, requested_ns=1
        )
    with shmbridge.Producer(bridge, "env", "64K", origin=LaneOrigin("env-1", "env-7-ab")) as relay:
        relay.put(again)
        make_producer().put({"tokens": [[1, 2], [3]], "score": [0.5, 1.0]})
        yield consumer
        relay.close_origin()


def record_all(consumer: shmbridge.Consumer, folder: Path, kind: str) -> list[object]:
    with Recorder(folder, format=kind) as recorder:
        records = [consumer.get(5), consumer.get(5)]
        recorder.take(records)
    origins = [record.meta.origin for record in records]
    for record in records:
        record.release()
    return origins


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_an_origin_is_kept_through_record_and_export(relayed, tmp_path, kind):
    origins = record_all(relayed, tmp_path / "folder", kind)
    assert {each and (each.node, each.producer_id, each.sequence, each.waited_ns) for each in origins} == {
        None,
        ("env-1", "env-7-ab", 41, 7),
    }
    assert [each.origin for each in read_archive(tmp_path / "folder")] == origins
    (tmp_path / "copy").mkdir()
    copy_folder(tmp_path / "folder", tmp_path / "copy" / f"part-000000.{kind}", kind)
    assert [each.origin for each in read_archive(tmp_path / "copy")] == origins


def test_a_file_of_an_earlier_build_has_no_origin(relayed, tmp_path, monkeypatch):
    """It may have a column of the user's own with that name."""
    record_all(relayed, tmp_path / "new", "arrow")
    table = pa.ipc.open_file(tmp_path / "new" / "part-000000.arrow").read_all()
    (tmp_path / "old").mkdir()
    without = table.drop_columns([ORIGIN])
    said = {key: value for key, value in without.schema.metadata.items() if key != b"shmbridge.revision"}
    without = without.replace_schema_metadata(said)
    with pa.ipc.new_file(tmp_path / "old" / "part-000000.arrow", without.schema) as file:
        file.write_table(without)
    assert [each.origin for each in read_archive(tmp_path / "old")] == [None, None]
    (tmp_path / "copy").mkdir()
    copy_folder(tmp_path / "old", tmp_path / "copy" / "part-000000.parquet")
    assert [each.origin for each in read_archive(tmp_path / "copy")] == [None, None]
