"""Column types: to Arrow and back, a user's own columns, and conflicts of two sides."""

import pyarrow as pa
import pytest

import shmbridge
from shmbridge.schema import STANDARD, Column, Columns, Kind, arrow_field, columns_of, standard_columns

OWN = pa.schema(
    [
        ("entropy", pa.list_(pa.float32())),
        ("seed", pa.int64()),
        ("ok", pa.bool_()),
        ("half", pa.float16()),
        ("note", pa.utf8()),
        ("blob", pa.binary()),
        ("topk", pa.list_(pa.list_(pa.int16()))),
        ("parts", pa.map_(pa.utf8(), pa.float32())),
    ]
)


def test_the_standard_schema_goes_to_arrow_and_back() -> None:
    assert columns_of(shmbridge.TRAJECTORY_SCHEMA).order == standard_columns().order


def test_the_standard_schema_is_the_documented_one() -> None:
    schema = shmbridge.TRAJECTORY_SCHEMA
    assert schema.names[0] == "tokens"
    assert schema.field("tokens").type == pa.list_(pa.int32())
    assert schema.field("score").type == pa.float64()
    assert schema.field("loss_mask").type == pa.list_(pa.uint8())
    assert schema.field("reward_components").type == pa.map_(pa.utf8(), pa.float32())
    assert schema.field("distill_logprobs").type == pa.list_(pa.list_(pa.float32()))
    assert schema.field("is_last").type == pa.bool_()
    assert schema.field("routed_experts").type == pa.binary()


def test_own_columns_come_after_the_standard_ones_and_go_back_to_arrow() -> None:
    columns = columns_of(OWN)
    assert [column.name for column in columns.order[: len(STANDARD)]] == list(STANDARD)
    assert pa.schema([arrow_field(columns[name]) for name in OWN.names]) == OWN


def test_the_table_in_a_segment_says_everything() -> None:
    columns = columns_of(OWN)
    read = Columns.decode(columns.encode())
    assert read.order == columns.order
    assert len(columns.encode()) == 64 * len(columns)


def test_checks_of_a_standard_column_are_known_to_every_reader() -> None:
    read = Columns.decode(standard_columns().encode())
    assert read["advantages"].per_token
    assert read["advantages"].finite


def test_a_standard_column_of_another_type_is_refused_with_both_shown() -> None:
    with pytest.raises(
        shmbridge.SchemaMismatch,
        match=r"'tokens' is list<int32> in TRAJECTORY_SCHEMA, list<int64> in schema=",
    ):
        columns_of(pa.schema([("tokens", pa.list_(pa.int64()))]))


@pytest.mark.parametrize(
    "wrong",
    [
        pa.timestamp("us"),
        pa.list_(pa.utf8()),
        pa.struct([("a", pa.int8())]),
        pa.map_(pa.utf8(), pa.int32()),
        pa.decimal128(5),
        pa.null(),
    ],
)
def test_types_no_lane_carries_are_refused_by_name(wrong) -> None:
    with pytest.raises(shmbridge.SchemaMismatch, match=r"'mine'.*no lane carries"):
        columns_of(pa.schema([("mine", wrong)]))


@pytest.mark.parametrize("name", ["", "x" * 57, "é" * 29, "a\0b"])
def test_names_that_do_not_fit_are_refused(name) -> None:
    with pytest.raises(shmbridge.SchemaMismatch, match="1 to 56"):
        columns_of(pa.schema([(name, pa.int32())]))


@pytest.mark.parametrize(
    ("name", "why"),
    [("scores", "name of 'score'"), ("rewards", "name of 'token_rewards'"), ("env_id", "number")],
)
def test_names_that_put_takes_for_something_else_are_refused(name, why) -> None:
    with pytest.raises(
        shmbridge.SchemaMismatch,
        match=rf"{name!r} cannot be put: .*{why}.* -> rename the column: 'my_{name}'",
    ):
        columns_of(pa.schema([(name, pa.list_(pa.float32()))]))


def test_too_many_columns_are_refused_with_the_limit() -> None:
    with pytest.raises(shmbridge.SchemaMismatch, match=f"at most {256 - len(STANDARD)}"):
        columns_of(pa.schema([(f"c{i}", pa.int32()) for i in range(300)]))


def test_columns_only_one_side_has_are_no_conflict() -> None:
    columns_of(OWN).check_agrees(standard_columns(), "here", "there")
    standard_columns().check_agrees(columns_of(OWN), "here", "there")


def test_a_conflict_names_both_types_and_both_sides() -> None:
    here, there = (columns_of(pa.schema([("mine", kind)])) for kind in (pa.int32(), pa.list_(pa.float32())))
    with pytest.raises(shmbridge.SchemaMismatch, match="'mine' is int32 here, list<float32> there"):
        here.check_agrees(there, "here", "there")


@pytest.mark.parametrize(("at", "value"), [(56, 9), (57, 99), (58, 3), (0, 0)])
def test_a_table_of_unknown_types_is_refused(at, value) -> None:
    raw = bytearray(columns_of(pa.schema([("m", pa.int32())]))["m"].encode())
    raw[at] = value
    with pytest.raises(shmbridge.SchemaMismatch, match="no type of this build"):
        Columns.decode(bytes(raw))


def test_kinds_have_the_names_arrow_gives_them() -> None:
    columns = columns_of(OWN)
    assert [columns[name].type_name for name in OWN.names] == [
        "list<float32>",
        "int64",
        "bool",
        "float16",
        "utf8",
        "binary",
        "list<list<int16>>",
        "map<utf8, float32>",
    ]
    assert isinstance(columns["seed"], Column)
    assert columns["seed"].kind is Kind.SCALAR
