"""Writing a record in place: committed when the block ends, never seen when it raises."""

import numpy as np
import pytest

import shmbridge


def test_a_claim_is_written_in_place_and_committed(producer, consumer) -> None:
    with producer.claim(2, {"tokens": [2, 1], "advantages": [2, 1], "score": None}, group_id="g", policy_version=3) as slot:
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
    assert consumer.get(timeout_s=5)["tokens"].values.tolist() == [1]
    assert producer.stats()["lane_free_bytes"] == producer.lane_bytes


def test_values_that_are_not_finite_abort_the_claim(producer, consumer) -> None:
    with pytest.raises(shmbridge.InvalidRecord) as caught, producer.claim(2, {"tokens": [1, 2], "advantages": [1, 2]}) as slot:
        slot["tokens"][:] = 1
        slot["advantages"][:] = [0, 1, np.nan]
    assert (caught.value.column, caught.value.row, caught.value.position) == ("advantages", 1, 1)
    assert consumer.poll() == []
    assert producer.stats()["dropped_total{invalid}"] == 1
    assert producer.put({"tokens": [[1]]}) == 0


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
