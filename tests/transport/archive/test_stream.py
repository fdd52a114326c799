"""A stream opens up to its last whole message, wherever it ends; what a killed recorder left is finished."""

import struct
from pathlib import Path

import pyarrow as pa
import pytest

import shmbridge
from shmbridge.archive import folder as parts
from shmbridge.archive.files import StreamFile, read_stream
from shmbridge.archive.folder import read_archive
from shmbridge.archive.format import marked
from shmbridge.archive.recorder import Recorder

SCHEMA = pa.schema([("n", pa.int64()), ("text", pa.utf8())])


def batch(number: int) -> pa.RecordBatch:
    return pa.record_batch([[number, number], ["a" * number, None]], schema=SCHEMA)


def numbers(path: Path) -> list[int]:
    opened = read_stream(path)
    return [] if opened is None else [each.column(0)[0].as_py() for each in opened[1]]


@pytest.fixture
def stream(tmp_path: Path) -> tuple[Path, list[int]]:
    """A stream of three messages, and where each ends, that of the schema first."""
    file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
    ends = [file.bytes]
    for number in range(3):
        file.append(batch(number))
        ends.append(file.bytes)
    file.close()
    return file.path, ends


def test_every_length_opens_up_to_the_last_whole_message(stream, tmp_path):
    path, ends = stream
    whole, cut = path.read_bytes(), tmp_path / "cut.arrows"
    assert len(whole) == ends[-1]
    for length in range(len(whole) + 1):
        cut.write_bytes(whole[:length])
        assert numbers(cut) == list(range(max(sum(end <= length for end in ends) - 1, 0))), length


def test_a_message_under_way_ends_the_stream_for_every_reader(stream, tmp_path):
    """As a killed recorder leaves it: any part of the message behind a prefix that is not written yet."""
    path, ends = stream
    whole, cut = path.read_bytes(), tmp_path / "cut.arrows"
    for length in range(ends[2], len(whole)):
        cut.write_bytes((whole[: ends[2]] + bytes(8) + whole[ends[2] + 8 :])[: max(length, ends[2] + 8)])
        assert pa.ipc.open_stream(cut).read_all().num_rows == 4, length


def test_a_write_that_fails_leaves_the_stream_whole(stream, monkeypatch, tmp_path):
    file = StreamFile(tmp_path / "part-000001.arrows", SCHEMA)
    file.append(batch(0))
    real, calls = parts.os.pwritev, []

    def part_of_it(fd, pieces, at):
        calls.append(at)
        if len(calls) == 2:
            raise OSError(28, "No space left on device")
        return real(fd, [pieces[0][:16]], at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", part_of_it)
        with pytest.raises(OSError, match="No space"):
            file.append(batch(1))
    assert file.path.stat().st_size == file.bytes
    file.append(batch(2))
    assert numbers(file.path) == [0, 2]


def recorded(folder: Path, bridge: str, first: int, count: int, **options) -> Recorder:
    """A recorder that is not closed, with `count` records of one producer."""
    recorder = Recorder(folder, **options)
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, producer_id="env") as producer:
        for number in range(first, first + count):
            producer.put({"tokens": [[number]], "loss_mask": [[1]]}, group_id=number)
        for record in consumer.poll():
            with record:
                recorder.take([record])
    return recorder


def test_the_next_recorder_finishes_what_a_killed_one_left(tmp_path, bridge):
    killed = recorded(tmp_path, bridge, 0, 4)
    left = killed._stream.path
    with left.open("r+b") as file:
        file.truncate(left.stat().st_size - 10)
    killed._held.close()  # as the kernel does
    with Recorder(tmp_path) as after:
        assert [path.name for path in after.finished_left] == ["part-000000.parquet"]
        ((producer_id, sequence),) = after.reached.items()
    assert (producer_id[:4], sequence) == ("env-", 2)
    assert not left.exists()
    assert [record.group_id for record in read_archive(tmp_path)] == ["0", "1", "2"]


def test_a_kill_between_rename_and_removal_loses_and_doubles_nothing(tmp_path, bridge):
    recorder = recorded(tmp_path, bridge, 0, 3)
    stream = recorder._stream.path
    raw = stream.read_bytes()
    recorder.close()
    stream.write_bytes(raw)
    (tmp_path / "part-000001.parquet.writing").write_bytes(b"half")
    assert len(list(read_archive(tmp_path))) == 3
    Recorder(tmp_path).close()
    assert sorted(path.name for path in tmp_path.glob("part-*")) == ["part-000000.parquet"]


def test_parts_are_finished_by_size_and_keep_the_order(tmp_path, bridge):
    with recorded(tmp_path, bridge, 0, 9, rotate_bytes=20_000, format="arrow"):
        pass
    names = sorted(path.name for path in tmp_path.glob("part-*"))
    assert len(names) > 1
    assert all(name.endswith(".arrow") for name in names)
    assert [record.group_id for record in read_archive(tmp_path)] == [str(number) for number in range(9)]


def test_a_second_recorder_is_refused(tmp_path):
    with Recorder(tmp_path), pytest.raises(shmbridge.ArchiveTaken, match=str(tmp_path)):
        Recorder(tmp_path)


def test_a_folder_without_parts_is_said(tmp_path):
    with pytest.raises(shmbridge.ArchiveUnreadable, match="holds no part"):
        list(read_archive(tmp_path))
    pa.ipc.new_stream(tmp_path / "part-000000.arrows", SCHEMA).close()
    with pytest.raises(shmbridge.ArchiveUnreadable, match="no archive of this build"):
        list(read_archive(tmp_path))


def without_stamps(raw: bytes) -> bytes:
    """Takes the checksums out of the heads of a stream's messages."""
    found, at = b"", 0
    while at < len(raw):
        (head_bytes,) = struct.unpack_from("<I", raw, at + 4)
        end = at + 8 + head_bytes
        (body_bytes,) = struct.unpack_from("<Q", raw, end - 24)
        found += raw[at : at + 4] + struct.pack("<I", head_bytes - 32) + raw[at + 8 : end - 32]
        found += raw[end : end + body_bytes]
        at = end + body_bytes
    return found


def test_writes_that_the_kernel_cuts_are_gone_on_with(tmp_path, monkeypatch):
    """Any cut, also within a piece; the same bytes as Arrow's own, and the checksums."""
    real, sizes = parts.os.pwritev, iter(range(1, 10_000))

    def cut(fd, pieces, at):
        return real(fd, [b"".join(pieces)[: next(sizes) % 37 + 1]], at)

    with monkeypatch.context() as patch:
        patch.setattr("os.pwritev", cut)
        patch.setattr("shmbridge.archive.files._MOST_PIECES", 3)
        file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
        for number in range(3):
            file.append(batch(number))
    file.close()
    wanted = [marked(SCHEMA).serialize(), *(batch(number).serialize() for number in range(3))]
    assert without_stamps(file.path.read_bytes()) == b"".join(map(bytes, wanted))
