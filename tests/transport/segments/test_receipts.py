"""What a bridge has of each producer on another node is known from its lanes, and, once these are gone, from
their receipts.
"""

import json
import os
from pathlib import Path

import pytest

import shmbridge
from shmbridge.cli import main
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.record import memory_of, table_of
from shmbridge.segments import (
    LaneInfo,
    Receipt,
    close_origin,
    committed_here,
    forget_producer,
    membership,
    newest_relayed,
    read_receipts,
    remove_receipts,
    segment,
)

SOURCE = "gsm8k-12-0123456789abcdef"


@pytest.fixture(scope="module")
def sent() -> tuple[bytes, bytes, tuple[int, ...]]:
    """A record's memory, the table of its lane, the words of its slot."""
    name = f"t-receipts-{os.getpid()}"
    with shmbridge.Producer(name, lane_bytes="64K") as producer, shmbridge.Consumer(name) as consumer:
        producer.put({"tokens": [[1, 2]], "prompt_length": [0]})
        with consumer.get(timeout_s=5) as record:
            memory = memory_of(record)
            return bytes(memory.memory), table_of(record), memory.words


@pytest.fixture
def relay(make_producer, sent):
    """Opens a producer of a relay, and puts records of these sequences of its source."""

    def make(*sequences: int, newest: int | None = None, source: str = SOURCE) -> shmbridge.Producer:
        producer = make_producer(origin=LaneOrigin("env-2", source, newest))
        for sequence in sequences:
            producer.put(RelayedRecord(*sent, -1, -1, sequence, 0, 0))
        return producer

    return make


def take(consumer, count: int) -> None:
    for _ in range(count):
        consumer.get(timeout_s=5).release()


def receipt_path(lane: str) -> Path:
    bridge, number = lane[1:].split(".l.")
    return segment.MOUNT / f"{bridge}.r.{number}"


def test_a_removed_lane_leaves_a_receipt_for_its_last_record(bridge, relay, consumer, until) -> None:
    producer = relay(3, 4, 17)
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 17)}
    take(consumer, 3)
    producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    (receipt,) = read_receipts(bridge)
    assert (receipt.node, receipt.producer_id, receipt.sequence) == ("env-2", SOURCE, 17)
    path = receipt_path(producer.lane_name)
    assert f"/{path.name}" == receipt.name
    assert json.loads(path.read_text()) == {"node": "env-2", "producer_id": SOURCE, "sequence": 17}
    assert path.stat().st_mode & 0o777 == 0o600
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 17)}


def test_a_lane_whose_origin_is_closed_leaves_none(bridge, relay, consumer, until) -> None:
    producer = relay(3)
    producer.close_origin()
    take(consumer, 1)
    producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    assert read_receipts(bridge) == []
    assert newest_relayed(bridge) == {}


def test_a_dead_lane_whose_source_sends_nothing_again_leaves_none(bridge, relay, consumer, until) -> None:
    """Its next relay says so of it; a living lane and another source's are left alone."""
    dead, living, other = relay(3), relay(4), relay(5, source="other")
    dead.close()
    close_origin(bridge, SOURCE)
    take(consumer, 3)
    for producer in (living, other):
        producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    assert sorted((each.producer_id, each.sequence) for each in read_receipts(bridge)) == [
        (SOURCE, 4),
        ("other", 5),
    ]


def test_a_lane_of_this_node_leaves_none(bridge, producer, consumer, until) -> None:
    producer.put({"tokens": [[1]]})
    assert newest_relayed(bridge) == {}
    take(consumer, 1)
    producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    assert read_receipts(bridge) == []


def test_a_lane_that_took_nothing_says_what_earlier_ones_had(bridge, relay, until) -> None:
    relay().close()
    assert read_receipts(bridge) == []
    producer = relay(newest=9)
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 9)}
    producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 9)}


def test_the_newest_of_all_lanes_and_receipts_counts(bridge, relay, consumer, until) -> None:
    first = relay(1, 2)
    take(consumer, 2)
    first.close()
    until(lambda: segment.lane_names(bridge) == [])
    second, third = relay(3, newest=2), relay(6, 5 + 2, source="other")
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 3), "other": ("env-2", 7)}
    for each in (second, third):
        each.close()
    held = consumer.poll()
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 3), "other": ("env-2", 7)}
    for record in held:
        record.release()
    del held, record
    until(lambda: segment.lane_names(bridge) == [])
    assert [(each.producer_id, each.sequence) for each in read_receipts(bridge)].count((SOURCE, 2)) == 1
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 3), "other": ("env-2", 7)}


def test_a_lane_that_is_removed_while_one_looks_is_found_by_its_receipt(
    bridge, relay, monkeypatch, make_consumer
) -> None:
    producer, names = relay(5), segment.lane_names
    with make_consumer() as consumer:
        take(consumer, 1)
        monkeypatch.setattr(membership, "remove_lane", lambda *_, **__: (False, "not now", 0))
        producer.close()
    monkeypatch.undo()
    assert names(bridge) == [producer.lane_name]

    def swept(name: str) -> list[str]:
        monkeypatch.undo()
        membership.sweep_bridge(name)
        return names(name)

    monkeypatch.setattr(segment, "lane_names", swept)
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}
    assert names(bridge) == []


def test_who_comes_late_to_a_lane_leaves_no_receipt(bridge, relay, make_consumer, monkeypatch) -> None:
    """It had opened the lane before another one removed it, and the relay the receipt."""
    producer, opened = relay(5), segment.open_segment
    with make_consumer() as consumer:
        take(consumer, 1)

        def late(name: str, flags: int = 0):
            file = opened(name, flags)
            if name == producer.lane_name:
                monkeypatch.undo()
                producer.close()
                assert segment.lane_names(bridge) == []
                assert remove_receipts(bridge, lambda _: True) != []
            return file

        monkeypatch.setattr(membership, "open_segment", late)
        assert membership.remove_lane(producer.lane_name)[:2] == (False, "gone already")
    assert read_receipts(bridge) == []


def test_what_is_no_receipt_is_left_alone(bridge, relay, consumer, until, tmp_path) -> None:
    producer = relay(5)
    take(consumer, 1)
    producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    stem = f"shmbridge.{bridge}.r."
    whole = receipt_path(producer.lane_name).read_bytes()
    for number, text in enumerate((b"", whole[:-5], b"[]", b"\xff" * 5000, whole.replace(b"5", b"-5"))):
        (segment.MOUNT / f"{stem}{number:016x}").write_bytes(text)
    (tmp_path / "elsewhere").write_bytes(whole.replace(b"5", b"55"))
    os.symlink(tmp_path / "elsewhere", segment.MOUNT / f"{stem}{99:016x}")
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}
    os.unlink(segment.MOUNT / f"{stem}{99:016x}")


def test_a_lane_stays_until_its_receipt_is_written(bridge, relay, consumer, until) -> None:
    """Something is in the way of it: the next sweep tries again."""
    producer = relay(5)
    path = receipt_path(producer.lane_name)
    path.mkdir()
    try:
        take(consumer, 1)
        producer.close()
        until(lambda: consumer.stats()["lanes_dead"] == 1)
        kept = membership.sweep_bridge(bridge).kept[producer.lane_name]
        assert kept == "its receipt cannot be written: Is a directory"
        assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}
    finally:
        path.rmdir()
    until(lambda: segment.lane_names(bridge) == [])
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}


def test_the_relay_removes_what_nobody_needs(bridge, relay, consumer, until) -> None:
    for source, sequence in ((SOURCE, 5), ("other", 6)):
        producer = relay(sequence, source=source)
        take(consumer, 1)
        producer.close()
    until(lambda: segment.lane_names(bridge) == [])
    (name,) = (each.name for each in read_receipts(bridge) if each.producer_id == SOURCE)
    assert remove_receipts(bridge, lambda each: each.producer_id == SOURCE) == [name]
    assert newest_relayed(bridge) == {"other": ("env-2", 6)}
    assert remove_receipts(bridge, lambda each: each.producer_id == SOURCE) == []


@pytest.fixture
def left(bridge, relay, make_consumer) -> Receipt:
    """All that is left of the bridge."""
    with make_consumer() as consumer:
        producer = relay(5)
        take(consumer, 1)
        producer.close()
    (receipt,) = read_receipts(bridge)
    assert segment.lane_names(bridge) == []
    return receipt


def test_a_bridge_of_which_only_receipts_are_left_is_listed(bridge, left, segments, capsys) -> None:
    """Its control segment is not kept for them."""
    assert segments() == [left.name[1:]] or segments() == [left.name]
    (info,) = (each for each in shmbridge.list_bridges() if each.name == bridge)
    assert (info.receipts, info.lanes, info.participants) == (1, [], False)
    assert main(["inspect", bridge]) == 0
    assert "1 receipt of lanes that are gone, for a relay or run that goes on" in capsys.readouterr().out


def test_clean_names_receipts_and_removes_them_only_when_told(bridge, left, segments, capsys) -> None:
    assert main(["clean", bridge]) == 0
    assert f"would remove {left.name}" in capsys.readouterr().out
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}
    membership.sweep_bridge(bridge, with_records=True)
    assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}, "only clean --yes removes them"
    assert main(["clean", bridge, "--yes"]) == 0
    assert f"removed {left.name}" in capsys.readouterr().out
    assert segments() == []


def test_clean_keeps_the_receipts_of_a_bridge_in_use(bridge, left, make_consumer) -> None:
    with make_consumer():
        report = shmbridge.clean(bridge, dry_run=False)
        assert report.kept[left.name] == "has living participants"
        assert newest_relayed(bridge) == {SOURCE: ("env-2", 5)}


def test_clean_removes_undelivered_records_and_their_receipt(bridge, relay, segments) -> None:
    relay(5).close()
    report = shmbridge.clean(bridge, dry_run=False)
    assert list(report.undelivered.values()) == [1]
    assert segments() == []
    assert newest_relayed(bridge) == {}


def test_inspect_says_from_which_node_records_come(bridge, relay, producer, capsys) -> None:
    relay()
    assert sorted(lane.origin_node for lane in lanes(bridge)) == ["", "env-2"]
    assert main(["inspect", bridge, "--seconds", "0"]) == 0
    lines = [line for line in capsys.readouterr().out.splitlines() if "running" in line]
    assert sum(" from env-2 " in line for line in lines) == 1


def lanes(bridge: str) -> list[LaneInfo]:
    return next(each.lanes for each in shmbridge.list_bridges() if each.name == bridge)


def test_a_producer_here_that_is_to_go_on_leaves_one_too(bridge, make_producer, make_consumer):
    """How many records it had committed is known from its lane, and, once that is gone, from the receipt."""
    producer, other = make_producer(), make_producer()
    producer.leave_receipt()
    for each in (producer, other):
        for _ in range(3):
            each.put({"tokens": [[1]]})
        each.close()
    assert committed_here(bridge, producer.producer_id) == 3
    consumer = make_consumer()
    for record in consumer.poll():
        record.release()
    consumer.close()
    make_producer()  # removes what is dead
    assert producer.lane_name not in segment.lane_names(bridge)
    assert committed_here(bridge, producer.producer_id) == 3
    assert committed_here(bridge, other.producer_id) is None
    assert newest_relayed(bridge) == {}
    forget_producer(bridge, producer.producer_id)
    assert committed_here(bridge, producer.producer_id) is None
    assert read_receipts(bridge) == []


def test_a_lane_whose_producer_is_forgotten_leaves_none(bridge, make_producer, make_consumer):
    producer = make_producer()
    producer.leave_receipt()
    producer.put({"tokens": [[1]]})
    producer.close()
    forget_producer(bridge, producer.producer_id)
    with make_consumer() as consumer:
        consumer.get(timeout_s=5).release()
    make_producer()
    assert producer.lane_name not in segment.lane_names(bridge)
    assert read_receipts(bridge) == []
