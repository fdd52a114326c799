"""The common forms, understood in C, give the same bytes as the careful way; whatever is uncommon is left to
it.
"""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shmbridge._ext import fast_put, header, lane_writer
from shmbridge._ext.plan import Plan, Stamp
from shmbridge.put.convert import take_in
from shmbridge.schema import ALIASES, standard_columns
from shmbridge.segments import membership, segment

TABLE = standard_columns()
FORMS = fast_put.Forms({**TABLE.forms, **{alias: TABLE.forms[name] for alias, name in ALIASES.items()}})
STAMP = Stamp(b"g", 0, 3, 3, False)
fast_put.know_tensors(torch.Tensor)


def plans(group) -> tuple[Plan | None, Plan]:
    measured = take_in(group, TABLE)
    careful = Plan(measured.columns, STAMP, measured.rows, measured.tokens, measured.uneven, measured.env_id)
    return FORMS.plan(group, STAMP, None), careful


@pytest.fixture
def placed(bridge):
    """The bytes of a plan in a lane."""
    control = membership.open_control(bridge)
    *_, size = header.lane_geometry(1 << 20, 64)
    _, mapping = segment.create_lane(bridge, size)
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


LENGTHS = [3, 1, 2, 70]
TOKENS = [list(range(100, 100 + length)) for length in LENGTHS]
MASKS = [[-100] * (len(row) // 2) + row[len(row) // 2 :] for row in TOKENS]
FLOATS = [[value / 7 for value in row] for row in TOKENS]
FLAT = np.concatenate([np.array(row, np.float32) for row in FLOATS])

QUICK = {
    "lists": {"tokens": TOKENS, "masks": MASKS, "scores": [1.0, 2, 0.5, -1.0], "advantages": FLOATS},
    "aliases": {"tokens": TOKENS, "rewards": FLOATS, "score": [0.0] * 4},
    "arrays": {
        "tokens": [np.array(row, np.int32) for row in TOKENS],
        "advantages": [np.array(row, np.float32) for row in FLOATS],
    },
    "other dtypes": {
        "tokens": [np.array(row, np.int64) for row in TOKENS],
        "advantages": [np.array(row) for row in FLOATS],
        "loss_mask": [np.array(row, np.int64) > 101 for row in TOKENS],
    },
    "uint16": {"tokens": [np.array(row, np.uint16) for row in TOKENS]},
    "empty rows": {"tokens": [[1, 2], [], [3]], "advantages": [[1.0, 2.0], [], [3.0]]},
    "flat": {
        "tokens": TOKENS,
        "advantages": (FLAT, np.array(LENGTHS)),
        "token_rewards": (FLAT, LENGTHS),
        "score": np.arange(4),
    },
    "flat of int32 lengths": {
        "tokens": (np.arange(76), np.array(LENGTHS, np.int32)),
        "advantages": (FLAT, np.array(LENGTHS, np.uint32)),
    },
    "matrix": {"tokens": np.arange(12).reshape(3, 4), "advantages": np.ones((3, 4))},
    "tensors": {
        "tokens": torch.arange(12).reshape(3, 4),
        "advantages": [torch.ones(4)] * 3,
        "loss_mask": torch.ones(3, 4, dtype=torch.uint8),
    },
    "nothing": {
        "tokens": TOKENS,
        "messages": None,
        "overrides": [],
        "generation_params": {},
        "ref_logprobs": None,
        "masks": None,
    },
    "masks beside arrays": {"tokens": [np.array(row) for row in TOKENS], "masks": MASKS},
    "other lists": {"tokens": TOKENS, "step_rewards": [[1.0], [], [2.0, 3.0], []], "env_id": 7},
}


@pytest.mark.parametrize("group", QUICK.values(), ids=QUICK)
def test_common_forms_are_quick_and_give_the_same_bytes(placed, group) -> None:
    fast, careful = plans(group)
    assert fast is not None
    assert placed(fast) == placed(careful)
    assert (fast.rows, fast.tokens, fast.index_bytes, fast.extent_bytes) == (
        careful.rows,
        careful.tokens,
        careful.index_bytes,
        careful.extent_bytes,
    )


@pytest.mark.parametrize(
    "group",
    [
        None,
        {},
        {"tokens": []},
        {"tokens": [[1], None]},
        {"tokens": [(1, 2)]},
        {"tokens": [[1, 2]], "advantages": [[1.0]]},
        {"tokens": [[1, 2]], "score": [1.0, 2.0]},
        {"tokens": [[1, 2]], "score": [None]},
        {"tokens": [[1, 2], []], "score": [1.0, 0.0]},
        {"tokens": [[1, 2]], "scores": [1.0], "score": [1.0]},
        {"tokens": [[1, 2]], "unknown": [1]},
        {"tokens": [[1, 2]], 7: [1]},
        {"tokens": [[1, 2]], "messages": [[{"role": "user"}]]},
        {"tokens": [[1, 2]], "masks": [[1]]},
        {"tokens": [[1, 2]], "masks": [(1, 2)]},
        {"tokens": [[1, 2]], "masks": np.array([[1, 2]])},
        {"tokens": [[1, 2]], "masks": [[1, 2]], "loss_mask": [[1, 1]]},
        {"tokens": [[1, 2]], "env_id": -1},
        {"tokens": [[1, 2]], "env_id": True},
        {"tokens": [np.array([[1, 2]])]},
        {"tokens": [np.arange(9)[::2]]},
        {"tokens": [np.array([1, 2], ">i4")]},
        {"tokens": (np.arange(4), [3, 2])},
        {"tokens": (np.arange(4), [5, -1])},
        {"tokens": (np.arange(4), [3.0, 1.0])},
        {"tokens": [torch.ones(2, requires_grad=True)]},
        {"tokens": [torch.ones(2, dtype=torch.bfloat16)]},
        {"tokens": [[1, 2]], "is_last": [True]},
    ],
    ids=repr,
)
def test_whatever_is_uncommon_is_left_to_the_careful_way(group) -> None:
    assert FORMS.plan(group, STAMP, None) is None


def test_a_group_larger_than_it_is_said_to_be_is_left_to_the_careful_way() -> None:
    assert FORMS.plan({"tokens": [[1], [2]]}, Stamp(b"g", 1, -1, -1, False), None) is None


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
        {"tokens": rows}, optional=dict.fromkeys(("masks", "advantages", "step_rewards"), rows)
    )
)
def test_what_is_quick_is_never_measured_otherwise(group) -> None:
    fast = FORMS.plan(group, STAMP, None)
    if fast is None:
        return
    measured = take_in(group, TABLE)
    assert sorted(column.name for column in measured.columns) == sorted(
        column.name for column in fast.columns
    )
    by_name = {column.name: column for column in measured.columns}
    for column in fast.columns:
        careful = by_name[column.name]
        assert (column.tag, column.entries, column.count) == (careful.tag, careful.entries, careful.count)
        assert (
            column.lengths is None and careful.lengths is None
        ) or column.lengths.tolist() == careful.lengths.tolist()


@pytest.fixture
def door(producer):
    return producer._door


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
def test_unusual_stamps_are_left_to_the_careful_way(door, group_id, version) -> None:
    assert door.stamp(group_id, 0, version) is None
    assert door.put({"tokens": [[1]]}, group_id, 0, version) is None


def test_usual_stamps(door, producer) -> None:
    assert door.stamp(None, 4, None).group_id == f"{producer.producer_id}:4".encode()
    assert door.stamp("gruppe-ä", 4, 0) is None  # nobody has published it: that is said first
    door.ahead = 1
    assert door.stamp("gruppe-ä", 4, 0).group_id == "gruppe-ä".encode()
    assert door.ahead == 2


@pytest.mark.parametrize(
    "wrong",
    [
        {"tokens": [[1, 2**31]]},
        {"tokens": [[1]], "masks": [[7]]},
        {"tokens": [[1]], "advantages": [[float("nan")]]},
    ],
)
def test_what_the_door_declines_leaves_no_trace(door, producer, wrong) -> None:
    before = producer.stats()
    assert door.put(wrong, None, 0, None) is None
    assert not producer._writer.claiming
    assert {**producer.stats(), "t": 0} == {**before, "t": 0}
    assert producer.put({"tokens": [[1]]}) == 0


def test_the_door_is_shut_while_the_bridge_is_paused_or_full(door, consumer) -> None:
    consumer.pause()
    assert door.put({"tokens": [[1]]}, None, 0, None) is None
    consumer.resume()
    taken = 0
    while door.put({"tokens": [[1]] * 8}, None, taken, None) is not None:
        taken += 1
    assert taken > 0
    assert consumer.stats()["records_total"] == taken


class Shrinks:
    """A number that takes the list it stands in away while it is read."""

    def __index__(self) -> int:
        self.home.clear()
        return 1


@pytest.mark.parametrize("others", [[], [5] * 40])
def test_a_list_that_shrinks_while_it_is_packed_is_refused(placed, others) -> None:
    row = [1, 2, *others]
    row[1] = Shrinks()
    row[1].home = row
    plan = FORMS.plan({"tokens": [row, [3]]}, STAMP, None)
    with pytest.raises(ValueError, match=r"does not fit|smaller"):
        placed(plan)


class Interrupts:
    def __index__(self) -> int:
        raise KeyboardInterrupt


@pytest.mark.parametrize("door", [True, False], ids=["common", "uncommon"])
def test_an_interrupt_while_values_are_packed_is_one_and_leaves_no_claim(producer, consumer, door) -> None:
    group = {"tokens": [[1, Interrupts()]]} if door else {"tokens": [(1, Interrupts())]}
    with pytest.raises(KeyboardInterrupt):
        producer.put(group)
    assert producer.put({"tokens": [[1]]}) == 0
    assert producer.put({"tokens": [(1,)]}) == 1
    ids = [record.group_id for record in consumer.poll()]
    assert len(set(ids)) == 2


def test_default_group_ids_are_all_different_whichever_way_a_group_goes(producer, consumer) -> None:
    for number in range(6):
        producer.put({"tokens": [[1]] if number % 2 else [(1,)]})
    assert len({record.group_id for record in consumer.poll()}) == 6


class Grows:
    """A mask that makes the list of tokens move while masks are compared with it."""

    def __index__(self) -> int:
        self.tokens.extend([0] * (1 << 20))
        return -100


def test_tokens_that_move_while_masks_are_folded_are_looked_up_anew(make_producer, consumer) -> None:
    producer = make_producer(lane_bytes="4M")
    tokens = [1000 + n for n in range(1 << 14)]
    masks = list(tokens)
    masks[1] = Grows()
    masks[1].tokens = tokens
    producer.put({"tokens": [tokens], "masks": [masks]})
    with consumer.get(5) as record:
        assert record["loss_mask"].values.tolist() == [1, 0, *[1] * ((1 << 14) - 2)]
