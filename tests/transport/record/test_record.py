"""A record as its reader sees it: in place, read-only, and valid until the last view is gone."""

import copy
import dataclasses
import gc
import os
import pickle
import threading

import numpy as np
import pyarrow as pa
import pytest

import shmbridge
from shmbridge.record import lane_memory

GROUP = {
    "tokens": [[1, 2, 3], [4]],
    "advantages": [[0.5, 1.0, 1.5], [2.0]],
    "score": [1.0, 0.0],
    "instance_id": ["a", "b"],
    "reward_components": [{"x": 1.0}, {}],
    "distill_token_ids": [[[1], [2, 3], []], [[4]]],
    "messages": ['["hi"]', "[]"],
}


@pytest.fixture
def held(producer):
    return lambda: producer.stats()["held"]


@pytest.fixture
def record(producer, consumer):
    def one(group=GROUP, **options) -> shmbridge.Record:
        producer.put(group, **options)
        return consumer.get(timeout_s=5)

    return one


def test_a_null_map_is_null_in_arrow_and_not_an_empty_one(record) -> None:
    parts = [None, {"q": 1.0}, {}]
    first = record({"tokens": [[1], [2], [3]], "reward_components": parts})
    assert first.to_arrow()["reward_components"].to_pylist() == [None, [("q", 1.0)], []]
    assert record(first.to_arrow()).to_arrow().equals(first.to_arrow())


def test_length_columns_and_membership(record) -> None:
    it = record()
    assert len(it) == 2
    assert it.columns == list(GROUP)
    assert "advantages" in it
    assert "ref_logprobs" not in it
    with pytest.raises(KeyError, match=r"ref_logprobs.*tokens, advantages"):
        it["ref_logprobs"]


def test_null_and_empty_columns_are_absent(record) -> None:
    it = record(
        {"tokens": [[1]], "scores": [1.0], "advantages": None, "overrides": [], "group_overrides": {}}
    )
    assert it.columns == ["tokens", "score"]
    for name in ("advantages", "overrides", "group_overrides"):
        assert name not in it
        with pytest.raises(KeyError):
            it[name]


def test_views_are_the_lanes_own_memory(record) -> None:
    it = record()
    lane = np.frombuffer(memoryview(it), np.uint8)
    for values in (it["tokens"].values, it["advantages"].values, it["score"], it["tokens"][1]):
        assert np.shares_memory(values, lane)
    assert it["tokens"].values.ctypes.data == it["tokens"].values.ctypes.data
    assert it["tokens"].values.ctypes.data % 64 == 0


def test_rows_from_both_ends_and_beyond(record) -> None:
    column = record()["tokens"]
    assert [row.tolist() for row in column] == [[1, 2, 3], [4]]
    assert column[-1].tolist() == [4]
    assert column.offsets.tolist() == [0, 3, 4]
    for beyond in (2, -3):
        with pytest.raises(IndexError):
            column[beyond]


def test_release_gives_the_memory_back(record, held) -> None:
    it = record()
    assert held() == 1
    it.release()
    it.release()
    assert held() == 0
    with pytest.raises(shmbridge.LeaseReleased, match="tokens"):
        it["tokens"]
    assert it.meta.sequence == 0


def test_a_with_block_releases(record, held) -> None:
    with record() as it:
        assert it["score"].tolist() == [1.0, 0.0]
    assert held() == 0


@pytest.mark.parametrize(
    "take",
    [
        lambda r: r["tokens"].values,
        lambda r: r["tokens"][1],
        lambda r: r["score"][:1],
        lambda r: r["distill_token_ids"][0][1],
    ],
)
def test_a_view_outlives_release_and_holds_the_memory(record, producer, held, take) -> None:
    it = record()
    view = take(it)
    before = view.tolist()
    it.release()
    del it
    with pytest.raises(shmbridge.LaneFull):
        for number in range(100):
            producer.put({"tokens": [[number] * 500]})
    assert held() >= 1
    assert view.tolist() == before


def test_a_lease_ends_with_its_last_view_and_not_with_the_object(record, held) -> None:
    it = record()
    first, second, row = it["tokens"].values, it["advantages"].values, it["tokens"][1]
    it.release()
    del first
    assert held() == 1
    del second
    assert (held(), row.tolist()) == (1, [4])
    del row
    assert held() == 0
    with pytest.raises(shmbridge.LeaseReleased):
        it["score"]
    with pytest.raises(BufferError, match="ended"):
        memoryview(it)


def test_lengths_and_nulls_are_copies_that_hold_nothing(record, held) -> None:
    it = record({"tokens": [[1, 2], [3]], "advantages": [[0.5, 1.0], None]})
    lengths, valid, offsets = it["tokens"].lengths, it.valid("advantages"), it["tokens"].offsets
    it.release()
    assert held() == 0
    assert (lengths.tolist(), valid.tolist(), offsets.tolist()) == ([2, 1], [True, False], [0, 2, 3])
    offsets[:] = 7
    with pytest.raises(ValueError, match="read-only"):
        lengths[0] = 7


def test_columns_of_zero_values(record, held) -> None:
    it = record(
        {
            "tokens": [[1], [2]],
            "step_rewards": [[], []],
            "instance_id": ["", ""],
            "distill_token_ids": [[[]], [[]]],
        }
    )
    column = it["step_rewards"]
    assert (len(column), column.lengths.tolist(), column.offsets.tolist(), column.valid) == (
        2,
        [0, 0],
        [0, 0, 0],
        None,
    )
    assert (column.values.dtype, column.values.shape, column[1].shape, column[-2].dtype) == (
        np.float32,
        (0,),
        (0,),
        np.float32,
    )
    assert not column.values.flags.writeable
    assert it["instance_id"] == ["", ""]
    assert it["distill_token_ids"].inner_lengths.tolist() == [0, 0]
    it.release()
    assert held() == 0


def test_columns_are_read_and_let_go_on_another_thread(record, held) -> None:
    it, seen = record(), []

    def read() -> None:
        seen.append([row.tolist() for row in it["tokens"]])
        views.append(it["score"])

    views: list[np.ndarray] = []
    for step in (read, it.release, views.clear):
        assert held() == 1
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    assert seen == [[[1, 2, 3], [4]]]
    assert held() == 0


def test_a_forked_child_has_no_columns_and_ends_no_lease(record, held) -> None:
    it = record()
    view = it["tokens"].values
    child = os.fork()
    if child == 0:
        try:
            it["advantages"]
        except BufferError:
            del view
            it.release()
            os._exit(0)
        os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert held() == 1
    assert view.tolist() == [1, 2, 3, 4]


def test_a_ragged_column_can_be_copied_out(record, held) -> None:
    it = record()
    for other in (pickle.loads(pickle.dumps(it["tokens"])), copy.deepcopy(it["tokens"])):
        assert [row.tolist() for row in other] == [[1, 2, 3], [4]]
        assert other.offsets.tolist() == [0, 3, 4]
    it.release()
    assert held() == 0


def test_a_view_outlives_its_consumer_which_keeps_the_bridge_until_then(bridge, record, consumer) -> None:
    view = record()["tokens"].values
    consumer.close()
    with pytest.raises(shmbridge.ConsumerTaken, match="this very process"):
        shmbridge.Consumer(bridge)
    assert view.tolist() == [1, 2, 3, 4]
    del view
    gc.collect()
    with shmbridge.Consumer(bridge) as again:
        assert [record._redelivered for record in again.poll()] == [True]  # not released


def test_arrow_has_the_same_values_and_holds_the_lease(record, held) -> None:
    it = record(group_id="g", policy_version=3)
    lane = np.frombuffer(memoryview(it), np.uint8)
    batch = it.to_arrow()
    assert isinstance(batch, pa.RecordBatch)
    assert batch.schema.names == list(GROUP)
    expected = {**GROUP, "reward_components": [[("x", 1.0)], []]}
    assert batch.to_pydict() == expected
    assert np.shares_memory(batch["tokens"].values.to_numpy(), lane)
    assert batch.schema.metadata[b"group_id"] == b"g"
    assert batch.schema.metadata[b"min_policy_version"] == b"3"
    for name in batch.schema.names:
        assert batch.schema.field(name).type == shmbridge.TRAJECTORY_SCHEMA.field(name).type
    del lane
    it.release()
    del it
    assert held() == 1
    assert batch["tokens"].to_pylist() == GROUP["tokens"]
    del batch
    assert held() == 0


def test_arrow_marks_nulls(record) -> None:
    batch = record(
        {"tokens": [[1], [2]], "score": [None, 1.0], "advantages": [[1.0], None], "instance_id": [None, "x"]}
    ).to_arrow()
    assert batch.to_pydict() == {
        "tokens": [[1], [2]],
        "score": [None, 1.0],
        "advantages": [[1.0], None],
        "instance_id": [None, "x"],
    }


def test_arrow_goes_back_in(record) -> None:
    first = record()
    second = record(first.to_arrow())
    assert second.to_arrow().equals(first.to_arrow())


def test_arrow_of_lossy_masks_and_messages_goes_back_in(record) -> None:
    first = record({"tokens": [[1, 2]], "masks": [[7, 8]], "scores": [1.0], "messages": [[{"role": "user"}]]})
    assert record(first.to_arrow()).to_scored_data() == first.to_scored_data()


def test_uneven_records_have_no_arrow_form(record) -> None:
    it = record({"tokens": [[1, 2]], "masks": [[1]], "scores": [1.0]}, foreign=True)
    assert it.meta.uneven
    with pytest.raises(ValueError, match="unequal"):
        it.to_arrow()


def test_metadata(record, producer) -> None:
    meta = record({**GROUP, "env_id": 4}, group_id="g", group_size=8, policy_version=(1, 2)).meta
    assert (meta.producer_id, meta.sequence, meta.group_id, meta.group_size) == (
        producer.producer_id,
        0,
        "g",
        8,
    )
    assert (meta.min_policy_version, meta.max_policy_version, meta.env_id, meta.split) == (1, 2, 4, "train")
    assert 0 < meta.t_created_ns <= meta.t_publish_ns
    assert not meta.redelivered


def test_metadata_does_not_change_and_outlives_its_record(record, held) -> None:
    it = record(group_id="g")
    meta, again = it.meta, it.meta
    assert meta is again
    with pytest.raises(AttributeError):
        meta.sequence = 3
    it.release()
    del it
    assert held() == 0
    assert dataclasses.asdict(meta)["group_id"] == "g"
    assert dataclasses.replace(meta, sequence=3) != meta == pickle.loads(pickle.dumps(meta))


def test_the_text_of_a_record_says_who_and_how_much(record, producer) -> None:
    assert f"{producer.producer_id}#0" in repr(record())


def test_records_in_garbage_cycles_are_not_released(record, consumer, held) -> None:
    holder = [record()]
    holder.append(holder)
    del holder
    gc.collect()
    assert held() == 1
    assert consumer.stats()["leases_returned_total"] == 1


def test_the_memory_of_a_lane_holds_the_records_values_and_may_only_be_read(producer, consumer) -> None:
    producer.put({"tokens": [[1, 2, 3]]})
    record = consumer.get(5.0)
    memory = lane_memory(record)
    assert memory.readonly
    values, whole = record["tokens"].values, np.frombuffer(memory, np.uint8)
    at = values.ctypes.data - whole.ctypes.data
    assert whole[at : at + 12].view(np.int32).tolist() == [1, 2, 3]
    record.release()
    del values, record
    assert consumer.stats()["held"] == 0  # the memory is no lease
