"""Columns by attribute, completion, mapping, repr: the comfort of records and batches."""

import copy
import gc
import pickle

import numpy as np
import pytest

import shmbridge
from shmbridge.record import BatchColumns, RecordColumns
from shmbridge.schema import STANDARD

GROUP = {
    "tokens": [[1, 2, 3], [4, 5]],
    "score": [1.0, 0.5],
    "advantages": [[1.0, 1.0, 1.0], [2.0, 2.0]],
    "messages": ["[]", "[]"],
    "prompt_length": [0, 0],
}
LACKING = {"tokens": [[6, 7]], "score": [0.0], "prompt_length": [0]}


def test_every_standard_column_is_an_attribute():
    named = {name for name in vars(RecordColumns) if not name.startswith("_")}
    assert named == set(STANDARD)
    assert {name for name in named if not getattr(RecordColumns, name).__doc__} == set()


def test_the_types_are_those_of_the_schema():
    """What type checkers read of the source, against the schema."""
    import ast
    import inspect

    tree = ast.parse(inspect.getsource(BatchColumns))
    guarded = next(each for each in tree.body[0].body if isinstance(each, ast.If))
    noted = {
        each.target.id: ast.unparse(each.annotation)
        for each in guarded.body
        if isinstance(each, ast.AnnAssign)
    }
    assert set(noted) == {*STANDARD, "scores"}
    literals = {
        constant.value
        for each in guarded.body
        if isinstance(each, ast.FunctionDef)
        for constant in ast.walk(each.args)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    }
    assert literals == {*STANDARD, "scores"}


def test_record(producer, consumer):
    producer.put(GROUP)
    record = consumer.get(5)
    assert record.tokens.values.tolist() == [1, 2, 3, 4, 5]
    assert record.score.tolist() == [1.0, 0.5]
    assert record.ref_logprobs is None
    assert list(record) == record.keys() == record.columns == record._ipython_key_completions_()
    assert dict(record)["score"].tolist() == [1.0, 0.5]
    assert dict(record.items()).keys() == dict(record).keys()
    assert {"tokens", "advantages", "release", "meta", "to_torch", "rows"} - {"to_torch"} <= set(dir(record))
    assert not {"slot", "generation", "abandon", "reader", "extent_bytes", "looked_at"} & set(dir(record))
    with pytest.raises(AttributeError):
        _ = record.tokenz
    assert "list&lt;int32&gt;" in record._repr_html_()
    record.release()
    assert repr(record).endswith("released>")
    assert "<table>" in record._repr_html_()
    dir(record)
    with pytest.raises(shmbridge.LeaseReleased):
        _ = record.tokens


def test_batch(producer, consumer):
    producer.put_many([GROUP, LACKING])
    batch = next(consumer.batches(groups=2, timeout_s=5))
    assert {"tokens", "loss_mask", "advantages", "scores", "release"} <= set(dir(batch))
    assert batch._ipython_key_completions_() == list(batch) == batch.keys()
    assert dict(batch)["score"].tolist() == [1.0, 0.5, 0.0]
    assert "1 rows lack it" in batch._repr_html_()
    with pytest.raises(AttributeError, match="tokenz"):
        _ = batch.tokenz
    batch.release()
    assert "released" in repr(batch)
    assert "<table>" in batch._repr_html_()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_advantages_or(producer, consumer, layout):
    producer.put_many([GROUP, LACKING])
    batch = next(consumer.batches(groups=2, layout=layout, timeout_s=5))
    packed = [1, 1, 1, 2, 2]
    wanted = {
        "number": (9.0, [*packed, 9, 9]),
        "rows": (np.array([7.0, 8.0, 9.0]), [*packed, 9, 9]),
        "tokens": (np.full(batch.tokens.shape, 9.0), [*packed, 9, 9]),
    }
    for given, values in wanted.values():
        found = batch.advantages_or(given)
        assert found.dtype == np.float32
        assert found.shape == batch.tokens.shape
        if layout == "padded":
            there = np.arange(found.shape[1]) < batch.lengths[:, None]
            assert not found[~there].any()
            found = found[there]
        assert found.tolist() == values
    with pytest.raises(shmbridge.BadArgument, match=r"shape \(4,\) -> give one number, one for each of"):
        batch.advantages_or(np.zeros(4))
    for wrong in ("x", None, [[1.0], [1.0, 2.0]]):
        with pytest.raises(shmbridge.BadArgument, match=r"fallback=.* is no number -> give one number"):
            batch.advantages_or(wrong)
    assert not np.shares_memory(batch.advantages_or(0.0), batch.advantages)


def test_advantages_or_where_nobody_has_them(producer, consumer):
    producer.put(LACKING)
    batch = next(consumer.batches(groups=1, timeout_s=5))
    assert batch.advantages is None
    assert batch.advantages_or(2.5).tolist() == [2.5, 2.5]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps], ids=["copy", "deepcopy", "pickle"])
def test_leases_cannot_be_copied(producer, consumer, how):
    producer.put_many([GROUP] * 2)
    batch, record = next(consumer.batches(groups=1, prefetch=0, timeout_s=5)), consumer.get(5)
    for each in (batch, record, consumer, producer):
        with pytest.raises(TypeError, match=r"cannot be (copied|pickled).*->"):
            how(each)
    record.release()
    batch.release()
    gc.collect()
    assert consumer.stats()["released_total"] == 2


def test_views_that_are_copies_can_be_copied(producer, consumer):
    producer.put(GROUP)
    record = consumer.get(5)
    again = copy.deepcopy(record["tokens"])
    record.release()
    assert [row.tolist() for row in again] == [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize(
    "name",
    [
        "sequence",
        "group_id",
        "group_size",
        "env_id",
        "min_policy_version",
        "max_policy_version",
        "t_created_ns",
        "t_publish_ns",
        "redelivered",
    ],
)
def test_an_attribute_that_moved_to_the_meta_keeps_its_old_name(name, producer, consumer) -> None:
    producer.put({"tokens": [[1, 2]]}, group_id="g", policy_version=3)
    with consumer.get(5) as record:
        with pytest.warns(FutureWarning, match=f"record.{name} is record.meta.{name}"):
            value = getattr(record, name)
        assert value == getattr(record.meta, name)
