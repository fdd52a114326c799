"""The content of a batch: the records' rows and nothing else, in both layouts."""

from itertools import chain, islice, repeat

import numpy as np
import pyarrow as pa
import pytest

from shmbridge.batch import Batch
from shmbridge.record import Group, Ragged, RaggedLists, Record
from shmbridge.schema import Kind

ROWS = [
    {
        "tokens": [[1, 2, 3], [4]],
        "advantages": [[0.5, 1, 1.5], [2]],
        "score": [1.0, 0.0],
        "step_rewards": [[0.5], []],
    },
    {"tokens": [[5, 6]], "score": [0.5], "instance_id": ["x"], "reward_components": [{"a": 1.0}]},
    {
        "tokens": [[7], [8, 9], []],
        "loss_mask": [[1], [0, 1], []],
        "group_overrides": {"k": 1},
        "scores": [1, 2, 3],
    },
]


@pytest.fixture
def batch(producer, consumer):
    def make(groups=ROWS, **options):
        for number, group in enumerate(groups):
            # which may have scored rows without tokens
            producer.put(group, group_id=f"g{number}", policy_version=number, foreign=True)
        return next(consumer.batches(groups=len(groups), **{"prefetch": 0, **options}))

    return make


def test_packed_arrays_are_the_rows_one_after_another(batch) -> None:
    it = batch()
    assert it.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]
    assert it.cu_seqlens.tolist() == [0, 3, 4, 6, 7, 9, 9]
    assert it.position_ids.tolist() == [0, 1, 2, 0, 0, 1, 0, 0, 1]
    assert it.lengths.tolist() == [3, 1, 2, 1, 2, 0]
    assert it.group_index.tolist() == [0, 0, 1, 2, 2, 2]
    assert (len(it), it.token_count, it.group_count) == (6, 9, 3)
    assert (it.tokens.dtype, it.cu_seqlens.dtype, it.position_ids.dtype) == (np.int32,) * 3


def test_padded_arrays_have_zeros_on_the_right(batch) -> None:
    it = batch(layout="padded")
    assert it.tokens.tolist() == [[1, 2, 3], [4, 0, 0], [5, 6, 0], [7, 0, 0], [8, 9, 0], [0, 0, 0]]
    assert it.advantages.tolist() == [[0.5, 1.0, 1.5], [2.0, 0, 0], *[[0.0] * 3] * 4]
    assert it.position_ids.shape == it.tokens.shape


def test_a_column_some_records_lack_is_zero_there_and_says_so(batch) -> None:
    it = batch()
    assert it.advantages.tolist() == [0.5, 1.0, 1.5, 2.0, 0, 0, 0, 0, 0]
    assert it.has("advantages").tolist() == [True, True, False, False, False, False]
    assert it.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert it.has("loss_mask").tolist() == [False, False, False, True, True, True]
    assert it.has("scores").all()


def test_a_column_no_record_has_is_none_or_a_key_error(batch) -> None:
    it = batch()
    assert it.ref_logprobs is None
    assert "ref_logprobs" not in it
    assert not it.has("ref_logprobs").any()
    with pytest.raises(KeyError):
        it["ref_logprobs"]
    with pytest.raises(AttributeError):
        _ = it.no_such_column


def test_scalars_lists_texts_and_maps_have_one_entry_per_row(batch) -> None:
    it = batch()
    assert it.scores.tolist() == it.score.tolist() == it["scores"].tolist() == [1.0, 0.0, 0.5, 1.0, 2.0, 3.0]
    assert [row.tolist() for row in it.step_rewards] == [[0.5], [], [], [], [], []]
    assert it.instance_id == [None, None, "x", None, None, None]
    assert it.reward_components == [None, None, {"a": 1.0}, None, None, None]
    assert it.group_overrides == [None, None, None, '{"k":1}', '{"k":1}', '{"k":1}']


def test_metadata_is_per_row(batch) -> None:
    it = batch()
    assert [meta.group_id for meta in it.meta] == ["g0", "g0", "g1", "g2", "g2", "g2"]
    assert [meta.min_policy_version for meta in it.meta] == [0, 0, 1, 2, 2, 2]


def test_the_arrays_stay_after_release(batch, producer) -> None:
    it = batch()
    assert producer.stats()["held"] == 3
    it.release()
    it.release()
    assert producer.stats()["held"] == 0
    for number in range(50):
        producer.put({"tokens": [[number] * 20]})
    assert it.tokens.tolist() == [1, 2, 3, 4, 5, 6, 7, 8, 9]


def test_a_row_of_another_length_than_its_tokens_is_absent(producer, consumer) -> None:
    producer.put({"tokens": [[1, 2, 3], [4]], "masks": [[1], [4, 5, 6]], "scores": [1.0]}, foreign=True)
    it = next(consumer.batches(groups=1, prefetch=0))
    assert it.masks.tolist() == it.loss_mask.tolist() == [0, 0, 0, 0]
    assert it.has("masks").tolist() == it.has("loss_mask").tolist() == [False, False]
    assert it.scores.tolist() == [1.0, 0.0]
    assert {name: rows.tolist() for name, rows in it.uneven.items()} == {
        name: [True, True] for name in ("masks", "loss_mask", "score")
    }


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_that_fit_of_an_uneven_column_stay_where_they_belong(producer, consumer, layout) -> None:
    """Values of the answer alone must not be placed on the prompt."""
    said = {
        "inference_logprobs": [[-3.0], [-1.0, -2.0], [-4.0, -5.0, -6.0]],
        "advantages": [[1.0, 1.0, 1.0], [2.0, 2.0]],  # a row is missing, and it is unknown which
        "token_versions": [[7, 7, 7], None, [7]],
        "distill_token_ids": [[[1], [2], [3]], [[4]], [[5]]],
    }
    producer.put({"tokens": [[1, 2, 3], [4, 5], [6]], **said}, foreign=True)
    producer.put({"tokens": [[7]], "inference_logprobs": [[-7.0]], "advantages": [[0.5]]})
    it = next(consumer.batches(groups=2, layout=layout, prefetch=0))
    flat = (
        (lambda values: values.ravel().tolist())
        if layout == "packed"
        else (
            lambda values: [
                value
                for row, length in zip(values, it.lengths, strict=True)
                for value in row[:length].tolist()
            ]
        )
    )
    assert flat(it.inference_logprobs) == [0, 0, 0, -1, -2, 0, -7]
    assert it.has("inference_logprobs").tolist() == [False, True, False, True]
    assert flat(it.advantages) == [0, 0, 0, 0, 0, 0, 0.5]
    assert it.has("advantages").tolist() == [False, False, False, True]
    assert flat(it.token_versions) == [7, 7, 7, 0, 0, 7, 0]
    assert it.has("token_versions").tolist() == [True, False, True, False]
    assert [[each.tolist() for each in it.distill_token_ids[row]] for row in range(4)] == [
        [[1], [2], [3]],
        [],
        [[5]],
        [],
    ]
    assert {name: rows.tolist() for name, rows in it.uneven.items()} == {
        "inference_logprobs": [True, False, True, False],
        "advantages": [True, True, True, False],
        "distill_token_ids": [False, True, False, False],
    }


def test_a_batch_without_masks_has_one_of_zeros(batch) -> None:
    it = batch([{"tokens": [[1, 2], [3]]}])
    assert it.loss_mask.tolist() == it["loss_mask"].tolist() == [0, 0, 0]
    assert not it.has("loss_mask").any()
    assert "loss_mask" not in it


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_rows_that_say_nothing_of_training_are_whole_if_that_is_asked_for(batch, layout) -> None:
    groups = [
        {"tokens": [[1, 2], [3]]},
        {"tokens": [[4, 5]], "prompt_length": [1]},
        {"tokens": [[6, 7]], "loss_mask": [[0, 1]]},
    ]
    it = batch(groups, layout=layout, whole_rows=True)
    assert it.loss_mask.tolist() == (
        [1, 1, 1, 0, 0, 0, 1] if layout == "packed" else [[1, 1], [1, 0], [0, 0], [0, 1]]
    )
    assert it.has("loss_mask").tolist() == [False, False, False, True]
    alone = batch([{"tokens": [[1, 2], [3]]}], layout=layout, whole_rows=True)
    assert alone.loss_mask.tolist() == ([1, 1, 1] if layout == "packed" else [[1, 1], [1, 0]])


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_column_of_uneven_records_has_the_rows_of_its_batch(producer, consumer, layout) -> None:
    short = {
        "step_rewards": [[1, 2]],
        "trace_spans": [[0, 2]],
        "reward_components": [{"a": 1.0}],
        "instance_id": ["x"],
    }
    long = {
        "step_rewards": [[3], [4]],
        "trace_spans": [[0, 1], [1, 2]],
        "reward_components": [{}, {}],
        "instance_id": ["y", "z"],
    }
    producer.put({"tokens": [[1, 2, 3], [4]], "scores": [1.0], **short}, foreign=True)
    producer.put({"tokens": [[5]], "scores": [2.0, 3.0], **long}, foreign=True)
    it = next(consumer.batches(groups=2, layout=layout, prefetch=0))
    assert [row.tolist() for row in it.step_rewards] == [[1.0, 2.0], [], [3.0]]
    assert [row.tolist() for row in it.trace_spans] == [[0, 2], [], [0, 1]]
    assert it.reward_components == [{"a": 1.0}, None, {}]
    assert it.instance_id == ["x", None, "y"]
    assert it.scores.tolist() == [1.0, 0.0, 2.0]
    assert all(
        it.has(name).tolist() == [True, False, True]
        for name in ("step_rewards", "trace_spans", "instance_id", "scores")
    )


def test_a_value_per_record_stands_in_each_of_its_rows(make_producer, make_consumer) -> None:
    per_record = {b"per": b"record"}
    schema = pa.schema(
        [
            pa.field("seed", pa.int64(), metadata=per_record),
            pa.field("goal", pa.list_(pa.int32()), metadata=per_record),
            pa.field("tree", pa.list_(pa.list_(pa.int16())), metadata=per_record),
        ]
    )
    producer, consumer = make_producer(schema=schema), make_consumer(schema=schema)
    producer.put({"tokens": [[1], [2]], "seed": [7], "goal": [[5, 6]], "tree": [[[1], [2, 3]]]})
    producer.put({"tokens": [[3]]})
    it = next(consumer.batches(groups=2, prefetch=0))
    assert it["seed"].tolist() == [7, 7, 0]
    assert [row.tolist() for row in it["goal"]] == [[5, 6], [5, 6], []]
    assert [[each.tolist() for each in it["tree"][row]] for row in range(3)] == [
        [[1], [2, 3]],
        [[1], [2, 3]],
        [],
    ]
    assert it.has("goal").tolist() == [True, True, False]


def test_lanes_may_differ_in_columns(make_producer, make_consumer) -> None:
    """One has a column more, and another number for it: each record is read by the table of its own lane."""
    mine, yours = pa.field("mine", pa.int32()), pa.field("yours", pa.list_(pa.float64()))
    consumer = make_consumer()
    make_producer(schema=pa.schema([mine, yours])).put(
        {"tokens": [[1]], "mine": [10], "yours": [[0.5]]}, group_id="a"
    )
    make_producer(schema=pa.schema([yours, mine])).put(
        {"tokens": [[2]], "mine": [20], "yours": [[1.5, 2.5]]}, group_id="b"
    )
    make_producer().put({"tokens": [[3]]}, group_id="c")
    it = next(consumer.batches(groups=3, prefetch=0))
    yours_of = [row.tolist() for row in it["yours"]]
    rows = zip(
        [meta.group_id for meta in it.meta], it.tokens.tolist(), it["mine"].tolist(), yours_of, strict=True
    )
    assert sorted(rows) == [("a", 1, 10, [0.5]), ("b", 2, 20, [1.5, 2.5]), ("c", 3, 0, [])]


@pytest.mark.parametrize(("layout", "shape"), [("packed", (0,)), ("padded", (2, 0))])
def test_rows_without_tokens(batch, layout, shape) -> None:
    it = batch([{"tokens": [[], []], "advantages": [[], []], "score": [1.0, 2.0]}], layout=layout)
    assert it.tokens.shape == it.advantages.shape == it.position_ids.shape == shape
    assert (it.scores.tolist(), it.cu_seqlens.tolist(), len(it), it.token_count) == (
        [1.0, 2.0],
        [0, 0, 0],
        2,
        0,
    )


def test_metadata_is_made_when_it_is_read(batch, monkeypatch) -> None:
    made = []
    meta = Record.meta
    monkeypatch.setattr(Record, "meta", property(lambda record: made.append(record) or meta.__get__(record)))
    it = batch()
    assert not made
    assert it.meta is it.meta
    assert made == it.records


def test_metadata_stays_after_release(batch) -> None:
    it = batch()
    it.release()
    assert [meta.sequence for meta in it.meta] == [0, 0, 1, 2, 2, 2]


def value_rows(record, name):
    """The column's values row by row, as its record says them: one per row; None in rows it does not
    reach.
    """
    value, column = record[name], record._lane_columns[name]
    if isinstance(value, RaggedLists):
        rows = [[each.tolist() for each in value[row]] for row in range(len(value))]
    elif isinstance(value, Ragged):
        rows = [row.tolist() for row in value]
    else:
        rows = list(value)
    return list(islice(chain(rows * (record.rows if column.per_record else 1), repeat(None)), record.rows))


def fitting_rows(record, name, column):
    """`value_rows`, with None in rows that the batch lacks."""
    if name not in record:
        return [None] * record.rows
    rows = value_rows(record, name)
    if not column.per_token:
        return rows
    tokens, fits = record["tokens"].lengths.tolist(), len(record[name]) == record.rows
    return [
        row if fits and row is not None and len(row) == length else None
        for row, length in zip(rows, tokens, strict=True)
    ]


def said_by_records(records, name, column):
    """The values that the batch should have for the column, row by row; a row with another number of values
    than tokens is absent.
    """
    for record in records:
        tokens = record["tokens"].lengths.tolist()
        for length, value in zip(tokens, fitting_rows(record, name, column), strict=True):
            if column.per_token and column.kind is Kind.LIST:
                yield [0] * length if value is None else value
            elif column.kind in (Kind.LIST, Kind.LIST_LIST):
                yield value or []
            else:
                yield 0 if value is None and column.kind is Kind.SCALAR else value


def said_by_batch(batch, name, column):
    values = batch[name]
    if column.per_token and column.kind is Kind.LIST:
        padded = values.tolist() if batch.layout == "padded" else []
        assert all(not any(row[length:]) for row, length in zip(padded, batch.lengths, strict=False))
        cut = [values[end - n : end] for end, n in zip(batch.cu_seqlens[1:], batch.lengths, strict=True)]
        yield from (
            [row[:n] for row, n in zip(padded, batch.lengths, strict=True)]
            if padded
            else [row.tolist() for row in cut]
        )
    elif column.kind is Kind.LIST_LIST:
        yield from ([each.tolist() for each in values[row]] for row in range(len(values)))
    else:
        yield from (each.tolist() if isinstance(each, np.ndarray) else each for each in values)


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize("foreign", [False, True])
def test_any_records_become_the_batch_they_say(make_producer, consumer, layout, foreign) -> None:
    """Drawn at random: which columns, how many rows, how long; uneven ones in any column."""
    draw, producer = np.random.default_rng(11), make_producer(lane_bytes="1M")

    def rows_of(make, rows):
        return [make() for _ in range(max(1, rows + (int(draw.integers(-1, 2)) if foreign else 0)))]

    def lists(high):
        return lambda: draw.integers(1, 9, draw.integers(0, high)).tolist()

    for _ in range(40):
        rows = int(draw.integers(1, 5))
        tokens = [draw.integers(1, 99, draw.integers(0 if foreign else 1, 30)).tolist() for _ in range(rows)]
        optional = {
            "advantages": rows_of(lists(30), rows)
            if foreign
            else [draw.normal(size=len(row)).astype(np.float32) for row in tokens],
            "token_versions": rows_of(lists(30), rows) if foreign else [[1] * len(row) for row in tokens],
            "step_rewards": rows_of(lists(4), rows),
            "distill_token_ids": rows_of(lambda: [lists(3)() for _ in range(draw.integers(0, 4))], rows)
            if foreign
            else [[[1, 2]] * len(row) for row in tokens],
            "score": rows_of(lambda: float(draw.normal()), rows),
            "prompt_length": draw.integers(0, [len(row) + 1 for row in tokens]).tolist(),
            "reward_components": rows_of(lambda: {"a": 1.0}, rows),
            "instance_id": rows_of(lambda: f"i{draw.integers(9)}", rows),
            "group_overrides": {"k": 1},
        }
        some = {name: value for name, value in optional.items() if draw.random() < 0.5}
        producer.put({"tokens": tokens, **some}, foreign=foreign)
    records = consumer.poll()
    groups = [Group(record._group_size, 0.0) for record in records]
    for group, record in zip(groups, records, strict=True):
        group.append(record)
    it = Batch(groups, layout)
    assert sorted(it.columns) == sorted(["tokens", *optional])
    for name in it.columns:
        column = next(record._lane_columns[name] for record in records if name in record)
        assert list(said_by_batch(it, name, column)) == list(said_by_records(records, name, column)), name
        reached = [row is not None for record in records for row in fitting_rows(record, name, column)]
        assert it.has(name).tolist() == reached, name


def test_columns_in_place_stay_out_of_the_batch_and_in_its_records(batch, consumer) -> None:
    made = []

    def make(groups, layout):
        made.append(Batch(groups, layout, in_place=("tokens", "advantages")))
        return made[-1]

    it = batch(make=make)
    assert it is made[0]
    assert it.tokens is None
    assert "advantages" not in it
    assert it.loss_mask.tolist() == [0, 0, 0, 0, 0, 0, 1, 0, 1]
    assert it.lengths.tolist() == [3, 1, 2, 1, 2, 0]
    assert [record["tokens"].values.tolist() for record in it.records] == [[1, 2, 3, 4], [5, 6], [7, 8, 9]]


def test_an_error_of_making_a_batch_is_raised_by_next_and_the_groups_stay(batch, consumer) -> None:
    def make(groups, layout):
        raise RuntimeError("no room on the device")

    with pytest.raises(RuntimeError, match="no room"):
        batch(make=make)
    assert next(consumer.batches(groups=3, prefetch=0)).token_count == 9
