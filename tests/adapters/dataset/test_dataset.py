"""A bridge as a torch data set: its tensors, the ends of leases, and what a saved state restores."""

from __future__ import annotations

import contextlib
import json

import pyarrow as pa
import pytest
import torch
from torch.utils.data import DataLoader

import shmbridge
from shmbridge.archive.folder import read_archive
from shmbridge.consumers.dataset import BridgeDataset, TooManyWorkers
from shmbridge.consumers.feed import BridgeAhead

GROUPS = 2
SIZE = 3  # rows of a group


@pytest.fixture
def producer(bridge):
    with shmbridge.Producer(bridge, env_name="test", lane_bytes="4M") as producer:
        yield producer


def put(producer, first, count, **more):
    """Put groups whose tokens say which they are: 1000 + group, then the row, then as many tokens as the row
    has.
    """
    for number in range(first, first + count):
        rows = range(SIZE)
        group = {
            "tokens": [[1000 + number, row, *range(row + 1)] for row in rows],
            "score": [float(row) for row in rows],
        }
        split = more.pop("split", "train")
        producer.put(group | more, policy_version=number, timeout_s=10.0, split=split)


def numbers(items):
    """Return which groups items are of, in order, each once."""
    found = [int(token) for item in items for token in item["tokens"][item["tokens"] >= 1000]]
    return list(dict.fromkeys(number - 1000 for number in found))


def left_over(bridge):
    with shmbridge.Consumer(bridge) as consumer:
        return [record.meta.sequence for record in consumer.poll(max_records=1000)]


def take(data, count):
    items = []
    for item in data:
        items.append(item)
        if len(items) == count:
            break
    return items


@pytest.mark.filterwarnings("error")
def test_a_batch_has_every_column_of_numbers_as_a_tensor(bridge, producer):
    more = {
        "step_rewards": [[0.5], [], [1.0, 2.0]],
        "finish_reason": [0, 1, 0],
        "instance_id": ["a", "b", "c"],
    }
    put(producer, 0, 1, loss_mask=[[0, 1, 1], [0, 1, 1, 1], [0, 0, 1, 1, 1]], **more)
    put(producer, 1, 1)
    with BridgeDataset(bridge, groups=2) as data:
        batch = next(iter(DataLoader(data, batch_size=None)))
    rows = ([1000 + group, row, *range(row + 1)] for group in range(2) for row in range(SIZE))
    assert batch["tokens"].tolist() == [token for row in rows for token in row]
    assert batch["tokens"].dtype == torch.int32
    assert batch["cu_seqlens"].tolist() == [0, 3, 7, 12, 15, 19, 24]
    assert batch["position_ids"].tolist()[:7] == [0, 1, 2, 0, 1, 2, 3]
    assert batch["lengths"].tolist() == [3, 4, 5] * 2
    assert batch["group_index"].tolist() == [0, 0, 0, 1, 1, 1]
    assert batch["policy_version"].tolist() == [0, 0, 0, 1, 1, 1]
    assert not batch["redelivered"].any()
    assert batch["score"].tolist() == [0.0, 1.0, 2.0] * 2
    assert "has_score" not in batch
    assert batch["loss_mask"].tolist() == [0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 1, 1] + [0] * 12
    assert batch["has_loss_mask"].tolist() == [True] * 3 + [False] * 3
    assert batch["step_rewards"].tolist() == [0.5, 1.0, 2.0]
    assert batch["step_rewards_lengths"].tolist() == [1, 0, 2, 0, 0, 0]
    assert "instance_id" not in batch


OF_ROWS = ["policy_version", "redelivered"]
OF_BATCHES = ["lengths", "cu_seqlens", "position_ids", "group_index", *OF_ROWS]
OF_COLUMNS = ["mine_lengths", "has_mine", "has_score"]  # beside those that bring them


@pytest.mark.parametrize(
    ("items", "name"),
    [
        *(("batches", name) for name in OF_BATCHES + OF_COLUMNS),
        *(("rows", name) for name in OF_ROWS),
        ("rows", "deep_inner_lengths"),
    ],
)
def test_a_column_with_the_name_of_a_key_of_the_items_is_refused(bridge, items, name):
    deep = [("deep", pa.list_(pa.list_(pa.int32())))] if items == "rows" else []
    schema = pa.schema([("mine", pa.list_(pa.int32())), (name, pa.int32()), *deep])
    says = rf"column '{name}' has the name of a key.*rename the column"
    if name in OF_BATCHES:
        with pytest.raises(ValueError, match=says):
            BridgeDataset(bridge, items=items, schema=schema)
    with shmbridge.Producer(bridge, lane_bytes="1M", schema=schema) as producer:
        put(
            producer,
            0,
            1,
            mine=[[1]] * SIZE,
            **{name: [900] * SIZE},
            **({"deep": [[[1]]] * SIZE} if deep else {}),
        )
        with (
            BridgeDataset(bridge, groups=1, items=items, timeout_s=10) as data,
            pytest.raises(shmbridge.SchemaMismatch, match=says),
        ):
            next(iter(data))
        assert left_over(bridge) == [0]


def test_a_column_whose_name_only_looks_like_a_key_is_handed_out(bridge):
    schema = pa.schema([("mine_lengths", pa.int32()), ("has_answer", pa.int32())])
    with (
        shmbridge.Producer(bridge, lane_bytes="1M", schema=schema) as producer,
        BridgeDataset(bridge, groups=1, schema=schema) as data,
    ):
        put(producer, 0, 1, mine_lengths=[7] * SIZE, has_answer=[1, 0, 1])
        batch = next(iter(data))
    assert (batch["mine_lengths"].tolist(), batch["has_answer"].tolist()) == ([7] * SIZE, [1, 0, 1])


def test_a_padded_batch_is_a_rectangle(bridge, producer):
    put(producer, 0, 1)
    with BridgeDataset(bridge, groups=1, layout="padded") as data:
        batch = next(iter(data))
    assert batch["tokens"].tolist() == [[1000, 0, 0, 0, 0], [1000, 1, 0, 1, 0], [1000, 2, 0, 1, 2]]
    assert batch["lengths"].tolist() == [3, 4, 5]


@pytest.mark.filterwarnings("error")
def test_a_row_has_what_it_has_and_no_more(bridge, producer):
    put(
        producer,
        0,
        1,
        step_rewards=[[0.5], [], [1.0, 2.0]],
        distill_token_ids=[[[1, 2]] * 3, [[3]] * 4, [[]] * 5],
    )
    put(producer, 1, 1)
    with BridgeDataset(bridge, groups=2, items="rows") as data:
        rows = take(data, 2 * SIZE)
    assert [row["tokens"].tolist() for row in rows[:3]] == [[1000, 0, 0], [1000, 1, 0, 1], [1000, 2, 0, 1, 2]]
    assert [row["score"].item() for row in rows] == [0.0, 1.0, 2.0] * 2
    assert [row["step_rewards"].tolist() for row in rows[:3]] == [[0.5], [], [1.0, 2.0]]
    assert rows[0]["distill_token_ids"].tolist() == [1, 2] * 3
    assert rows[0]["distill_token_ids_inner_lengths"].tolist() == [2] * 3
    assert "step_rewards" not in rows[3]
    assert rows[3]["policy_version"].item() == 1


def test_rows_of_one_token_are_not_taken_for_scalars(bridge, producer):
    producer.put({"tokens": [[7], [8]], "score": [0.5, 1.5]})
    with BridgeDataset(bridge, groups=1, items="rows") as data:
        rows = take(data, 2)
    assert [row["tokens"].tolist() for row in rows] == [[7], [8]]
    assert [row["score"].shape for row in rows] == [torch.Size([])] * 2


@pytest.mark.parametrize("items", ["batches", "rows"])
@pytest.mark.parametrize(
    ("asked", "right"), [({}, [1, 3]), ({"split": "eval"}, [0, 2]), ({"split": None}, [0, 1, 2, 3])]
)
def test_items_are_of_the_train_split_unless_asked(bridge, producer, items, asked, right):
    for number in range(4):
        put(producer, number, 1, split="train" if number % 2 else "eval")
    with BridgeDataset(bridge, groups=1, items=items, timeout_s=10, **asked) as data:
        data.drain()
        assert numbers(data) == right
        assert data.stats()["held"] == 0


def test_records_held_for_a_checkpoint_are_released_by_release_only(bridge, producer):
    put(producer, 0, 6)
    with BridgeDataset(bridge, groups=GROUPS, hold="checkpoint") as data:
        assert numbers(take(data, 2)) == [0, 1, 2, 3]
        assert data.stats()["released_total"] == 0
        data.release()
        assert numbers(take(data, 1)) == [4, 5]
    assert left_over(bridge) == [4, 5]


def test_holding_for_a_checkpoint_that_never_comes_is_an_error_with_the_numbers(bridge):
    tokens = [[1] * 5_000] * 4
    with (
        shmbridge.Producer(bridge, lane_bytes="256K", on_full="drop") as producer,
        BridgeDataset(bridge, groups=2, hold="checkpoint", timeout_s=30) as data,
        pytest.raises(shmbridge.BatchTooBig, match="who waits for it holds"),
    ):
        for _ in range(8):
            producer.put({"tokens": tokens})
        for _ in data:
            producer.put({"tokens": tokens})


@pytest.mark.parametrize("hold", ["step", "checkpoint"])
def test_records_in_a_state_are_not_handed_out_again(bridge, producer, hold):
    put(producer, 0, 6)
    with BridgeDataset(bridge, groups=GROUPS, hold=hold) as data:
        assert numbers(take(data, 2)) == [0, 1, 2, 3]
        state = json.loads(json.dumps(data.state_dict()))
    put(producer, 6, 1)
    with BridgeDataset(bridge, groups=3) as data:
        data.load_state_dict(state)
        (batch,) = take(data, 1)
        assert numbers([batch]) == [4, 5, 6]  # a full batch, whatever was skipped
        assert data.stats()["rows_skipped_total"] == (6 if hold == "step" else 12)
        assert data.stats()["records_gone_total"] == 0
        assert data.stats()["handed_out_items_total"] == 3
        assert data.stats()["released_total"] == 4


def test_a_state_in_the_middle_of_a_group_goes_on_with_its_next_row(bridge, producer):
    put(producer, 0, 3)
    with BridgeDataset(bridge, groups=2, items="rows") as data:
        take(data, SIZE + 1)
        state = data.state_dict()
    with BridgeDataset(bridge, groups=2, items="rows") as data:
        data.load_state_dict(state)
        rows = take(data, 2)
        assert [row["tokens"].tolist()[:2] for row in rows] == [[1001, 1], [1001, 2]]
        assert data.stats()["rows_skipped_total"] == SIZE + 1
        assert data.stats()["handed_out_rows_total"] == 2 * SIZE
        again = data.state_dict()
    with BridgeDataset(bridge, groups=1, items="rows") as data:
        data.load_state_dict(again)
        assert numbers(take(data, SIZE)) == [2]


@pytest.mark.parametrize("items", ["batches", "rows"])
def test_two_resumes_over_uneven_lanes_hand_each_group_out_once(bridge, items):
    """Each process but the last ends after a state is saved and before the release. The second takes few
    groups, so few are redelivered to it.
    """
    size = SIZE if items == "rows" else 1  # items of a group
    found, state = [], None
    with shmbridge.Producer(bridge, env_name="a") as few, shmbridge.Producer(bridge, env_name="b") as many:
        put(few, 0, 1)
        put(many, 100, 9)
        for groups, count in (
            (10, 10 if items == "rows" else 1),
            (2, 2 if items == "rows" else 1),
            (2, 14 if items == "rows" else 7),
        ):
            with BridgeDataset(bridge, groups=groups, items=items, hold="checkpoint", timeout_s=10.0) as data:
                if state is not None:
                    data.load_state_dict(state)
                found += numbers(take(data, count * size))
                state = json.loads(json.dumps(data.state_dict()))
            if groups == 10:
                put(few, 1, 8)
                put(many, 109, 8)
    assert len(found) == 10 + 16
    assert sorted(found) == [*range(9), *range(100, 117)]


@pytest.mark.parametrize("items", ["batches", "rows"])
def test_a_state_names_skipped_records_until_they_are_released(bridge, producer, items):
    put(producer, 0, 3)
    with BridgeDataset(bridge, groups=1, items=items, hold="checkpoint") as data:
        take(data, 1 if items == "batches" else SIZE)
        state = data.state_dict()
    (first,) = state["held"]
    with BridgeDataset(bridge, groups=1, items=items, hold="checkpoint") as data:
        data.load_state_dict(state)
        assert first in data.state_dict()["held"]
        assert numbers(take(data, 1)) == [1]
        assert data.stats()["rows_skipped_total"] == SIZE
        assert first not in data.state_dict()["held"]


@pytest.mark.parametrize("items", ["batches", "rows"])
def test_states_do_not_grow_with_resumes(bridge, producer, items):
    state, found = None, []
    for number in range(6):
        put(producer, number, 1)
        with BridgeDataset(bridge, groups=1, items=items, hold="checkpoint", timeout_s=10.0) as data:
            if state is not None:
                data.load_state_dict(state)
            found += numbers(take(data, 1 if items == "batches" else SIZE))
            state = json.loads(json.dumps(data.state_dict()))
            assert len(state["held"]) <= 2
            data.release()
    assert found == [0, 1, 2, 3, 4, 5]


def test_records_consumed_after_a_state_are_counted_as_gone(bridge, producer):
    put(producer, 0, 6)
    with BridgeDataset(bridge, groups=1, prefetch=0) as data:
        take(data, 1)
        old = data.state_dict()
        take(data, 4)
        data.release()
    with BridgeDataset(bridge, groups=1) as data:
        data.load_state_dict(old)
        assert numbers(take(data, 1)) == [5]
        assert data.stats()["records_gone_total"] == 4
        assert data.stats()["rows_skipped_total"] == 0


def test_an_environment_restarted_under_its_own_id_has_all_its_groups_read(bridge):
    with shmbridge.Producer(bridge, lane_bytes="4M", producer_id="env1") as first:
        put(first, 0, 3)
        with BridgeDataset(bridge, groups=1) as data:
            assert numbers(take(data, 3)) == [0, 1, 2]
            state = json.loads(json.dumps(data.state_dict()))
    with (
        shmbridge.Producer(bridge, lane_bytes="4M", producer_id="env1") as second,
        BridgeDataset(bridge, groups=1, timeout_s=20.0) as data,
    ):
        data.load_state_dict(state)
        put(second, 10, 3)
        assert [number for number in numbers(take(data, 3)) if number >= 10] == [10, 11, 12]
        assert second.producer_id != first.producer_id


def test_a_state_of_something_else_is_refused(bridge):
    with pytest.raises(ValueError, match=r"no state of a BridgeDataset .* it has epoch"):
        BridgeDataset(bridge).load_state_dict({"epoch": 3})
    for other in ({}, None, {"format": 1}, {"format": 1, "items": 1, "rows": 1, "tokens": 1, "held": []}):
        with pytest.raises(ValueError, match="no state of a BridgeDataset"):
            BridgeDataset(bridge).load_state_dict(other)


def test_a_state_is_not_loaded_over_items_that_are_out(bridge, producer):
    put(producer, 0, 1)
    with BridgeDataset(bridge, groups=1) as data:
        take(data, 1)
        with pytest.raises(ValueError, match="items were asked for"):
            data.load_state_dict(data.state_dict())


def test_a_state_is_not_loaded_after_a_wait_in_vain(bridge, producer):
    """What the wait has found may be in the state."""
    put(producer, 0, 1)
    with BridgeDataset(bridge, groups=2, timeout_s=0.3) as data:
        state = data.state_dict()
        with pytest.raises(shmbridge.ConsumerEmpty):
            next(iter(data))
        with pytest.raises(ValueError, match="items were asked for"):
            data.load_state_dict(state)


def rows_in(items) -> list[tuple[int, int]]:
    return [(int(item["tokens"][0]) - 1000, int(item["tokens"][1])) for item in items]


def test_a_release_in_the_middle_of_a_batch_keeps_what_is_left(bridge, producer):
    put(producer, 0, 5)
    options = {"groups": 2, "items": "rows", "hold": "checkpoint", "timeout_s": 2.0}
    with BridgeDataset(bridge, **options) as data:
        found = rows_in(take(data, SIZE + 1))
        state = data.state_dict()
        data.release()
    with BridgeDataset(bridge, **options) as data:
        data.load_state_dict(state)
        found += rows_in(take(data, 5 * SIZE - len(found)))
        data.release()
    assert sorted(found) == [(group, row) for group in range(5) for row in range(SIZE)]


@pytest.mark.parametrize("hold", ["step", "checkpoint"])
def test_an_exception_in_an_iteration_leaves_the_rest_of_its_batch(bridge, producer, hold):
    put(producer, 0, 2)
    with BridgeDataset(bridge, groups=2, items="rows", hold=hold, timeout_s=2.0) as data:
        rows = iter(data)
        found = rows_in([next(rows) for _ in range(2)])
        with pytest.raises(KeyboardInterrupt):
            rows.throw(KeyboardInterrupt())
        found += rows_in(take(data, 2 * SIZE - 2))
    assert found == [(group, row) for group in range(2) for row in range(SIZE)]


def test_a_batch_that_does_not_come_in_time_is_an_error_and_comes_later(bridge, producer):
    put(producer, 0, 1)
    with BridgeDataset(bridge, groups=2, timeout_s=0.2) as data:
        with pytest.raises(shmbridge.ConsumerEmpty):
            next(iter(data))
        put(producer, 1, 1)
        assert numbers(take(data, 1)) == [0, 1]


def test_environments_hear_of_versions(bridge, producer):
    with BridgeDataset(bridge, max_staleness=1, groups=1) as data:
        put(producer, 0, 3)  # of versions 0, 1 and 2
        data.publish_policy_version(3)
        assert numbers(take(data, 1)) == [2]
        assert data.stats()["discarded_total{stale}"] == 2


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"items": "group"}, "items='group'"),
        ({"hold": "gather"}, "hold='gather'"),
        ({"split": "test"}, "split='test'"),
        ({"items": "rows", "layout": "padded"}, "rows have no padding"),
        ({"rank": 0}, "both or neither"),
        ({"rank": 2, "world_size": 2}, "rank=2 is not within"),
        ({"rank": 0, "world_size": 2, "hold": "checkpoint"}, "for one process"),
        ({"rank": 0, "world_size": 2, "longest_row": 8}, "longest_row is for one process"),
        ({"layout": "square"}, "layout='square'"),
        ({"unfit": "leave_out"}, "of rows"),
    ],
)
def test_arguments_that_cannot_be_are_named(bridge, wrong, said):
    with pytest.raises(ValueError, match=said):
        BridgeDataset(bridge, **wrong)


def test_an_unknown_argument_is_named_before_anything_is_opened(bridge):
    with pytest.raises(TypeError, match="takes no argument batch_size"):
        BridgeDataset(bridge, batch_size=4)


def test_several_workers_are_refused_with_the_reason(bridge, producer):
    loader = DataLoader(BridgeDataset(bridge), batch_size=None, num_workers=2)
    with pytest.raises(
        TooManyWorkers, match=r"2 workers over bridge .* has one consumer -> num_workers=0, or 1"
    ):
        next(iter(loader))


def test_a_worker_cannot_hold_for_a_checkpoint(bridge, producer):
    loader = DataLoader(BridgeDataset(bridge, hold="checkpoint"), batch_size=None, num_workers=1)
    with pytest.raises(ValueError, match="no release\\(\\) of the training process reaches"):
        next(iter(loader))


@pytest.mark.parametrize("hold", ["step", "checkpoint"])
def test_a_break_within_a_group_leaves_its_other_rows_to_the_next_iteration(bridge, producer, hold):
    put(producer, 0, 4)
    found, state = [], None
    for count in (1, 4, 1, 3):
        with BridgeDataset(bridge, groups=2, items="rows", hold=hold, timeout_s=10.0) as data:
            if state is not None:
                data.load_state_dict(state)
            for _ in range(count):
                (row,) = take(data, 1)
                found.append(row["tokens"].tolist()[:2])
            state = json.loads(json.dumps(data.state_dict()))
    assert found == [[1000 + group, row] for group in range(3) for row in range(SIZE)]


def test_a_state_of_the_release_before_is_read(bridge, producer):
    put(producer, 0, 4)
    with shmbridge.Consumer(bridge) as consumer:
        consumer.get(5.0).release()
        left = [record.meta.producer_id for record in consumer.poll()]
    held = [[left[0], 1, SIZE], [left[0], 2, 2]]  # the second one in part
    counts = {"items": 8, "rows": 8, "tokens": 32}
    state = {"format": 1, **counts, "held": held, "mounts": {}, "newest": {left[0]: 2}}
    with BridgeDataset(bridge, groups=1, items="rows", hold="checkpoint", timeout_s=10.0) as data:
        data.load_state_dict(state)
        rows = take(data, 1 + SIZE)
        assert [row["tokens"].tolist()[:2] for row in rows] == [
            [1002, 2],
            *([1003, row] for row in range(SIZE)),
        ]
        assert data.stats()["rows_skipped_total"] == SIZE + 2
        assert data.stats()["handed_out_rows_total"] == 8 + 1 + SIZE


@pytest.mark.parametrize("items", ["batches", "rows"])
def test_what_cannot_be_read_is_not_released_by_the_next_iteration(bridge, items):
    schema = pa.schema([("redelivered", pa.int32())])
    with (
        shmbridge.Producer(bridge, lane_bytes="1M", schema=schema) as producer,
        BridgeDataset(bridge, groups=1, items=items, timeout_s=10.0) as data,
    ):
        put(producer, 0, 1, redelivered=[900] * SIZE)
        for _ in range(2):
            with pytest.raises(shmbridge.SchemaMismatch):
                next(iter(data))
        assert (data.stats()["released_total"], data.state_dict()["held"]) == (0, [])
        data.close()
        assert left_over(bridge) == [0]


def test_rows_that_the_model_cannot_take_are_left_out_if_asked(bridge, producer):
    put(producer, 0, 2)
    with BridgeDataset(
        bridge, groups=1, items="rows", longest_row=4, unfit="leave_out", timeout_s=10.0
    ) as data:
        data.drain()
        assert [row["tokens"].tolist()[:2] for row in data] == [[1000, 0], [1000, 1], [1001, 0], [1001, 1]]
        assert (data.stats()["feed_rows_left_out_too_long_total"], data.stats()["held"]) == (2, 0)
        assert data.stats()["handed_out_rows_total"] == 4


def test_a_group_at_which_training_fails_twice_is_set_aside_if_asked(bridge, producer, tmp_path):
    put(producer, 0, 2)
    found = []
    for _ in range(3):
        with (
            contextlib.suppress(ZeroDivisionError),
            BridgeDataset(bridge, groups=1, timeout_s=10.0, set_aside_after=2, run_dir=tmp_path) as data,
        ):
            found += numbers(take(data, 1))
            assert found[-1] != 0, 1 / 0
    assert found == [0, 0, 1]
    assert len(list(read_archive(tmp_path / "set_aside"))) == 1


def test_a_trained_bridge_is_refused_only_if_asked_and_without_a_state(bridge, producer):
    put(producer, 0, 2)
    with BridgeDataset(bridge, groups=1, timeout_s=10.0) as data:
        data.publish_policy_version(3)
        assert numbers(take(data, 1)) == [0]
        state = data.state_dict()
    with BridgeDataset(bridge, groups=1, timeout_s=10.0, start=None) as data:
        for trained in (lambda: next(iter(data)), lambda: data.publish_policy_version(4)):
            with pytest.raises(BridgeAhead, match="trained up to version 3"):
                trained()
    with BridgeDataset(bridge, groups=1, timeout_s=10.0, start=None) as data:
        data.load_state_dict(state)
        assert numbers(take(data, 1)) == [1]
    with BridgeDataset(bridge, groups=1, timeout_s=10.0) as data:
        assert numbers(take(data, 1)) == [1]


def test_torchrun_says_who_is_who(bridge, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "4")
    data = BridgeDataset(bridge)
    assert (data.rank, data.world_size) == (1, 4)
    data.publish_policy_version(3)  # rank 0's word counts: nothing is opened here
    assert bridge not in [info.name for info in shmbridge.list_bridges()]


def test_rows_without_a_mask_train_nothing_unless_that_is_asked_for(bridge, producer):
    put(producer, 0, 2)
    with BridgeDataset(bridge, groups=1) as data:
        batch = next(iter(data))
        assert batch["loss_mask"].tolist() == [0] * 12
        assert batch["has_loss_mask"].tolist() == [False] * 3
    with BridgeDataset(bridge, groups=1, whole_rows=True) as data:
        assert next(iter(data))["loss_mask"].tolist() == [1] * 12
    with BridgeDataset(bridge, groups=1, items="rows", whole_rows=True) as data:
        assert next(iter(data))["loss_mask"].tolist() == [1] * 3
    with BridgeDataset(bridge, groups=1, layout="padded", whole_rows=True) as data:
        assert next(iter(data))["loss_mask"].tolist() == [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1] * 5]


def test_environments_that_wait_for_a_run_are_told_of_one(bridge):
    """The docs' snippet names no run, and an Atropos environment puts nothing before a run is announced."""
    from shmbridge.control.messages import Register, Registered
    from shmbridge.control.server import ControlClient

    with (
        BridgeDataset(bridge, groups=16, timeout_s=0.1) as data,
        shmbridge.Producer(bridge, env_name="env", lane_bytes="1M") as producer,
    ):
        with pytest.raises(shmbridge.ConsumerEmpty):
            next(iter(data))  # opens the bridge
        client = ControlClient(bridge, role="env", name="env")
        try:
            answer = client.request(Register("env", 1024, 16, 1.0, None, producer.producer_id), 10.0)
        finally:
            client.close()
        assert isinstance(answer, Registered)
        assert (answer.run.batch_size, answer.run.max_token_len) == (128, 0)
        assert answer.run.num_steps > 10**9


def test_a_consumer_without_a_run_says_that_environments_wait_for_one(bridge, producer):
    with shmbridge.Consumer(bridge) as consumer:
        for empty in (
            lambda: consumer.get(timeout_s=0.05),
            lambda: next(consumer.batches(groups=1, prefetch=0, timeout_s=0.05)),
        ):
            with pytest.raises(
                shmbridge.ConsumerEmpty, match=r"announced no run.*Consumer\(run=shmbridge.Run\("
            ):
                empty()
    with (
        shmbridge.Consumer(bridge, run=shmbridge.Run()) as consumer,
        pytest.raises(shmbridge.ConsumerEmpty, match="are environments"),
    ):
        consumer.get(timeout_s=0.05)
