"""Files carry checksums over every byte that a reader uses; those of earlier builds are read, with a line."""

import gzip
import logging
import struct
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import shmbridge
from shmbridge.archive import files as seal
from shmbridge.archive import folder as parts
from shmbridge.archive.files import StreamFile, read_stream
from shmbridge.archive.folder import copy_folder, finish_folder, read_archive
from shmbridge.archive.recorder import Recorder
from tests.transport.archive.test_stream import SCHEMA, batch, recorded

EARLIER = Path(__file__).with_name("revision_1")
KINDS = ("parquet", "arrow", "arrows")


@pytest.fixture(params=["parquet", "arrow"])
def part(request, tmp_path, bridge) -> Path:
    """A finished part of several blocks, whose values no two blocks share."""
    random = np.random.default_rng(3)
    with (
        Recorder(tmp_path / "records", format=request.param) as recorder,
        shmbridge.Consumer(bridge) as consumer,
        shmbridge.Producer(bridge, "env", "8M") as producer,
    ):
        for number in range(6):
            tokens = random.integers(0, 1 << 30, 40_000).astype(np.int32)
            producer.put({"tokens": [tokens], "loss_mask": [tokens > 0]}, group_id=number)
        for record in consumer.poll():
            with record:
                recorder.take([record])
    (found,) = (tmp_path / "records").glob("part-*")
    assert found.stat().st_size > 10 * seal.BLOCK
    return found


def refused(folder: Path) -> str:
    """What reading a folder is refused with."""
    with pytest.raises(shmbridge.ArchiveUnreadable) as wrong:
        list(read_archive(folder))
    return str(wrong.value)


def earlier(folder: Path, kind: str) -> Path:
    """A part that a build before the checksums wrote."""
    folder.mkdir()
    path = folder / f"part-000000.{kind}"
    path.write_bytes(gzip.decompress((EARLIER / f"{path.name}.gz").read_bytes()))
    return path


# -- finished parts


def test_a_changed_block_is_named_with_its_bytes(part):
    raw = bytearray(part.read_bytes())
    raw[3 * seal.BLOCK + 17] ^= 1
    part.write_bytes(raw)
    said = refused(part.parent)
    assert f"{part} is damaged: bytes {3 * seal.BLOCK} to {4 * seal.BLOCK} are not what was written" in said


def test_blocks_that_change_places_or_come_twice_are_refused(part):
    whole = part.read_bytes()
    one, other = (slice(at * seal.BLOCK, (at + 1) * seal.BLOCK) for at in (2, 5))
    swapped = bytearray(whole)
    swapped[one], swapped[other] = whole[other], whole[one]
    for raw in (
        swapped,
        whole[: one.stop] + whole[one] + whole[one.stop :],
        whole[: one.start] + whole[one.stop :],
    ):
        part.write_bytes(raw)
        assert str(part) in refused(part.parent)


def test_footer_and_seal_are_refused_for_one_bit(part):
    """Every bit of the last bytes, and one of each byte of seal and footer."""
    whole = part.read_bytes()
    with part.open("rb") as file:
        footer = seal._footer(file)
    (data,) = struct.unpack_from("<Q", whole, footer - 48)
    places = [(at, at % 8) for at in range(data, len(whole))]
    places += [(at, bit) for at in range(len(whole) - 12, len(whole)) for bit in range(8)]
    step = max(len(places) // 400, 1)
    for at, bit in places[::step] + places[-96:]:
        raw = bytearray(whole)
        raw[at] ^= 1 << bit
        part.write_bytes(raw)
        assert str(part) in refused(part.parent), (at, bit)


def test_a_part_is_checked_wherever_it_lies(part, tmp_path):
    """The checksums are inside: one part, copied out of its folder, has them."""
    alone = tmp_path / "alone" / part.name.replace("000000", "000042")
    alone.parent.mkdir()
    raw = bytearray(part.read_bytes())
    alone.write_bytes(raw)
    assert len(list(read_archive(alone.parent))) == 6
    raw[seal.BLOCK] ^= 0x80
    alone.write_bytes(raw)
    assert str(alone) in refused(alone.parent)


@pytest.mark.parametrize("part", ["parquet"], indirect=True)
def test_keys_are_read_of_a_parquet_part_whose_values_are_damaged(part):
    """A recorder that goes on in a folder reads three columns of each part, and no more."""
    raw = bytearray(part.read_bytes())
    group = pq.ParquetFile(part).metadata.row_group(0)
    columns = [group.column(number) for number in range(group.num_columns)]
    (column,) = [each for each in columns if each.path_in_schema.startswith("tokens.")]
    raw[column.data_page_offset + column.total_compressed_size // 2] ^= 4
    part.write_bytes(raw)
    Recorder(part.parent).close()
    assert sum(parts.keys_of(part.parent).counts().values()) == 6
    assert str(part) in refused(part.parent)


def test_another_program_that_rewrites_a_part_must_not_promise_checksums(part, caplog):
    """It keeps the metadata of the schema, and cannot know the seal."""
    whole = pa.BufferReader(part.read_bytes())
    table = pq.read_table(whole) if part.suffix == ".parquet" else pa.ipc.open_file(whole).read_all()

    def write(table: pa.Table) -> None:
        if part.suffix == ".parquet":
            pq.write_table(table, part)
        else:
            with pa.ipc.new_file(part, table.schema) as file:
                file.write_table(table)

    write(table)
    assert "it says that it carries checksums, and they are not there" in refused(part.parent)
    said = {key: value for key, value in table.schema.metadata.items() if key != b"shmbridge.revision"}
    write(table.replace_schema_metadata(said))
    assert len(list(read_archive(part.parent))) == 6
    assert caplog.text.count("without checksums") == 1
    write(table.replace_schema_metadata({**said, b"shmbridge.revision": b"3"}))
    assert "revision 3" in refused(part.parent) or "not there" in refused(part.parent)


# -- the part in progress


def test_messages_that_are_left_out_come_twice_or_change_places_end_a_stream(tmp_path):
    file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
    ends = [file.bytes]
    for _ in range(4):
        file.append(batch(3))  # all the same: only their order tells them apart
        ends.append(file.bytes)
    file.close()
    whole = file.path.read_bytes()
    head, *messages = [whole[start:end] for start, end in zip([0, *ends], ends, strict=False)]
    for order, left in (([0, 2, 3], 1), ([0, 0, 1, 2, 3], 1), ([0, 2, 1, 3], 1), ([3, 1, 2], 0), ([], 0)):
        file.path.write_bytes(head + b"".join(messages[at] for at in order))
        stream = read_stream(file.path)
        assert len(list(stream.batches)) == left, order
        assert (stream.damage() is None) == (not order)
    file.path.write_bytes(b"".join(messages))
    assert read_stream(file.path).schema is None


def test_a_stream_is_read_while_it_grows(tmp_path, bridge):
    """Up to its last whole message; a reader never takes one under way for damage."""
    file = StreamFile(tmp_path / "part-000000.arrows", SCHEMA)
    stream = read_stream(file.path)
    for number in range(5):
        file.append(batch(number))
        assert next(stream.batches).column(0)[0].as_py() == number
    assert list(stream.batches) == []
    assert stream.damage() is None
    file.close()


def test_what_a_killed_recorder_leaves_is_checked_as_far_as_it_goes(tmp_path, bridge):
    killed = recorded(tmp_path, bridge, 0, 4)
    path, end = killed._stream.path, killed._stream.bytes
    killed._held.close()
    whole = path.read_bytes()
    path.write_bytes(whole + bytes(8) + b"half a message" * 9)
    assert [record.group_id for record in read_archive(tmp_path)] == ["0", "1", "2", "3"]
    raw = bytearray(whole)
    raw[end - 100] ^= 1
    path.write_bytes(raw)
    records = read_archive(tmp_path)
    assert [next(records).group_id for _ in range(3)] == ["0", "1", "2"]
    with pytest.raises(
        shmbridge.ArchiveUnreadable, match=f"{path.name} is damaged: .*bytes .* to {end} are not"
    ):
        next(records)
    raw = bytearray(whole)
    raw[60] ^= 1
    path.write_bytes(raw)
    assert f"{path} is damaged: {len(raw)} bytes behind byte 0" in refused(tmp_path)
    assert finish_folder(tmp_path).records == 0
    assert [each.name for each in tmp_path.glob("part-*")] == [f"{path.name}.damaged"]


# -- files of builds that knew no checksums


@pytest.mark.parametrize("kind", KINDS)
def test_a_part_of_an_earlier_build_is_read_with_one_line(tmp_path, caplog, kind):
    path = earlier(tmp_path / "old", kind)
    path.with_name(f"part-000001.{kind}").write_bytes(path.read_bytes())
    for _ in range(2):
        first, uneven, last = read_archive(path.parent)
    assert first.group.values["tokens"].values.tolist() == [1, 2, 3, 4]
    assert np.signbit(first.group.values["score"].values).tolist() == [False, True]
    assert (first.group_id, first.min_policy_version, last.split) == ("first", 3, "eval")
    assert (uneven.group.uneven, uneven.group.values["advantages"].entries) == (True, 3)
    assert uneven.group.values["distill_token_ids"].values.tolist() == [1, 2, 3]
    lines = [line.getMessage() for line in caplog.records if line.levelno == logging.WARNING]
    assert [line for line in lines if "without checksums" in line] == [
        f"{path.parent} has parts without checksums: an earlier revision wrote them, and damage to their "
        "values cannot be "
        f"seen -> `shmbridge export {path.parent} --out FILE` writes a copy that carries them"
    ]


def test_a_copy_of_earlier_parts_carries_checksums(tmp_path):
    earlier(tmp_path / "old", "arrows")
    (tmp_path / "new").mkdir()
    copy = tmp_path / "new" / "part-000000.parquet"
    copy_folder(tmp_path / "old", copy)
    with seal.CheckedFile(copy) as file:
        assert file.sealed
    finish_folder(tmp_path / "old", "arrow")
    with seal.CheckedFile(tmp_path / "old" / "part-000000.arrow") as file:
        assert file.sealed
    old, new = (list(read_archive(tmp_path / name)) for name in ("old", "new"))
    assert (
        [record.group_id for record in old]
        == [record.group_id for record in new]
        == ["first", "uneven", "last"]
    )


def test_a_damaged_stream_of_an_earlier_build_is_refused_where_it_cannot_be_read(tmp_path):
    path = earlier(tmp_path / "old", "arrows")
    raw = path.read_bytes()
    path.write_bytes(raw[:-100])
    records = read_archive(path.parent)
    assert [next(records).group_id for _ in range(2)] == ["first", "uneven"]
    with pytest.raises(shmbridge.ArchiveUnreadable, match=r"arrows is damaged: \d+ bytes behind byte \d+"):
        next(records)
