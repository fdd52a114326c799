"""Data that environments send and training leaves out: counted under the environment's name, and reported
once.
"""

from __future__ import annotations

import numpy as np
import pytest

import shmbridge
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner.data.training_rows import (
    SaidOnce,
    UnreadImages,
    prepare,
    refuse_images,
    rows_with_unknown_tokens,
    token_staleness,
)
from shmbridge.consumers.learner.train.grpo_update import Learner, LongRow, UnknownTokens
from shmbridge.consumers.learner.train.objective import Objective


@pytest.fixture
def batch_of(bridge):
    """Return a maker of the packed batch of what environments put: (environment's name, groups) ..."""
    opened = []

    def make(*environments):
        consumer = shmbridge.Consumer(bridge)
        opened.append(consumer)
        for name, groups in environments:
            producer = shmbridge.Producer(bridge, env_name=name, lane_bytes="1M")
            opened.append(producer)
            for group in groups:
                producer.put(group, foreign=True)
        count = sum(len(groups) for _, groups in environments)
        return next(consumer.batches(groups=count, prefetch=0, timeout_s=10))

    yield make
    for each in reversed(opened):
        each.close()


ATROPOS = {"tokens": [[1, 2, 3, 4]] * 2, "masks": [[-100, -100, 3, 4]] * 2, "scores": [1.0, 0.0]}
SOUND = {**ATROPOS, "inference_logprobs": [[1.0, 1.0, -0.5, -0.25]] * 2}


@pytest.mark.parametrize(
    "masks",
    [[[3, 4], [-100, -100, 3, 4]], [[-100, -100, 3, 4]] * 3],
    ids=["a row is short", "a row too many"],
)
@pytest.mark.parametrize("said", [{"prompt_length": [1, 1]}, {}], ids=["prompt_length", "no prompt_length"])
@pytest.mark.parametrize("column", ["masks", "loss_mask"])
def test_tokens_that_a_mask_of_another_length_leaves_out_are_not_trained(batch_of, column, masks, said):
    mask = masks if column == "masks" else [[int(each > 0) for each in row] for row in masks]
    batch = batch_of(("env", [{"tokens": ATROPOS["tokens"], "scores": [1.0, 0.0], column: mask, **said}]))
    fitting = [False, len(masks) == 2]
    for whole_rows in (False, True):
        rows, metrics = prepare(batch, 1.0, whole_rows=whole_rows)
        assert rows.trained.tolist() == [False] * 4 + [False, False, fitting[1], fitting[1]]
        assert (
            metrics["trajectories_without_mask"]
            == metrics["trajectories_uneven{loss_mask}"]
            == fitting.count(False)
        )
    batch.train_whole_rows()
    assert batch.loss_mask.tolist() == rows.trained.astype(int).tolist()


def test_columns_that_nobody_reads_are_counted_by_name(batch_of):
    unread = {
        "distill_token_ids": [[[1]] * 4] * 2,
        "distill_logprobs": [[[-1.0]] * 4] * 2,
        "messages": [[{"role": "user"}]] * 2,
    }
    batch = batch_of(
        ("env", [{**SOUND, **unread, "images": [None, []]}]),
        ("second", [{**SOUND, "ref_logprobs": [[-1.0] * 4] * 2}]),
    )
    _, metrics = prepare(batch, 1.0)
    ignored = {name: count for name, count in metrics.items() if name.startswith("columns_ignored")}
    assert ignored == {
        f"columns_ignored/{name}": 2 for name in ("distill_token_ids", "distill_logprobs", "ref_logprobs")
    }
    assert metrics["atropos/second/columns_ignored/ref_logprobs"] == 2
    _, metrics = prepare(batch, 1.0, with_reference=True)
    assert "columns_ignored/ref_logprobs" not in metrics


def test_columns_that_options_ask_for_are_not_ignored(bridge):
    steps = {
        "step_rewards": [[1.0]] * 2,
        "step_ends": [[4]] * 2,
        "token_rewards": [[0.5] * 4] * 2,
        "reward_components": [{"a": 1.0}] * 2,
    }
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        producer.put({**ATROPOS, **steps})
        batch = next(consumer.batches(groups=1, prefetch=0, timeout_s=10))
        _, metrics = prepare(batch, 1.0, Credit(steps="to_go", token_rewards="group"))
        assert {name for name in metrics if name.startswith("columns_")} == {
            "columns_ignored/reward_components"
        }
        _, metrics = prepare(batch, 1.0)
        assert {name for name in metrics if name.startswith("columns_")} == {
            f"columns_ignored/{name}" for name in steps
        }
        batch.release()


def test_sampling_from_a_part_of_the_vocabulary_is_counted(packed_batch):
    batch = packed_batch(
        [[1, 2]] * 6,
        generation_params=[
            '{"top_p": 0.9}',
            '{"top_p": 1.0, "top_k": -1}',
            '{"top_k": 20}',
            '{"min_p": 0.1}',
            '{"top_p": "x"}',
            None,
        ],
        overrides=['{"top_p": 1}', None, None, None, None, '{"top_p": 0.5}'],
    )
    _, metrics = prepare(batch, 1.0)
    assert metrics["trajectories_cut_sampling"] == metrics["atropos/test/trajectories_cut_sampling"] == 3


def test_images_are_refused_by_name(batch_of, tiny_model):
    seen = {**SOUND, "images": [["data:image/png;base64,AA"], None]}
    batch = batch_of(("text", [SOUND]), ("vision", [seen]))
    with pytest.raises(
        UnreadImages, match=r"1 trajectories have images.*environment 'vision'.*--ignore-images"
    ):
        refuse_images(batch)
    with pytest.raises(UnreadImages):
        Learner(tiny_model(0), Objective(), lambda step: 1e-3).accumulate(batch)
    metrics = Learner(tiny_model(0), Objective(ignore_images=True), lambda step: 1e-3).accumulate(batch)
    assert metrics["columns_ignored/images"] == metrics["atropos/vision/columns_ignored/images"] == 1


@pytest.mark.parametrize("wrong", [28, 2**31 - 1])
def test_a_token_that_the_model_does_not_have_is_named_or_its_row_left_out(
    batch_of, tiny_model, wrong, monkeypatch
):
    monkeypatch.setenv("SHMBRIDGE_CHECK_ROWS", "1")
    odd = {**SOUND, "tokens": [[1, 2, 3, 4], [1, wrong, 3, 4]]}
    batch = batch_of(("good", [SOUND]), ("odd", [odd]))
    row = next(
        place for place, each in enumerate(np.split(batch.tokens, batch.cu_seqlens[1:-1])) if wrong in each
    )
    named = (
        rf"token id {wrong}, but the model has 28: environment 'odd' .* record 0 of producer .*-> "
        r".*--leave-out-unknown-tokens"
    )
    with pytest.raises(UnknownTokens, match=named):
        Learner(tiny_model(0), Objective(), lambda step: 1e-3).accumulate(batch)
    learner = Learner(tiny_model(0), Objective(leave_out_unknown_tokens=True), lambda step: 1e-3)
    metrics = learner.accumulate(batch)
    assert metrics["trajectories_unknown_tokens"] == metrics["atropos/odd/trajectories_unknown_tokens"] == 1
    assert (metrics["trained_tokens"], metrics["tokens_masked_stale"], metrics["trajectories_scored"]) == (
        6,
        0,
        4,
    )
    assert metrics["rows_compared{odd}"] == 2
    assert (
        sum(
            "odd: 1 trajectories have a token id that the model does not have" in each
            for each in SaidOnce().sentences(metrics)
        )
        == 1
    )
    unmasked = Learner(tiny_model(0), Objective(), lambda step: 1e-3)
    batch.loss_mask[batch.cu_seqlens[row] : batch.cu_seqlens[row + 1]] = 0
    batch.tokens[batch.tokens == wrong] = 2
    batch.records = []  # the same row without a trained token; nothing to compare with
    assert unmasked.accumulate(batch)["loss"] == metrics["loss"]
    for one, other in zip(learner.model.parameters(), unmasked.model.parameters(), strict=True):
        np.testing.assert_array_equal(one.grad, other.grad)


@pytest.mark.parametrize(
    ("length", "longest", "said"), [(0, None, "the model has {} positions"), (9, 8, "--max-token-len is 8")]
)
def test_a_row_longer_than_may_be_trained_is_named_or_left_out(batch_of, tiny_model, length, longest, said):
    positions = tiny_model(0).config.max_position_embeddings
    length = positions + 6 if longest is None else length
    odd = {
        **SOUND,
        "tokens": [[1, 2, 3, 4], [5] * length],
        "masks": [[-100, -100, 3, 4], [-100, *[5] * (length - 1)]],
        "inference_logprobs": [[1.0, 1.0, -0.5, -0.25], [-1.0] * length],
    }
    batch = batch_of(("good", [SOUND]), ("odd", [odd]))
    named = (
        f"a trajectory of {length} tokens, and {said.format(positions)}: environment 'odd', group .*long-rows"
    )
    with pytest.raises(LongRow, match=named):
        Learner(tiny_model(0), Objective(longest_row=longest), lambda step: 1e-3).accumulate(batch)
    goal = Objective(longest_row=longest, leave_out_long_rows=True)
    metrics = Learner(tiny_model(0), goal, lambda step: 1e-3).accumulate(batch)
    assert metrics["trajectories_too_long"] == metrics["atropos/odd/trajectories_too_long"] == 1
    assert metrics["trained_tokens"] == 6
    assert any("1 trajectories are longer than" in each for each in SaidOnce().sentences(metrics))


def test_token_versions_that_cannot_be_are_of_unknown_age_and_said(packed_batch):
    odd = [[-1, 2**31 - 1, 3], [-1, -7, 3], [-1, 6, -1], None]
    batch = packed_batch([[1, 2, 3]] * 4, token_versions=odd, groups=range(4), version=4)
    assert token_staleness(BatchFacts(batch), 6).tolist() == [2, -1, 3, 2, -1, 3, 2, 0, 2, 2, 2, 2]
    _, metrics = prepare(batch, 1.0, policy_version=6)
    assert metrics["trajectories_odd_versions"] == metrics["atropos/test/trajectories_odd_versions"] == 2
    assert (metrics["token_staleness_max"], metrics["tokens_without_version"]) == (3, 2)
    assert (
        sum("2 trajectories say a policy version above" in each for each in SaidOnce().sentences(metrics))
        == 1
    )
    batch.meta[2].min_policy_version = 7
    _, metrics = prepare(batch, 1.0, policy_version=6)
    assert metrics["trajectories_odd_versions"] == 3
    assert prepare(batch, 1.0)[1]["trajectories_odd_versions"] == 0


def test_no_token_is_unknown_where_all_are_known(packed_batch):
    assert rows_with_unknown_tokens(packed_batch([[0, 27]]), 28) is None
    assert rows_with_unknown_tokens(packed_batch([[0, 1], [5, -1], [28], [3]]), 28).tolist() == [
        False,
        True,
        True,
        False,
    ]
    _, metrics = prepare(packed_batch([[0, 27]]), 1.0)
    assert metrics["trajectories_unknown_tokens"] == 0


def test_data_that_is_left_out_is_named_once_by_environment_and_column():
    said = SaidOnce()
    step = {
        "trajectories_without_mask": 5,
        "atropos/math/trajectories_without_mask": 3,
        "atropos/code/trajectories_without_mask": 2,
        "atropos/math/trajectories_uneven{inference_logprobs}": 4,
        "atropos/math/columns_ignored/distill_logprobs": 1,
        "atropos/math/mean_score": 0.5,
        "atropos/a.b/trajectories_greedy": 0,
    }
    sentences = said.sentences(step)
    assert len(sentences) == 4
    assert (
        sum(
            "environment math: 3 trajectories have neither a mask nor prompt_length" in each
            for each in sentences
        )
        == 1
    )
    assert (
        sum(
            "4 trajectories have another number of values of inference_logprobs than tokens" in each
            for each in sentences
        )
        == 1
    )
    assert sum("have distill_logprobs, which this learner does not read" in each for each in sentences) == 1
    assert said.sentences(step) == []
    assert (
        len(
            said.sentences(
                {"atropos/math/trajectories_uneven{advantages}": 1, "atropos/a.b/trajectories_greedy": 1}
            )
        )
        == 2
    )
