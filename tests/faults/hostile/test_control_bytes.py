"""The control segment is scribbled over: a new participant gets a typed error, present ones go on, an
inspection from outside may show it.
"""

import mmap
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.segments import control_name
from shmbridge.weights import WeightsReader, WeightsWriter

WORDS = {
    "magic": (0, 8),
    "layout_version": (8, 4),
    "creator_pid": (12, 4),
    "created_ns": (16, 8),
    "hub_pid": (0x100, 8),
    "hub_pid_namespace": (0x108, 8),
    "hub_epoch": (0x110, 8),
    "run_epoch": (0x118, 8),
    "policy_version": (0x120, 8),
    "paused": (0x128, 8),
    "draining": (0x130, 8),
    "column_count": (0x138, 8),
    "hub_sleeping": (0x180, 4),
    "doorbell": (0x200, 4),
    "arrivals": (0x280, 4),
    "weights_floor": (0x300, 8),
}
COMERS = (
    lambda bridge: shmbridge.Producer(bridge, lane_bytes="64K", on_full="drop"),
    shmbridge.Consumer,
    lambda bridge: shmbridge.Rank(bridge, 0, 1),
    WeightsReader,
    WeightsWriter,
)


@contextmanager
def control_bytes(bridge: str) -> Iterator[mmap.mmap]:
    with open(f"/dev/shm{control_name(bridge)}", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        yield memory


def come(bridge: str) -> list[str]:
    """Every kind of participant joins; returns the names of the typed errors."""
    met = []
    for comer in COMERS:
        try:
            comer(bridge).close()
        except shmbridge.ShmBridgeError as error:
            met.append(type(error).__name__)
    return met


@pytest.mark.parametrize("word", WORDS)
def test_control_words_may_hold_any_number(
    bridge, make_producer, look_around: Callable[[str], None], word
) -> None:
    producer = make_producer(on_full="drop")
    at, width = WORDS[word]
    with control_bytes(bridge) as memory:
        whole = memory[:4096]
        for value in (0, 1, 2**31, 2**63, 2**64 - 1):
            memory[at : at + width] = (value % (1 << 8 * width)).to_bytes(width, "little")
            look_around(bridge)
            come(bridge)
            memory[:4096] = whole
            assert come(bridge) == [], f"{word} = {value}: once the words are right again everybody can come"
    producer.close()


@pytest.mark.parametrize("word", [2**60 + 1, 2**63, 2**64 - 1])
def test_weights_of_a_version_that_cannot_be(bridge, word) -> None:
    """A writer of weights gets an error with the cause and the remedy, at once and later; readers go on;
    nothing is removed.
    """
    at, width = WORDS["weights_floor"]
    values = [("a", np.zeros(8, np.float32))]
    with WeightsReader(bridge) as reader:
        with WeightsWriter(bridge) as writer, control_bytes(bridge) as memory:
            writer.publish(1, values)
            memory[at : at + width] = word.to_bytes(width, "little")
            for call in (
                lambda: writer.publish(2, values),
                lambda: writer.last_version,
                lambda: writer.fill(2, []).__enter__(),
            ):
                with pytest.raises(
                    shmbridge.LayoutMismatch,
                    match=rf"weights had version {word - 1}, .* shmbridge clean <bridge> --yes",
                ):
                    call()
        with pytest.raises(shmbridge.LayoutMismatch, match="weights had version") as kept:
            WeightsWriter(bridge)
        with reader.lease(timeout_s=1) as lease:
            assert lease.version == 1
        with control_bytes(bridge) as memory:
            memory[at : at + width] = (5).to_bytes(width, "little")
        with WeightsWriter(bridge) as writer, pytest.raises(ValueError, match="is not after 4"):
            writer.publish(4, values)
        with control_bytes(bridge) as memory:
            memory[at : at + width] = word.to_bytes(width, "little")
        del kept
    assert not shmbridge.clean(bridge, dry_run=False).kept
    with WeightsWriter(bridge) as writer:
        writer.publish(0, values)


def test_a_wrong_magic_is_a_typed_error_and_keeps_no_lock(bridge, make_producer) -> None:
    make_producer()
    with control_bytes(bridge) as memory:
        memory[:8] = b"NOTSHMBR"
        caught = []
        for comer in COMERS:
            with pytest.raises(shmbridge.ShmBridgeError) as wrong:
                comer(bridge)
            caught.append(wrong.value)  # an error that is kept must not keep the bridge
        memory[:8] = b"SHBCTRL1"
        assert come(bridge) == []


@pytest.mark.parametrize("what", ["kind", "dtype", "item_bytes", "name", "count"])
def test_the_hub_s_column_table(bridge, make_consumer, what) -> None:
    """A new producer cannot compare its columns: a typed error, and the hub goes on with the present
    producers.
    """
    consumer = make_consumer()
    early = shmbridge.Producer(bridge, lane_bytes="64K")
    with control_bytes(bridge) as memory:
        whole = bytes(memory)
        at = {"kind": 4096 + 56, "dtype": 4096 + 57, "item_bytes": 4096 + 58, "name": 4096, "count": 0x138}[
            what
        ]
        memory[at : at + (1 if at > 4096 else 8)] = (
            b"\x63" if at > 4096 else struct.pack("<Q", 2**63 if what == "count" else 0)
        )
        with suppress(shmbridge.ShmBridgeError):
            shmbridge.Producer(bridge, lane_bytes="64K").close()
        early.put({"tokens": [[5]]})
        assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [5]
        memory[:] = whole
    early.close()


def test_a_short_or_empty_control_segment_is_made_whole(bridge) -> None:
    for size, filler in ((0, b""), (100, b"\0"), (4096, b"\0"), (20479, b"\0")):
        with open(f"/dev/shm{control_name(bridge)}", "wb") as file:
            file.write(filler * size)
        assert come(bridge) == [], f"a control segment of {size} bytes"


def test_a_control_segment_of_garbage(bridge, look_around: Callable[[str], None]) -> None:
    path = f"/dev/shm{control_name(bridge)}"
    for size in (8, 100, 4096, 20480, 1 << 20):
        with open(path, "wb") as file:
            file.write(b"\x5a" * size)
        look_around(bridge)
        assert len(come(bridge)) == len(COMERS), f"{size} bytes of garbage"
        assert control_name(bridge) in shmbridge.clean(bridge, dry_run=False).removed
        assert come(bridge) == []


@pytest.mark.parametrize("kind", ["directory", "fifo", "link", "dangling link"])
@pytest.mark.parametrize("of", ["lane", "weights"])
def test_an_object_with_the_name_of_a_segment_that_is_none(
    bridge, look_around: Callable[[str], None], tmp_path, kind, of
) -> None:
    path = f"/dev/shm/shmbridge.{bridge}." + ("w" if of == "weights" else "l.0123456789abcdef")
    (tmp_path / "target").write_bytes(b"\x5a" * 40960)
    make = {"directory": os.mkdir, "fifo": os.mkfifo}.get(
        kind, lambda at: os.symlink(tmp_path / kind.replace("link", "target").strip(), at)
    )
    make(path)
    try:
        assert come(bridge) == []
        look_around(bridge)
    finally:
        os.rmdir(path) if kind == "directory" else os.path.lexists(path) and os.unlink(path)
    assert (tmp_path / "target").read_bytes() == b"\x5a" * 40960


@settings(
    derandomize=True, database=None, max_examples=25, deadline=None, suppress_health_check=list(HealthCheck)
)
@given(
    changes=st.lists(
        st.tuples(st.one_of(st.integers(0, 0x310), st.integers(4096, 4096 + 31 * 64)), st.integers(0, 255)),
        min_size=1,
        max_size=8,
    )
)
def test_control_bytes_may_be_whatever_hypothesis_writes(make_producer, bridge, changes) -> None:
    make_producer().close()
    with shmbridge.Producer(bridge, lane_bytes="64K"), control_bytes(bridge) as memory:
        whole = bytes(memory)
        for at, value in changes:
            memory[at] = value
        come(bridge)
        memory[:] = whole
    assert come(bridge) == []
