"""Recordings, parcels and recorded groups that lie, put into a bridge: each is refused, or harmless.

    SHMBRIDGE_CHECK_ROWS=1 python tests/faults/hostile/lies.py

A liar knows the checksums: they are right. One line a lie, JSON: its name and what came of it. A crash shows
as the end of this process, behind the name of the lie that was under way.
"""

import contextlib
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa

sys.path.insert(0, str(Path(__file__).parents[3]))
import shmbridge
from shmbridge.archive.folder import FinishedFile, read_archive
from shmbridge.archive.format import Layout
from shmbridge.archive.recorder import flat_record
from shmbridge.put import FlatColumn, LaneOrigin, RecordedGroup, RelayedRecord
from shmbridge.record import memory_of, table_of
from shmbridge.relay import wire
from tests.faults.hostile import recordings

UNEVEN = 2  # of recordings.groups()
Arrays = dict[str, "pa.Array | Turned"]


def stream_of(name: str, array: pa.Array, *, more: int = 0) -> bytes:
    """An Arrow stream of one column, as record_odd holds it; `more` batches too many."""
    batch = pa.RecordBatch.from_arrays([array], names=[name])
    return bytes(batch.schema.serialize()) + bytes(batch.serialize()) * (1 + more) + b"\0" * 8


def with_offsets(name: str, array: pa.Array, was: list[int], lie: list[int], kind: str = "i4") -> bytes:
    """The stream of an array, with other offsets written over its own."""
    raw = stream_of(name, array)
    before, after = (np.array(offsets, kind).tobytes() for offsets in (was, lie))
    assert raw.count(before) == 1, f"{name}: {raw.count(before)} places"
    return raw.replace(before, after)


# -- what stands in record_odd of an uneven record: the file's type of a column, other rows than its record

FLOATS = pa.array([[0.5], [0.25, -0.0], [1.0]], pa.list_(pa.float32()))
LISTS = pa.array([[[1], [2, 3]], [[4]]], pa.list_(pa.list_(pa.int32())))
PAIRS = pa.list_(pa.struct([("key", pa.utf8()), ("value", pa.float32())]))
NAMED = pa.array(
    [[{"key": "ab", "value": 1.0}], [{"key": "cde", "value": 2.0}, {"key": "f", "value": 3.0}]], PAIRS
)
TEXTS = pa.array(["ab", "cde", None], pa.utf8())
FLOAT_ENDS, LIST_ENDS, INNER_ENDS, TEXT_ENDS, KEY_ENDS = (
    [0, 1, 3, 4],
    [0, 2, 3],
    [0, 1, 3, 4],
    [0, 2, 5],
    [0, 2, 5, 6],
)
HUGE = (1 << 31) - 1


def lies_in_odd() -> dict[str, list[bytes] | bytes]:
    """The streams of record_odd, or all its bytes."""
    a, b, d, m, s = "advantages", "reward_components", "distill_token_ids", "messages", "score"
    good = stream_of(a, FLOATS)
    reused = bytearray(good)
    return {
        "good": [good],
        "offsets backwards": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, 900, 5, 4])],
        "offsets backwards, the sum is right": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, 3, 1, 4])],
        "offsets beyond": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, 1, 3, 1 << 20])],
        "offsets beyond by one": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, 1, 3, 5])],
        "offsets to 2**31 - 1": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, 1, 3, HUGE])],
        "a negative offset": [with_offsets(a, FLOATS, FLOAT_ENDS, [-4, 0, 2, 4])],
        "lengths that wrap": [with_offsets(a, FLOATS, FLOAT_ENDS, [0, HUGE, -HUGE, 4])],
        "inner offsets backwards": [with_offsets(d, LISTS, INNER_ENDS, [0, 3, 1, 4])],
        "inner offsets beyond": [with_offsets(d, LISTS, INNER_ENDS, [0, 1, 3, 1 << 28])],
        "outer offsets beyond": [with_offsets(d, LISTS, LIST_ENDS, [0, 2, 9])],
        "text offsets beyond": [with_offsets(m, TEXTS.slice(0, 2), TEXT_ENDS, [0, 2, 5 << 20])],
        "key offsets backwards": [with_offsets(b, NAMED, KEY_ENDS, [0, 5, 2, 6])],
        "key offsets beyond": [with_offsets(b, NAMED, KEY_ENDS, [0, 2, 5, 1 << 24])],
        "int64 for a float64 score": [stream_of(s, pa.array([1, 2, 3], pa.int64()))],
        "float32 for a float64 score": [stream_of(s, pa.array([1, 2, 3], pa.float32()))],
        "int32 for float32 values": [stream_of(a, FLOATS.cast(pa.list_(pa.int32()), safe=False))],
        "float64 for float32 values": [stream_of(a, FLOATS.cast(pa.list_(pa.float64())))],
        "a list for a scalar": [stream_of(s, FLOATS)],
        "a scalar for a list": [stream_of(a, pa.array([1.0, 2.0, 3.0], pa.float32()))],
        "64-bit offsets": [stream_of(a, FLOATS.cast(pa.large_list(pa.float32())))],
        "lengths above 2**31": [
            with_offsets(
                a, FLOATS.cast(pa.large_list(pa.float32())), FLOAT_ENDS, [0, 1 << 32, 1 << 33, 4], "i8"
            )
        ],
        "a list of fixed size": [stream_of(a, pa.array([[1.0]] * 3, pa.list_(pa.float32(), 1)))],
        "a null inside of a list": [stream_of(a, pa.array([[0.5], [None, 1.0]], pa.list_(pa.float32())))],
        "a null list inside": [stream_of(d, pa.array([[[1], None]], LISTS.type))],
        "a null pair": [stream_of(b, pa.array([[None]], PAIRS))],
        "a null key": [stream_of(b, pa.array([[{"key": None, "value": 1.0}]], PAIRS))],
        "null rows": [stream_of(a, pa.array([None, [0.5]], pa.list_(pa.float32())))],
        "binary for text": [stream_of(m, TEXTS.cast(pa.binary()))],
        "text that is not UTF-8": [stream_of(m, TEXTS).replace(b"abcde", b"\xff\xfe\xfd\xfc\xfb")],
        "a dictionary": [stream_of(m, TEXTS.dictionary_encode())],
        "no rows": [stream_of(a, FLOATS.slice(0, 0))],
        "a million rows": [stream_of(a, pa.array([[]] * 1_000_000, pa.list_(pa.float32())))],
        "tokens with other rows": [stream_of("tokens", pa.array([[1], [2], [3]], pa.list_(pa.int32())))],
        "a column of the record": [stream_of("group_overrides", pa.array(["{}", "{}"]))],
        "a column that there is not": [stream_of("nothing", FLOATS)],
        "a column that was not put": [stream_of("token_rewards", FLOATS)],
        "a column twice": [good, stream_of(a, FLOATS.slice(0, 2))],
        "two batches": [stream_of(a, FLOATS, more=1)],
        "no batch": [bytes(pa.schema([(a, FLOATS.type)]).serialize()) + b"\0" * 8],
        "cut in its body": [good[:-24]],
        "cut in its head": [good[: len(good) // 2]],
        "compressed": [compressed(a, FLOATS)],
        "a number of rows of 2**63 - 1": [numbered(reused, 3, (1 << 63) - 1)],
        "a number of rows below 0": [numbered(reused, 3, -3)],
        "a buffer beyond": [numbered(reused, 16, 1 << 40)],
        "nothing": [b""],
        "not a stream": [b"\xff" * 64],
        "not a list": msgspec.msgpack.encode({"a": good}),
        "a list that is longer than it is": b"\xdd\xff\xff\xff\xff" + msgspec.msgpack.encode(good),
        "bytes that are longer than they are": b"\x91\xc6\xff\xff\xff\xff" + good,
        "deep": b"\x91" * 5000,
    }


def compressed(name: str, array: pa.Array) -> bytes:
    """A stream as no recorder writes it, and any reader reads it."""
    sink, batch = pa.BufferOutputStream(), pa.RecordBatch.from_arrays([array], names=[name])
    with pa.ipc.new_stream(sink, batch.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


def numbered(raw: bytes | bytearray, number: int, lie: int) -> bytes:
    """The stream with `lie` for the first int64 of that value in the head of its batch."""
    found = bytearray(raw)
    begin = found.index(b"\xff\xff\xff\xff", 8)
    at = found.index(number.to_bytes(8, "little", signed=True), begin)
    found[at : at + 8] = lie.to_bytes(8, "little", signed=True)
    return bytes(found)


# -- what stands in the columns of a part


class Turned(NamedTuple):
    """A list array whose offsets become others, once Arrow has looked at them."""

    array: pa.Array
    offsets: np.ndarray[Any, Any]
    lie: list[int]


def lists(lie: list[int], values: pa.Array, rows: int) -> Turned:
    offsets = np.linspace(0, len(values), rows + 1).astype(np.int32)
    raw = pa.py_buffer(offsets)
    return Turned(
        pa.Array.from_buffers(pa.list_(values.type), rows, [None, raw], children=[values]), offsets, lie
    )


def lies_in_columns(good: pa.RecordBatch) -> dict[str, Arrays]:
    """Columns to put in the place of those of the part, which has one record of two rows."""
    rows, tokens = good.num_rows, pa.array([1, 2, 3, 4, 5], pa.int32())
    text = lambda *values: pa.array(values, pa.utf8())  # noqa: E731
    return {
        "tokens backwards": {"tokens": lists([0, 4, 2], tokens, rows)},
        "tokens beyond": {"tokens": lists([0, 3, 1 << 24], tokens, rows)},
        "tokens below 0": {"tokens": pa.array([[1, -2, 3], [4, 5]], pa.list_(pa.int32()))},
        "float32 tokens": {"tokens": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.float32()))},
        "int64 tokens": {"tokens": pa.array([[1, 2, 3], [4, 5]], pa.list_(pa.int64()))},
        "a null token": {"tokens": pa.array([[1, None, 3], [4, 5]], pa.list_(pa.int32()))},
        "a null row of tokens": {"tokens": pa.array([[1, 2, 3], None], pa.list_(pa.int32()))},
        "a row of tokens fewer": {"tokens": pa.array([[1, 2], [4, 5]], pa.list_(pa.int32()))},
        "record_row from 1": {"record_row": pa.array([1, 2], pa.int32())},
        "record_row with a gap": {"record_row": pa.array([0, 7], pa.int32())},
        "record_row backwards": {"record_row": pa.array([0, -1], pa.int32())},
        "no record_row": {"record_row": pa.array([0, None], pa.int32())},
        "no sequence": {"sequence": pa.array([None, None], pa.int64())},
        "a sequence below 0": {"sequence": pa.array([-1, -1], pa.int64())},
        "a sequence of 2**63 - 1": {"sequence": pa.array([(1 << 63) - 1] * 2, pa.int64())},
        "a sequence that is text": {"sequence": text("0", "0")},
        "no columns": {"record_columns": text(None, None)},
        "columns that are no JSON": {"record_columns": text("{", "{")},
        "a column that there is not": {"record_columns": text('{"what":"values"}', "")},
        "a column that is neither": {"record_columns": text('{"tokens":"some"}', "")},
        "tokens that are null": {"record_columns": text('{"tokens":"null"}', "")},
        "even": {"record_uneven": pa.array([False, False])},
        "even, without record_odd": {
            "record_uneven": pa.array([False, False]),
            "record_odd": pa.nulls(rows, pa.binary()),
        },
        "another split": {"split": text("test", "test")},
        "a group of no rows": {"group_size": pa.array([0, 0], pa.int32())},
        "a group of -1 rows": {"group_size": pa.array([-1, -1], pa.int32())},
        "versions backwards": {"min_policy_version": pa.array([9, 9], pa.int64())},
        "an environment below 0": {"env_id": pa.array([-7, -7], pa.int32())},
        "a commit before the clock began": {"t_publish_ns": pa.array([-(1 << 62)] * 2, pa.int64())},
        "a long name": {"env_name": text("e" * 100_000, "e")},
        "a long producer": {"producer_id": text("p" * 100_000, "p")},
        "a long group": {"group_id": text("g" * 100_000, "g")},
    }


# -- groups as they come from a recording, made by hand


def lies_in_groups() -> dict[str, dict[str, FlatColumn]]:
    """Columns of a RecordedGroup: the last door before C."""

    def u4(*numbers: int) -> np.ndarray[Any, Any]:
        return np.array(numbers, np.uint32)

    five, good = np.arange(5, dtype=np.int32), FlatColumn(2, np.arange(5, dtype=np.int32), u4(3, 2))
    floats = five.astype(np.float32)
    return {
        "good": {"tokens": good},
        "lengths beyond": {"tokens": FlatColumn(3, five, u4(900, 0xFFFFFC81, 0))},
        "lengths short": {"tokens": FlatColumn(2, five, u4(3, 1))},
        "lengths of 2**32 - 1": {"tokens": FlatColumn(2, five, u4(0xFFFFFFFF, 0xFFFFFFFF))},
        "lengths that wrap": {"tokens": FlatColumn(2, five, u4(0xFFFFFFFF, 6))},
        "more lengths than rows": {"tokens": FlatColumn(2, five, u4(3, 1, 1))},
        "fewer lengths than rows": {"tokens": FlatColumn(3, five, u4(3, 2))},
        "int64 lengths": {"tokens": FlatColumn(2, five, np.array([3, 2]))},
        "no lengths": {"tokens": FlatColumn(5, five)},
        "int64 values": {"tokens": FlatColumn(2, five.astype(np.int64), u4(3, 2))},
        "values of two dimensions": {"tokens": FlatColumn(2, five.reshape(5, 1), u4(3, 2))},
        "rows below 0": {"tokens": FlatColumn(-2, five, u4(3, 2))},
        "2**32 rows": {"tokens": FlatColumn(1 << 32, five, u4(3, 2))},
        "a mask of other rows": {
            "tokens": good,
            "loss_mask": FlatColumn(3, np.ones(5, np.uint8), u4(3, 1, 1)),
        },
        "a mask of other lengths": {
            "tokens": good,
            "loss_mask": FlatColumn(2, np.ones(5, np.uint8), u4(1, 4)),
        },
        "lengths for scalars": {"tokens": good, "score": FlatColumn(2, np.ones(2), u4(1, 1))},
        "a score too few": {"tokens": good, "score": FlatColumn(2, np.ones(1))},
        "marks of null too few": {
            "tokens": good,
            "score": FlatColumn(2, np.ones(2), valid=np.ones(1, np.bool_)),
        },
        "inner lengths beyond": {
            "tokens": good,
            "distill_token_ids": FlatColumn(2, five, u4(3, 2), u4(1, 1, 1, 1, 1 << 30)),
        },
        "inner lengths too few": {"tokens": good, "distill_token_ids": FlatColumn(2, five, u4(3, 2), u4(5))},
        "keys too short": {
            "tokens": good,
            "reward_components": FlatColumn(2, floats[:2], u4(1, 1), u4(1, 9), keys=b"ab"),
        },
        "text too short": {
            "tokens": good,
            "instance_id": FlatColumn(2, np.frombuffer(b"abc", np.uint8), u4(1, 1 << 20)),
        },
        "step ends beyond": {"tokens": good, "step_ends": FlatColumn(2, five[1:3], u4(1, 77))},
    }


# -- parcels, whose sender's memory lies


def lies_in_parcels(extent: np.ndarray[Any, Any], words: wire.Words) -> dict[str, tuple[bytes, wire.Words]]:
    """The bytes of a record of another node, and the words of its slot. An entry of its directory has 64
    bytes: column, kind, tag, entries, then where values and lengths lie, and how many there are.
    """
    lengths = extent.view(np.uint32)
    found = {"good": (extent.tobytes(), words)}
    index = words[2] // 4
    for at in range(index):
        for what, lie in (("2**32 - 1", 0xFFFFFFFF), ("2**31", 1 << 31), ("one more", int(lengths[at]) + 1)):
            changed = lengths.copy()
            changed[at] = lie
            found[f"word {at} of the index: {what}"] = (changed.tobytes(), words)
    for at, name in enumerate(
        ("rows", "columns", "index_bytes", "group_id_bytes", "flags", "tokens", "group_size")
    ):
        for lie in (0, -1, words[at] + 1, 1 << 31, (1 << 32) - 1, (1 << 63) - 1, -(1 << 63)):
            said = list(words)
            said[at] = lie
            found[f"{name} {lie}"] = (extent.tobytes(), tuple(said))  # type: ignore[assignment]
    found["cut"] = (extent.tobytes()[:-64], words)
    found["nothing"] = (b"", words)
    return found


# -- what comes of them


class Bridge:
    """A hub, and what it has of a lie."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.consumer = shmbridge.Consumer(name, schema=recordings.SCHEMA)

    def outcome(self, put: Callable[[], Any]) -> dict[str, Any]:
        """What a put ends in; `wanted`, if it returns something, must be what the hub has."""
        said: dict[str, Any] = {"refused": "", "wrong": ""}
        try:
            wanted = put()
            found = self.taken()
            said["wrong"] = "" if wanted is None or wanted == found else f"{found} is not {wanted}"
        except shmbridge.ShmBridgeError as wrong:
            said["refused"] = f"{type(wrong).__name__}: {wrong.message}"
            self.taken()
        except BaseException as wrong:
            said["wrong"] = f"{type(wrong).__name__}: {wrong}"
        said["quarantined"] = self.consumer.stats()["lanes_quarantined"]
        return said

    def taken(self) -> list[Any]:
        """What the hub has got, each record looked at to its last value; text may be none."""
        found = []
        for record in self.consumer.poll():
            with record, contextlib.suppress(shmbridge.RecordUnreadable):
                flat = flat_record(record)
                found.append({name: recordings.bits(column) for name, column in flat.values.items()})
                record.to_scored_data()
        return found


def replayed(bridge: Bridge, folder: Path) -> Callable[[], Any]:
    """Puts what a folder holds as `shmbridge replay` does, and says what the lanes must have then."""
    from shmbridge.producers.replay import replay

    def put() -> Any:
        wanted = [
            {
                name: recordings.bits(each)
                for name, each in record.group.values.items()
                if isinstance(each, FlatColumn)
            }
            for record in read_archive(folder)
        ]
        replay(str(folder), bridge.name, speed="max", lane_bytes="1M", any_order=True, timeout_s=20)
        return wanted

    return put


def archived(bridge: Bridge, root: Path) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The lies in parts, each in a folder of its own."""
    part = recordings.make(root / "good", f"{bridge.name}-m")["arrow"]
    shmbridge.clean(f"{bridge.name}-m", dry_run=False)
    reader = pa.ipc.open_file(part.read_bytes())
    rows = pa.Table.from_batches([reader.get_batch(at) for at in range(reader.num_record_batches)])
    group_ids = rows.column("group_id").to_pylist()
    at = group_ids.index(recordings.groups()[UNEVEN][1]["group_id"])
    good = rows.slice(at, 2).combine_chunks().to_batches()[0]

    def written(number: int, columns: Arrays, layout: Layout | None = None) -> Path:
        folder = root / str(number)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        given = [columns.get(name, good.column(name)) for name in good.schema.names]
        turned = [each for each in given if isinstance(each, Turned)]
        arrays = [each.array if isinstance(each, Turned) else each for each in given]
        schema = pa.schema(
            [(name, array.type) for name, array in zip(good.schema.names, arrays, strict=True)],
            metadata=(layout.schema if layout else good.schema).metadata,
        )
        with FinishedFile(folder / "part-000000.arrow", schema, "arrow") as file:
            batch = pa.RecordBatch.from_arrays(arrays, schema=schema)
            for each in turned:
                each.offsets[:] = each.lie
            file.write(batch)
        return folder

    for number, (name, odd) in enumerate(lies_in_odd().items()):
        raw = odd if isinstance(odd, bytes) else msgspec.msgpack.encode(odd)
        names = ["tokens", "advantages", "score", "messages", "distill_token_ids", "reward_components"]
        said = json.dumps({name: "values" for name in names if name == "tokens" or name.encode() in raw})
        columns = {
            "record_odd": pa.array([raw, None], pa.binary()),
            "record_columns": pa.array([said, said], pa.utf8()),
        }
        yield f"record_odd: {name}", replayed(bridge, written(number, columns))
    for number, (name, columns) in enumerate(lies_in_columns(good).items()):
        yield f"column: {name}", replayed(bridge, written(1000 + number, columns))


def grouped(bridge: Bridge, producer: shmbridge.Producer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The lies in recorded groups."""
    for name, columns in lies_in_groups().items():
        for uneven in (False, True):
            group = RecordedGroup(producer.columns, columns, uneven=uneven)
            wanted = [{column: recordings.bits(each) for column, each in columns.items()}]

            def put(group: RecordedGroup = group, wanted: Any = wanted) -> Any:
                producer.put(group)
                return wanted

            yield f"group: {name}, uneven {uneven}", put


def parcelled(bridge: Bridge, producer: shmbridge.Producer) -> Iterator[tuple[str, Callable[[], Any]]]:
    """The lies in parcels; each has its record's checksum."""
    producer.put(
        {"tokens": [[1, 2, 3], [4, 5]], "score": [1.0, 2.0], "distill_token_ids": [[[1]] * 3, [[2]] * 2]}
    )
    (record,) = bridge.consumer.poll()
    sent, table = memory_of(record), table_of(record)
    extent, words = np.frombuffer(bytes(sent.memory), np.uint8), sent.words
    record.release()
    del record
    lane = wire.SourceLane("env-1-0123456789abcdef", "env", table, 1 << 20)
    origin = LaneOrigin("env-1", lane.producer_id)
    with shmbridge.Producer(bridge.name, "env", "1M", schema=recordings.SCHEMA, origin=origin) as relay:
        for sequence, (name, (raw, said)) in enumerate(lies_in_parcels(extent, words).items()):

            def put(raw: bytes = raw, said: wire.Words = said, sequence: int = sequence) -> None:
                one = wire.SentRecord(lane, np.frombuffer(raw, np.uint8), said, sequence, -1, -1, 1)
                parcel = wire.PullReply(wire.State("env-1", "s", 1), [one])
                (came,) = wire.decode(wire.encode(parcel)).records
                relay.put(
                    RelayedRecord(came.extent, came.lane.table, came.words, -1, -1, came.sequence, 1, 1),
                    timeout_s=20,
                )

            yield f"parcel: {name}", put
        relay.close_origin()


def main() -> None:
    """Tries every lie on one bridge; prints a line for each."""
    name = f"lies-{os.getpid()}"
    with tempfile.TemporaryDirectory() as folder:
        bridge = Bridge(name)
        try:
            with shmbridge.Producer(name, "env", "1M", schema=recordings.SCHEMA) as producer:
                for lies in (
                    archived(bridge, Path(folder)),
                    grouped(bridge, producer),
                    parcelled(bridge, producer),
                ):
                    for lie, put in lies:
                        print(json.dumps({"begun": lie}), flush=True)
                        print(json.dumps({"lie": lie, **bridge.outcome(put)}), flush=True)
        finally:
            bridge.consumer.close()
            shmbridge.clean(name, dry_run=False)


if __name__ == "__main__":
    main()
