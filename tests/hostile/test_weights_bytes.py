"""A weights segment is scribbled over: a reader gets a typed error or nothing, or weights that are whole; a new writer begins anew."""

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
from shmbridge import segment
from shmbridge.weights import WeightsReader, WeightsWriter

TABLE_AT, LATEST_AT = 4096, 128
WORDS = {
    "magic": 0,
    "layout_version": 8,
    "table_bytes": 16,
    "data_at": 24,
    "slot_bytes": 32,
    "latest": LATEST_AT,
    "slot_0": 136,
    "slot_1": 144,
}
VALUES = np.arange(8, dtype=np.float32)


@pytest.fixture
def weights(bridge) -> Iterator[tuple[str, mmap.mmap]]:
    """A bridge with one version of weights, the bytes of their segment, and a writer that is alive."""
    with WeightsWriter(bridge) as writer:
        writer.publish(1, [("a", VALUES)])
        writer.publish(2, [("a", VALUES + 1)])
        with open(f"/dev/shm{segment.weights_name(bridge)}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            yield bridge, memory


def look(bridge: str) -> dict[str, np.ndarray] | None:
    """What a reader gets: tensors, or None and a typed error. Anything else it raises is the test's failure."""
    with WeightsReader(bridge) as reader:
        with contextlib.suppress(shmbridge.ShmBridgeError):
            assert reader.version is None or isinstance(reader.version, int)
        with contextlib.suppress(shmbridge.ShmBridgeError), reader.lease(timeout_s=0.002) as lease:
            for name, tensor in lease.tensors.items():
                assert tensor.tobytes() is not None, name
            return {name: tensor.copy() for name, tensor in lease.tensors.items()}
    return None


def write_table(memory: mmap.mmap, raw: bytes) -> None:
    memory[16:24] = struct.pack("<Q", len(raw))
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
        assert found is None or any(np.array_equal(found.get("a"), VALUES + version) for version in (0, 1)), f"{word} = {value}: {found}"
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
    """Outside its slot, misaligned, of no number's type, or of another size than its shape: none is handed out."""
    bridge, memory = weights
    for lie in LIES:
        write_table(memory, msgspec.json.encode([["a", *lie]]))
        found = look(bridge)
        assert found is None or found["a"].size == 0, f"{lie}: {found}"


@settings(derandomize=True, database=None, max_examples=80, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    changes=st.lists(
        st.tuples(st.one_of(st.integers(0, 160), st.integers(TABLE_AT, TABLE_AT + 40)), st.integers(0, 255)), min_size=1, max_size=6
    )
)
def test_whatever_hypothesis_writes(weights, changes) -> None:
    bridge, memory = weights
    before = memory[:8192]
    for at, value in changes:
        memory[at] = value
    try:
        look(bridge)
    finally:
        memory[:8192] = before


def test_a_short_segment(bridge) -> None:
    path = f"/dev/shm{segment.weights_name(bridge)}"
    for size in (0, 1, 4095, 4096, 8191):
        with open(path, "wb") as file:
            file.write(b"\x5a" * size)
        assert look(bridge) is None


@pytest.mark.parametrize("table", [b"{", b"\xff\xfe", msgspec.json.encode([["a", "float32", [8], 0, 32]])])
def test_a_writer_begins_anew_on_a_dead_one_s_garbage(bridge, table) -> None:
    """Somebody takes part all the time, so that the remains are not swept."""
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer:
            writer.publish(1, [("a", VALUES)])
        with open(f"/dev/shm{segment.weights_name(bridge)}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            write_table(memory, table)
            memory[32:40] = struct.pack("<Q", 1)  # slots of one byte
        with WeightsWriter(bridge) as writer:
            writer.publish(7, [("a", VALUES + 7)])
            with reader.lease(timeout_s=2) as lease:
                assert np.array_equal(lease.tensors["a"], VALUES + 7)


def test_the_mount_is_looked_at_with_garbage_weights(bridge, look_around: Callable[[str], None]) -> None:
    with WeightsWriter(bridge), open(f"/dev/shm{segment.weights_name(bridge)}", "wb") as file:
        file.write(b"\xff" * 9000)
        file.flush()
        look_around(bridge)
