"""Damaged and foreign files are an error that names the file, never a traceback, a crash, or silence."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shmbridge
from shmbridge.archive.files import StreamFile, read_stream
from shmbridge.archive.folder import copy_folder, counts_of, finish_folder, finish_left, read_archive
from shmbridge.archive.recorder import Recorder
from tests.transport.archive.test_stream import SCHEMA, batch, numbers, recorded

ROUNDS = 40


@pytest.fixture(params=["parquet", "arrow"])
def whole(request, tmp_path, bridge):
    """A folder with one finished part."""
    with recorded(tmp_path / "records", bridge, 0, 5, format=request.param):
        pass
    return tmp_path / "records"


def outcome_in_a_child(folder: Path, said: Path) -> str:
    """What reading, copying and finishing a folder end in, or the signal that ends the process."""
    if (pid := os.fork()) == 0:
        try:
            outcomes = []
            for call in (
                lambda: list(read_archive(folder)),
                lambda: copy_folder(folder, said.with_suffix(".parquet")),
                lambda: finish_folder(folder),
                lambda: Recorder(folder).close(),
            ):
                try:
                    call()
                    outcomes.append("ok")
                except shmbridge.ArchiveUnreadable as wrong:
                    outcomes.append("typed" if str(folder) in str(wrong) else str(wrong))
                except BaseException as wrong:
                    outcomes.append(f"{type(wrong).__name__}: {wrong}")
            said.write_text(" | ".join(outcomes))
        finally:
            os._exit(0)
    status = os.waitpid(pid, 0)[1]
    return f"signal {status}" if status else said.read_text()


def test_any_damage_is_named(whole, tmp_path):
    (part,) = whole.glob("part-*")
    good, random = part.read_bytes(), np.random.default_rng(5)
    outcomes = set()
    for number in range(ROUNDS):
        bad = bytearray(good)
        at = int(random.integers(len(bad)))
        if number % 3 == 0:
            bad = bad[:at]
        elif number % 3 == 1:
            bad[at] ^= 1 << int(random.integers(8))
        else:
            bad[at : at + 64] = b"\xff" * 64
        part.write_bytes(bad)
        outcomes |= set(outcome_in_a_child(whole, tmp_path / "said").split(" | "))
    assert outcomes <= {"ok", "typed"}
    assert "typed" in outcomes


@pytest.mark.parametrize("call", [Recorder, finish_folder, lambda folder: list(read_archive(folder))])
def test_a_foreign_file_with_the_name_of_a_part(tmp_path, call):
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part-000000.parquet")
    with pytest.raises(shmbridge.ArchiveUnreadable, match=r"part-000000\.parquet"):
        call(tmp_path)


def test_a_damaged_message_is_kept_beside_what_can_be_read(tmp_path, bridge, caplog):
    """A message under way begins with zeros; what begins otherwise was there, and is not removed."""
    killed = recorded(tmp_path, bridge, 0, 4)
    stream, ends = killed._stream.path, []
    raw = stream.read_bytes()
    with pa.OSFile(str(stream)) as source:
        reader = pa.ipc.open_stream(source)
        for _ in reader:
            ends.append(source.tell())
    damaged = raw[: ends[1] + 8] + b"\xff" * 40 + raw[ends[1] + 48 :]
    stream.write_bytes(damaged)
    killed._held.close()
    records = read_archive(tmp_path)
    assert [next(records).group_id for _ in range(2)] == ["0", "1"]
    lost = f"{len(raw) - ends[1]} bytes behind byte {ends[1]} cannot be read"
    with pytest.raises(shmbridge.ArchiveUnreadable, match=f"part-000000.arrows is damaged: {lost}.*export"):
        next(records)
    Recorder(tmp_path).close()
    assert lost in caplog.text
    assert sorted(path.name for path in tmp_path.glob("part-*")) == [
        "part-000000.arrows.damaged",
        "part-000000.parquet",
    ]
    assert (tmp_path / "part-000000.arrows.damaged").read_bytes() == damaged
    assert [record.group_id for record in read_archive(tmp_path)] == ["0", "1"]


def test_a_message_under_way_is_no_damage(tmp_path, caplog):
    file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
    file.append(batch(0))
    end = file.bytes
    file.append(batch(1))
    file.close()
    raw = bytearray(file.path.read_bytes())
    raw[end : end + 8] = bytes(8)
    file.path.write_bytes(raw)
    assert numbers(file.path) == [0]
    assert read_stream(file.path) is not None
    assert not caplog.text


@pytest.mark.parametrize("size", [8, 9, 500, 4096])
def test_zeros_where_a_message_was_are_damage_and_no_message_under_way(tmp_path, caplog, size):
    """A disk that loses a block gives it back as zeros; what stood behind them must not go without a word."""
    file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
    ends = [0, file.bytes]
    for number in range(3000, 3005):
        file.append(batch(number))
        ends.append(file.bytes)
    file.close()
    whole = file.path.read_bytes()
    for at, left in zip(ends[:-2], (0, 0, 1, 2, 3), strict=True):
        raw = bytearray(whole)
        raw[at : at + size] = bytes(len(raw[at : at + size]))
        file.path.write_bytes(raw)
        stream = read_stream(file.path)
        assert len(list(stream.batches)) == left
        assert (stream.damage().at, stream.damage().left) == (at, len(whole) - at)
        assert len(finish_left(tmp_path, "arrow")) == (left > 0)
        (tmp_path / "part-000000.arrow").unlink(missing_ok=True)
        assert (tmp_path / "part-000000.arrows.damaged").read_bytes() == raw
    for behind in (b"", bytes(7), bytes(3 << 20)):
        file.path.write_bytes(whole + behind)
        assert numbers(file.path) == [3000, 3001, 3002, 3003, 3004]
        assert read_stream(file.path).damage() is None


NO_FILES = {
    "a pipe": os.mkfifo,
    "a device without end": lambda path: path.symlink_to("/dev/zero"),
    "a link to nothing": lambda path: path.symlink_to("/no/where"),
    "a folder": lambda path: path.mkdir(),
}


@pytest.mark.parametrize("kind", ["parquet", "arrow", "arrows"])
@pytest.mark.parametrize("what", NO_FILES)
def test_a_part_that_is_no_file_is_refused_and_not_waited_for(tmp_path, what, kind):
    path = tmp_path / f"part-000000.{kind}"
    NO_FILES[what](path)
    for call in (Recorder, finish_folder, counts_of, lambda folder: list(read_archive(folder))):
        with pytest.raises(shmbridge.ArchiveUnreadable, match=rf"part-000000\.{kind} is not a file"):
            call(tmp_path)
    assert os.path.lexists(path)


@pytest.mark.parametrize("live", [True, False], ids=["a stream", "a finished part"])
def test_parts_of_two_folders_in_one_are_all_read(tmp_path, bridge, live):
    """They have the same numbers, and none of them takes another's place."""
    with recorded(tmp_path / "one", bridge, 0, 3):
        pass
    killed = recorded(tmp_path / "two", bridge, 10, 2, format="arrow")
    if not live:
        killed.close()
    for part in (tmp_path / "two").glob("part-*"):
        (tmp_path / "one" / part.name).write_bytes(part.read_bytes())
    wanted = {"0", "1", "2", "10", "11"}
    assert {record.group_id for record in read_archive(tmp_path / "one")} == wanted
    assert finish_folder(tmp_path / "one").records == 5
    Recorder(tmp_path / "one").close()
    assert {record.group_id for record in read_archive(tmp_path / "one")} == wanted
    assert not list((tmp_path / "one").glob("*.arrows"))
    killed.close()


def test_parts_of_earlier_releases_keep_their_columns(tmp_path, make_consumer, make_producer, monkeypatch):
    """They named an own column `column_sequence` as it is, which now is the name of an own `sequence`."""
    folder = tmp_path / "records"
    for names in (["column_sequence"], ["column_sequence", "sequence"]):
        schema = pa.schema([(name, pa.float32()) for name in names])
        with monkeypatch.context() as earlier:
            if len(names) == 1:
                earlier.setattr("shmbridge.archive.format._free", lambda name: name)
            with make_consumer(tap=Recorder(folder), schema=schema) as consumer:
                group = {name: [float(len(names) + at)] for at, name in enumerate(names)}
                with make_producer(schema=schema) as producer:
                    producer.put({"tokens": [[1]], "loss_mask": [[1]], **group})
                    consumer.get(5).release()
    wanted = [{"column_sequence": [1.0]}, {"column_sequence": [2.0], "sequence": [3.0]}]

    def own(folder: Path) -> list[dict[str, list[float]]]:
        found = []
        for record in read_archive(folder):
            values = {name: column.values.tolist() for name, column in record.group.values.items()}
            found.append({name: each for name, each in values.items() if "sequence" in name})
        return found

    assert own(folder) == wanted
    (tmp_path / "one").mkdir()
    copy_folder(folder, tmp_path / "one" / "part-000000.parquet")
    assert own(tmp_path / "one") == wanted
