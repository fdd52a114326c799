"""Parcels and asks through bytes; what is not a parcel is refused."""

import random
import struct
from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pytest

from shmbridge import InvalidRecord, LayoutMismatch
from shmbridge._ext.weights import checksum
from shmbridge.config import Run
from shmbridge.relay import wire

LANE = wire.SourceLane("gsm8k-1-0123456789abcdef", "gsm8k", b"\0table\xff", 1 << 20)
OTHER = wire.SourceLane("math-2-fedcba9876543210", "math", b"", 64 << 10)
STATE = wire.State("env-1", "session", 3, finished=["gone-1"], counters={"held": 2.0})


def record(lane: wire.SourceLane, sequence: int, size: int) -> wire.SentRecord:
    extent = np.random.default_rng(sequence).integers(0, 256, size, np.uint8)
    return wire.SentRecord(lane, extent, (1, 2, 3, 4, 5, 6, -1), sequence, -1, 7, 1 << 40)


def through(parcel: wire.PullReply) -> wire.PullReply:
    return wire.decode([np.array(each) for each in wire.encode(parcel)])


@pytest.mark.parametrize("sizes", [(), (1,), (64, 65), (40_000,), (100, 40_000, 1, 16 << 10, (16 << 10) - 1)])
def test_a_parcel_comes_as_it_was_sent(sizes):
    sent = [record((LANE, OTHER)[at % 2], at, size) for at, size in enumerate(sizes)]
    came = through(wire.PullReply(STATE, sent))
    assert came.state == STATE
    assert len(came.records) == len(sent)
    for one, other in zip(sent, came.records, strict=True):
        assert (one.lane, one.words, one.sequence) == (other.lane, other.words, other.sequence)
        assert one.min_policy_version, one.waited_ns == (other.min_policy_version, other.waited_ns)
        assert one.extent.tobytes() == other.extent.tobytes()


def test_large_records_are_not_copied_and_small_ones_are_joined():
    sent = [record(LANE, at, 100) for at in range(50)] + [record(LANE, 50, 1 << 20)]
    arrays = wire.encode(wire.PullReply(STATE, sent))
    assert len(arrays) == 3
    assert np.shares_memory(arrays[2], sent[50].extent)


def test_an_ask_comes_as_it_was_sent():
    ask = wire.PullRequest(
        "s", 1, {"a": 3}, {"a": [(4, "SB204")]}, {"a": 5}, 6, 7, True, run=Run(num_steps=9), step=2
    )
    assert wire.decode_request(wire.encode_request(ask)) == ask


def test_another_layout_is_refused_with_both_sides():
    arrays = wire.encode(wire.PullReply(STATE, []), layout_version=99)
    with pytest.raises(LayoutMismatch, match=r"layout 99, and this node has \d"):
        wire.decode(arrays)


def sent() -> list[np.ndarray]:
    """A parcel of small and large records of two lanes, two of them of one size."""
    records = [record(LANE, 0, 100), record(OTHER, 1, 20_000), record(LANE, 2, 20_000), record(LANE, 3, 64)]
    return [np.array(each) for each in wire.encode(wire.PullReply(STATE, records))]


def refused(arrays: Sequence[object]) -> str:
    with pytest.raises(InvalidRecord) as wrong:
        wire.decode(arrays)  # type: ignore[arg-type]
    return wrong.value.message


def test_garbage_is_refused():
    good = sent()
    noise = np.random.default_rng(1).integers(0, 256, 5000, np.uint8)
    for arrays in (
        [],
        [np.zeros(64, np.uint8)],
        [np.zeros(0, np.uint8), *good[1:]],
        [noise, *good[1:]],
        good[:1],
        good[1:],
        ["text"],
        [None, None],
        [good[0][::2], *good[1:]],
        [good[0].astype(np.float64), *good[1:]],
    ):
        assert refused(arrays)
    with pytest.raises(InvalidRecord):
        wire.decode_request(b"\x93nothing")


def test_a_parcel_cut_anywhere_is_refused():
    good = sent()
    for part, whole in enumerate(good):
        step = 1 if part == 0 else 997
        for end in [*range(0, len(whole), step), len(whole) - 1]:
            refused([each[:end] if at == part else each for at, each in enumerate(good)])


def test_a_changed_bit_anywhere_is_refused():
    good, mixed = sent(), random.Random(5)
    used = {
        1: 192
    }  # small records begin at lines: 100 and 64 bytes, and 28 between them that belong to nobody
    for part, whole in enumerate(good):
        for _ in range(400):
            at = mixed.randrange(used.get(part, len(whole)))
            if part == 1 and 100 <= at < 128:
                continue
            bad = [np.array(each) for each in good]
            bad[part][at] ^= 1 << mixed.randrange(8)
            said = refused(bad)
            assert "is not what was sent" in said, (part, at)


def test_parts_that_change_places_are_refused():
    """Their records have the same size: only the checksums tell them apart."""
    head, small, one, other = sent()
    assert "record 1 of math-2-fedcba9876543210 is not what was sent" in refused([head, small, other, one])
    refused([head, small, one, one])


def test_a_head_that_lies_and_has_the_right_checksum_is_refused():
    """The sender's memory is wrong, or it is no relay of ours."""
    good = sent()
    with pa.ipc.open_stream(pa.py_buffer(good[0][:-8].tobytes())) as stream:
        batch, schema = stream.read_next_batch(), stream.schema
    columns = {name: batch.column(name).to_pylist() for name in schema.names}

    def head(schema: pa.Schema = schema, batches: int = 1, **changes: list[object]) -> np.ndarray:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, schema) as stream:
            arrays = [pa.array((columns | changes)[name], schema.field(name).type) for name in schema.names]
            for _ in range(batches):
                stream.write_batch(pa.RecordBatch.from_arrays(arrays, schema=schema))
        raw = sink.getvalue().to_pybytes()
        return np.frombuffer(raw + struct.pack("<Q", checksum([raw])), np.uint8)

    assert len(wire.decode([head(), *good[1:]]).records) == 4
    said = dict(schema.metadata)
    lies = [
        head(part=[0, 9, 2, 0]),
        head(part=[0, -1, 2, 0]),
        head(at=[0, 1, 0, 128]),
        head(at=[1 << 62, 0, 0, 128]),
        head(size=[100, 1 << 62, 20_000, 64]),
        head(size=[100, -20_000, 20_000, 64]),
        head(lane=[0, 2, 0, 0]),
        head(lane=[0, None, 0, 0]),
        head(sequence=[-1, 1, 2, 3]),
        head(sequence=[0, None, 2, 3]),
        head(check=[0, 0, 0, 0]),
        head(batches=0),
        head(batches=2),
        head(schema.set(0, pa.field("lane", pa.int32()))),
        head(pa.schema(list(schema)[:-1], metadata=said)),
        head(pa.schema(list(reversed(list(schema))), metadata=said)),
        head(schema.with_metadata({})),
        head(schema.with_metadata(said | {b"shmbridge.layout": b"two"})),
        head(schema.with_metadata(said | {b"shmbridge.lanes": b"[" * 5000})),
        head(schema.with_metadata(said | {b"shmbridge.lanes": b'[["a","b","%%%",1]]'})),
        head(schema.with_metadata(said | {b"shmbridge.lanes": b'[["a","b"]]'})),
        head(schema.with_metadata(said | {b"shmbridge.state": b"{}"})),
    ]
    for number, lie in enumerate(lies):
        assert refused([lie, *good[1:]]), number
