"""A broken peer's writes cost only that peer's records: typed errors, refused lanes, groups discarded and
counted.
"""

import os
import struct
import subprocess
import time

import pyarrow as pa
import pytest

import shmbridge
from shmbridge._ext import header
from shmbridge.hub import LaneSet
from shmbridge.schema import Columns, standard_columns
from shmbridge.segments import MOUNT, DeathWatch, control_name, open_mapping, pid_namespace

PID_AT, HUB_EPOCH_AT, TABLE_AT, DEFINITION = 12, 0x110, 4096, 64
NOTE = pa.schema(
    [
        pa.field("note", pa.int32(), metadata={"per": "record"}),
        pa.field("says", pa.utf8(), metadata={"per": "record"}),
    ]
)


def scribble(name: str, at: int, raw: bytes) -> None:
    memoryview(open_mapping(name))[at : at + len(raw)] = raw


def overwrite(name: str, found: bytes, raw: bytes) -> None:
    """Replaces bytes that stand once in a segment."""
    memory = bytes(memoryview(open_mapping(name)))
    assert memory.count(found) == 1
    scribble(name, memory.index(found), raw)


# -- records
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("prefetch", [0, 1])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_a_group_that_fits_no_batch_is_counted_and_the_others_are_batched(
    make_producer, consumer, prefetch, layout
) -> None:
    broken, whole = make_producer(), make_producer()
    broken.put({"tokens": [[1]], "instance_id": ["overwritten"]})
    overwrite(broken.lane_name, b"overwritten", b"\xff" * 11)
    broken.put({"tokens": [[2]]})
    whole.put({"tokens": [[3]]})
    whole.put({"tokens": [[4]]})
    consumer.drain()
    batches = [
        sorted(batch.tokens.ravel().tolist())
        for batch in consumer.batches(groups=3, prefetch=prefetch, layout=layout)
    ]
    assert batches == [[2, 3, 4]]
    stats = consumer.stats()
    assert (stats["discarded_total{corrupt}"], stats["released_total"], stats["held"]) == (1, 3, 0)


def test_a_batch_that_fails_for_no_group_of_its_own_loses_none(make_producer, consumer, monkeypatch) -> None:
    producer = make_producer()
    producer.put({"tokens": [[1]]})
    producer.put({"tokens": [[2]]})
    with monkeypatch.context() as patch:
        patch.setattr(
            "shmbridge.hub.former.Batch", lambda *_: (_ for _ in ()).throw(MemoryError("no room today"))
        )
        with pytest.raises(MemoryError):
            next(consumer.batches(groups=2, prefetch=0))
    assert next(consumer.batches(groups=2, prefetch=0)).tokens.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "found", "raw", "read"),
    [
        ({"instance_id": ["abcdefgh"]}, b"abcdefgh", b"\xff", lambda record: record["instance_id"]),
        (
            {"reward_components": [{"abcdefgh": 1.0}]},
            b"abcdefgh",
            b"\xff",
            lambda record: record["reward_components"],
        ),
        ({"messages": ['["abcdefgh"]']}, b'["abcdefgh"]', b"{", lambda record: record.json("messages")),
        ({"messages": ['["abcdefgh"]']}, b'["abcdefgh"]', b'["\xff', lambda record: record.json("messages")),
        (
            {"messages": ["[" * 500 + "]" * 500] * 1},
            b"[" * 500,
            b"[" * 1000,
            lambda record: record.json("messages"),
        ),
        ({"extra": '["abcdefgh"]'}, b'["abcdefgh"]', b"[,", lambda record: record.to_scored_data()),
        ({"instance_id": ["abcdefgh"]}, b"abcdefgh", b"\xff", lambda record: record.to_arrow()),
    ],
)
def test_text_that_is_none_is_one_typed_error(producer, consumer, column, found, raw, read) -> None:
    producer.put({"tokens": [[1]], **column})
    overwrite(producer.lane_name, found, raw)
    record = consumer.get(timeout_s=5)
    with pytest.raises(shmbridge.RecordUnreadable, match=next(iter(column))) as caught:
        read(record)
    assert (caught.value.code, bool(caught.value.hint)) == ("SB205", True)
    assert record["tokens"].values.tolist() == [1]


def test_a_column_of_the_record_has_one_value(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(schema=NOTE), make_consumer(schema=NOTE)
    for wrong in ({"note": [1, 2]}, {"says": ["a", "b"]}):
        for foreign in (False, True):
            with pytest.raises(shmbridge.InvalidRecord, match="has length 2, and is one per record"):
                producer.put({"tokens": [[1], [2]], **wrong}, foreign=foreign)
    assert consumer.poll() == []
    producer.put({"tokens": [[1], [2]], "note": [7], "says": ["a"]})
    record = consumer.get(timeout_s=5)
    arrow = record.to_arrow()
    assert arrow.to_pydict() == {"tokens": [[1], [2]], "note": [7, 7], "says": ["a", "a"]}
    producer.put(arrow)
    again = consumer.get(timeout_s=5)
    assert (again["note"].tolist(), again["says"]) == ([7], ["a"])
    with producer.claim(rows=2, lengths={"tokens": [1, 1], "note": None}) as slot:
        slot["tokens"][:], slot["note"][:] = [1, 2], 9
    assert next(consumer.batches(groups=1, prefetch=0))["note"].tolist() == [9, 9]


# -- lanes
# ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def watch():
    """Call it with the function of a tick; returns the watch and the list of its ticks' times."""
    made = []

    def start(tick):
        ticks: list[float] = []

        def on_tick() -> bool:
            ticks.append(time.monotonic())
            return tick(len(ticks))

        made.append(DeathWatch(lambda _: None, on_tick))
        return made[-1], ticks

    yield start
    for each in made:
        each.stop()


def test_the_death_watch_outlives_whatever_a_round_raises(watch, until) -> None:
    def tick(number: int) -> bool:
        if number == 1:
            raise OverflowError("a number that cannot be")
        return False

    death_watch, ticks = watch(tick)
    death_watch.nudge()
    until(lambda: len(ticks) >= 2)


def test_a_pid_of_another_process_that_ends_does_not_spin_the_watch(producer, watch, until) -> None:
    other = subprocess.Popen(["sleep", "60"])
    death_watch, ticks = watch(lambda _: False)
    lane = open_mapping(producer.lane_name)
    death_watch.watch(producer.lane_name, lane, other.pid, pid_namespace())
    other.kill()
    other.wait()
    began = len(ticks)
    until(lambda: len(ticks) >= began + 3)
    first, last = ticks[began], ticks[-1]
    assert len(ticks) - began < 20 + 40 * (last - first), (
        f"{len(ticks) - began} rounds in {last - first:.3f} s"
    )
    time.sleep(0.5)
    assert len(ticks) < began + 30


def garbage(raw: bytes, at: int):
    return lambda name: scribble(name, TABLE_AT + at, raw)


@pytest.mark.parametrize(
    "spoil",
    [
        garbage(b"\x4d", 2 * DEFINITION + 56),
        garbage(standard_columns().encode()[64:128], 2 * DEFINITION),
        garbage(b"\x80", DEFINITION + 59),
        garbage(b"TOKENS", 0),
        garbage(b"\0\5\4", DEFINITION + 56),
    ],
    ids=["kind", "name twice", "flags", "no tokens", "a standard column of another type"],
)
def test_a_lane_whose_columns_cannot_be_is_refused_and_no_other(make_producer, make_consumer, spoil) -> None:
    broken, whole = make_producer(), make_producer()
    broken.put({"tokens": [[1]]})
    whole.put({"tokens": [[2]]})
    spoil(broken.lane_name)
    consumer = make_consumer()
    assert [record["tokens"].values.tolist() for record in consumer.poll()] == [[2]]
    assert consumer.stats()["lanes_refused"] == 1


def definition(name: bytes, kind: int, code: int, size: int, flags: int) -> bytes:
    return struct.pack("<56sBBBBI", name, kind, code, size, flags, 0)


@pytest.mark.parametrize(
    "table",
    [
        definition(b"a", 0, 4, 4, 0) * 2,
        definition(b"a", 4, 4, 4, 2),
        definition(b"a", 0, 4, 4, 4),
        definition(b"", 0, 4, 4, 0),
        definition(b"a\0b", 0, 4, 4, 0),
    ],
    ids=["name twice", "bytes of int32", "unknown flag", "no name", "a name with a zero in it"],
)
def test_a_column_table_that_cannot_be(table) -> None:
    with pytest.raises(shmbridge.SchemaMismatch):
        Columns.decode(table)


def test_a_lane_that_says_it_holds_more_than_there_is_ends_the_backlog() -> None:
    class Lying:
        waiting, calls = 2**64 - 1, 0

        def take(self) -> None:
            self.calls += 1
            assert self.calls < 100, "it is asked for ever"

    assert list(LaneSet.take_backlog([Lying()])) == []


@pytest.mark.parametrize(
    ("at", "raw"),
    [("slot", struct.pack("<QQ", 64, 2**64 - 1)), ("wanted", struct.pack("<Q", 2**64 - 1))],
    ids=["extent beyond 64 bits", "wanted"],
)
def test_a_starving_lane_with_words_that_cannot_be_starves(make_producer, make_consumer, at, raw) -> None:
    producer, consumer = make_producer(on_full="raise"), make_consumer()
    producer.put({"tokens": [[1] * 8000]})
    producer.put({"tokens": [[1] * 8000]})
    held = consumer.poll()
    with pytest.raises(shmbridge.LaneFull):
        producer.put({"tokens": [[1] * 8000]})
    lane = next(iter(consumer._lanes))
    assert lane.waits_for_space
    _, slots, *_ = header.lane_geometry(producer.lane_bytes, 64)
    memory = bytes(memoryview(open_mapping(producer.lane_name)))[:TABLE_AT]
    place = slots + 16 if at == "slot" else memory.index(struct.pack("<Q", lane.reader.wanted_bytes))
    scribble(producer.lane_name, place, raw)
    assert lane.waits_for_space
    assert len(held) == 2


# -- the bridge
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("epoch", [2**31, 2**62, 2**64 - 1])
def test_a_count_of_consumers_that_cannot_be_is_a_typed_error(bridge, producer, epoch) -> None:
    with shmbridge.Rank(bridge, 0, 1) as inside:
        scribble(control_name(bridge), HUB_EPOCH_AT, struct.pack("<Q", epoch))
        with pytest.raises(shmbridge.LayoutMismatch, match=str(epoch)):
            shmbridge.Consumer(bridge)
        with pytest.raises(shmbridge.LayoutMismatch, match=str(epoch)):
            inside.next_share(timeout_s=0.1)


def test_a_hub_outlives_a_count_of_consumers_that_cannot_be(bridge, producer, consumer) -> None:
    scribble(control_name(bridge), HUB_EPOCH_AT, struct.pack("<Q", 2**64 - 1))
    consumer._lanes.look_for_ranks()
    producer.put({"tokens": [[1]]})
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [1]


@pytest.mark.parametrize("suffix", ["c", "s"])
def test_a_folder_for_the_control_segment_is_a_typed_error_and_a_file_for_the_socket_is_nothing(
    bridge, suffix
) -> None:
    path = MOUNT / f"shmbridge.{bridge}.{suffix}"
    path.write_text("") if suffix == "s" else path.mkdir()
    try:
        shmbridge.list_bridges()
        shmbridge.clean(bridge, dry_run=False)
        if suffix == "c":
            with pytest.raises(shmbridge.LayoutMismatch, match="no segment"):
                shmbridge.Producer(bridge)
        shmbridge.clean(bridge, dry_run=False)
    finally:
        path.unlink() if suffix == "s" else os.rmdir(path)


def test_a_name_that_is_no_text_leaves_no_lane(bridge, segments) -> None:
    with pytest.raises(ValueError, match="not Unicode text"):
        shmbridge.Producer(bridge, env_name="\ud800", producer_id="p")
    assert segments() == []
