"""A record's memory, taken out of one lane and put into a lane of another bridge, is the same record."""

import contextlib
import itertools
import os
import time
from collections.abc import Callable, Iterator

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import shmbridge
from shmbridge.put import LaneOrigin, RelayedRecord
from shmbridge.record import CHECKED_COLUMNS, memory_of, table_of
from tests.transport.archive import recorded_groups as known

MORE = pa.schema([("another", pa.int8()), *reversed(list(known.SCHEMA)), ("last", pa.utf8())])
TOKENS = {"tokens": [[1, 2, 3], [4]], "prompt_length": [1, 0]}


def relayed(record: shmbridge.Record, **changes: object) -> RelayedRecord:
    sent = memory_of(record)
    said = {
        "extent": bytes(sent.memory),
        "table": table_of(record),
        "words": sent.words,
        "min_policy_version": sent.min_policy_version,
        "max_policy_version": sent.max_policy_version,
        "sequence": sent.sequence,
        "waited_ns": sent.waited_ns(),
        "requested_ns": time.monotonic_ns(),
    }
    return RelayedRecord(**said | changes)


class Nodes:
    """A producer and a consumer of one node, and a relay's producer and a consumer of another."""

    def __init__(self, name: str, schema: pa.Schema, there: pa.Schema) -> None:
        options = {"env_name": "env", "lane_bytes": "256K", "on_full": "raise"}
        self.consumer = shmbridge.Consumer(f"{name}-a", schema=schema)
        self.producer = shmbridge.Producer(f"{name}-a", schema=schema, **options)
        self.origin = LaneOrigin("env-2", self.producer.producer_id)
        self.learner = shmbridge.Consumer(f"{name}-b", schema=there)
        self.relay = shmbridge.Producer(f"{name}-b", schema=there, origin=self.origin, **options)

    def close(self) -> None:
        for end in (self.producer, self.consumer, self.relay, self.learner):
            end.close()
        for bridge in (self.producer.bridge, self.relay.bridge):
            shmbridge.clean(bridge, dry_run=False)

    def sent(self, group: object = TOKENS, **options: object) -> shmbridge.Record:
        self.producer.put(group, **options)
        return self.consumer.get(timeout_s=5)

    def through(self, group: object, **options: object) -> tuple[shmbridge.Record, shmbridge.Record]:
        record = self.sent(group, **options)
        self.relay.put(relayed(record))
        return record, self.learner.get(timeout_s=5)


_NUMBERS = itertools.count()


@pytest.fixture(scope="module")
def nodes() -> Iterator[Callable[..., Nodes]]:
    """Nodes by the schemas of both, made once for the module."""
    made: dict[bool, Nodes] = {}

    def of(*, other_columns: bool = False) -> Nodes:
        if other_columns not in made:
            name = f"t-relayed-{os.getpid()}-{next(_NUMBERS)}"
            made[other_columns] = Nodes(name, known.SCHEMA, MORE if other_columns else known.SCHEMA)
        return made[other_columns]

    yield of
    for each in made.values():
        each.close()


def same(record: shmbridge.Record, came: shmbridge.Record) -> None:
    """Both have the same content to the bit; both are released."""
    wanted, found = known.contents(record), known.contents(came)
    for each in (wanted, found):  # in the order of the lane's columns
        each["tags"] = sorted(each["tags"])
    assert found == wanted
    assert came.columns == record.columns
    for name in CHECKED_COLUMNS:
        mine, theirs = record.row_checks(name), came.row_checks(name)
        assert (mine is None) == (theirs is None)
        assert mine is None or np.array_equal(mine, theirs)
    record.release()
    came.release()


@pytest.mark.parametrize("other_columns", [False, True], ids=["same columns", "more, in another order"])
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(group=known.groups(), split=st.sampled_from(["train", "eval"]))
def test_every_kind_of_column_is_the_same_there(nodes, other_columns, group, split) -> None:
    same(*nodes(other_columns=other_columns).through(group, split=split, policy_version=(3, 5)))


def test_a_group_of_atropos_is_the_same_there(nodes) -> None:
    """Uneven rows, an unknown key, messages, overrides, masks that do not fold: as `foreign` puts them."""
    group = {
        "tokens": [[1, 2, 3], [4, 5]],
        "masks": [[-100, 2, 3], [7, 5]],
        "scores": [1.0, 0.5],
        "advantages": [[0.5, 0.25], [1.0, 2.0, 3.0]],
        "ref_logprobs": None,
        "overrides": [],
        "group_overrides": {},
        "messages": [[{"role": "user", "content": "é"}], []],
        "unknown": {"a": 1},
    }
    record, came = nodes(other_columns=True).through(group, foreign=True)
    assert came.meta.uneven
    assert came.to_scored_data() == record.to_scored_data()
    same(record, came)


def test_fragments_and_ids_are_the_same_there(nodes) -> None:
    record, came = nodes().through(TOKENS, group_id="frage é", group_size=5)
    assert (came.meta.group_id, came.meta.group_size, len(came)) == ("frage é", 5, 2)
    same(record, came)


def test_the_key_of_its_source_travels_beside_its_own(nodes) -> None:
    there = nodes()
    before = time.monotonic_ns()
    record, came = there.through(TOKENS)
    origin = came.meta.origin
    assert record.meta.origin is None
    assert came.meta.producer_id == there.relay.producer_id
    assert (origin.node, origin.producer_id) == ("env-2", there.producer.producer_id)
    assert origin.sequence == record.meta.sequence
    assert origin.waited_ns > 0
    assert 0 < origin.transfer_ns < time.monotonic_ns() - before
    assert came.meta.t_publish_ns > record.meta.t_publish_ns, "age counts from the arrival here"
    same(record, came)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, lambda raw: np.frombuffer(raw, np.uint8)])
def test_an_extent_may_be_any_flat_memory(nodes, kind) -> None:
    there = nodes()
    record = there.sent()
    there.relay.put(relayed(record, extent=kind(bytes(memoryview(record)))))
    same(record, there.learner.get(timeout_s=5))


def test_the_memory_of_the_lane_is_not_copied_before_it_is_put(nodes) -> None:
    there = nodes()
    record = there.sent()
    sent = memory_of(record)
    assert np.shares_memory(np.frombuffer(sent.memory, np.uint8), record["tokens"].values)
    assert sent.memory.readonly
    record.release()
    assert there.producer.stats()["held"] == 1, "the view holds the lease"
    del sent
    assert there.producer.stats()["held"] == 0


# -- refusals


def refused(there: Nodes, record: RelayedRecord, error: type[Exception]) -> None:
    """Nothing of it is committed, and the lane goes on."""
    before = there.relay.stats()["records_total"]
    with pytest.raises(error):
        there.relay.put(record)
    assert there.relay.stats()["records_total"] == before
    assert there.learner.poll() == []


def test_a_record_comes_once_and_in_order(nodes) -> None:
    there = nodes()
    first, second = there.sent(), there.sent()
    late, again = relayed(first), relayed(second)
    there.relay.put(relayed(second))
    there.learner.get(timeout_s=5).release()
    for each in (late, again):
        refused(there, each, shmbridge.InvalidRecord)
    first.release()
    second.release()


def test_a_lane_without_an_origin_takes_none(nodes, make_producer) -> None:
    record = nodes().sent()
    with pytest.raises(shmbridge.InvalidRecord, match="origin"):
        make_producer().put(relayed(record))
    record.release()


def test_a_column_that_the_lane_cannot_carry_is_refused_with_both_shown(nodes, bridge) -> None:
    there = nodes()
    record = there.sent({**TOKENS, "one_int8": [1, 2]})
    absent = there.sent(TOKENS)
    for schema in (None, pa.schema([("one_int8", pa.int16())])):
        with shmbridge.Producer(bridge, lane_bytes="64K", schema=schema, origin=there.origin) as relay:
            with pytest.raises(shmbridge.SchemaMismatch, match="'one_int8' is int8"):
                relay.put(relayed(record))
            assert relay.put(relayed(absent)) == 0, "a record without it may come"
        shmbridge.clean(bridge, dry_run=False)
    record.release()
    absent.release()


def test_a_record_larger_than_half_the_lane_is_refused(nodes, bridge) -> None:
    record = nodes().sent({"tokens": [np.arange(9000, dtype=np.int32)]})
    with (
        shmbridge.Producer(bridge, lane_bytes="64K", origin=LaneOrigin("env-2", "p")) as relay,
        pytest.raises(shmbridge.RecordTooBig),
    ):
        relay.put(relayed(record))
    record.release()


WRONG_WORDS = {
    "rows": (0, [0, 1, 3, 1 << 31, 1 << 32, -1]),
    "columns": (1, [0, 3, 255, 1 << 20, 1 << 32]),
    "index_bytes": (2, [0, 64, 128, 1 << 20, (1 << 32) - 64, 1 << 33]),
    "group_id_bytes": (3, [60000, 1 << 16]),
    "flags": (4, [4, 0x8001, -1]),
    "tokens": (5, [0, 3, 5, 1 << 40, 1 << 64]),
    "group_size": (6, [0, 1, -1, -(1 << 31), 1 << 31]),
}


@pytest.mark.parametrize("which", WRONG_WORDS)
def test_words_that_are_not_the_records_are_refused(nodes, which) -> None:
    there = nodes()
    record = there.sent()
    place, wrong = WRONG_WORDS[which]
    for value in wrong:
        words = list(record._slot_words)
        assert words[place] != value
        words[place] = value
        refused(there, relayed(record, words=tuple(words)), shmbridge.InvalidRecord)
    record.release()


@pytest.mark.parametrize(
    "changes",
    [
        {"words": (1, 2, 3)},
        {"words": ("a", "b", "c", "d", "e", "f", "g")},
        {"extent": b""},
        {"extent": "text"},
        {"extent": np.zeros((4, 64), np.uint8)[:, ::2]},
        {"table": b""},
        {"table": b"x" * 63},
        {"table": None},
        {"sequence": -1},
        {"sequence": (1 << 64) - 1},
        {"min_policy_version": 5, "max_policy_version": 4},
        {"min_policy_version": -2},
        {"waited_ns": 1 << 64},
    ],
    ids=str,
)
def test_what_is_no_record_is_refused(nodes, changes) -> None:
    there = nodes()
    record = there.sent()
    refused(there, relayed(record, **changes), shmbridge.InvalidRecord)
    record.release()


def test_a_table_of_types_that_no_lane_has_is_refused(nodes) -> None:
    there = nodes()
    record = there.sent()
    refused(there, relayed(record, table=b"\xff" * 640), shmbridge.SchemaMismatch)
    record.release()


def test_a_truncated_extent_is_refused(nodes) -> None:
    there = nodes()
    record = there.sent()
    raw = bytes(memoryview(record))
    for size in {*range(0, len(raw), 64), len(raw) - 1, record._slot_words[2] - 64}:
        refused(there, relayed(record, extent=raw[:size]), shmbridge.InvalidRecord)
    record.release()


@settings(
    max_examples=300,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    group=known.groups(), seed=st.integers(0, 2**32 - 1), count=st.integers(1, 8), everywhere=st.booleans()
)
def test_garbage_is_refused_or_read_as_any_record(nodes, group, seed, count, everywhere) -> None:
    """Bytes of the index are overwritten, or all is noise: what is committed, its consumer can read."""
    there, random = nodes(other_columns=True), np.random.default_rng(seed)
    record = there.sent(group)
    raw = np.frombuffer(bytes(memoryview(record)), np.uint8).copy()
    if everywhere:
        raw[:] = random.integers(0, 256, len(raw), np.uint8)
    else:
        places = random.integers(0, record._slot_words[2], count)
        raw[places] = random.integers(0, 256, count, np.uint8)
    said = relayed(record, extent=raw)
    record.release()
    try:
        there.relay.put(said)
    except (shmbridge.InvalidRecord, shmbridge.SchemaMismatch):
        assert there.learner.poll() == []
        return
    assert not everywhere
    (came,) = there.learner.poll()
    for name in came.columns:
        with contextlib.suppress(shmbridge.RecordUnreadable):
            came[name]
    assert there.learner.stats()["lanes_quarantined"] == 0
    came.release()


# -- the lane


def test_an_origin_that_a_header_cannot_hold_is_refused(bridge, segments) -> None:
    for node, producer_id, newest in (
        ("", "p", None),
        ("n" * 64, "p", None),
        ("n", "p" * 96, None),
        ("n\0", "p", None),
        ("n", "", None),
        ("\ud800", "p", None),
        ("n", "p", -1),
    ):
        with pytest.raises(shmbridge.BadArgument, match="origin"):
            shmbridge.Producer(bridge, lane_bytes="64K", origin=LaneOrigin(node, producer_id, newest))
    assert segments() == []


def test_an_origin_as_long_as_a_header_holds_arrives(nodes, bridge) -> None:
    record = nodes().sent()
    origin = LaneOrigin("n" * 63, "é" * 47 + "p")
    with (
        shmbridge.Consumer(bridge, schema=known.SCHEMA) as consumer,
        shmbridge.Producer(bridge, lane_bytes="64K", origin=origin) as relay,
    ):
        relay.put(relayed(record))
        with consumer.get(timeout_s=5) as came:
            assert (came.meta.origin.node, came.meta.origin.producer_id) == ("n" * 63, "é" * 47 + "p")
        relay.close_origin()
    record.release()


def test_a_lane_begins_after_what_earlier_ones_have(nodes, bridge) -> None:
    there = nodes()
    first, second = there.sent(), there.sent()
    origin = LaneOrigin("env-2", there.producer.producer_id, newest=first._sequence)
    with shmbridge.Producer(bridge, lane_bytes="64K", origin=origin) as relay:
        with pytest.raises(shmbridge.InvalidRecord):
            relay.put(relayed(first))
        assert relay.put(relayed(second)) == 0
    first.release()
    second.release()
    shmbridge.clean(bridge, dry_run=False)
