"""A weights segment is scribbled over: a reader gets a typed error, nothing, or whole weights; a new writer
begins again.
"""

import contextlib
import mmap
import struct
from collections.abc import Callable, Iterator

import msgspec
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.segments import weights_name
from shmbridge.weights import WeightsPart, WeightsReader, WeightsWriter

TABLE_AT, LATEST_AT = 4096, 128
WORDS = {
    "magic": 0,
    "layout_version": 8,
    "table_bytes": 16,
    "data_at": 24,
    "slot_bytes": 32,
    "tensors": 40,
    "words_at": 48,
    "segment_id": 56,
    "filling": 256,
    "bell": 384,
    "latest": LATEST_AT,
    "slot_0": 136,
    "slot_1": 144,
}
VALUES = np.arange(8, dtype=np.float32)


@contextlib.contextmanager
def weights_bytes(bridge: str) -> Iterator[mmap.mmap]:
    with open(f"/dev/shm{weights_name(bridge)}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


@pytest.fixture
def weights(bridge) -> Iterator[tuple[str, mmap.mmap]]:
    """A bridge with one version of weights, the bytes of their segment, and a writer that is alive."""
    with WeightsWriter(bridge) as writer:
        writer.publish(1, [("a", VALUES)])
        writer.publish(2, [("a", VALUES + 1)])
        with weights_bytes(bridge) as memory:
            yield bridge, memory


def look(bridge: str) -> dict[str, np.ndarray] | None:
    """Returns what a reader gets: tensors, or None and a typed error. Any other exception fails the test."""
    with WeightsReader(bridge) as reader:
        with contextlib.suppress(shmbridge.ShmBridgeError):
            assert reader.version is None or isinstance(reader.version, int)
        with contextlib.suppress(shmbridge.ShmBridgeError):
            reader.wait(None, timeout_s=0.002)
        with contextlib.suppress(shmbridge.ShmBridgeError):
            reader.copy(timeout_s=0.002)
        with contextlib.suppress(shmbridge.ShmBridgeError), reader.lease(timeout_s=0.002) as lease:
            for name, tensor in lease.tensors.items():
                assert tensor.tobytes() is not None, name
            assert lease.changed_since(lease.version - 1) <= set(lease.dtypes)
            return {name: tensor.copy() for name, tensor in lease.tensors.items()}
    return None


def words_at(table_bytes: int) -> int:
    return TABLE_AT + -(-table_bytes // 8) * 8


def write_table(memory: mmap.mmap, raw: bytes) -> None:
    memory[16:24] = struct.pack("<Q", len(raw))
    memory[48:56] = struct.pack("<Q", words_at(len(raw)))
    memory[TABLE_AT : TABLE_AT + len(raw)] = raw


def test_untouched_weights_are_read(weights) -> None:
    bridge, _ = weights
    assert np.array_equal(look(bridge)["a"], VALUES + 1)


@pytest.mark.parametrize("word", WORDS)
def test_words_of_the_header(weights, word) -> None:
    bridge, memory = weights
    at, whole = WORDS[word], memory[:TABLE_AT]
    for value in (0, 1, 2, 7, 63, 4095, 4097, 2**31, 2**32, 2**63, 2**64 - 4096, 2**64 - 1):
        memory[at : at + 8] = struct.pack("<Q", value)
        found = look(bridge)
        assert found is None or any(np.array_equal(found.get("a"), VALUES + version) for version in (0, 1)), (
            f"{word} = {value}: {found}"
        )
        memory[:TABLE_AT] = whole


def test_words_that_wrap_when_they_are_added(weights) -> None:
    bridge, memory = weights
    memory[24:40] = struct.pack("<QQ", 2**64 - 4096, 2048)
    assert look(bridge) is None


def test_the_version_before_the_first_is_none(weights) -> None:
    """latest = 1 means version -1, which a slot that was never filled holds."""
    bridge, memory = weights
    memory[LATEST_AT : LATEST_AT + 24] = struct.pack("<QQQ", 1, 0, 0)
    assert look(bridge) is None


def words_of_tensor(memory: mmap.mmap) -> dict[str, int]:
    """Places of the words of the one tensor there is."""
    (begin,) = struct.unpack("<Q", memory[48:56])
    return {
        name: begin + 8 * number
        for number, name in enumerate(("written", "stamp_0", "reserved_0", "stamp_1", "reserved_1"))
    }


@pytest.mark.parametrize("word", [(2**60 + 1) * 2, 2**63, 2**64 - 2])
def test_a_version_that_cannot_be_is_none(bridge, word) -> None:
    """Slot and word agree on it, but readers have no version, and the next writer goes on and is not refused
    for ever.
    """
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(1, [("a", VALUES)])
        with weights_bytes(bridge) as memory:
            memory[LATEST_AT : LATEST_AT + 16] = struct.pack("<QQ", word, word // 2)
        assert reader.version is None
        for name in ("a", "b"):
            with WeightsWriter(bridge) as writer:
                version = 2 if writer.last_version is None else writer.last_version + 1
                writer.publish(version, [(name, VALUES + 2)])
            assert reader.version == version


@pytest.mark.parametrize(
    "word", ["layout_version", "table_bytes", "data_at", "slot_bytes", "tensors", "words_at"]
)
def test_the_version_of_remains_is_not_forgotten(bridge, word) -> None:
    """A version on which two words agree was there, and readers have seen it, whatever happened to the rest
    of the header.
    """
    with WeightsReader(bridge):
        with WeightsWriter(bridge) as writer:
            writer.publish(7, [("a", VALUES)])
        with weights_bytes(bridge) as memory:
            memory[WORDS[word] : WORDS[word] + 8] = struct.pack("<Q", 2**40 - 1)
        with WeightsWriter(bridge) as writer:
            assert writer.last_version == 7
            with pytest.raises(ValueError, match="is not after 7"):
                writer.publish(7, [("a", VALUES)])
            writer.publish(8, [("a", VALUES)])


@pytest.mark.parametrize("value", [0, 1, 2, 4, 2**32, 2**63, 2**64 - 1])
@pytest.mark.parametrize("word", ["written", "stamp_0", "reserved_0", "stamp_1", "reserved_1"])
def test_words_of_a_tensor(weights, word, value) -> None:
    """The values are still there; `changed_since` returns all names, or those that the stamps give."""
    bridge, memory = weights
    at = words_of_tensor(memory)[word]
    memory[at : at + 8] = struct.pack("<Q", value)
    assert np.array_equal(look(bridge)["a"], VALUES + 1)
    with WeightsReader(bridge) as reader, reader.lease() as lease:
        assert lease.version == 2
        said = "a" in lease.changed_since(1)
        assert said == (word != "stamp_1" or value not in (1, 2)), "version 2 is in slot 1: its stamp is 3"


@pytest.mark.parametrize("word", [*WORDS, "written", "stamp_0", "reserved_0", "stamp_1", "reserved_1"])
def test_a_writer_goes_on_over_garbage_words_or_says_why(bridge, word) -> None:
    """Whatever a dead writer's words were, its successor publishes whole versions or begins again; readers
    see them.
    """
    for value in (0, 1, 7, 2**32, 2**63, 2**64 - 1):
        with WeightsReader(bridge) as reader:
            with WeightsWriter(bridge) as writer:
                writer.publish(1 if writer.last_version is None else writer.last_version + 1, [("a", VALUES)])
            with weights_bytes(bridge) as memory:
                at = (WORDS | words_of_tensor(memory))[word]
                memory[at : at + 8] = struct.pack("<Q", value)
            with WeightsWriter(bridge) as writer:
                version = 5 if writer.last_version is None else writer.last_version + 1
                for number in (version, version + 1):
                    writer.publish(number, [("a", VALUES + number)])
                    with WeightsReader(bridge) as fresh, fresh.lease(timeout_s=2) as lease:
                        assert lease.version == number
                        assert np.array_equal(lease.tensors["a"], VALUES + number)
                with (
                    writer.fill(version + 2, [("a", "float32", (8,))]) as filling,
                    WeightsPart(bridge) as part,
                ):
                    part.write(filling.ticket, "a", VALUES + 3)
                with reader.lease(timeout_s=2) as lease:
                    assert np.array_equal(lease.tensors["a"], VALUES + 3)
                assert not lease.changed_since(version + 2)
                assert lease.changed_since(version + 1) == {"a"}


def test_a_part_meets_garbage(weights) -> None:
    """Words that are scribbled over while a filling is under way: a part writes where its own table says, or
    is refused.
    """
    bridge, memory = weights
    whole = memory[:8192]
    with WeightsPart(bridge) as fresh:
        for word, at in (WORDS | words_of_tensor(memory)).items():
            for value in (0, 1, 63, 4097, 2**32, 2**63, 2**64 - 1):
                ticket = {
                    "segment": f"{struct.unpack('<Q', whole[56:64])[0]:016x}",
                    "filling": 5,
                    "version": 3,
                }
                memory[256:264] = struct.pack("<Q", 5)
                memory[at : at + 8] = struct.pack("<Q", value)
                with contextlib.suppress(shmbridge.ShmBridgeError), WeightsPart(bridge) as part:
                    part.write(ticket, "a", VALUES)
                with contextlib.suppress(shmbridge.ShmBridgeError):
                    fresh.write(ticket, "a", VALUES, (slice(0, 8),))
                memory[:8192] = whole
    assert np.array_equal(look(bridge)["a"], VALUES + 1), (
        f"slot 1 is the newest, ticket 5 is for slot 0: {word}"
    )


TABLES = [
    b"",
    b"{",
    b"[[",
    b"{}",
    b"null",
    b"\xff\xfe",
    b'[["a"]]',
    b'[["a","float32",[8],0]]',
    b'[["a","float32",8,0,32]]',
    b"[" * 3000,
    b'[["\xff","float32",[8],0,32]]',
    b"[[1,2,3,4,5]]",
    b'[["a","float32",["8"],0,32]]',
]


def test_a_table_that_is_none(weights) -> None:
    bridge, memory = weights
    with WeightsReader(bridge) as reader:
        for table in TABLES:
            write_table(memory, table)
            with pytest.raises(shmbridge.ShmBridgeError), reader.lease(timeout_s=0.002):
                pytest.fail(f"weights by the table {table[:40]!r}")


LIES = [
    ("object", [8], 0, 32),
    ("float32", [8], -32, 32),
    ("float32", [9999], 0, 39996),
    ("zzz", [8], 0, 32),
    ("float32", [-1], 0, 32),
    ("float32", [8], 3, 32),
    ("float32", [8], 4096, 32),
    ("float32", [8], 64, 32),
    ("float32", [8], 0, 16),
    ("float32", [8], 0, -32),
    ("V99999999999", [8], 0, 32),
    ("i4,(2,2)f4", [1], 0, 20),
    ("float32", [2**62, 2**62], 0, 32),
    ("float32", [2**63], 0, 32),
    ("U8", [1], 0, 32),
    ("float32", [8], 2**63 - 1, 32),
    ("datetime64[s]", [4], 0, 32),
    ("float32", [-2, -4], 0, 32),
    ("float32", [0, 2**62], 0, 0),
    ("", [8], 0, 32),
    ("float32", [8], 2**64 - 64, 32),
]


def test_a_tensor_that_is_not_where_it_says(weights) -> None:
    """Outside its slot, misaligned, of no number's type, or of another size than its shape: none is handed
    out.
    """
    bridge, memory = weights
    for lie in LIES:
        write_table(memory, msgspec.json.encode([["a", *lie]]))
        found = look(bridge)
        assert found is None or found["a"].size == 0, f"{lie}: {found}"


@settings(
    derandomize=True, database=None, max_examples=80, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    changes=st.lists(
        st.tuples(
            st.one_of(st.integers(0, 160), st.integers(256, 264), st.integers(TABLE_AT, TABLE_AT + 90)),
            st.integers(0, 255),
        ),
        min_size=1,
        max_size=6,
    )
)
def test_weights_bytes_may_be_whatever_hypothesis_writes(weights, changes) -> None:
    bridge, memory = weights
    before = memory[:8192]
    for at, value in changes:
        memory[at] = value
    try:
        look(bridge)
    finally:
        memory[:8192] = before


def test_a_short_segment(bridge) -> None:
    path = f"/dev/shm{weights_name(bridge)}"
    for size in (0, 1, 4095, 4096, 8191):
        with open(path, "wb") as file:
            file.write(b"\x5a" * size)
        assert look(bridge) is None


@pytest.mark.parametrize("table", [b"{", b"\xff\xfe", msgspec.json.encode([["a", "float32", [8], 0, 32]])])
def test_a_writer_begins_again_on_a_dead_ones_garbage(bridge, table) -> None:
    """A participant is there all the time, so that the remains are not swept."""
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(1, [("a", VALUES)])
        with weights_bytes(bridge) as memory:
            write_table(memory, table)
            memory[32:40] = struct.pack("<Q", 1)  # slots of one byte
        with WeightsWriter(bridge) as writer:
            writer.publish(7, [("a", VALUES + 7)])
            with reader.lease(timeout_s=2) as lease:
                assert np.array_equal(lease.tensors["a"], VALUES + 7)


def test_the_mount_is_looked_at_with_garbage_weights(bridge, look_around: Callable[[str], None]) -> None:
    with WeightsWriter(bridge), open(f"/dev/shm{weights_name(bridge)}", "wb") as file:
        file.write(b"\xff" * 9000)
        file.flush()
        look_around(bridge)
