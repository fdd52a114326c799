"""The one grammar of `put`: every form gives the same bytes as before, and the common ones need no Python."""

import json
import os
from types import MappingProxyType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from put_forms import COLUMNS, OUTCOMES, TOKENS, Ends, outcomes

import shmbridge
from shmbridge._ext import header
from shmbridge._ext import lane as lane_writer
from shmbridge._ext.put import BadValue, LossyMasks, Plan, Stamp
from shmbridge.put import RecordPlanner
from shmbridge.schema import standard_columns
from shmbridge.segments import create_lane, open_control

TABLE = standard_columns()
STAMP = Stamp(b"g", 0, 3, 3, False)


@pytest.fixture(scope="module")
def ends():
    """A producer whose rows carry no checks, and a consumer."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SHMBRIDGE_CHECK_ROWS", "0")
        bridge = f"t-forms-{os.getpid()}"
        made = Ends(bridge)
        made.producer._planner.plan(
            {"tokens": torch.ones(1, 1, dtype=torch.int32)}, STAMP, False
        )  # from now on it knows tensors
        yield made
        made.close()
        shmbridge.clean(bridge, dry_run=False)


def test_every_form_and_every_mistake_gives_the_bytes_or_the_error_that_it_always_gave(ends) -> None:
    expected, found = json.loads(OUTCOMES.read_text()), outcomes(ends)
    assert {name: found.get(name) for name in expected if found.get(name) != expected[name]} == {}
    assert sorted(found) == sorted(expected)


COMMON = {
    "tokens": [
        "lists",
        "list of tuples",
        "arrays",
        "arrays and lists",
        "other dtype",
        "matrix",
        "tensors",
        "tensor",
        "flat tensor",
        "flat, lengths list",
        "flat, lengths int64",
        "flat, lengths uint32",
    ],
    "masks": ["lists", "tuple of lists", "list of tuples", "null", "[]", "()", "{}"],
    "loss_mask": ["lists", "bools"],
    "advantages": ["lists", "arrays", "other dtype", "null"],
    "score": ["list", "tuple", "array", "int array", "bools", "NumPy numbers"],
    "distill_token_ids": ["lists", "arrays", "null"],
    "messages": ["null", "[]", "{}"],
    "env_id": ["0", "7", "None"],
}
UNCOMMON = {
    "tokens": [
        "tuple of lists",
        "strided",
        "reversed",
        "big endian",
        "bfloat16",
        "tensors that need a gradient",
        "a row of None",
        "masked",
        "null",
    ],
    "masks": ["arrays", "a row of None", "a shorter row"],
    "advantages": ["deque", "a row of None", "a shorter row", "a row less", "flat, lengths tuple"],
    "score": ["deque", "None in it", "a value less", "number"],
    "reward_components": ["dicts"],
    "messages": ["values"],
    "env_id": ["NumPy", "-1", "True"],
    "unknown": ["list"],
}


def groups(forms: dict[str, list[str]]) -> list:
    return [
        pytest.param({"tokens": TOKENS, column: COLUMNS[column][name]}, id=f"{column}: {name}")
        for column in forms
        for name in forms[column]
    ]


@pytest.mark.parametrize("group", groups(COMMON))
def test_common_forms_need_no_converter(ends, group) -> None:
    ends.producer.put({"tokens": [[1]]})  # now no check of the segments' names is due
    assert ends.producer._fast_put.put(group, "g", None) is not None
    for record in ends.consumer.poll():
        record.release()


@pytest.mark.parametrize(
    "group",
    [
        *groups(UNCOMMON),
        None,
        {},
        MappingProxyType({"tokens": TOKENS}),
        {"tokens": [[1, 2], []], "score": [1.0, 0.0]},
        {"tokens": [[1, 2]], "scores": [1.0], "score": [1.0]},
        {"tokens": [[1, 2]], 7: [1]},
        {"tokens": [[1, 2]], "masks": [[1, 7]]},
        {"tokens": [[1, 2**31]]},
        {"tokens": [[1]], "advantages": [[float("nan")]]},
    ],
    ids=lambda group: None if group is None else repr(group)[:60],
)
def test_uncommon_and_wrong_groups_leave_no_trace_on_the_fast_path(ends, group) -> None:
    producer = ends.producer
    before = producer.stats()
    assert producer._fast_put.put(group, "g", None) is None
    assert not producer._writer.claiming
    assert producer.stats() == before


number = (
    st.integers(-(2**40), 2**40)
    | st.booleans()
    | st.floats(width=32)
    | st.none()
    | st.sampled_from([2**31 - 1, -(2**31), 2**70])
)
row = st.lists(number, max_size=4) | st.lists(st.integers(0, 300), max_size=4).map(np.array) | st.none()
rows = st.lists(row, max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    group=st.fixed_dictionaries(
        {"tokens": rows}, optional=dict.fromkeys(("masks", "advantages", "step_rewards", "score"), rows)
    )
)
def test_a_group_means_the_same_on_the_fast_and_on_the_slow_path(ends, group) -> None:
    assert ends.outcome(group, {}) == ends.outcome(MappingProxyType(group), {})


@pytest.fixture
def placed(bridge):
    """The bytes of a plan in a lane."""
    control = open_control(bridge)
    *_, size = header.lane_geometry(1 << 20, 64)
    _, mapping = create_lane(bridge, size)
    header.format_lane(mapping, 1 << 20, 64, TABLE.encode(), len(TABLE), 1, 1, b"me", b"env")
    writers = [lane_writer.LaneWriter(mapping, control.mapping)]
    del control, mapping

    def place(plan: Plan) -> bytes:
        assert writers[0].claim(plan.extent_bytes)
        memory = writers[0].claimed_memory()
        memory[:] = bytes(len(memory))
        plan.place(writers[0])
        return bytes(memory)

    yield place
    writers.clear()  # the lane ends with it


@pytest.fixture
def fast_put(producer):
    return producer._fast_put


@pytest.mark.parametrize(
    ("group_id", "version"),
    [
        (7, 1),
        ("x" * 1001, 1),
        ("\ud800", 1),
        ("g", (1, 2)),
        ("g", -1),
        ("g", 1 << 31),
        ("g", 1 << 70),
        ("g", True),
    ],
)
def test_unusual_stamps_are_left_to_the_slow_path(fast_put, group_id, version) -> None:
    assert fast_put.put({"tokens": [[1]]}, group_id, version) is None


def test_usual_stamps_take_the_fast_path(fast_put, producer, consumer) -> None:
    group = {"tokens": [[1]]}
    assert fast_put.put(group, None, None) == 0
    assert fast_put.put(group, "gruppe-ä", 0) is None  # not published: the slow path warns of the first
    fast_put.ahead = 1
    assert fast_put.put(group, "gruppe-ä", 0) == 1
    assert fast_put.ahead == 2
    assert [record._group_id for record in consumer.poll()] == [f"{producer.producer_id}:0", "gruppe-ä"]


def test_fast_put_declines_while_the_bridge_is_paused_or_full(fast_put, consumer) -> None:
    consumer.pause()
    assert fast_put.put({"tokens": [[1]]}, None, None) is None
    consumer.resume()
    taken = 0
    while fast_put.put({"tokens": [[1]] * 8}, None, None) is not None:
        taken += 1
    assert taken > 0
    assert consumer.stats()["records_total"] == taken


class Shrinks:
    """A number that empties the list it stands in while it is read."""

    def __index__(self) -> int:
        self.home.clear()
        return 1


@pytest.mark.parametrize("others", [[], [5] * 40])
def test_a_list_that_shrinks_while_it_is_packed_is_refused(placed, others) -> None:
    row = [1, 2, *others]
    row[1] = Shrinks()
    row[1].home = row
    plan = RecordPlanner(TABLE, 1 << 20).plan({"tokens": [row, [3]]}, STAMP, False)
    with pytest.raises(BadValue) as caught:
        placed(plan)
    assert (caught.value.column, caught.value.row) == ("tokens", 0)


def _moved(rows: list) -> None:
    """The first row gains what the second loses."""
    rows[0].append(rows[1].pop())


def _resized(rows: list) -> None:
    rows[0].resize(4, refcheck=False)
    rows[1].resize(2, refcheck=False)


@pytest.mark.parametrize(
    ("column", "rows", "change"),
    [
        ("tokens", [[1, 2, 3], [4, 5, 6]], _moved),
        ("tokens", [np.arange(3, dtype=np.int32), np.arange(3, dtype=np.int32)], _resized),
        ("loss_mask", [[1, 1, 1], [0, 0, 1]], _moved),
        ("step_rewards", [[1.0, 2.0], [3.0]], _moved),
        ("distill_token_ids", [[[1], [2], [3]], [[4], [5], [6]]], lambda rows: _moved(rows[0])),
    ],
    ids=["lists", "arrays", "a mask", "a free length", "nested"],
)
def test_rows_whose_lengths_change_while_a_put_waits_are_refused(placed, column, rows, change) -> None:
    group = {"tokens": [[1, 2, 3], [4, 5, 6]], column: rows}
    plan = RecordPlanner(TABLE, 1 << 20).plan(group, STAMP, False)
    change(rows)
    with pytest.raises(BadValue) as caught:
        placed(plan)
    assert (caught.value.column, caught.value.row, caught.value.fault) == (column, 0, "resized")
    assert abs(caught.value.value - caught.value.limit) == 1


def test_masks_whose_lengths_change_while_a_put_waits_are_not_folded(placed) -> None:
    masks = [[-100, -100, -100], [-100, -100, 6]]
    plan = RecordPlanner(TABLE, 1 << 20).plan({"tokens": [[1, 2, 3], [4, 5, 6]], "masks": masks}, STAMP, True)
    masks[0].append(masks[1].pop(0))
    with pytest.raises(LossyMasks):
        placed(plan)


class Interrupts:
    def __index__(self) -> int:
        raise KeyboardInterrupt


@pytest.mark.parametrize("rows", [list, tuple], ids=["common", "uncommon"])
def test_an_interrupt_while_values_are_packed_is_one_and_leaves_no_claim(producer, consumer, rows) -> None:
    group = {"tokens": rows([[1, Interrupts()]])}
    with pytest.raises(KeyboardInterrupt):
        producer.put(group)
    assert producer.put({"tokens": [[1]]}) == 0
    assert producer.put({"tokens": ([1],)}) == 1
    ids = [record._group_id for record in consumer.poll()]
    assert len(set(ids)) == 2


def test_default_group_ids_are_all_different_whichever_way_a_group_goes(producer, consumer) -> None:
    for number in range(6):
        producer.put({"tokens": [[1]] if number % 2 else ([1],)})
    assert len({record._group_id for record in consumer.poll()}) == 6


class Grows:
    """A mask that makes the list of tokens move while masks are compared with it."""

    def __index__(self) -> int:
        self.tokens.extend([0] * (1 << 20))
        return -100


def test_tokens_that_move_while_masks_are_folded_are_looked_up_again(make_producer, consumer) -> None:
    producer = make_producer(lane_bytes="4M")
    tokens = [1000 + n for n in range(1 << 14)]
    masks = list(tokens)
    masks[1] = Grows()
    masks[1].tokens = tokens
    producer.put({"tokens": [tokens], "masks": [masks]})
    with consumer.get(5) as record:
        assert record["loss_mask"].values.tolist() == [1, 0, *[1] * ((1 << 14) - 2)]


def test_two_empty_rows_are_no_flat_array_with_lengths(producer, consumer) -> None:
    empty = np.zeros(0, np.float32)
    producer.put({"tokens": [[1], [2]], "step_rewards": (empty, empty)})
    with consumer.get(5) as record:
        assert record["step_rewards"].lengths.tolist() == [0, 0]
