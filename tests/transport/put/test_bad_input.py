"""Groups that must never reach a consumer: each is a typed error that says where, nothing is committed, and
the producer goes on.
"""

import ctypes
import gc
import os
import re
import threading
import time
from collections import deque

import numpy as np
import pyarrow as pa
import pytest

import shmbridge
from shmbridge.segments import control_name, open_mapping

NAN = float("nan")


@pytest.fixture(scope="module")
def shared_consumer():
    name = f"t-bad-{os.getpid()}"
    with shmbridge.Consumer(name) as consumer:
        yield consumer
    shmbridge.clean(name, dry_run=False)


@pytest.fixture
def ends(shared_consumer):
    """A consumer for all tests of this file and a producer of one's own."""
    with shmbridge.Producer(shared_consumer.bridge, lane_bytes="64K", on_full="raise") as producer:
        yield producer, shared_consumer
    gc.collect()
    shared_consumer.take_back_dropped()
    for record in shared_consumer.poll():
        record.release()


def refused(ends, group) -> shmbridge.ShmBridgeError:
    producer, consumer = ends
    before = producer.stats()
    with pytest.raises(shmbridge.InvalidRecord) as caught:
        producer.put(group)
    assert consumer.poll() == []
    after = producer.stats()
    assert after["records_total"] == before["records_total"]
    assert after["dropped_total{invalid}"] == before["dropped_total{invalid}"] + 1
    assert producer.put({"tokens": [[1]]}) == before["records_total"]
    assert [record["tokens"].values.tolist() for record in consumer.poll()] == [[1]]
    return caught.value


@pytest.mark.parametrize(
    ("group", "column", "row"),
    [
        ({"tokens": [[1], [2, 2**31]]}, "tokens", 1),
        ({"tokens": ((1,), (2, -1))}, "tokens", 1),
        ({"tokens": [[1]], "rewards": [[NAN]]}, "rewards", 0),
        ({"tokens": [[1], [2]], "messages": [[]]}, "messages", -1),
        ({"tokens": [[1]], "messages": ["[" * 100_000]}, "messages", 0),
        ({"tokens": [[1]], "advantage": [[1]]}, "advantage", -1),
        (pa.record_batch({"tokens": [[1]], "score": [NAN]}), "score", 0),
        ({"tokens": deque()}, "tokens", -1),
        ([[1, 2]], "", -1),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_wrong_group_is_refused_with_its_place_and_counted(ends, group, column, row) -> None:
    """put_forms has every mistake with its place; this test checks that nothing of it is left."""
    wrong = refused(ends, group)
    assert (wrong.code, wrong.column, wrong.row) == ("SB204", column, row)
    assert wrong.hint


def test_names_with_braces_and_arrows_are_shown_as_they_are(ends) -> None:
    for name in ("{0}", "{tokens", "a -> b", "input{ids"):
        assert repr(name) in refused(ends, {"tokens": [[1]], name: 1}).message
        assert refused(ends, {name: [[1]]}).column == "tokens"


def test_masked_arrays_without_a_masked_value_are_plain_ones(ends) -> None:
    producer, consumer = ends
    producer.put({"tokens": [np.ma.array([1, 2])], "score": np.ma.array([0.5], mask=[0])})
    record = consumer.get(timeout_s=5)
    assert (record["tokens"][0].tolist(), record["score"].tolist()) == ([1, 2], [0.5])


def test_wrong_values_written_in_place_abort_the_claim(ends) -> None:
    producer, consumer = ends
    ends_of = {"step_ends": [2]}
    for column, values, lengths in (
        ("tokens", [1, -2], {}),
        ("step_ends", [2, 1], ends_of),
        ("step_ends", [1, 3], ends_of),
    ):
        with (
            pytest.raises(shmbridge.InvalidRecord) as caught,
            producer.claim(1, {"tokens": [2], **lengths}) as slot,
        ):
            slot["tokens"][:] = 1
            slot[column][:] = values
        assert caught.value.column == column
    with pytest.raises(shmbridge.InvalidRecord) as caught:
        producer.claim(2, {"tokens": [2, 0], "score": None})
    assert (caught.value.column, caught.value.row) == ("tokens", 1)
    assert consumer.poll() == []
    assert producer.put({"tokens": [[1]]}) == 0


def test_a_prompt_may_be_the_whole_row_or_nothing_or_unknown(ends) -> None:
    producer, consumer = ends
    producer.put({"tokens": [[1, 2], [3], [4]], "prompt_length": [2, 0, None]})
    assert consumer.get(timeout_s=5)["prompt_length"].tolist()[:2] == [2, 0]
    producer.put({"tokens": [[1, 2], [3]], "prompt_length": [-1, 1], "score": pa.array([1.0, 2.0])})
    assert consumer.get(timeout_s=5)["prompt_length"].tolist() == [-1, 1]
    with (
        pytest.raises(shmbridge.InvalidRecord) as caught,
        producer.claim(1, {"tokens": [2], "prompt_length": None}) as slot,
    ):
        slot["tokens"][:], slot["prompt_length"][:] = 1, 3
    assert (caught.value.column, caught.value.row) == ("prompt_length", 0)


def test_ends_of_steps_may_be_absent_where_rewards_are_given(ends) -> None:
    producer, consumer = ends
    producer.put(
        {
            "tokens": [[1, 2, 3], [4], [5]],
            "step_rewards": [[1.0, 0.5], [0.1], [2.0]],
            "step_ends": [[1, 3], [], None],
        }
    )
    assert consumer.get(timeout_s=5)["step_ends"][0].tolist() == [1, 3]


@pytest.mark.parametrize("version", ["3", (5, 2), -2], ids=str)
def test_a_version_that_is_none_is_shown_as_it_was_written(ends, version) -> None:
    producer, consumer = ends
    with pytest.raises(shmbridge.InvalidRecord, match=re.escape(f"policy_version={version!r}")):
        producer.put({"tokens": [[1]]}, policy_version=version)
    assert consumer.poll() == []


def test_a_version_that_nobody_published_is_counted_at_both_ends_and_said_once(
    make_producer, make_consumer, caplog
) -> None:
    consumer, producer = make_consumer(), make_producer(env_name="early")
    consumer.publish_policy_version(3)
    for version in (3, 99, 99, (2, 98)):
        producer.put({"tokens": [[1]]}, policy_version=version)
    assert producer.stats()["policy_version_ahead_total"] == 3
    said = [record.message for record in caplog.records if "policy version" in record.message]
    assert len(said) == 1
    assert "99" in said[0]
    assert "3 is the newest published" in said[0]
    next(consumer.batches(groups=4, timeout_s=5)).release()
    assert consumer.stats()["policy_version_ahead_total"] == 2  # (2, 98) began under 2


def test_fragments_that_contradict_each_other_are_refused(ends) -> None:
    producer, consumer = ends
    producer.put({"tokens": [[1]] * 3}, group_id="g", group_size=4)
    for rows, size in ((3, 4), (1, 8), (1, "4")):
        with pytest.raises(shmbridge.InvalidRecord, match=f"group_size={size!r}"):
            producer.put({"tokens": [[1]] * rows}, group_id="g", group_size=size)
    (first,) = consumer.poll()
    producer.put({"tokens": [[1]]}, group_id="g", group_size=4)
    producer.put({"tokens": [[1]]}, group_id="g", group_size=8)  # the group is whole: the id may name another
    assert len([first, *consumer.poll()]) == 3


def test_contradictory_fragments_that_arrive_are_discarded_and_counted(
    make_producer, make_consumer, caplog
) -> None:
    producer, consumer = make_producer(), make_consumer()
    producer.put({"tokens": [[1]] * 3}, group_id="g", group_size=4)
    producer._planner.fragments._partial.clear()  # as from a producer without the check
    producer.put({"tokens": [[2]] * 3}, group_id="g", group_size=4)
    producer.put({"tokens": [[3]]}, group_id="h")
    batch = next(consumer.batches(groups=1, timeout_s=10, prefetch=0))
    assert batch["tokens"].tolist() == [3]
    batch.release()
    with pytest.raises(shmbridge.ConsumerEmpty):
        next(consumer.batches(groups=1, timeout_s=0.2, prefetch=0))
    assert consumer.stats()["discarded_total{partial}"] == 2
    assert any("6 rows, and group_size=4" in record.message for record in caplog.records)


@pytest.mark.parametrize("size", [64, -1, 0, "4K", True, 64e6, 1.5, None], ids=repr)
def test_a_lane_of_no_size_is_refused(bridge, size) -> None:
    with pytest.raises(shmbridge.BadArgument, match=re.escape(f"lane_bytes={size!r}")) as caught:
        shmbridge.Producer(bridge, lane_bytes=size)
    assert isinstance(caught.value, TypeError)
    assert bridge not in {info.name for info in shmbridge.list_bridges()}


@pytest.mark.parametrize(
    "options",
    [{"run": {"batch_size": 64}}, {"lanes": 0}, {"lanes": -1}, {"lanes": "many"}, {"lanes": True}],
    ids=str,
)
def test_a_consumers_arguments_are_looked_at(bridge, options) -> None:
    with pytest.raises(shmbridge.BadArgument, match=f"{next(iter(options))}="):
        shmbridge.Consumer(bridge, **options)
    shmbridge.Consumer(bridge).close()


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda consumer: consumer.get("5"), "timeout_s='5'"),
        (lambda consumer: consumer.get(timeout_s=[1]), "timeout_s=[1]"),
        (lambda consumer: consumer.batches(layout="pack"), "layout='pack'"),
        (lambda consumer: consumer.batches(hold="steps"), "hold='steps'"),
        (lambda consumer: consumer.batches(groups=0), "groups=0"),
        (lambda consumer: consumer.batches(rows=-1), "rows=-1"),
        (lambda consumer: consumer.batches(groups="8"), "groups='8'"),
        (lambda consumer: consumer.announce_run({"batch_size": 1}), "run="),
    ],
    ids=["text", "list", "layout", "hold", "groups", "rows", "text of groups", "run"],
)
def test_a_consumers_calls_name_the_argument_that_is_wrong(shared_consumer, call, argument) -> None:
    with pytest.raises(shmbridge.BadArgument, match=re.escape(argument)):
        call(shared_consumer)


def test_a_column_of_nulls_in_rows_that_must_have_values_is_marked_not_invented(ends) -> None:
    producer, consumer = ends
    producer.put({"tokens": [[1], [2]], "advantages": [None, [1.0]]})
    column = consumer.get(timeout_s=5)["advantages"]
    assert column.valid.tolist() == [False, True]
    assert column[0].tolist() == []


@pytest.mark.parametrize("name", ["", "a b", "a/b", "a.b", "é", "x" * 49, "../x", 5, None])
def test_bad_bridge_names_are_refused_by_every_end(name) -> None:
    for end in (shmbridge.Producer, shmbridge.Consumer):
        with pytest.raises(shmbridge.BadBridgeName):
            end(name)
    if name is not None:
        with pytest.raises(shmbridge.BadBridgeName):
            shmbridge.clean(name)


def patch_version(name: str) -> None:
    np.frombuffer(memoryview(open_mapping(name)), "<u4", 1, 8)[0] = 77


def test_a_bridge_of_another_layout_is_refused_with_both_versions(
    bridge, make_producer, make_consumer
) -> None:
    make_producer()
    patch_version(control_name(bridge))
    for make in (make_producer, make_consumer):
        with pytest.raises(shmbridge.LayoutMismatch, match="77"):
            make()


def test_a_lane_of_another_layout_is_refused_and_the_others_go_on(make_producer, make_consumer) -> None:
    good, other = make_producer(), make_producer()
    other.put({"tokens": [[9]]})
    good.put({"tokens": [[1]]})
    patch_version(other.lane_name)
    consumer = make_consumer()
    assert [record["tokens"].values.tolist() for record in consumer.poll()] == [[1]]
    assert consumer.stats()["lanes_refused"] == 1


def test_a_conflicting_type_is_refused_whichever_side_comes_second(
    bridge, make_producer, make_consumer
) -> None:
    narrow, wide = (pa.schema([("mine", kind)]) for kind in (pa.int32(), pa.float32()))
    producer = make_producer(schema=narrow)
    for make in (make_consumer, make_producer):
        with pytest.raises(shmbridge.SchemaMismatch, match=r"'mine' is float32.*int32"):
            make(schema=wide)
    producer.close()
    make_consumer(schema=wide)
    with pytest.raises(shmbridge.SchemaMismatch, match=r"'mine' is int32.*float32"):
        make_producer(schema=narrow)


def test_a_consumer_that_could_not_start_leaves_the_bridge_free(
    bridge, make_producer, make_consumer, monkeypatch
) -> None:
    def broken(*_, **__):
        raise OSError("no socket today")

    with monkeypatch.context() as patch:
        patch.setattr("shmbridge.control.server.ControlServer", broken)
        with pytest.raises(OSError, match="no socket"):
            shmbridge.Consumer(bridge)
    make_consumer()


def test_a_refused_consumer_leaves_no_columns_behind(make_producer, make_consumer) -> None:
    narrow, wide = (pa.schema([("mine", kind)]) for kind in (pa.int32(), pa.float32()))
    make_producer(schema=narrow)
    with pytest.raises(shmbridge.SchemaMismatch):
        make_consumer(schema=wide)
    make_producer(schema=narrow)


def test_an_overflow_of_the_caller_s_own_object_is_not_called_a_record_too_big(producer) -> None:
    class Endless(list):
        def __len__(self) -> int:
            raise OverflowError("I have no end")

    with pytest.raises((OverflowError, shmbridge.InvalidRecord), match="no end") as caught:
        producer.put({"tokens": Endless([[1]])})
    assert not isinstance(caught.value, shmbridge.RecordTooBig)


@pytest.mark.parametrize("poison", [-5, 2**33 + 7])
def test_int64_tokens_that_another_thread_changes_are_never_stored_as_other_numbers(ends, poison):
    # memmove through ctypes runs without the GIL, while `put` converts.
    producer, consumer = ends
    tokens, good, bad = np.ones(8000, np.int64), np.ones(8000, np.int64), np.full(8000, poison)
    ended, move = threading.Event(), ctypes.CDLL(None).memmove
    move.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]

    def change() -> None:
        while not ended.is_set():
            for source in (bad, good):
                move(tokens.ctypes.data, source.ctypes.data, tokens.nbytes)

    thread = threading.Thread(target=change)
    thread.start()
    try:
        until = time.monotonic() + 3
        while time.monotonic() < until:
            try:
                producer.put({"tokens": tokens[None]})
            except shmbridge.InvalidRecord:
                continue
            with consumer.get(timeout_s=10) as record:
                assert (record["tokens"].values == 1).all()
    finally:
        ended.set()
        thread.join()
