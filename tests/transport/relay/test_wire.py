"""Parcels and asks through bytes; what is no parcel is refused."""

import numpy as np
import pytest

from shmbridge import InvalidRecord, LayoutMismatch
from shmbridge.config import Run
from shmbridge.relay import wire

LANE = wire.SourceLane("gsm8k-1-0123456789abcdef", "gsm8k", b"\0table\xff", 1 << 20)
OTHER = wire.SourceLane("math-2-fedcba9876543210", "math", b"", 64 << 10)
STATE = wire.State("env-1", "session", 3, finished=["gone-1"], counters={"held": 2.0})


def record(lane: wire.SourceLane, sequence: int, size: int) -> wire.SentRecord:
    extent = np.random.default_rng(sequence).integers(0, 256, size, np.uint8)
    return wire.SentRecord(lane, extent, (1, 2, 3, 4, 5, 6, -1), sequence, -1, 7, 1 << 40)


def through(parcel: wire.Parcel) -> wire.Parcel:
    return wire.decode([np.array(each) for each in wire.encode(parcel)])


@pytest.mark.parametrize("sizes", [(), (1,), (64, 65), (40_000,), (100, 40_000, 1, 16 << 10, (16 << 10) - 1)])
def test_a_parcel_comes_as_it_was_sent(sizes):
    sent = [record((LANE, OTHER)[at % 2], at, size) for at, size in enumerate(sizes)]
    came = through(wire.Parcel(STATE, sent))
    assert came.state == STATE
    assert len(came.records) == len(sent)
    for one, other in zip(sent, came.records, strict=True):
        assert (one.lane, one.words, one.sequence) == (other.lane, other.words, other.sequence)
        assert one.min_policy_version, one.waited_ns == (other.min_policy_version, other.waited_ns)
        assert one.extent.tobytes() == other.extent.tobytes()


def test_large_records_are_not_copied_and_small_ones_are_joined():
    sent = [record(LANE, at, 100) for at in range(50)] + [record(LANE, 50, 1 << 20)]
    arrays = wire.encode(wire.Parcel(STATE, sent))
    assert len(arrays) == 3
    assert np.shares_memory(arrays[2], sent[50].extent)


def test_an_ask_comes_as_it_was_sent():
    ask = wire.Ask(
        "s", 1, {"a": 3}, {"a": [(4, "SB204")]}, {"a": 5}, 6, 7, True, run=Run(num_steps=9), step=2
    )
    assert wire.decode_ask(wire.encode_ask(ask)) == ask


def test_another_layout_is_refused_with_both_sides():
    arrays = wire.encode(wire.Parcel(STATE, []), layout_version=99)
    with pytest.raises(LayoutMismatch, match=r"layout 99, and this node has \d"):
        wire.decode(arrays)


def test_garbage_is_refused():
    good = wire.encode(wire.Parcel(STATE, [record(LANE, 0, 100), record(LANE, 1, 20_000)]))
    bad = [[np.zeros(64, np.uint8)], good[:1], [good[0], good[1][:10], good[2]], [good[0][:100], *good[1:]]]
    for arrays in bad:
        with pytest.raises(InvalidRecord):
            wire.decode(arrays)
    with pytest.raises(InvalidRecord):
        wire.decode_ask(b"\x93nothing")
