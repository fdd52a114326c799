"""A full disk: recording stops with an error and nothing is lost, or ends and counts what it leaves out."""

import resource
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pytest

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.archive.recorder import Recorder


@contextmanager
def files_of_at_most(size: int) -> Iterator[None]:
    """Lets no file of this process grow beyond so many bytes: a write there ends early, or with EFBIG."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture
def put_nine(make_producer):
    """Nine records of 20 KB."""
    producer = make_producer(lane_bytes="1M")
    for number in range(9):
        producer.put({"tokens": [[number] * 5000], "loss_mask": [[1] * 5000]})
    return producer


def take(consumer: shmbridge.Consumer) -> list[int]:
    found = []
    for record in consumer:
        found.append(record.meta.sequence)
        record.release()
        if len(found) == 9:
            break
    return found


def stream_of(folder: Path) -> int:
    """Rows of the part in progress, as any reader sees it."""
    (path,) = folder.glob("*.arrows")
    return pa.ipc.open_stream(path).read_all().num_rows


def test_stop_is_an_error_and_what_was_not_written_is_unreleased(make_consumer, put_nine, tmp_path):
    consumer = make_consumer(tap=Recorder(tmp_path))
    with consumer.get(5):
        pass
    with files_of_at_most(120_000):
        with pytest.raises(shmbridge.ArchiveFull, match="no room for 1 records") as caught:
            take(consumer)
        assert str(tmp_path) in str(caught.value)
        assert "nothing is lost" in caught.value.hint
        with pytest.raises(shmbridge.ArchiveFull):
            consumer.get(1)
    recorded = stream_of(tmp_path)
    assert 1 < recorded < 9
    assert put_nine.stats()["held"] >= 9 - recorded
    consumer.take_back_dropped()  # of the iteration that the error ended
    while consumer.stats()["held"]:
        consumer.get(5).release()
    consumer.close()
    assert [record.sequence for record in read_archive(tmp_path)] == list(range(9))


def test_skip_ends_the_recording_and_counts(make_consumer, put_nine, tmp_path, caplog):
    recorder = Recorder(tmp_path, on_full_disk="skip")
    consumer = make_consumer(tap=recorder)
    with files_of_at_most(120_000):
        assert take(consumer) == list(range(9))
    stats = recorder.stats()
    assert stats["recorded_total"] == stream_of(tmp_path)
    assert stats["recorded_total"] + stats["skipped_total"] == 9
    assert stats["skipped_total"] > 0
    assert "recording has ended" in caplog.text
    consumer.close()
    assert len(list(read_archive(tmp_path))) == stats["recorded_total"]


def test_no_room_for_the_finished_file(make_consumer, put_nine, tmp_path, caplog, monkeypatch):
    consumer = make_consumer(tap=Recorder(tmp_path))
    take(consumer)

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("shmbridge.archive.folder.FinishedFile.write", full)
        consumer.close()
    assert "stays a stream" in caplog.text
    assert [path.name for path in tmp_path.glob("part-*")] == ["part-000000.arrows"]
    assert len(list(read_archive(tmp_path))) == 9


@pytest.mark.parametrize("remove", [shutil.rmtree, lambda folder: next(folder.glob("*.arrows")).unlink()])
def test_a_part_that_is_removed_under_the_recorder_is_an_error(make_consumer, put_nine, tmp_path, remove):
    """What would be written into a file without a name would be lost, and its records released."""
    folder = tmp_path / "records"
    consumer = make_consumer(tap=Recorder(folder))
    consumer.get(5).release()
    remove(folder)
    with pytest.raises(shmbridge.ArchiveUnwritable, match=r"removed|No such file") as caught:
        consumer.get(5)
    assert str(folder) in str(caught.value)
    assert put_nine.stats()["held"] == 8
    folder.mkdir(exist_ok=True)
    assert [record.meta.sequence for record in consumer.poll()] == list(range(1, 9)), "into a new part"
    consumer.close()
    assert [record.sequence for record in read_archive(folder)] == list(range(1, 9))


def test_a_disk_that_fails_is_named(make_consumer, put_nine, tmp_path, monkeypatch):
    consumer = make_consumer(tap=Recorder(tmp_path))
    consumer.get(5).release()

    def broken(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", broken)
        patch.setattr("os.pwrite", broken)
        with pytest.raises(shmbridge.ArchiveUnwritable, match="Input/output error") as caught:
            consumer.get(5)
    assert "another disk" in caught.value.hint
    for record in consumer.poll():
        record.release()
    consumer.close()
    assert [record.sequence for record in read_archive(tmp_path)] == list(range(9))


@pytest.mark.parametrize(
    ("path", "why"),
    [("file/records", "Not a directory"), ("file", "File exists"), ("/proc/no", "No such file")],
)
def test_a_folder_that_cannot_be_is_said(tmp_path, path, why):
    (tmp_path / "file").touch()
    with pytest.raises(shmbridge.ArchiveUnwritable, match=why) as caught:
        Recorder(tmp_path / path)
    assert "Errno" not in str(caught.value)
    assert caught.value.hint


def test_more_values_than_a_file_counts(make_consumer, make_producer, tmp_path, monkeypatch, caplog):
    """Not for ever: the error says how to go on without that record."""
    monkeypatch.setattr("shmbridge.archive.recorder.MOST_VALUES", 60_000)
    producer = make_producer(lane_bytes="4M")
    for size in (3, 100_000, 3):
        producer.put({"tokens": [[1] * size], "loss_mask": [[1] * size]})
    with make_consumer(tap=Recorder(tmp_path)) as consumer:
        consumer.get(5).release()
        for _ in range(2):
            with pytest.raises(shmbridge.RecordTooBig, match="100000 values") as caught:
                consumer.get(5)
        assert "skip" in caught.value.hint
    recorder = Recorder(tmp_path, on_full_disk="skip")
    with make_consumer(tap=recorder) as consumer:
        for _ in range(2):
            consumer.get(5).release()
    assert (recorder.stats()["skipped_total"], recorder.stats()["recorded_total"]) == (1, 1)
    assert "100000 values" in caplog.text
    assert [record.sequence for record in read_archive(tmp_path)] == [0, 2]
