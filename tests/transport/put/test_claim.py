"""Writing a record in place: committed when the block ends, never seen when it raises."""

import gc
import os
import sys
import threading
import time

import numpy as np
import pytest

import shmbridge

PACKAGE = os.path.dirname(shmbridge.__file__) + os.sep  # a clone may have the same name


def test_a_claim_is_written_in_place_and_committed(producer, consumer) -> None:
    with producer.claim(
        2, {"tokens": [2, 1], "advantages": [2, 1], "score": None}, group_id="g", policy_version=3
    ) as slot:
        slot["tokens"][:] = [1, 2, 3]
        slot["advantages"][:] = [0.5, 1.5, 2.5]
        slot["score"][:] = [1, 0]
        assert consumer.poll() == []
    assert slot.sequence == 0
    record = consumer.get(timeout_s=5)
    assert [row.tolist() for row in record["tokens"]] == [[1, 2], [3]]
    assert [row.tolist() for row in record["advantages"]] == [[0.5, 1.5], [2.5]]
    assert (record.meta.group_id, record.meta.min_policy_version) == ("g", 3)


def test_an_exception_aborts_and_the_next_put_has_the_same_sequence(producer, consumer) -> None:
    with pytest.raises(ZeroDivisionError), producer.claim(1, {"tokens": [3]}) as slot:
        slot["tokens"][:] = 9
        raise ZeroDivisionError
    assert consumer.poll() == []
    assert producer.put({"tokens": [[1]]}) == 0
    with consumer.get(timeout_s=5) as record:
        assert record["tokens"].values.tolist() == [1]
    del record
    assert producer.stats()["lane_free_bytes"] == producer.lane_bytes


def test_values_that_are_not_finite_abort_the_claim(producer, consumer) -> None:
    with (
        pytest.raises(shmbridge.InvalidRecord) as caught,
        producer.claim(2, {"tokens": [1, 2], "advantages": [1, 2]}) as slot,
    ):
        slot["tokens"][:] = 1
        slot["advantages"][:] = [0, 1, np.nan]
    assert (caught.value.column, caught.value.row, caught.value.position) == ("advantages", 1, 1)
    assert consumer.poll() == []
    assert producer.stats()["dropped_total{invalid}"] == 1
    assert producer.put({"tokens": [[1]]}) == 0


def test_a_claimed_column_that_was_never_asked_for_is_refused(producer, consumer) -> None:
    for number in range(200):  # until the claim lies where an earlier record did
        producer.put({"tokens": [[number] * 20], "advantages": [[0.5] * 20]})
        for record in consumer.poll():
            record.release()
    del record
    before = producer.stats()["records_total"]
    with (
        pytest.raises(shmbridge.InvalidRecord) as caught,
        producer.claim(2, {"tokens": [3, 2], "advantages": [3, 2]}) as slot,
    ):
        slot["tokens"][:] = 7
    assert caught.value.column == "advantages"
    assert slot.sequence is None
    assert consumer.poll() == []
    assert producer.stats()["records_total"] == before
    assert producer.stats()["dropped_total{invalid}"] == 1
    # a column without values has nothing to write
    with producer.claim(1, {"tokens": [1], "step_rewards": [0]}) as slot:
        slot["tokens"][:] = 1
    assert slot.sequence == before


def test_one_claim_at_a_time_is_a_typed_error(producer) -> None:
    with producer.claim(1, {"tokens": [1]}) as slot:
        with pytest.raises(shmbridge.ShmBridgeError):
            producer.put({"tokens": [[1]]})
        slot["tokens"][:] = 5
    assert slot.sequence == 0


def test_the_view_is_closed_with_the_block(producer, consumer) -> None:
    with producer.claim(1, {"tokens": [1]}) as slot:
        slot["tokens"][:] = 5
    with pytest.raises(shmbridge.ShmBridgeError):
        slot["tokens"][:] = 6
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [5]


@pytest.mark.parametrize(
    ("rows", "lengths"),
    [
        (1, {"score": None}),
        (0, {"tokens": []}),
        (-1, {"tokens": []}),
        (2, {"tokens": [1]}),
        (1, {"tokens": [3], "advantages": [2]}),
        (1, {"tokens": [1], "advantage": [1]}),
        (1, {"tokens": [1], "messages": [1]}),
        (1, {"tokens": [-1]}),
        (1, {"tokens": None}),
    ],
    ids=str,
)
def test_claims_that_cannot_be_are_refused_and_leave_no_claim_open(producer, rows, lengths) -> None:
    with pytest.raises(shmbridge.InvalidRecord):
        producer.claim(rows, lengths)
    assert producer.put({"tokens": [[1]]}) == 0


def test_a_claim_too_large_for_the_lane_is_refused(producer) -> None:
    with pytest.raises(shmbridge.RecordTooBig):
        producer.claim(1, {"tokens": [20_000]})


def test_a_claim_in_a_full_lane_raises_lane_full(make_producer) -> None:
    producer = make_producer()
    while producer.stats()["lane_free_bytes"] > 13_000:
        producer.put({"tokens": [np.arange(3000)]})
    with pytest.raises(shmbridge.LaneFull):
        producer.claim(1, {"tokens": [3000]}, timeout_s=0.05)


def test_a_claim_that_nobody_enters_is_given_back(producer, consumer) -> None:
    slot = producer.claim(rows=1, lengths={"tokens": [3]})
    del slot
    assert producer.put({"tokens": [[1]]}) == 0


class Interrupt(KeyboardInterrupt):
    """As a handler raises it."""


def write(producer, kept) -> None:
    with producer.claim(1, {"tokens": [2]}) as slot:
        kept.append(slot)
        slot["tokens"][:] = 7


def interrupted_at(number: int, call) -> bool:
    """Calls it, and raises before the instruction of that number within shmbridge; whether there was one."""
    left = [number]

    def trace(frame, event, _):
        if not frame.f_code.co_filename.startswith(PACKAGE):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            left[0] -= 1
            if left[0] == 0:
                raise Interrupt
        return trace

    gc.disable()  # or the interrupt can come in the finalizer of an earlier test's object, which swallows it
    sys.settrace(trace)
    try:
        call()
    except Interrupt:
        return True
    finally:
        sys.settrace(None)
        gc.enable()
    return left[0] <= 0


def test_an_interrupt_at_any_instruction_of_a_claim_leaves_none_open(producer, consumer) -> None:
    number, kept = 0, []  # the slots are kept, as a caller's variable keeps them
    while interrupted_at(number := number + 1, lambda: write(producer, kept)):
        assert producer.put({"tokens": [[1]]}) is not None, f"after instruction {number}"
        for record in consumer.poll():
            assert record["tokens"].values.tolist() in ([1], [7, 7])
            record.release()
    assert number > 50
    assert all(slot.sequence is not None for slot in kept[-1:])


def test_an_interrupt_at_any_instruction_of_a_put_leaves_no_claim_open(producer, consumer) -> None:
    number, group = 0, {"tokens": ([1, 2],), "score": [1.0]}  # a tuple of rows takes the slow path
    while interrupted_at(number := number + 1, lambda: producer.put(group)):
        with producer.claim(1, {"tokens": [1]}) as slot:
            slot["tokens"][:] = 1
        for record in consumer.poll():
            record.release()
    assert number > 50


def test_a_second_end_of_an_old_claim_leaves_a_new_one_alone(producer, consumer) -> None:
    with producer.claim(1, {"tokens": [1]}) as old:
        old["tokens"][:] = 1
    with producer.claim(1, {"tokens": [1]}) as new:
        new["tokens"][:] = 2
        old.__exit__(None)
        old.__exit__(ValueError, ValueError(), None)
        old.abort()
    assert (old.sequence, new.sequence) == (0, 1)
    assert [record["tokens"].values.tolist() for record in consumer.poll()] == [[1], [2]]


def test_a_claim_that_meets_another_threads_leaves_it_alone(producer, consumer, monkeypatch) -> None:
    others = []
    look = producer._held_back

    def overtaken() -> bool:
        held = look()
        if not others:
            others.append(None)
            others[0] = producer.claim(1, {"tokens": [1]})
        return held

    monkeypatch.setattr(producer, "_held_back", overtaken)
    with pytest.raises(shmbridge.ClaimOpen):
        producer.claim(1, {"tokens": [1]})
    with others[0] as slot:
        slot["tokens"][:] = 5
    assert slot.sequence == 0
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [5]


def test_threads_that_claim_at_once_never_share_a_record(make_producer, make_consumer) -> None:
    producer, consumer = make_producer(lane_bytes="1M"), make_consumer()
    told: dict[int, int] = {}
    switch = sys.getswitchinterval()

    def claim_many(who: int) -> None:
        for turn in range(60):
            try:
                with producer.claim(1, {"tokens": [3]}, timeout_s=20) as slot:
                    slot["tokens"][:] = 1000 * who + turn
                told[slot.sequence] = 1000 * who + turn
            except shmbridge.ClaimOpen:
                time.sleep(0.0005)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=claim_many, args=(who,)) for who in range(1, 5)]
        for thread in threads:
            thread.start()
        seen = {}
        while any(thread.is_alive() for thread in threads) or len(seen) < len(told):
            for record in consumer.poll():
                seen[record._sequence] = record["tokens"].values.tolist()
                record.release()
    finally:
        sys.setswitchinterval(switch)
    assert told
    assert seen == {sequence: [value] * 3 for sequence, value in told.items()}
    assert consumer.stats()["lanes_quarantined"] == 0


def test_a_producer_that_closes_during_a_put_says_closed(producer) -> None:
    class Closing:
        def __index__(self) -> int:
            producer.close()
            return 7

    with pytest.raises(shmbridge.Closed):
        producer.put({"tokens": [[1, Closing(), 3]]})


def test_a_claim_whose_producer_closes_says_closed(producer) -> None:
    with pytest.raises(shmbridge.Closed), producer.claim(1, {"tokens": [1]}) as slot:
        slot["tokens"][:] = 1
        producer.close()
    with pytest.raises(shmbridge.ClaimOpen):
        slot["tokens"]


def test_two_threads_in_one_end_are_named_where_that_is_asked_for(
    make_producer, make_consumer, monkeypatch
) -> None:
    monkeypatch.setenv("SHMBRIDGE_DEBUG", "1")
    producer, consumer = make_producer(), make_consumer()
    inside, go_on = threading.Event(), threading.Event()

    class Slow:
        def __index__(self) -> int:
            inside.set()
            assert go_on.wait(20)
            return 7

    first = threading.Thread(target=lambda: producer.put({"tokens": [[Slow()]]}), name="first")
    first.start()
    assert inside.wait(20)
    try:
        with pytest.raises(
            shmbridge.UsedByTwoThreads,
            match=r"producer .*'first' is in put\(\), and thread 'MainThread' calls claim\(\)",
        ):
            producer.claim(1, {"tokens": [1]})
    finally:
        go_on.set()
        first.join()
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [7]
    waits = threading.Thread(target=lambda: consumer.get(timeout_s=3), name="waits", daemon=True)
    with monkeypatch.context() as patch:
        patch.setattr(consumer._waiting, "wait", lambda _left: (inside.set(), time.sleep(0.01)))
        inside.clear()
        waits.start()
        assert inside.wait(20)
        with pytest.raises(
            shmbridge.UsedByTwoThreads, match=r"the consumer of bridge .*'waits' is in get\(\)"
        ):
            consumer.poll()
        producer.put({"tokens": [[1]]})
        waits.join()


@pytest.mark.parametrize("rows", [2**33, 2**70])
def test_a_claim_of_more_rows_than_a_record_can_have_is_too_big(producer, rows) -> None:
    with pytest.raises(shmbridge.RecordTooBig, match=str(rows)):
        producer.claim(rows, {"score": None, "tokens": [1]})
