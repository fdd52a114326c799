"""Weights through the bridge: versions, leases, deaths, and tensors that do not match."""

import os
import struct
import time

import numpy as np
import posix_ipc
import pytest
import torch

import shmbridge
from shmbridge.segments import locks, open_mapping, weights_name
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
    with pytest.raises(shmbridge.NotReady, match=r"no weights on bridge .* within 0\.02 s"):
        reader.copy(timeout_s=0.02)


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
    source = {
        str(dtype): torch.arange(6).reshape(2, 3).to(dtype)
        for dtype in (
            torch.bfloat16,
            torch.float16,
            torch.float64,
            torch.int8,
            torch.int64,
            torch.uint8,
            torch.bool,
            torch.float8_e4m3fn,
        )
    }
    source |= {
        "scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "transposed": torch.arange(6.0).reshape(2, 3).T,
    }
    writer.publish(1, source.items())
    with reader.lease() as lease:
        for name, tensor in source.items():
            assert lease.dtypes[name] == str(tensor.dtype).removeprefix("torch.")
            assert lease.tensors[name].shape == tuple(tensor.shape)
            assert (
                lease.tensors[name].tobytes()
                == tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            )
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


def test_one_tensor_lives_at_a_time(ends) -> None:
    """A tensor of a generator is copied before the next is requested, since it may be the same memory; except
    in a writer's first version.
    """
    writer, reader = ends
    writer.publish(1, tensors(1))
    scratch = np.empty(15, np.float32)

    def made(version: int, changed_only: bool):
        scratch[:] = version
        yield "w", scratch.reshape(3, 5)
        scratch[:] = -1
        if not changed_only:
            yield tensors(version)[1]

    for version, changed_only in ((2, False), (3, True)):
        writer.publish(version, made(version, changed_only), changed_only=changed_only)
        with reader.lease() as lease:
            assert (lease.tensors["w"] == version).all()


def test_versions_only_rise(ends) -> None:
    writer, _ = ends
    writer.publish(2, tensors(2))
    for version in (2, 1):
        with pytest.raises(ValueError, match="is not after 2"):
            writer.publish(version, tensors(0))


@pytest.mark.parametrize(
    ("other", "what"),
    [
        (
            [("w", np.zeros((5, 3), np.float32)), ("b", torch.zeros(7, dtype=torch.bfloat16))],
            r"'w' float32\[5, 3\].*float32\[3, 5\]",
        ),
        ([("w", np.zeros((3, 5), np.float64)), ("b", torch.zeros(7, dtype=torch.bfloat16))], "float64"),
        ([("w", np.zeros((3, 5), np.float32))], "1 tensors given, the segment has 2"),
        (
            [("v", np.zeros((3, 5), np.float32)), ("b", torch.zeros(7, dtype=torch.bfloat16))],
            "'v' was given, the segment has 2",
        ),
        ([("b", torch.zeros(7, dtype=torch.bfloat16))], "the segment has 2: 'w' is missing"),
        ([*tensors(2), ("new", np.zeros(1))], "'new' was given, the segment has 2: it is not of them"),
        ([*tensors(2), *tensors(2)[:1]], "'w' was given, the segment has 2: it comes twice"),
    ],
)
def test_other_tensors_are_refused_by_name(ends, other, what) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with pytest.raises(shmbridge.WeightsMismatch, match=what):
        writer.publish(2, other)
    assert reader.version == 1
    writer.publish(2, tensors(2))


def test_the_order_of_tensors_does_not_matter(ends) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    writer.publish(2, tensors(2)[::-1])
    with reader.lease() as lease:
        assert (lease.tensors["w"] == 2).all()
        assert [spec.name for spec in lease.specs] == ["w", "b"]


def test_one_writer_at_a_time(ends, bridge) -> None:
    writer, _ = ends
    writer.publish(1, tensors(1))
    with pytest.raises(
        shmbridge.ConsumerTaken, match=rf"living writer: pid {os.getpid()} .this very process."
    ):
        WeightsWriter(bridge)


def test_the_first_to_publish_of_two_new_writers_is_the_writer(bridge) -> None:
    with WeightsWriter(bridge) as first, WeightsWriter(bridge) as second, WeightsReader(bridge) as reader:
        first.publish(1, tensors(1))
        for _ in range(2):
            with pytest.raises(shmbridge.ConsumerTaken, match=f"living writer: pid {os.getpid()}"):
                second.publish(2, tensors(2))
        assert reader.copy()[0] == 1
        first.close()
        second.publish(2, tensors(2))
        assert reader.copy()[0] == 2


def test_a_refused_writer_is_told_of_the_one_that_took_over(bridge, child) -> None:
    with WeightsReader(bridge):
        with WeightsWriter(bridge) as first:
            first.publish(1, tensors(1))
        process = child(
            """
import time
from shmbridge.weights import WeightsWriter
writer = WeightsWriter(bridge)
print("ready", flush=True)
time.sleep(60)
"""
        )
        with pytest.raises(shmbridge.ConsumerTaken, match=f"living writer: pid {process.pid} "):
            WeightsWriter(bridge)


def test_a_successor_may_bring_another_model(bridge) -> None:
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(1, tensors(1))
        with WeightsWriter(bridge) as second:
            second.publish(2, [("other", np.arange(3))])
        with reader.lease() as lease:
            assert list(lease.tensors) == ["other"]


def test_numbers_of_the_other_byte_order_arrive_as_numbers(ends) -> None:
    writer, reader = ends
    writer.publish(
        1, [("swapped", np.arange(5, dtype=">f4")), ("strided", np.arange(10, dtype=np.int16)[::2])]
    )
    with reader.lease() as lease:
        assert lease.tensors["swapped"].tolist() == [0, 1, 2, 3, 4]
        assert lease.tensors["strided"].tolist() == [0, 2, 4, 6, 8]


def test_every_float8_keeps_its_bits(ends) -> None:
    writer, reader = ends
    raw = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    dtypes = [
        torch.float8_e4m3fn,
        torch.float8_e4m3fnuz,
        torch.float8_e5m2,
        torch.float8_e5m2fnuz,
        torch.float8_e8m0fnu,
    ]
    writer.publish(1, [(str(dtype), raw.view(dtype).T) for dtype in dtypes])
    with reader.lease() as lease:
        for dtype in dtypes:
            assert lease.dtypes[str(dtype)] == str(dtype).removeprefix("torch.")
            assert (lease.tensors[str(dtype)] == raw.numpy().T).all()


def test_a_model_of_no_tensors_is_one(ends) -> None:
    writer, reader = ends
    for version in (1, 2):
        writer.publish(version, [])
        with reader.lease() as lease:
            assert (lease.version, dict(lease.tensors), lease.changed_since(1)) == (version, {}, frozenset())


def test_leases_of_one_reader_are_counted(ends) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with reader.lease() as outer:
        with reader.lease():
            pass
        writer.publish(2, tensors(2))
        with pytest.raises(shmbridge.WeightsBusy):
            writer.publish(3, tensors(3), timeout_s=0.05)
        assert (outer.tensors["w"] == 1).all()
    writer.publish(3, tensors(3), timeout_s=0.05)


def test_a_copy_is_ones_own_and_holds_nothing_afterwards(ends) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    version, copied = reader.copy()
    for number in (2, 3, 4):
        writer.publish(number, tensors(number), timeout_s=0.05)
    assert version == 1
    assert (copied["w"] == 1).all()
    assert copied["b"].dtype == np.uint16
    version, again = reader.copy(copied)
    assert (version, again["w"] is copied["w"]) == (4, True)
    assert (copied["w"] == 4).all()


def test_a_copy_holds_its_slot_until_the_last_byte_is_copied(ends, monkeypatch) -> None:
    """The writer comes round before each tensor is copied: once into the other slot, then not."""
    writer, reader = ends
    writer.publish(1, tensors(1))
    copyto, refused = np.copyto, []

    def overtaken(to: np.ndarray, values: np.ndarray) -> None:
        for _ in range(2):
            try:
                writer.publish(writer.last_version + 1, tensors(writer.last_version + 1), timeout_s=0)
            except shmbridge.WeightsBusy as busy:
                refused.append(busy)
        copyto(to, values)

    monkeypatch.setattr(np, "copyto", overtaken)
    version, copied = reader.copy()
    assert len(refused) == 3
    assert (version, copied["w"][0, 0], copied["w"][-1, -1]) == (1, 1, 1)


@pytest.mark.parametrize(
    "wrong", [None, np.zeros((5, 3), np.float32), np.zeros((3, 5)), np.zeros((3, 10), np.float32)[:, ::2]]
)
def test_a_copy_goes_into_arrays_that_fit(ends, wrong) -> None:
    writer, reader = ends
    writer.publish(1, tensors(1))
    with pytest.raises(shmbridge.WeightsMismatch, match="tensor 'w'"):
        reader.copy({} if wrong is None else {"w": wrong})


@pytest.mark.parametrize("wanted", [None, 2])
def test_a_lease_that_the_writer_came_round_before_is_of_what_is_there(ends, monkeypatch, wanted) -> None:
    """Between reading the version and locking its slot, two others are published; the second of them is in
    that slot.
    """
    writer, reader = ends
    for version in (1, 2):
        writer.publish(version, tensors(version))

    def overtaken(*arguments: int) -> bool:
        monkeypatch.undo()
        for version in (3, 4):
            writer.publish(version, tensors(version))
        return locks.lock_shared(*arguments)

    monkeypatch.setattr("shmbridge.weights.reader.lock_shared", overtaken)
    if wanted is None:
        with reader.lease() as lease:
            assert (lease.version, lease.tensors["w"][0, 0]) == (4, 4)
    else:
        with pytest.raises(shmbridge.NotReady, match="version 2"), reader.lease(version=wanted):
            pytest.fail("it is not there any more")
    writer.publish(5, tensors(5), timeout_s=0)
    writer.publish(6, tensors(6), timeout_s=0)


@pytest.mark.parametrize("written", [0, 1, 2])
def test_a_version_whose_slot_is_being_filled_again_cannot_be_leased(ends, written) -> None:
    """Some of its bytes are of a version that was never committed."""
    writer, reader = ends
    for version in (1, 2):
        writer.publish(version, tensors(version))
    found = reader._current()
    assert found.holds(0, 1)
    with (
        pytest.raises(ZeroDivisionError),
        writer.fill(3, [("w", "float32", (3, 5)), ("b", "bfloat16", (7,))]) as filling,
    ):
        for name, tensor in tensors(3)[:written]:
            filling.write(name, tensor)
        raise ZeroDivisionError
    assert not found.holds(0, 1)
    with pytest.raises(shmbridge.NotReady, match="version 1"), reader.lease(version=1):
        pytest.fail("it is torn")
    with reader.lease() as lease:
        assert (lease.version, lease.tensors["w"][0, 0]) == (2, 2)


def test_waiting_ends_with_the_next_version(bridge, ends, child) -> None:
    writer, reader = ends
    with pytest.raises(shmbridge.NotReady, match="no weights on bridge"):
        reader.wait(None, timeout_s=0.02)
    writer.publish(1, tensors(1))
    assert reader.wait(None, timeout_s=0) == 1
    with pytest.raises(shmbridge.NotReady, match="but 1 within"):
        reader.wait(1, timeout_s=0.02)
    waiting = child(
        """
from shmbridge.weights import WeightsReader
reader = WeightsReader(bridge)
print("ready", flush=True)
print(*(reader.wait(version, 30) for version in (1, 2, 3)), reader.late_wakes)
"""
    )
    for version in (2, 3, 4):
        writer.publish(version, tensors(version))
        reader.wait(version - 1, timeout_s=1)
        time.sleep(0.02)  # for the child to go back to sleep, so that it sees each
    assert waiting.communicate(timeout=30)[0].split()[-1] == "0"


def test_waiting_goes_on_with_another_segment(bridge) -> None:
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as first:
            first.publish(7, tensors(7))
        assert reader.wait(None, timeout_s=1) == 7
        with WeightsWriter(bridge) as second:
            second.publish(8, [("other", np.arange(3))])
        assert reader.wait(7, timeout_s=1) == 8
        assert reader.late_wakes == 0


def test_a_part_is_not_taken_for_the_whole(ends) -> None:
    class Sharded(torch.Tensor):
        """As a DTensor: its shape is that of the whole."""

        def full_tensor(self) -> torch.Tensor:
            raise AssertionError("a collective, in the midst of a write")

    with pytest.raises(shmbridge.WeightsMismatch, match=r"'part' is a DTensor \[3\]"):
        ends[0].publish(1, [("part", torch.zeros(3).as_subclass(Sharded))])


@pytest.mark.filterwarnings("ignore::UserWarning")  # of kinds of tensors that are in beta
@pytest.mark.parametrize("form", ["meta", "sparse", "csr", "nested", "lazy"])
def test_a_tensor_without_plain_values_is_refused_by_name_and_the_rest_stays(ends, form) -> None:
    writer, reader = ends
    w = torch.eye(3)
    made = {
        "meta": lambda: w.to("meta"),
        "sparse": w.to_sparse,
        "csr": w.to_sparse_csr,
        "nested": lambda: torch.nested.nested_tensor([w[0], w[1]]),
        "lazy": torch.nn.parameter.UninitializedParameter,
    }[form]()
    for changed_only in (False, True):
        with pytest.raises(shmbridge.WeightsMismatch, match=r"tensor 'w' .* has no values in one piece"):
            writer.publish(2, [("w", made)], changed_only=changed_only)
        if not changed_only:
            writer.publish(1, [("w", w)])
    assert reader.copy()[0] == 1


def test_a_tensor_that_is_negated_when_read_arrives_as_it_reads(ends) -> None:
    ends[0].publish(1, [("w", torch._neg_view(torch.ones(3)))])
    assert ends[1].copy()[1]["w"].tolist() == [-1, -1, -1]


def test_another_builds_weights_are_refused_with_both_versions(bridge, ends) -> None:
    ends[0].publish(1, tensors(1))
    memoryview(open_mapping(weights_name(bridge)))[8:12] = struct.pack("<I", 7)
    with (
        WeightsReader(bridge) as fresh,
        pytest.raises(shmbridge.LayoutMismatch, match="layout version 7, this build has 2"),
    ):
        fresh.version  # noqa: B018, it looks


def test_a_closed_reader_says_so(bridge) -> None:
    reader = WeightsReader(bridge)
    reader.close()
    reader.close()
    with pytest.raises(shmbridge.Closed):
        reader.wait(None, 1)


@pytest.mark.parametrize("version", [-1, 1 << 60])
def test_versions_are_counted_from_zero(ends, version) -> None:
    with pytest.raises(ValueError, match="from 0"):
        ends[0].publish(version, tensors(0))


def test_a_closed_writer_says_so(bridge) -> None:
    writer = WeightsWriter(bridge)
    writer.close()
    writer.close()
    with pytest.raises(shmbridge.Closed):
        writer.publish(1, tensors(1))


def test_tensors_that_no_reader_could_take_are_not_published(ends) -> None:
    writer, reader = ends
    with pytest.raises(shmbridge.WeightsMismatch, match=r"'when' is datetime64\[s\]\[4\]"):
        writer.publish(1, [("when", np.zeros(4, "datetime64[s]"))])
    assert reader.version is None


def test_a_version_that_somebody_holds_can_be_had_by_number(bridge):
    """One process finds the newest version and tells others, which can lease it while the learner goes on."""
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader, WeightsReader(bridge) as other:
        writer.publish(1, {"a": np.full(4, 1.0)}.items())
        with reader.lease() as held:
            writer.publish(2, {"a": np.full(4, 2.0)}.items())
            with other.lease(version=1) as lease:
                assert (lease.version, lease.tensors["a"].tolist()) == (held.version, [1.0] * 4)
            with other.lease(version=2) as lease, pytest.raises(shmbridge.WeightsBusy):
                writer.publish(3, {"a": np.full(4, 3.0)}.items(), timeout_s=0.05)
            with other.lease() as lease:
                assert lease.version == 2
        writer.publish(3, {"a": np.full(4, 3.0)}.items())
        for gone in (1, 4):
            with (
                pytest.raises(shmbridge.NotReady, match=rf"version {gone} .* holds 3"),
                other.lease(version=gone, timeout_s=60),
            ):
                pass


def test_the_same_number_in_another_segment_is_another_version(bridge):
    with WeightsReader(bridge) as reader:
        for value in (1.0, 2.0):
            with WeightsWriter(bridge) as writer:
                writer.publish(5, {"a": np.full(4, value)}.items())
            assert reader.wait(5 if value == 2.0 else None, timeout_s=10) == 5
            with reader.lease() as lease:
                assert lease.tensors["a"].tolist() == [value] * 4
            with pytest.raises(shmbridge.NotReady):
                reader.wait(5, timeout_s=0.01)
            posix_ipc.unlink_shared_memory(weights_name(bridge))


def test_a_reader_that_is_told_what_somebody_else_has_waits_for_another(bridge):
    with WeightsWriter(bridge) as writer, WeightsReader(bridge) as reader:
        writer.publish(5, {"a": np.full(4, 1.0)}.items())
        with pytest.raises(shmbridge.NotReady):
            reader.wait(5, timeout_s=0.01)


def test_tensors_that_publish_on_their_way_leave_no_lower_version(bridge) -> None:
    def tensors(version: int) -> list[tuple[str, np.ndarray]]:
        return [("w", np.full(4, version, np.float32))]

    with WeightsReader(bridge) as reader, WeightsWriter(bridge) as writer:

        def on_the_way():
            writer.publish(5, tensors(5))
            yield from tensors(3)

        with pytest.raises(ValueError, match="not after 5"):
            writer.publish(3, on_the_way())
        assert (writer.last_version, reader.version) == (5, 5)
