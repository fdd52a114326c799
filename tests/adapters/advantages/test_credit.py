"""Credit of each token: estimators by name, rewards of steps and tokens, own advantages of some tokens, and
each row's fallback.
"""

from __future__ import annotations

import math
import uuid

import numpy as np
import pyarrow as pa
import pytest

import shmbridge
from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit, NoAdvantages, credited
from shmbridge.consumers.advantages.from_scores import (
    batch_normalised,
    group_advantages,
    group_normalised,
    leave_one_out,
)
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model.load import Reference
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

FOUR = [[1, 2, 3], [4, 5], [6, 7, 8], [9, 10, 11, 12]]
SCORES = [1.0, 0.0, 0.25, 2.0]


def credit(batch, **options):
    advantages, metrics = credited(batch, BatchFacts(batch).trained_tokens, Credit(**options))
    assert advantages.dtype == np.float32
    return np.split(advantages, batch.cu_seqlens[1:-1]), metrics


@pytest.mark.parametrize(
    ("name", "function"),
    [
        ("grpo", group_normalised),
        ("dr_grpo", lambda scores, groups: group_advantages(scores, groups, scale="none")),
        ("rloo", leave_one_out),
    ],
)
def test_estimators_by_name_give_every_trained_token_its_rows_value(packed_batch, name, function):
    rows, _ = credit(packed_batch(FOUR, scores=SCORES, groups=[0, 0, 1, 1]), estimator=name)
    for row, expected in zip(rows, function(SCORES, [0, 0, 1, 1]), strict=True):
        np.testing.assert_array_equal(row, [0.0] + [expected] * (len(row) - 1))


def test_the_whole_batch_is_normalised_over_trained_tokens_of_groups_that_differ(packed_batch):
    rows = [*FOUR, [1, 2], [3, 4, 5], [6, 7]]
    masks = [None, [0, 1], [0, 0, 1], None, None, None, None]
    batch = packed_batch(rows, scores=[*SCORES, 0.5, 0.5, 7.0], groups=[0, 0, 1, 1, 2, 2, 3], masks=masks)
    made, metrics = credit(batch, estimator="batch")
    centred = np.concatenate([[0.5] * 2, [-0.5], [-0.875], [0.875] * 3])
    np.testing.assert_allclose(
        np.concatenate(made)[BatchFacts(batch).trained_tokens][:7],
        (centred - centred.mean()) / centred.std(),
        rtol=1e-5,
    )
    assert not np.concatenate(made[4:]).any()  # equal scores, and a group of one
    assert metrics["trajectories_no_signal"] == 0


STEPS = {
    "scores": [3.0, 1.0, 2.0],
    "groups": [0, 0, 0],
    "step_rewards": [[1.0, 0.0], [2.0], None],
    "step_ends": [[3, 5], [2], None],
}
SIX = [[1, 2, 3, 4, 5, 6], [7, 8], [9, 10]]


def test_step_rewards_are_mixed_with_the_outcome_and_rows_without_them_keep_it(packed_batch):
    rows, metrics = credit(packed_batch(SIX, **STEPS), estimator="dr_grpo", steps="to_go", step_weight=0.5)
    np.testing.assert_allclose(rows[0], [0, 0, 0, 0, 0, 0.5])  # outcome 1, steps -1 -1 -1 -1 0
    np.testing.assert_allclose(rows[1], [0, 0])  # outcome -1, steps 1
    np.testing.assert_allclose(rows[2], [0, 0])  # the mean score
    assert metrics["trajectories_without_steps"] == 1
    alone, _ = credit(packed_batch(SIX, **STEPS), estimator="dr_grpo", steps="step", step_weight=1.0)
    np.testing.assert_allclose(alone[0], [0, 0, 0, -1, -1, 0])
    later, _ = credit(
        packed_batch(SIX, **STEPS), estimator="dr_grpo", steps="to_go", step_weight=1.0, step_discount=0.5
    )
    np.testing.assert_allclose(later[0], [0, -0.5, -0.5, -1, -1, 0])


def test_step_rewards_are_divided_by_their_deviation_where_scores_are(packed_batch):
    rows, _ = credit(packed_batch(SIX, **STEPS), steps="step", step_weight=1.0)
    assert rows[1][1] == pytest.approx(1.0 / np.std([1, 0, 2]), rel=1e-3)


def test_step_rewards_can_be_compared_place_by_place(packed_batch):
    """The second step is hard for all rows, so no row loses by it. A third step that only one row has gives
    0.
    """
    steps = {
        "step_rewards": [[1, 0], [0, 0], [1, 0, 1], [5, 5]],
        "step_ends": [[2, 3], [2, 3], [2, 3, 4], [2, 3]],
    }
    batch = packed_batch(
        [[1, 2, 3], [4, 5, 6], [7, 8, 9, 1], [2, 3, 4]], scores=[0.0] * 4, groups=[0, 0, 0, 1], **steps
    )
    rows, _ = credit(batch, estimator="dr_grpo", steps="step", step_weight=1.0, step_over="place")
    np.testing.assert_allclose(
        np.concatenate(rows), [0, 1 / 3, 0, 0, -2 / 3, 0, 0, 1 / 3, 0, 0, 0, 0, 0], atol=1e-6
    )
    rows, _ = credit(batch, estimator="dr_grpo", steps="step", step_weight=1.0)
    np.testing.assert_allclose(rows[0], [0, 4 / 7, -3 / 7], atol=1e-6)
    with pytest.raises(ValueError, match="step_over='row'"):
        credit(batch, steps="step", step_over="row")


@pytest.mark.parametrize("ends", [[3], [3, 9], [5, 3], [0, 5], [3, 3]])
def test_steps_that_do_not_fit_their_row_cost_that_row_its_steps_and_are_counted(packed_batch, ends):
    odd = STEPS | {"step_ends": [[3, 5], [2], ends], "step_rewards": [[1.0, 0.0], [2.0], [9.0, 9.0]]}
    rows, metrics = credit(
        packed_batch([*SIX[:2], [1, 2, 3, 4, 5]], **odd), estimator="dr_grpo", steps="step", step_weight=1.0
    )
    np.testing.assert_allclose(rows[0], [0, 0, 0, -1, -1, 0])  # the nines stand in no mean
    np.testing.assert_allclose(rows[1], [0, 1])
    assert not rows[2].any()
    assert (metrics["trajectories_odd_credit"], metrics["trajectories_without_steps"]) == (1, 1)


def test_steps_without_ends_count_for_the_whole_row(packed_batch):
    rows, metrics = credit(
        packed_batch(SIX, **STEPS | {"step_ends": None}), estimator="dr_grpo", steps="to_go", step_weight=1.0
    )
    np.testing.assert_allclose(rows[0], [0, -1, -1, -1, -1, -1])
    assert metrics["trajectories_odd_credit"] == 0


def test_steps_are_not_looked_at_unless_asked_for(packed_batch):
    rows, metrics = credit(packed_batch(SIX, **STEPS), estimator="dr_grpo")
    np.testing.assert_allclose(rows[0], [0, 1, 1, 1, 1, 1])
    assert metrics["trajectories_without_steps"] == 0
    rows, metrics = credit(packed_batch(SIX, scores=[3.0, 1.0, 2.0]), estimator="dr_grpo", steps="to_go")
    np.testing.assert_allclose(rows[0], [0, 1, 1, 1, 1, 1])
    assert metrics["trajectories_without_steps"] == 3


@pytest.mark.parametrize("over", ["group", "batch"])
def test_token_rewards_go_to_the_tokens_before_them_and_rows_without_them_keep_what_they_had(
    packed_batch, over
):
    batch = packed_batch(
        [[1, 2, 3], [4, 5, 6], [7, 8]],
        scores=[1.0, 0.0, 0.5],
        token_rewards=[[0.0, 0.0, 1.0], [0.0, 1.0, 0.0], None],
    )
    rows, metrics = credit(
        batch, estimator="dr_grpo", token_rewards=over, token_weight=1.0, token_discount=0.5
    )
    to_go = np.array([0.5, 1.0, 1.0, 0.0])  # of the four trained tokens that have rewards
    np.testing.assert_allclose(
        np.concatenate([rows[0][1:], rows[1][1:]]), (to_go - to_go.mean()) / to_go.std(), rtol=1e-3
    )
    np.testing.assert_allclose(rows[2], [0, 0])
    assert metrics["trajectories_without_token_rewards"] == 1
    mixed, _ = credit(batch, estimator="dr_grpo", token_rewards=over, token_weight=0.5, token_discount=0.5)
    assert mixed[0][2] == pytest.approx((0.5 + rows[0][2]) / 2, abs=1e-6)


def test_own_advantages_win_token_by_token(packed_batch):
    batch = packed_batch(
        FOUR,
        scores=SCORES,
        groups=[0, 0, 1, 1],
        advantages=[[9.0, 5.0, 6.0], None, [0.0, 7.0, 8.0], [0.0, 1.0, 2.0, 3.0]],
        advantages_mask=[[1, 0, 1], None, None, [1, 1]],
    )
    rows, metrics = credit(batch, estimator="dr_grpo")
    np.testing.assert_allclose(rows[0], [0, 0.5, 6])  # by mask; an untrained token has none
    np.testing.assert_allclose(rows[1], [0, -0.5])
    np.testing.assert_allclose(rows[2], [0, 7, 8])  # without a mask: all
    np.testing.assert_allclose(rows[3], [0, 1, 2, 3])  # a mask that does not fit is none
    assert (metrics["trajectories_partly_own"], metrics["trajectories_own_advantages"]) == (1, 3)
    assert (metrics["trajectories_odd_credit"], metrics["groups_fallback"]) == (1, 1)
    rows, metrics = credit(batch, estimator="dr_grpo", use_own=False)
    np.testing.assert_allclose(rows[2], [0, -0.875, -0.875])
    assert (metrics["trajectories_partly_own"], metrics["groups_fallback"]) == (0, 0)


def test_a_row_that_has_only_some_of_its_own_needs_the_fallback(packed_batch):
    own = {"scores": [1.0, 0.0], "advantages": [[0.0, 1.0], [0.0, 2.0]]}
    prepare(packed_batch([[1, 2], [3, 4]], **own), 1.0, Credit(fallback=False))
    prepare(
        packed_batch([[1, 2], [3, 4]], **own, advantages_mask=[[0, 1], None]), 1.0, Credit(fallback=False)
    )
    with pytest.raises(NoAdvantages, match=r"group group-0 .* has 2 trajectories, and 1 of them without"):
        prepare(
            packed_batch([[1, 2], [3, 4]], **own, advantages_mask=[[1, 0], None]), 1.0, Credit(fallback=False)
        )


def test_a_mask_of_advantages_comes_through_lanes_as_a_column_of_ones_own(tmp_path):
    """`Producer(schema=)` and `Consumer(schema=)` add the column."""
    name = f"t{uuid.uuid4().hex[:12]}"
    schema = pa.schema([("advantages_mask", pa.list_(pa.uint8()))])
    try:
        with shmbridge.Producer(name, lane_bytes="4M", schema=schema) as producer:
            producer.put(
                {
                    "tokens": [[1, 2, 3], [4, 5]],
                    "loss_mask": [[0, 1, 1], [0, 1]],
                    "score": [1.0, 0.0],
                    "advantages": [[0.0, 5.0, 6.0], [0.0, 7.0]],
                    "advantages_mask": [[0, 0, 1], [0, 0]],
                }
            )
            with shmbridge.Consumer(name, schema=schema) as consumer:
                batch = next(iter(consumer.batches(groups=1, layout="packed")))
                rows, metrics = credit(batch, estimator="dr_grpo")
                batch.release()
        np.testing.assert_allclose(np.concatenate(rows), [0, 0.5, 6, 0, -0.5])
        assert metrics["trajectories_partly_own"] == 2
    finally:
        shmbridge.clean(name, dry_run=False)


def test_long_answers_lose_score_before_advantages_are_made_of_it(packed_batch):
    rows = [[1, 2, 3, 4, 5], [1, 2, 3, 4], [1, 2, 3]]
    batch = packed_batch(rows, scores=[1.0, 1.0, 1.0])
    made, metrics = credit(batch, estimator="dr_grpo", overlong_length=4, overlong_buffer=2)
    np.testing.assert_allclose([row[1] for row in made], np.array([0.0, 0.5, 1.0]) - 0.5)
    assert metrics["overlong_penalty_mean"] == pytest.approx(0.5)
    # stale tokens are not trained, and are still part of the answer
    versions = [[-1, 0, 0, 9, 9], [-1, 0, 9, 9], [-1, 9, 9]]
    aged = packed_batch(rows, scores=[1.0, 1.0, 1.0], token_versions=versions)
    kept, metrics = prepare(
        aged,
        1.0,
        Credit("dr_grpo", overlong_length=4, overlong_buffer=2),
        policy_version=9,
        max_token_staleness=1,
    )
    assert (metrics["tokens_masked_stale"], metrics["overlong_penalty_mean"]) == (3, pytest.approx(0.5))
    np.testing.assert_allclose(kept.advantages, [0, 0, 0, -0.5, -0.5, 0, 0, 0, 0, 0, 0.5, 0.5])
    _, described = prepare(batch, 1.0, Credit(overlong_length=4, overlong_buffer=2))
    assert described["reward_mean"] == 1.0  # what the environment said


def test_advantages_are_normalised_then_clipped_and_silenced_rows_stay_silent(packed_batch):
    silence = [None, None, None, '{"set_advantage_to_zero": true}']
    batch = packed_batch(FOUR, scores=SCORES, groups=[0, 0, 1, 1], overrides=silence)
    plain, _ = credit(packed_batch(FOUR, scores=SCORES, groups=[0, 0, 1, 1]), estimator="rloo")
    normalised = batch_normalised(np.concatenate(plain), BatchFacts(batch).trained_tokens)
    made, metrics = credit(batch, estimator="rloo", normalise="batch", clip=(-0.5, 0.75))
    np.testing.assert_allclose(np.concatenate(made[:3]), np.clip(normalised, -0.5, 0.75)[:8], rtol=1e-6)
    assert not made[3].any()
    assert metrics["trajectories_silenced"] == 1


ON_RANKS = [
    {"estimator": "batch"},
    {"token_rewards": "batch"},
    {"normalise": "global"},
    {"estimator": "batch", "token_rewards": "batch"},
]


@pytest.mark.parametrize("options", ON_RANKS)
def test_ranks_make_the_advantages_of_the_whole_batch(packed_batch, on_ranks, options):
    """There are four groups on two ranks, one of which has no token rewards at all."""
    scores, rng = [1.0, 0.0, 3.0, 1.0, 0.5, 0.0, 2.0, 2.5], np.random.default_rng(4)
    rows = [list(range(int(length))) for length in rng.integers(2, 9, 8)]
    rewards = [rng.normal(size=len(row)).tolist() if i < 4 else None for i, row in enumerate(rows)]
    groups = [0, 0, 1, 1, 2, 2, 3, 3]

    def part(begin, end):
        own, numbered = (
            None if begin >= 4 else rewards[begin:end],
            [group - groups[begin] for group in groups[begin:end]],
        )
        return packed_batch(rows[begin:end], scores=scores[begin:end], groups=numbered, token_rewards=own)

    def rank(number, reduce):
        batch = part(4 * number, 4 * number + 4)
        return credited(batch, BatchFacts(batch).trained_tokens, Credit(**options), reduce=reduce)[0]

    whole = packed_batch(rows, scores=scores, groups=groups, token_rewards=rewards)
    together, _ = credited(whole, BatchFacts(whole).trained_tokens, Credit(**options))
    np.testing.assert_allclose(np.concatenate(on_ranks(2, rank)), together, rtol=1e-5, atol=1e-6)


def test_every_column_comes_through_lanes(tiny_model):
    """All of it at once, from records of which one has every column and the other none of them."""
    name = f"t{uuid.uuid4().hex[:12]}"
    rich = {
        "tokens": [[1, 2, 3, 4], [5, 6, 7]],
        "loss_mask": [[0, 1, 1, 1], [0, 1, 1]],
        "score": [1.0, 0.0],
        "step_rewards": [[1.0, 0.0], [0.5]],
        "step_ends": [[2, 4], [3]],
        "token_rewards": [[0.0, 0.0, 0.0, 1.0], [0.0, 0.0, 0.5]],
        "inference_logprobs": [[1.0, -2.0, -3.0, -4.0], [1.0, -3.0, -3.0]],
        "ref_logprobs": [[1.0, -2.5, -3.0, -3.0], [1.0, -3.0, -3.0]],
        "token_versions": [[-1, 0, 4, 5], [-1, 5, 5]],
    }
    plain = {"tokens": [[8, 9], [10, 11, 12]], "loss_mask": [[0, 1], [0, 1, 1]], "score": [2.0, 1.0]}
    made = Credit(
        "batch", steps="to_go", token_rewards="group", overlong_length=3, overlong_buffer=1, clip=(-2.0, 2.0)
    )
    goal = Objective(loss="grpo", kl=0.1, tis_cap=2.0, max_token_staleness=3, credit=made)
    learner = Learner(model := tiny_model(2), goal, lambda step: 1e-3, reference=Reference(model))
    try:
        with shmbridge.Producer(name, lane_bytes="4M") as producer, shmbridge.Consumer(name) as consumer:
            producer.put(rich, policy_version=(0, 5))
            producer.put(plain, policy_version=5)
            batch = next(iter(consumer.batches(groups=2, layout="packed")))
            metrics = learner.accumulate(batch, 5) | learner.apply()
            batch.release()
    finally:
        shmbridge.clean(name, dry_run=False)
    counted = {
        "trained_tokens": 7,
        "tokens_masked_stale": 1,
        "tokens_without_logprob": 3,
        "tokens_without_reference": 3,
        "trajectories_without_steps": 2,
        "trajectories_without_token_rewards": 2,
        "trajectories_odd_credit": 0,
        "trajectories_no_signal": 0,
        "update_skipped": False,
        "token_staleness_max": 1,
    }
    assert {key: metrics[key] for key in counted} == counted
    assert metrics["kl"] > 0.0
    assert metrics["grad_norm"] > 0.0
    assert metrics["overlong_penalty_mean"] == pytest.approx(0.25)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimator", ["grpo", "dr_grpo", "rloo", "batch"])
@pytest.mark.parametrize(
    ("scores", "broken"),
    [
        ([1e308, 1e308, -1e308, -1e308], 4),
        ([1e155, 0.0, 0.0, 0.0], 1),
        ([1e39, 0.0, 1.0, 2.0], 1),
        ([1e37, -1e37, 0.0, 1e37], 0),
    ],
)
def test_scores_that_overflow_are_counted_as_none_and_nothing_becomes_infinite(
    packed_batch, estimator, scores, broken
):
    batch = packed_batch([[1, 2, 3]] * 4, scores=scores)
    rows, metrics = prepare(batch, 1.0, Credit(estimator=estimator))
    assert np.isfinite(rows.advantages).all()
    assert rows.advantages.any() == (len(set(scores[-3:])) > 1 and broken < 4)
    assert metrics["trajectories_no_signal"] == broken
    assert metrics["trajectories_scored"] == metrics["atropos/test/trajectories_scored"] == 4 - broken
    for name in (
        "reward_mean",
        "reward_std",
        "advantage_mean",
        "advantage_std",
        "atropos/mean_score",
        "atropos/test/std_score",
    ):
        assert math.isfinite(metrics[name]) or (broken == 4 and ("reward" in name or "score" in name)), name


@pytest.mark.parametrize(
    "wrong",
    [{"estimator": "gpro"}, {"steps": "yes"}, {"step_over": 1}, {"token_rewards": "on"}, {"normalise": None}],
)
def test_a_word_that_a_field_does_not_know_is_refused(wrong):
    """It would have been taken for another one."""
    (name,) = wrong
    with pytest.raises(shmbridge.BadArgument, match=f"{name}=.* -> one of"):
        Credit(**wrong)
