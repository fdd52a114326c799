"""Group-normalised advantages: the formula, its guards, and who wins on a token."""

from __future__ import annotations

import numpy as np
import pytest

from shmbridge.consumers.advantages.rows import group_normalised, override_rows, spread_to_tokens


def test_formula_for_groups_in_any_order():
    rng = np.random.default_rng(7)
    group = rng.permutation(np.repeat(np.arange(5), 8))
    scores = rng.normal(3.0, 2.0, group.size)

    result = group_normalised(scores, group, eps=1e-4)

    assert result.dtype == np.float32
    for g in range(5):
        own = scores[group == g]
        np.testing.assert_allclose(result[group == g], (own - own.mean()) / (own.std() + 1e-4), rtol=1e-6)


def test_better_than_the_group_is_positive_and_a_group_sums_to_zero():
    result = group_normalised([0.0, 0.0, 0.0, 1.0], [0, 0, 0, 0])
    assert result[3] > 1.5
    assert (result[:3] < 0).all()
    assert result.sum() == pytest.approx(0.0, abs=1e-5)


@pytest.mark.parametrize("score", [0.0, 0.1, -1e9, 1 / 3])
def test_equal_scores_give_exactly_zero(score):
    # 8 * 0.1 has a mean that is not 0.1: the guard must not trust arithmetic.
    assert not group_normalised([score] * 8, [0] * 8, eps=0.0).any()


def test_group_of_one_gives_zero_beside_a_group_that_does_not():
    result = group_normalised([5.0, 0.0, 1.0], [1, 0, 0])
    assert result[0] == 0.0
    assert result[1] < 0.0 < result[2]


@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_score_is_left_out_of_its_group(broken):
    result = group_normalised([0.0, broken, 1.0], [0, 0, 0])
    alone = group_normalised([0.0, 1.0], [0, 0])
    np.testing.assert_array_equal(result, [alone[0], 0.0, alone[1]])


def test_a_row_without_a_score_is_left_out_of_its_group():
    result = group_normalised([0.0, 0.0, 1.0], [0, 0, 0], usable=[True, False, True])
    alone = group_normalised([0.0, 1.0], [0, 0])
    np.testing.assert_array_equal(result, [alone[0], 0.0, alone[1]])


def test_no_rows():
    assert group_normalised([], []).shape == (0,)


def test_lengths_that_disagree_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        group_normalised([1.0, 2.0, 3.0], [0, 0])


def test_spread_reaches_trained_tokens_only():
    result = spread_to_tokens([2.0, -3.0], [0, 3, 5], np.array([0, 1, 1, 1, 0], dtype=np.uint8))
    assert result.dtype == np.float32
    np.testing.assert_array_equal(result, [0.0, 2.0, 2.0, -3.0, 0.0])


def test_the_records_own_advantages_win_row_by_row():
    from_scores = np.array([0, 1, 1, 0, 4, 4], dtype=np.float32)
    own = np.array([9, -7, 0, 0, 0, 0], dtype=np.float32)
    mask = np.array([0, 1, 1, 0, 1, 1], dtype=np.uint8)

    result = override_rows(from_scores, own, [True, False], [0, 3, 6], mask)

    # An own value of 0 is a value; the untrained token's 9 is not; row 1 carried none and keeps its 4.
    np.testing.assert_array_equal(result, [0, -7, 0, 0, 4, 4])
    np.testing.assert_array_equal(from_scores, [0, 1, 1, 0, 4, 4])


def test_scores_too_large_to_square_count_as_broken():
    np.testing.assert_allclose(
        group_normalised([1e308, 1e308, 1.0, 3.0], [0, 0, 0, 0]), [0, 0, -1, 1], atol=1e-3
    )
    np.testing.assert_array_equal(group_normalised([1e200, -1e200], [0, 0]), [0, 0])
