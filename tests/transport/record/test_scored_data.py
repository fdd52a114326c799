"""Atropos groups go in and come out the same."""

import numpy as np
import pytest

BASE = {"tokens": [[5, 6, 7], [8, 9]], "masks": [[-100, 6, 7], [-100, 9]], "scores": [1.0, -1.0]}


@pytest.fixture
def trip(producer, consumer):
    def go(group, **options):
        producer.put(group, **options)
        record = consumer.get(timeout_s=5)
        return record, record.to_scored_data()

    return go


@pytest.mark.parametrize("empty", [None, [], {}], ids=repr)
@pytest.mark.parametrize(
    "name",
    [
        "advantages",
        "ref_logprobs",
        "inference_logprobs",
        "messages",
        "overrides",
        "group_overrides",
        "generation_params",
        "images",
        "distill_token_ids",
        "distill_logprobs",
    ],
)
def test_empty_columns_come_back_as_null_or_empty_as_they_were(trip, name, empty) -> None:
    group = {**BASE, name: empty}
    _, back = trip(group)
    assert back == group
    assert type(back[name]) is type(empty)


def test_a_full_group_comes_back_exactly(trip) -> None:
    group = {
        **BASE,
        "scores": [0.1, 1e-300],
        "advantages": [[0.5, -1.0, 0.0], [1.0, 2.0]],
        "inference_logprobs": [[1.0, -0.5, -2.0], [1.0, -0.25]],
        "ref_logprobs": [[0.0, -0.5, -2.0], [0.0, -0.25]],
        "messages": [[{"role": "user", "content": "ä\n"}], [{"role": "user", "content": ""}]],
        "overrides": [{"set_advantage_to_zero": True}, {}],
        "group_overrides": {"a": [1, None, 2.5]},
        "generation_params": {"temperature": 0.7},
        "images": [None, "data:..."],
        "distill_token_ids": [[[1, 2], [3, 4], []], [[5], [6]]],
        "distill_logprobs": [[[-1.0, -2.0], [-3.0, -4.0], []], [[-5.0], [-6.0]]],
        "env_id": 3,
    }
    assert trip(group)[1] == group


def test_per_token_floats_are_rounded_and_scores_are_not(trip) -> None:
    _, back = trip({**BASE, "scores": [0.1, 0.2], "advantages": [[0.1, 0.2, 0.3], [0.4, 0.5]]})
    assert back["scores"] == [0.1, 0.2]
    assert back["advantages"] == [
        [float(np.float32(value)) for value in row] for row in ([0.1, 0.2, 0.3], [0.4, 0.5])
    ]


def test_masks_that_lose_nothing_are_folded(trip) -> None:
    record, back = trip(BASE)
    assert "masks" not in record
    assert [row.tolist() for row in record["loss_mask"]] == [[0, 1, 1], [0, 1]]
    assert back == BASE


@pytest.mark.parametrize(
    "masks", [[[-100, 1, 1], [0, 9]], [[7, 7, 7], [8, 9]], [[-100, 6, 70_000], [-100, 9]]]
)
def test_masks_that_would_lose_something_are_carried_too(trip, masks) -> None:
    record, back = trip({**BASE, "masks": masks})
    assert [row.tolist() for row in record["masks"]] == masks
    assert [row.tolist() for row in record["loss_mask"]] == [
        [int(value != -100) for value in row] for row in masks
    ]
    assert back["masks"] == masks


@pytest.mark.parametrize("form", [np.array, tuple], ids=["array", "tuple"])
def test_masks_of_other_forms_come_back_as_lists(trip, form) -> None:
    _, back = trip(
        {
            **BASE,
            "tokens": [form(row) for row in BASE["tokens"]],
            "masks": [form(row) for row in BASE["masks"]],
        }
    )
    assert back == BASE


def test_no_masks_come_back_as_none(trip) -> None:
    assert trip({**BASE, "masks": None})[1] == {**BASE, "masks": None}


def test_foreign_groups_keep_unknown_keys_and_unequal_rows(trip) -> None:
    group = {
        **BASE,
        "masks": [[-100, 6], [-100, 9]],
        "advantages": [[1.0], [2.0, 3.0]],
        "weird": {"x": [1, 2]},
        "other": None,
    }
    record, back = trip(group, foreign=True)
    assert record.meta.uneven
    assert back == group


def test_strings_in_json_columns_keep_their_quotes(trip) -> None:
    group = {**BASE, "messages": ["plain", '{"a": 1}'], "group_overrides": "text"}
    assert trip(group)[1] == group
