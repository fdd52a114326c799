"""`shmbridge record`, `export` and `replay` from the command line."""

import json
import os
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pyarrow.parquet as pq
import pytest

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.archive.recorder import Recorder, observe
from shmbridge.cli import main

SOME = {"tokens": [[1, 2], [3]], "loss_mask": [[0, 1], [1]]}


def test_an_observer_records_beside_a_consumer(make_consumer, make_producer, tmp_path):
    producer, consumer = make_producer(), make_consumer()
    recorder, seen = Recorder(tmp_path), threading.Event()

    def quick(take=recorder.take):
        def took(records):
            take(records)
            seen.set()

        return took

    recorder.take = quick()
    done = []
    stop = threading.Event()
    watching = threading.Thread(
        target=lambda: done.append(observe(consumer.bridge, recorder, stopped=stop.is_set))
    )
    producer.put(SOME, group_id="seen")
    watching.start()
    assert seen.wait(20)
    with consumer.get(5) as record:
        assert record.meta.group_id == "seen"
    stop.set()
    watching.join()
    assert (done[0].recorded, done[0].missed) == (1, 0)
    assert [record.group_id for record in read_archive(tmp_path)] == ["seen"]


def test_what_is_released_before_it_looks_is_missed(make_consumer, make_producer, tmp_path):
    producer, consumer = make_producer(), make_consumer()
    recorder = Recorder(tmp_path)
    looks = []

    def stopped() -> bool:
        """Between two looks of the observer."""
        looks.append(0)
        if len(looks) == 2:
            for number in range(5):
                producer.put(SOME, group_id=number)
            for record in consumer.poll(3):
                record.release()
        return len(looks) > 4

    producer.put(SOME, group_id="first")
    done = observe(consumer.bridge, recorder, stopped=stopped)
    assert done.recorded + done.missed == 6
    assert done.missed in (2, 3)  # the first was looked at before
    assert len(list(read_archive(tmp_path))) == done.recorded


def test_record_ends_at_a_limit(make_consumer, make_producer, tmp_path, capsys):
    producer = make_producer()
    bridge = make_consumer().bridge
    for number in range(5):
        producer.put(SOME, group_id=number)
    assert main(["record", bridge, "--out", str(tmp_path), "--limit", "3", "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["recorded"], done["missed"]) == (3, 0)
    assert list(done["reached"].values()) == [2]
    assert main(["record", bridge, "--out", str(tmp_path), "--limit", "2"]) == 0
    said = capsys.readouterr().out
    assert "2 records in" in said
    assert "3 there already" in said
    assert [record.group_id for record in read_archive(tmp_path)] == ["0", "1", "2", "3", "4"]


def test_record_ends_by_a_signal_with_finished_parts(make_consumer, make_producer, tmp_path):
    producer = make_producer()
    bridge = make_consumer().bridge
    producer.put(SOME)
    command = [sys.executable, "-m", "shmbridge.cli", "record", bridge, "--out", str(tmp_path), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as recording:
        while not list(tmp_path.glob("part-*")):
            assert recording.poll() is None
            threading.Event().wait(0.01)
        recording.send_signal(signal.SIGTERM)
        said, _ = recording.communicate(timeout=30)
    assert recording.returncode == 0
    assert json.loads(said)["recorded"] == 1
    assert [path.suffix for path in tmp_path.glob("part-*")] == [".parquet"]


@pytest.fixture
def killed(tmp_path, make_consumer, make_producer):
    """A folder with a finished part and a stream of a recorder that is gone."""
    folder, producer, consumer = tmp_path / "records", make_producer(), make_consumer()
    recorder = Recorder(folder)
    for number in range(4):
        producer.put(SOME, group_id=number)
    for number, record in enumerate(consumer.poll()):
        recorder.take([record])
        record.release()
        if number == 1:
            recorder._rotate()
            recorder._to_finish.put(None)
            recorder._finisher.join()
            recorder._finisher = None
    recorder._stream.close()
    recorder._held.close()
    return folder, producer.producer_id


def test_export_finishes_and_says_the_keys(killed, capsys):
    folder, producer_id = killed
    assert sorted(path.suffix for path in folder.glob("part-*")) == [".arrows", ".parquet"]
    assert main(["export", str(folder)]) == 0
    said = capsys.readouterr().out
    assert f"{producer_id}: 4 records, up to sequence 3" in said
    assert [path.suffix for path in sorted(folder.glob("part-*"))] == [".parquet"] * 2


def test_export_into_one_file_has_each_record_once(killed, tmp_path, capsys):
    folder, _ = killed
    twice = folder / "part-000007.parquet"
    twice.write_bytes((folder / "part-000000.parquet").read_bytes())
    assert main(["export", str(folder), "--out", str(tmp_path / "one.parquet"), "--json"]) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["records"], done["rows"], done["again"]) == (4, 8, 2)
    table = pq.read_table(tmp_path / "one.parquet")
    assert table["group_id"].to_pylist() == [str(number) for number in (0, 0, 1, 1, 2, 2, 3, 3)]
    assert main(["export", str(folder), "--out", str(tmp_path / "one.arrow")]) == 0
    import pyarrow as pa

    assert pa.ipc.open_file(tmp_path / "one.arrow").read_all().num_rows == 8


def test_export_of_a_folder_in_use(tmp_path, make_consumer, make_producer, capsys):
    producer, consumer = make_producer(), make_consumer(tap=Recorder(tmp_path))
    producer.put(SOME)
    with consumer.get(5):
        assert main(["export", str(tmp_path)]) == 1
        assert "SB702" in capsys.readouterr().err
        assert main(["export", str(tmp_path), "--out", str(tmp_path / "copy.parquet")]) == 0
    assert pq.read_table(tmp_path / "copy.parquet").num_rows == 2


def test_commands_without_an_archive(tmp_path, capsys):
    assert main(["export", str(tmp_path)]) == 1
    assert main(["replay", str(tmp_path), "--bridge", "t-none"]) == 1
    assert capsys.readouterr().err.count("SB703") == 2


def test_replay_command(killed, bridge, capsys):
    folder, _ = killed
    again = f"{bridge[:40]}-r"
    try:
        assert main(["replay", str(folder), "--bridge", again, "--speed", "max", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["records"] == 4
        with shmbridge.Consumer(again) as consumer:
            assert [record.meta.group_id for record in consumer.poll()] == ["0", "1", "2", "3"]
            consumer.take_back_dropped()
            for record in consumer.poll():
                record.release()
    finally:
        shmbridge.clean(again, dry_run=False)


def test_names_cannot_write_to_the_terminal(make_consumer, make_producer, tmp_path, capsys):
    """Any process may have chosen them."""
    with make_consumer(tap=Recorder(tmp_path)) as consumer, make_producer(env_name="a\x1b[31mb") as producer:
        producer.put({"tokens": [[1]]})
        consumer.get(5).release()
    assert main(["export", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "\\x1b[31mb" in said
    assert "\x1b" not in said


def test_a_folder_whose_name_is_not_utf_8(make_consumer, make_producer, tmp_path, capsys):
    folder = Path(os.fsdecode(os.fsencode(tmp_path) + b"/\xff\n"))
    with make_consumer(tap=Recorder(folder)) as consumer, make_producer() as producer:
        producer.put({"tokens": [[1, 2]], "loss_mask": [[0, 1]]})
        consumer.get(5).release()
    assert [path.name for path in folder.glob("part-*")] == ["part-000000.parquet"]
    out = folder / "all.arrow"
    assert main(["export", str(folder), "--out", str(out), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["out"] == str(out)
    assert main(["export", str(folder), "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert said.splitlines()[0].endswith("\\udcff\\n/all.arrow")
    said.encode()
    assert len(list(read_archive(folder))) == 1


def test_an_export_that_cannot_be_written_says_why(killed, tmp_path, capsys):
    folder, _ = killed
    (tmp_path / "there").mkdir()
    for out in (tmp_path / "none" / "one.parquet", tmp_path / "there", "/dev/full", "/proc/one.parquet"):
        assert main(["export", str(folder), "--out", str(out)]) == 1
        (line,) = capsys.readouterr().err.splitlines()
        assert "SB704" in line
        assert str(out) in line
        assert "Errno" not in line
        assert " -> " in line
    assert not list(tmp_path.glob("**/*.writing"))
    assert stat.S_ISCHR(os.stat("/dev/full").st_mode), "a device is not replaced"
