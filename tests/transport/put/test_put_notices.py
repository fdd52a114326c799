"""Notices in an environment's log about groups that a learner cannot train with as they are: once each, and
none for sound groups.
"""

import numpy as np
import pyarrow as pa
import pytest

MASKED = {"tokens": [[1, 2, 3]], "masks": [[-100, 2, 3]], "scores": [1.0]}


@pytest.fixture
def said(make_producer, caplog):
    """Returns the notices on groups that one environment puts, each twice."""

    def put(*groups, foreign=True):
        with make_producer(env_name="math", lane_bytes="1M") as producer:
            for group in groups * 2:
                producer.put(group, foreign=foreign)
        return [record.getMessage() for record in caplog.records if record.name == "shmbridge.producer"]

    return put


def test_sound_groups_get_no_notice(said) -> None:
    sampling = {
        "generation_params": {"temperature": 0.7, "top_p": 1.0, "top_k": -1},
        "overrides": [{"temperature": 1.0}],
        "images": [None],
    }
    prompted = {"tokens": [[1, 2]], "prompt_length": np.array([1]), "temperature": np.array([0.7])}
    assert said(MASKED, {**MASKED, **sampling}) == []
    assert said(prompted, {"tokens": [[1]], "loss_mask": [np.array([1])]}, foreign=False) == []


@pytest.mark.parametrize("foreign", [True, False])
@pytest.mark.parametrize("masks", [{}, {"masks": None}, {"masks": []}, {"loss_mask": [[1], None]}])
def test_rows_without_a_mask_get_a_notice(said, masks, foreign) -> None:
    (sentence,) = said({"tokens": [[1], [2]], **masks}, foreign=foreign)
    assert sentence.startswith("environment math: a group has neither loss_mask, masks nor prompt_length")


def test_rows_without_a_mask_in_arrow_and_in_a_claim_get_a_notice(make_producer, caplog) -> None:
    with make_producer(env_name="arrow") as producer:
        producer.put(pa.RecordBatch.from_pydict({"tokens": [[1, 2]]}))
    with make_producer(env_name="claim") as producer, producer.claim(1, {"tokens": [2]}) as slot:
        slot["tokens"][:] = 1
    with (
        make_producer(env_name="sound") as producer,
        producer.claim(1, {"tokens": [2], "loss_mask": [2]}) as slot,
    ):
        slot["tokens"][:] = slot["loss_mask"][:] = 1
    assert [record.getMessage()[:18] for record in caplog.records] == [
        "environment arrow:",
        "environment claim:",
    ]


def test_each_uneven_column_gets_a_notice_with_its_numbers(said) -> None:
    uneven = {"inference_logprobs": [[-1.0]], "advantages": [[1.0] * 3, [1.0] * 3]}
    logprobs, advantages = said({**MASKED, **uneven}, {**MASKED, "inference_logprobs": [[-1.0] * 5]})
    assert "'inference_logprobs'" in logprobs
    assert "row 0 has length 1, tokens have 3" in logprobs
    assert "'advantages' has length 2, tokens have 1" in advantages


GREEDY = [
    {"temperature": [0.0]},
    {"generation_params": {"temperature": 0}},
    {"overrides": [{"temperature": 1e-6}]},
]


@pytest.mark.parametrize("greedy", GREEDY)
def test_greedy_sampling_gets_a_notice(said, greedy) -> None:
    (sentence,) = said({**MASKED, **greedy})
    assert "temperature below 1e-5" in sentence


@pytest.mark.parametrize("cut", [{"top_p": 0.9}, {"top_k": 20}, {"min_p": 0.1}])
def test_sampling_from_a_part_of_the_vocabulary_gets_a_notice(said, cut) -> None:
    (sentence,) = said({**MASKED, "group_overrides": cut})
    assert "top_p, top_k or min_p" in sentence


def test_images_get_a_notice(said) -> None:
    (sentence,) = said({**MASKED, "images": [["data:"]]})
    assert "has images" in sentence
