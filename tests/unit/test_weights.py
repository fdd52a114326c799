"""Weights through the bridge: versions, leases, deaths, and tensors that do not match."""

import signal
import struct

import msgspec
import numpy as np
import pytest
import torch

import shmbridge
from shmbridge import segment
from shmbridge.weights import WeightsReader, WeightsWriter


@pytest.fixture
def ends(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        yield writer, reader


def tensors(value: float) -> list:
    return [("w", np.full((3, 5), value, np.float32)), ("b", torch.full((7,), value, dtype=torch.bfloat16))]


def test_nothing_is_there_before_the_first_version(ends) -> None:
    writer, reader = ends
    assert (writer.last_version, reader.version) == (None, None)
    with pytest.raises(shmbridge.NotReady, match="no weights"), reader.lease(timeout_s=0.02):
        pass


def test_the_newest_version_is_read_in_place(ends) -> None:
    writer, reader = ends
    for version in (0, 1, 5):
        writer.publish(version, tensors(version))
        assert (writer.last_version, reader.version) == (version, version)
        with reader.lease() as lease:
            assert lease.version == version
            assert lease.tensors["w"].shape == (3, 5)
            assert (lease.tensors["w"] == version).all()
            assert not lease.tensors["w"].flags.writeable
            assert lease.tensors["w"].ctypes.data % 64 == lease.tensors["b"].ctypes.data % 64 == 0


def test_bfloat16_and_every_other_dtype_keep_their_bits(ends) -> None:
    writer, reader = ends
    source = {str(dtype): torch.arange(6).reshape(2, 3).to(dtype) for dtype in (
        torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64, torch.uint8, torch.bool, torch.float8_e4m3fn)}  # fmt: skip
    source |= {"scalar": torch.tensor(2.5), "empty": torch.empty(0, 3), "transposed": torch.arange(6.0).reshape(2, 3).T}
    writer.publish(1, source.items())
    with reader.lease() as lease:
        for name, tensor in source.items():
            assert lease.dtypes[name] == str(tensor.dtype).removeprefix("torch.")
            assert lease.tensors[name].shape == tuple(tensor.shape)
            assert lease.tensors[name].tobytes() == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        back = torch.from_numpy(lease.tensors["torch.bfloat16"].copy()).view(torch.bfloat16)
    assert torch.equal(back, source["torch.bfloat16"])


def test_a_lease_makes_the_writer_wait_only_for_its_slot(ends) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with reader.lease() as lease:
        writer.publish(2, tensors(2))
        with pytest.raises(shmbridge.WeightsBusy):
            writer.publish(3, tensors(3), timeout_s=0.05)
        assert (lease.tensors["w"] == 1).all()
        assert (writer.last_version, reader.version) == (2, 2)
    writer.publish(3, tensors(3), timeout_s=0.05)
    assert reader.version == 3


def test_versions_only_rise(ends) -> None:
    writer, _ = ends
    writer.publish(2, tensors(2))
    for version in (2, 1):
        with pytest.raises(ValueError, match="is not after 2"):
            writer.publish(version, tensors(0))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        ([("w", np.zeros((5, 3), np.float32)), ("b", torch.zeros(7, dtype=torch.bfloat16))], r"'w' float32\[5, 3\].*float32\[3, 5\]"),
        ([("w", np.zeros((3, 5), np.float64)), ("b", torch.zeros(7, dtype=torch.bfloat16))], "float64"),
        ([("w", np.zeros((3, 5), np.float32))], "1 tensors given, the segment has 2"),
        ([("v", np.zeros((3, 5), np.float32)), ("b", torch.zeros(7, dtype=torch.bfloat16))], "'v'"),
    ],
)  # fmt: skip
def test_other_tensors_are_refused_by_name(ends, other, what) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with pytest.raises(shmbridge.WeightsMismatch, match=what):
        writer.publish(2, other)
    assert reader.version == 1
    writer.publish(2, tensors(2))


def test_one_writer_at_a_time(ends, bridge) -> None:
    writer, _ = ends
    writer.publish(1, tensors(1))
    with pytest.raises(shmbridge.ConsumerTaken, match="living writer"):
        WeightsWriter(bridge)


def test_a_killed_writer_leaves_its_last_version(bridge, child) -> None:
    with WeightsReader(bridge) as reader:
        process = child(
            """
import numpy as np, time
from shmbridge.weights import WeightsWriter
writer = WeightsWriter(bridge)
writer.publish(1, [("w", np.full(1000, 1.0))])
writer.publish(2, [("w", np.full(1000, 2.0))])
writer._versions.begin(0)
print("ready", flush=True)
time.sleep(60)
"""
        )
        process.send_signal(signal.SIGKILL)
        process.wait()
        with reader.lease() as lease:
            assert lease.version == 2
            assert (lease.tensors["w"] == 2).all()
        with WeightsWriter(bridge) as writer:
            assert writer.last_version == 2
            writer.publish(3, [("w", np.full(1000, 3.0))])
        with reader.lease() as lease:
            assert (lease.version, lease.tensors["w"][0]) == (3, 3.0)


def test_a_killed_reader_frees_its_slot(bridge, child) -> None:
    with WeightsWriter(bridge) as writer:
        writer.publish(1, tensors(1))
        process = child(
            """
import time
from shmbridge.weights import WeightsReader
lease = WeightsReader(bridge).lease()
lease.__enter__()
print("ready", flush=True)
time.sleep(60)
"""
        )
        writer.publish(2, tensors(2))
        process.send_signal(signal.SIGKILL)
        process.wait()
        writer.publish(3, tensors(3), timeout_s=1)


def test_a_successor_may_bring_another_model(bridge) -> None:
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(1, tensors(1))
        with WeightsWriter(bridge) as second:
            second.publish(2, [("other", np.arange(3))])
        with reader.lease() as lease:
            assert list(lease.tensors) == ["other"]


def test_a_closed_writer_says_so(bridge) -> None:
    writer = WeightsWriter(bridge)
    writer.close()
    writer.close()
    with pytest.raises(shmbridge.Closed):
        writer.publish(1, tensors(1))


TABLE_AT, LATEST_AT = 4096, 128


@pytest.fixture
def scribble(bridge, ends):
    """Call it with a place and bytes: published weights, of version 1, that something overwrote."""
    ends[0].publish(1, tensors(1))
    memory = memoryview(segment.open_mapping(segment.weights_name(bridge)))

    def write(at: int, raw: bytes) -> None:
        memory[at : at + len(raw)] = raw

    return write


@pytest.mark.parametrize(
    ("dtype", "shape"), [("float32", [3, 4]), ("float32", [-3, -5]), ("float64", [3, 5]), ("object", [3, 5]), ("zzz", [3, 5])]
)
def test_a_tensor_that_does_not_lie_where_it_says_is_refused(ends, scribble, dtype, shape) -> None:
    scribble(TABLE_AT, msgspec.json.encode([["w", dtype, shape, 0, 60], ["b", "bfloat16", [7], 64, 14]]).ljust(66))
    with pytest.raises(shmbridge.WeightsMismatch), ends[1].lease():
        pass


@pytest.mark.parametrize("raw", [b"{", b'[["\xff', b"[" * 60])
def test_a_table_that_is_none_is_refused_and_a_new_writer_begins_anew(bridge, ends, scribble, raw) -> None:
    writer, reader = ends
    scribble(TABLE_AT, raw)
    with pytest.raises(shmbridge.WeightsMismatch, match="no table"):
        assert reader.version is None
    writer.close()
    with WeightsWriter(bridge) as successor:
        assert successor.last_version is None
        successor.publish(0, tensors(7))
        with reader.lease() as lease:
            assert (lease.tensors["w"] == 7).all()


@pytest.mark.parametrize(
    ("at", "words"),
    [(24, [0]), (24, [2**64 - 4096, 2048]), (24, [4096]), (32, [2**63]), (32, [1]), (16, [2**64 - 1]), (LATEST_AT, [1, 0, 0]),
     (LATEST_AT, [2**63])],
)  # fmt: skip
def test_words_that_cannot_be_are_no_weights(bridge, scribble, at, words) -> None:
    scribble(at, struct.pack(f"<{len(words)}Q", *words))
    refusals = (shmbridge.NotReady, shmbridge.WeightsMismatch)
    with WeightsReader(bridge) as fresh, pytest.raises(refusals), fresh.lease(timeout_s=0.02):
        pass


def test_what_no_reader_could_take_is_not_published(ends) -> None:
    writer, reader = ends
    with pytest.raises(shmbridge.WeightsMismatch, match=r"'when' is datetime64\[s\]\[4\]"):
        writer.publish(1, [("when", np.zeros(4, "datetime64[s]"))])
    assert reader.version is None
