"""Advantages: what is refused, and which source sets a token's value. The formulas:
test_advantages_estimators.py.
"""

from __future__ import annotations

import numpy as np
import pytest

from shmbridge.consumers.advantages.from_scores import group_normalised, override_rows, spread_to_tokens


def test_no_rows_have_no_advantages():
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
