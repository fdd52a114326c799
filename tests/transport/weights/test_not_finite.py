"""A version with NaN or an infinity among its values: the writer says so, a lease refuses it if asked."""

import logging

import numpy as np
import pytest

from shmbridge.errors import WeightsMismatch
from shmbridge.relay.weights import WeightsReceiver, WeightsSender
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

# dtype word -> bits of numbers that are not finite, and of the largest that are.
BITS = {
    "float16": (np.uint16, [0x7C00, 0xFC00, 0x7E01], [0x7BFF, 0xFBFF]),
    "float32": (np.uint32, [0x7F800000, 0xFF800000, 0x7FC00000, 0xFFFFFFFF], [0x7F7FFFFF, 0x1]),
    "float64": (np.uint64, [0x7FF << 52, 0xFFF << 52, 0x7FF << 52 | 1], [0x7FEF << 48, 0x800F << 48]),
}
TORCH_BITS = {
    "bfloat16": (np.int16, [0x7F80, 0xFF80, 0x7FC1], [0x7F7F, 0xFF7F, 0x7E00]),
    "float8_e4m3fn": (np.uint8, [0x7F, 0xFF], [0x7E, 0xFE]),
    "float8_e5m2": (np.uint8, [0x7C, 0xFC, 0x7D], [0x7B, 0xFB]),
    "float8_e4m3fnuz": (np.uint8, [0x80], [0x7F, 0xFF]),
}


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        yield writer, reader


def refused(reader: WeightsReader) -> str:
    """Why the newest version is not given; "" if it is."""
    with reader.lease() as lease:
        try:
            lease.require_finite()
        except WeightsMismatch as wrong:
            return str(wrong)
        return ""


@pytest.mark.parametrize("dtype", BITS)
@pytest.mark.parametrize("place", [0, 7, 299_999, -1])
def test_each_number_that_is_not_finite_is_found(ends, dtype, place):
    """Wherever it stands: the copy goes in pieces."""
    (writer, reader), (word, strange, finite) = ends, BITS[dtype]
    for version, bits in enumerate([*finite, *strange]):
        values = np.zeros(300_001, word)
        values[place] = bits
        writer.publish(version, [("a", np.ones(3, np.int8)), ("w", values.view(dtype))])
        said = refused(reader)
        assert bool(said) == (bits in strange), hex(bits)
        assert not said or f"version {version} of the weights has values that are not finite" in said
        assert not said or "1 of 2 tensors, first 'w'" in said


@pytest.mark.parametrize("dtype", TORCH_BITS)
def test_of_torchs_types_too(ends, dtype):
    torch = pytest.importorskip("torch")
    (writer, reader), (word, strange, finite) = ends, TORCH_BITS[dtype]
    for version, bits in enumerate([*finite, *strange]):
        values = np.zeros(1000, word)
        values.view(values.dtype.str.replace("i", "u"))[501] = bits
        writer.publish(version, [("w", torch.from_numpy(values).view(getattr(torch, dtype)))])
        assert bool(refused(reader)) == (bits in strange), hex(bits)


def test_numbers_that_only_look_like_it_are_taken(ends):
    writer, reader = ends
    kinds = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64", "bool"]
    writer.publish(0, [(kind, np.full(100, -1).astype(kind)) for kind in kinds])
    assert refused(reader) == ""


def test_the_bridge_carries_it_all_the_same_and_the_version_before_stays_leasable(ends):
    writer, reader = ends
    writer.publish(1, [("w", np.ones(4, np.float32))])
    writer.publish(2, [("w", np.full(4, np.nan, np.float32))])
    assert "not finite" in refused(reader)
    assert np.isnan(reader.copy()[1]["w"]).all()
    with reader.lease(version=1) as lease:
        lease.require_finite()
        assert lease.tensors["w"].tolist() == [1.0] * 4


def test_the_writer_says_it_once_a_version(ends, caplog):
    writer, _ = ends
    with caplog.at_level(logging.WARNING):
        writer.publish(1, [("w", np.ones(4, np.float16))])
        assert not caplog.records
        writer.publish(2, [("w", np.array([1, np.inf, 1, 1], np.float16))])
    assert [each.getMessage() for each in caplog.records] == [
        f"version 2 of the weights of bridge {writer.bridge!r} has values that are not finite: "
        "1 of 1 tensors, first 'w' -> engines refuse it; look at the loss of the step before"
    ]


def test_it_stays_with_a_tensor_that_is_not_written_again(ends):
    """With `changed_only`: the tensor goes on from slot to slot, until it is replaced."""
    writer, reader = ends
    good, bad = np.ones(5, np.float32), np.array([1, 1, np.nan, 1, 1], np.float32)
    writer.publish(0, [("a", good), ("b", good)])
    writer.publish(1, [("a", bad)], changed_only=True)
    for version in (2, 3, 4):
        writer.publish(version, [("b", good * version)], changed_only=True)
        assert "1 of 2 tensors, first 'a'" in refused(reader)
    writer.publish(5, [("a", good)], changed_only=True)
    assert refused(reader) == ""
    writer.publish(6, [("b", good)], changed_only=True)
    assert refused(reader) == ""
    with WeightsReader(writer.bridge) as another:
        assert refused(another) == ""


@pytest.mark.parametrize("form", ["strided", "transposed", "torch"])
def test_of_sources_that_are_not_in_one_piece(ends, form):
    writer, reader = ends
    values = np.zeros((6, 8), np.float32)
    for version, middle in enumerate([1.0, np.inf]):
        values[2, 4] = middle
        source = {"strided": values[::2, ::2], "transposed": values.T, "torch": values.T}[form]
        if form == "torch":
            source = pytest.importorskip("torch").from_numpy(values).T
        writer.publish(version, [("w", source)])
        assert bool(refused(reader)) == (version == 1)


def test_one_shard_of_many_is_enough(ends, bridge):
    """Whoever writes it: the writer, or a part in another process, which has only the ticket."""
    writer, reader = ends
    spec = [("w", "float32", (4, 8)), ("v", "float32", (4,))]
    row, bad = np.ones((1, 8), np.float32), np.full((1, 8), np.nan, np.float32)
    with WeightsPart(bridge) as part:
        for version, (ours, theirs) in enumerate([(row, row), (bad, row), (row, bad), (row, row)]):
            with writer.fill(version, spec) as filling:
                filling.write("v", np.ones(4, np.float32))
                filling.write("w", ours, (slice(0, 1),))
                part.write(filling.ticket, "w", np.repeat(row, 2, 0), (slice(1, 3),))
                part.write(filling.ticket, "w", theirs, (slice(3, 4), slice(0, 8)))
            assert bool(refused(reader)) == (version in (1, 2))


def test_another_nodes_readers_refuse_it_too(bridge):
    """The relay carries it, as it is."""
    there = f"{bridge}-there"
    with (
        WeightsWriter(bridge) as writer,
        WeightsSender(bridge, part_bytes=64) as out,
        WeightsReceiver(there) as into,
    ):
        for version, value in enumerate([1.0, np.inf]):
            values = np.ones(100, np.float64)
            values[77] = value
            writer.publish(version, [("w", values), ("v", np.ones(3, np.float16))])
            with out.read() as offer:
                assert into.begin(offer.head)
                for number in range(offer.head.parts):
                    into.write(offer.head.transfer, number, offer.part(number))
                into.commit(offer.head.transfer)
            with WeightsReader(there) as reader:
                assert bool(refused(reader)) == (version == 1)
