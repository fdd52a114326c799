"""Training arrays of a batch: every optional column present, absent, or in some records only."""

from __future__ import annotations

import numpy as np
import pytest

from shmbridge.consumers.advantages.credit import Credit, NoAdvantages
from shmbridge.consumers.learner.data.training_rows import prepare

ROWS = [[1, 2, 3], [4, 5, 6], [7, 8, 9]]


def test_rows_with_and_without_their_own_columns_mix(packed_batch):
    batch = packed_batch(
        ROWS,
        scores=[1.0, 0.0, None],
        advantages=[None, [9.0, 0.5, -0.5], None],
        logprobs=[[1.0, -2.0, -3.0], None, [1.0, -4.0, -5.0]],
        temperatures=[0.5, None, None],
    )
    rows, metrics = prepare(batch, 0.8)
    np.testing.assert_allclose(rows.advantages[:3], [0.0, 1.0, 1.0], rtol=1e-3)
    np.testing.assert_allclose(rows.advantages[3:], [0.0, 0.5, -0.5, 0.0, 0.0, 0.0])
    np.testing.assert_allclose(rows.sampled_logprobs, [1, -2, -3, *[np.nan] * 3, 1, -4, -5])
    np.testing.assert_allclose(rows.temperature, [0.5, 0.8, 0.8])
    assert metrics["trajectories_own_advantages"] == 1
    assert metrics["trajectories_no_signal"] == 1
    assert metrics["reward_mean"] == 0.5


def test_everything_after_the_prompt_is_trained_without_a_mask(packed_batch):
    batch = packed_batch(ROWS, masks=[[0, 1, 0], None, None], prompt_lengths=[2, 2, 0])
    rows, metrics = prepare(batch, 1.0)
    expected = [[False, True, False], [False, False, True], [False, True, True]]
    np.testing.assert_array_equal(rows.trained, np.concatenate(expected))
    assert (metrics["trained_tokens"], metrics["trajectories_without_mask"]) == (4, 0)


def test_a_row_that_does_not_say_where_its_answer_is_trains_nothing(packed_batch):
    batch = packed_batch(
        [*ROWS, [1, 2]],
        groups=[0, 0, 1, 1],
        envs=["a", "a", "b", "b"],
        masks=[[0, 1, 0], None, None, None],
        prompt_lengths=[2, 2, None, -1],
    )
    rows, metrics = prepare(batch, 1.0)
    assert np.flatnonzero(rows.trained).tolist() == [1, 5]
    assert metrics["trajectories_without_mask"] == metrics["atropos/b/trajectories_without_mask"] == 2
    assert "atropos/a/trajectories_without_mask" not in metrics
    rows, metrics = prepare(batch, 1.0, whole_rows=True)
    assert np.flatnonzero(rows.trained).tolist() == [1, 5, 7, 8, 10]
    assert metrics["trajectories_without_mask"] == 0


def test_the_narrowest_word_on_temperature_wins(packed_batch):
    batch = packed_batch(
        [[1, 2]] * 5,
        group_overrides=['{"temperature": 0.1, "group_size": 4}'] * 5,
        generation_params=[
            None,
            '{"temperature": 0.2}',
            '{"temperature": 0.2}',
            '{"temperature": 0.2}',
            None,
        ],
        overrides=[None, "{}", '{"temperature": 0.3}', '{"temperature": 0.3}', '{"temperature": 0}'],
        temperatures=[None, None, None, 0.4, None],
    )
    rows, _ = prepare(batch, 1.0)
    np.testing.assert_allclose(rows.temperature, [0.1, 0.2, 0.3, 0.4, 1.0])


def test_a_value_that_is_no_temperature_costs_neither_the_run_nor_the_row(packed_batch):
    odd = [
        '{"temperature": "hot"}',
        '{"temperature": [1]}',
        '{"temperature": 1e60}',
        '{"temperature": NaN}',
        "temperature, no JSON",
    ]
    rows, metrics = prepare(packed_batch([[1, 2]] * 6, overrides=[*odd, '{"temperature": 0.5}']), 0.7)
    np.testing.assert_allclose(rows.temperature, [0.7] * 5 + [0.5])
    # text that is not JSON is ignored
    assert (metrics["trajectories_odd_temperature"], metrics["trajectories_greedy"]) == (4, 0)


def test_an_environment_can_silence_a_row(packed_batch):
    silence = [None, '{"set_advantage_to_zero": true}', '{"set_advantage_to_zero": false}']
    own = [None, None, [0.0, 2.0, 2.0]]
    rows, metrics = prepare(
        packed_batch(ROWS, scores=[1.0, 0.0, 0.0], advantages=own, overrides=silence), 1.0
    )
    assert rows.advantages[1] > 1.0  # its group keeps the score of the silenced row
    np.testing.assert_array_equal(rows.advantages[3:], [0, 0, 0, 0, 2, 2])
    assert metrics["groups_flat"] == 0
    assert metrics["trajectories_silenced"] == 1


GROUPS = {
    "groups": [0, 0, 1, 1, 2],
    "envs": ["math", "math", "code", "code", "code"],
    "scores": [1.0, 0.0, 2.0, 2.0, None],
    "advantages": [[0.0, 5.0], [0.0, -5.0], None, [0.0, 7.0], None],
}
PAIRS = [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10]]


def test_groups_without_their_own_advantages_fall_back_and_are_counted(packed_batch):
    rows, metrics = prepare(packed_batch(PAIRS, **GROUPS), 1.0)
    np.testing.assert_array_equal(rows.advantages[1::2], [5, -5, 0, 7, 0])
    assert metrics["groups_fallback"] == 2
    assert metrics["trajectories_no_signal"] == 1
    _, metrics = prepare(packed_batch(PAIRS[:2], scores=[1.0, 0.0]), 1.0)
    assert metrics["groups_fallback"] == 1


def test_advantages_of_environments_can_be_ignored(packed_batch):
    rows, metrics = prepare(packed_batch(PAIRS, **GROUPS), 1.0, Credit(use_own=False, fallback=False))
    np.testing.assert_allclose(rows.advantages[1::2], [1, -1, 0, 0, 0], rtol=1e-3)
    assert metrics["groups_fallback"] == 0  # no row fell back, since scores were asked for
    assert metrics["trajectories_own_advantages"] == 3


def test_a_group_without_advantages_is_an_error_without_the_fallback(packed_batch):
    with pytest.raises(NoAdvantages, match=r"group group-1 of environment 'code' has 2 .* 1 of them without"):
        prepare(packed_batch(PAIRS, **GROUPS), 1.0, Credit(fallback=False))
    silence = ['{"set_advantage_to_zero": true}' if row is None else None for row in GROUPS["advantages"]]
    rows, metrics = prepare(packed_batch(PAIRS, **GROUPS, overrides=silence), 1.0, Credit(fallback=False))
    np.testing.assert_array_equal(rows.advantages[1::2], [5, -5, 0, 7, 0])
    assert (metrics["groups_fallback"], metrics["trajectories_silenced"]) == (0, 2)


def test_trajectories_under_the_names_that_dashboards_know(packed_batch):
    masks = [[0, 1], [0, 1], [0, 0], [1, 1], [0, 1]]
    _, metrics = prepare(packed_batch(PAIRS, **GROUPS, masks=masks), 1.0)
    assert metrics["atropos/mean_score"] == 1.25
    assert metrics["atropos/num_environments"] == 2
    assert metrics["atropos/identical_score_rate"] == 0.5
    assert (metrics["atropos/math/mean_score"], metrics["atropos/code/mean_score"]) == (0.5, 2.0)
    assert (metrics["atropos/math/mean_advantage"], metrics["atropos/math/std_advantage"]) == (0.0, 5.0)
    assert metrics["atropos/code/mean_advantage"] == 3.5  # of two: the third has no trained token
    assert (metrics["atropos/avg_response_length"], metrics["atropos/empty_response_count"]) == (0.8, 1)


def test_a_response_lasts_from_its_first_trained_token_to_the_end(packed_batch):
    masks = [[0, 1, 0, 1, 0, 0], [0, 0, 0, 0, 0, 1]]
    _, metrics = prepare(packed_batch([[1, 2, 3, 4, 5, 6]] * 2, masks=masks, scores=[1.0, 0.0]), 1.0)
    assert metrics["atropos/avg_response_length"] == 3.0


def test_broken_scores_are_no_reward(packed_batch):
    _, metrics = prepare(packed_batch(ROWS, scores=[1.0, np.nan, 0.0], groups=[0, 0, 1]), 1.0)
    assert metrics["reward_mean"] == 0.5
    assert metrics["trajectories_no_signal"] == 1
    assert (metrics["groups"], metrics["groups_flat"]) == (2, 2)


def test_fresh_are_tokens_that_name_the_trained_version_themselves(packed_batch):
    """A stamp is the version that was published when generation began; an engine may still have had the one
    before.
    """
    batch = packed_batch(
        ROWS, masks=[[0, 1, 1]] * 3, token_versions=[[-1, 5, 4], None, [-1, -1, 6]], version=5
    )
    rows, metrics = prepare(batch, 1.0, policy_version=5)
    assert rows.fresh is not None
    assert np.flatnonzero(rows.fresh).tolist() == [1]
    assert (metrics["token_staleness_max"], metrics["tokens_without_version"]) == (1, 1)  # 6 is impossible
    stamped, _ = prepare(packed_batch(ROWS, version=5), 1.0, policy_version=5)
    assert stamped.fresh is not None
    assert not stamped.fresh.any()
    unknown, _ = prepare(packed_batch(ROWS, token_versions=[[-1, -1, -1]] * 3), 1.0, policy_version=-1)
    assert unknown.fresh is not None
    assert not unknown.fresh.any()
    assert prepare(batch, 1.0)[0].fresh is None
