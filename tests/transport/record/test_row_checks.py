"""Checks of rows: stored by every form of `put`, over the values in the lane, hidden from columns, Arrow and
Atropos.
"""

import asyncio
import math

import numpy as np
import pyarrow as pa
import pytest
import torch

import shmbridge
from shmbridge.record import CHECK_VARIABLE, CHECKED_COLUMNS, DEFAULT_EVERY, check_of, checked_every

TOKENS = [[5, 6, 7], [8, 9]]
MASK = [[0, 1, 1], [0, 1]]
LOGPROBS = [[math.nan, -0.5, -0.25], [math.nan, -2.0]]
ADVANTAGES = [[0.5, 0.5, -1.5], [0.0, 3.0]]
LENGTHS = np.array([3, 2])
PUT = {
    "tokens": [np.array(row, np.int32) for row in TOKENS],
    "loss_mask": [np.array(row, np.uint8) for row in MASK],
    "inference_logprobs": [np.array(row, np.float32) for row in LOGPROBS],
    "advantages": [np.array(row, np.float32) for row in ADVANTAGES],
}
LISTS = {"tokens": TOKENS, "loss_mask": MASK, "inference_logprobs": LOGPROBS, "advantages": ADVANTAGES}


def flat(group):
    return {
        name: (np.concatenate([np.asarray(row) for row in rows]), LENGTHS) for name, rows in group.items()
    }


def masks(group):
    trained = [
        [token if on else -100 for token, on in zip(*pair, strict=True)]
        for pair in zip(TOKENS, MASK, strict=True)
    ]
    return {name: rows for name, rows in group.items() if name != "loss_mask"} | {
        "masks": trained,
        "scores": [1.0, 0.0],
    }


FORMS = {
    "lists": LISTS,
    "arrays": PUT,
    "arrays of other types": {name: [np.array(row) for row in rows] for name, rows in LISTS.items()},
    "tensors": {name: [torch.from_numpy(row) for row in rows] for name, rows in PUT.items()},
    "flat arrays and lengths": flat(PUT),
    "tuples, which take the slow path": {
        name: tuple(tuple(row) for row in rows) for name, rows in LISTS.items()
    },
    "masks of Atropos, folded": masks(LISTS),
    "arrow": pa.RecordBatch.from_pydict(
        {
            name: pa.array(rows, pa.list_(pa.from_numpy_dtype(PUT[name][0].dtype)))
            for name, rows in LISTS.items()
        }
    ),
}


def put(producer, form):
    producer.put(form)


def assert_checked(record) -> None:
    for name, rows in PUT.items():
        assert record.row_checks(name).tolist() == [check_of(name, row) for row in rows], name


@pytest.fixture
def every_row(monkeypatch):
    monkeypatch.setenv(CHECK_VARIABLE, "1")


@pytest.mark.usefixtures("every_row")
@pytest.mark.parametrize("form", FORMS)
def test_each_form_of_put_has_the_same_checks(producer, consumer, form) -> None:
    put(producer, FORMS[form])
    with consumer.get(timeout_s=10) as record:
        assert_checked(record)
        assert record.row_checks("ref_logprobs") is None


@pytest.mark.usefixtures("every_row")
def test_foreign_groups_put_async_and_a_claim_have_checks(producer, consumer) -> None:
    producer.put(masks(LISTS), foreign=True)
    asyncio.run(producer.put_async(PUT))
    with producer.claim(2, dict.fromkeys(PUT, LENGTHS)) as slot:
        for name, rows in PUT.items():
            slot[name][:] = np.concatenate(rows)
    for _ in range(3):
        with consumer.get(timeout_s=10) as record:
            assert_checked(record)


@pytest.mark.usefixtures("every_row")
def test_rare_masks_are_checked_as_the_loss_mask_beside_them(producer, consumer) -> None:
    producer.put({"tokens": TOKENS, "masks": [[-100, 1, 1], [-100, 9]], "scores": [1.0, 0.0]})
    with consumer.get(timeout_s=10) as record:
        assert record["masks"][0].tolist() == [-100, 1, 1]
        assert record.row_checks("loss_mask").tolist() == [
            check_of("loss_mask", row) for row in PUT["loss_mask"]
        ]
        assert record.row_checks("masks") is None


@pytest.mark.usefixtures("every_row")
def test_checks_are_no_column(producer, consumer) -> None:
    producer.put(masks(LISTS))
    with consumer.get(timeout_s=10) as record:
        assert record.columns == ["tokens", "inference_logprobs", "advantages", "loss_mask", "score"]
        assert record.to_arrow().schema.names == record.columns
        assert record.to_scored_data() == masks(LISTS) | {
            "inference_logprobs": [[1.0, -0.5, -0.25], [1.0, -2.0]]
        }
        producer.put(record.to_arrow())
    with consumer.get(timeout_s=10) as again:
        assert_checked(again)


@pytest.mark.usefixtures("every_row")
def test_a_row_of_another_length_or_null_has_nothing_to_compare(producer, consumer) -> None:
    producer.put(
        {
            "tokens": TOKENS,
            "masks": None,
            "inference_logprobs": [[-0.5], LOGPROBS[1]],
            "advantages": [None, ADVANTAGES[1]],
            "scores": [1.0, 0.0],
        },
        foreign=True,
    )
    with consumer.get(timeout_s=10) as record:
        for name in ("inference_logprobs", "advantages"):
            assert record.row_checks(name).tolist() == [0, check_of(name, PUT[name][1])]
        assert record.row_checks("tokens").all()
        assert record.row_checks("loss_mask") is None


def test_checks_end_with_the_lease(producer, consumer) -> None:
    producer.put(PUT)
    record = consumer.get(timeout_s=10)
    checks = record.row_checks("tokens")
    record.release()
    with pytest.raises(shmbridge.LeaseReleased):
        record.row_checks("tokens")
    assert checks.all()


def test_checks_are_on_one_row_in_so_many_wherever_it_stands(bridge, consumer, monkeypatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "8")
    rows, records = 8, 400
    found = np.zeros(rows, int)
    with shmbridge.Producer(bridge, lane_bytes="16M") as producer:
        for _ in range(records):
            producer.put({"tokens": [[1, 2]] * rows, "advantages": [[0.0, 1.0]] * rows})
            with consumer.get(timeout_s=10) as record:
                checks = record.row_checks("tokens")
                if checks is not None:
                    found += checks != 0
                    assert ((record.row_checks("advantages") != 0) == (checks != 0)).all()
    assert 0.08 < found.sum() / (rows * records) < 0.17
    assert found.min() > 0.04 * records


def test_rows_carry_no_checks_where_nobody_wants_any(bridge, consumer, monkeypatch) -> None:
    monkeypatch.setenv(CHECK_VARIABLE, "0")
    with shmbridge.Producer(bridge) as producer:
        producer.put(PUT)
    with consumer.get(timeout_s=10) as record:
        assert record.row_checks("tokens") is None


def test_the_variable_must_be_a_number(bridge, monkeypatch) -> None:
    monkeypatch.delenv(CHECK_VARIABLE)
    assert checked_every() == DEFAULT_EVERY
    for wrong in ("often", "-1", "1.5", str(1 << 32)):
        monkeypatch.setenv(CHECK_VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{CHECK_VARIABLE}='{wrong}' is not a number of rows"):
            shmbridge.Producer(bridge)


def test_a_check_knows_its_column_place_and_length() -> None:
    values = np.arange(1, 100, dtype=np.float32)
    seen = {check_of(name, values) for name in CHECKED_COLUMNS}
    seen |= {
        check_of("advantages", changed)
        for changed in (np.roll(values, 1), values[1:], values[:-1], np.append(values, 0)[:-1] * 2)
    }
    for place in range(values.size):
        seen.add(check_of("advantages", np.where(np.arange(values.size) == place, -values, values)))
    assert len(seen) == len(CHECKED_COLUMNS) + 4 + values.size
    assert 0 not in seen
    assert (
        check_of("tokens", np.arange(4, dtype="<i4")) == 15263788030397751712
    )  # the same on all machines and releases
