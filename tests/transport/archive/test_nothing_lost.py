"""What a recorder must not lose: records, columns with odd names, files of others."""

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from shmbridge.archive import folder as parts
from shmbridge.archive.files import StreamFile
from shmbridge.archive.format import OF_RECORD, Layout
from shmbridge.archive.recorder import Recorder
from shmbridge.producers.replay import parse_speed
from shmbridge.schema import columns_of


def _three_batches(path: Path) -> None:
    layout = Layout(columns_of(None))
    stream = StreamFile(path, layout.schema)
    for sequence in range(3):
        values: dict[str, Any] = {"producer_id": ["a-1"], "sequence": [sequence], "record_row": [0]}
        arrays = [pa.array(values.get(each.name, [None]), each.type) for each in layout.schema]
        stream.append(pa.RecordBatch.from_arrays(arrays, schema=layout.schema))
    stream.close()


def test_want_of_memory_while_a_stream_is_finished_keeps_the_stream(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _three_batches(tmp_path / "part-000000.arrows")
    read, reads = pa.ipc.read_record_batch, []

    def short_of_memory(*given: Any) -> pa.RecordBatch:
        reads.append(given)
        if len(reads) > 1:
            raise pa.ArrowMemoryError("malloc failed")
        return read(*given)

    with monkeypatch.context() as short:
        short.setattr(pa.ipc, "read_record_batch", short_of_memory)
        with pytest.raises(MemoryError):
            parts.finish_left(tmp_path, "parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["part-000000.arrows"]
    parts.finish_left(tmp_path, "parquet")
    assert parts.keys_of(tmp_path).counts() == {"a-1": 3}


def test_two_columns_never_get_one_name_in_a_file() -> None:
    ours = ("sequence", "record_row", "producer_id")
    assert set(ours) <= OF_RECORD.keys()
    own = [pa.field(f"{before}{name}", pa.int32()) for name in ours for before in ("", "column_")]
    layout = Layout(columns_of(pa.schema(own)))
    names = np.array(layout.schema.names)
    assert len(names) == len(np.unique(names))
    assert Layout.of_schema(layout.schema, "here").names == layout.names


def test_a_recorder_removes_only_its_own_files(tmp_path: Path) -> None:
    (tmp_path / "novel.writing").write_text("mine")
    (tmp_path / "part-000000.parquet.writing").write_text("left by a killed recorder")
    Recorder(tmp_path).close()
    assert sorted(path.name for path in tmp_path.iterdir()) == [".recording", "novel.writing"]


def test_a_speed_that_no_clock_can_wait_for_is_refused() -> None:
    with pytest.raises(Exception, match="from 1e-06 on"):
        parse_speed("1e-310")


def test_a_rotation_that_fails_loses_no_new_column(
    make_producer: Any, make_consumer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lane with a column of its own begins another part; the disk fails just then."""
    consumer = make_consumer()
    make_producer().put({"tokens": [[1]]})
    make_producer(schema=pa.schema([pa.field("own", pa.int32())])).put({"tokens": [[2]], "own": [7]})
    first, second = sorted(consumer.poll(), key=lambda record: int(record["tokens"].values[0]))
    with Recorder(tmp_path) as recorder:
        recorder.take([first])
        with monkeypatch.context() as failing:
            failing.setattr(recorder, "_rotate", _fail)
            with pytest.raises(OSError, match="no such disk"):
                recorder.take([second])
        recorder.take([second])
    rows = pa.concat_tables(
        [pq.read_table(path) for path in sorted(tmp_path.glob("part-*.parquet"))], promote_options="default"
    )
    assert rows["own"].to_pylist() == [None, 7]


def _fail() -> None:
    raise OSError("no such disk")
