"""The estimators over a group and over the batch: formulas against loops, guards, invariants, which source
sets a token's value.
"""

from __future__ import annotations

import threading

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from shmbridge.consumers.advantages.from_scores import (
    batch_normalised,
    clip_to_range,
    group_advantages,
    group_normalised,
    leave_one_out,
    override_tokens,
    silence_rows,
    spread_to_tokens,
)

SCORE = st.floats(-8, 8, width=16) | st.sampled_from([0.0, 1.0])
ROWS = st.lists(st.tuples(SCORE, st.integers(0, 4), st.booleans()), max_size=24)
ESTIMATORS = [
    lambda scores, group, usable=None: group_advantages(scores, group, usable=usable),
    lambda scores, group, usable=None: group_advantages(scores, group, usable=usable, scale="none"),
    leave_one_out,
]


def slowly(scores, group, usable, *, scale="std", eps=1e-4, floor=1e-4, ddof=0):
    out = np.zeros(len(scores))
    for i, mine in enumerate(group):
        members = [s for s, g, u in zip(scores, group, usable, strict=True) if g == mine and u]
        if not usable[i] or len(set(members)) < 2:
            continue
        mean = sum(members) / len(members)
        deviation = (sum((s - mean) ** 2 for s in members) / (len(members) - ddof)) ** 0.5
        out[i] = scores[i] - mean
        if scale == "std":
            out[i] /= max(deviation, floor * abs(mean)) + eps
    return out


def columns(rows):
    scores, group, usable = ([row[i] for row in rows] for i in range(3))
    return np.array(scores, float), np.array(group, int), np.array(usable, bool)


@given(ROWS, st.sampled_from(["std", "none"]), st.sampled_from([0, 1]), st.sampled_from([0.0, 1e-4, 0.5]))
def test_group_advantages_are_those_of_a_loop(rows, scale, ddof, floor):
    scores, group, usable = columns(rows)
    result = group_advantages(scores, group, usable=usable, scale=scale, ddof=ddof, floor=floor)
    assert result.dtype == np.float32
    np.testing.assert_allclose(
        result, slowly(scores, group, usable, scale=scale, ddof=ddof, floor=floor), rtol=1e-5, atol=1e-5
    )


@given(ROWS)
def test_leave_one_out_is_that_of_a_loop(rows):
    scores, group, usable = columns(rows)
    expected = np.zeros(len(rows))
    for i in range(len(rows)):
        others = [scores[j] for j in range(len(rows)) if j != i and group[j] == group[i] and usable[j]]
        if usable[i] and others:
            expected[i] = scores[i] - sum(others) / len(others)
    np.testing.assert_allclose(leave_one_out(scores, group, usable=usable), expected, rtol=1e-5, atol=1e-5)


def test_estimators_give_hand_made_values():
    scores, group = [1.0, 0.0, 0.0, 1.0, 5.0], [0, 0, 0, 0, 1]
    np.testing.assert_array_equal(group_advantages(scores, group, eps=0.0), [1, -1, -1, 1, 0])
    np.testing.assert_array_equal(group_advantages(scores, group, scale="none"), [0.5, -0.5, -0.5, 0.5, 0])
    np.testing.assert_allclose(
        group_advantages(scores, group, eps=0.0, ddof=1), np.array([1, -1, -1, 1, 0]) * 0.75**0.5, rtol=1e-6
    )
    np.testing.assert_allclose(leave_one_out(scores, group), [2 / 3, -2 / 3, -2 / 3, 2 / 3, 0], rtol=1e-6)


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("score", [0.0, 0.1, -1e9, 1 / 3])
def test_equal_scores_and_groups_of_one_give_exactly_zero(estimate, score):
    assert not estimate([score] * 8 + [7.0], [0] * 8 + [1]).any()


@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("broken", [np.nan, np.inf, -np.inf])
def test_a_broken_score_is_left_out_of_its_group(estimate, broken):
    alone = estimate([0.0, 1.0], [0, 0])
    np.testing.assert_array_equal(estimate([0.0, broken, 1.0], [0, 0, 0]), [alone[0], 0.0, alone[1]])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("estimate", ESTIMATORS)
@pytest.mark.parametrize("broken", [1.1e37, 1e39, -1e155, 1e308])
def test_a_score_that_float32_does_not_bear_counts_for_nobody(estimate, broken):
    alone = estimate([0.0, 1.0], [0, 0])
    np.testing.assert_array_equal(estimate([0.0, broken, 1.0], [0, 0, 0]), [alone[0], 0.0, alone[1]])
    np.testing.assert_array_equal(estimate([broken, broken, -broken, -broken], [0] * 4), [0.0] * 4)
    assert np.isfinite(estimate([1e37, -1e37, -1e37], [0] * 3)).all()


@pytest.mark.parametrize("sign", [1, -1])
def test_the_floor_is_a_share_of_the_mean_whatever_its_sign(sign):
    result = group_advantages([sign * 9.0, sign * 11.0], [0, 0], eps=0.0, floor=0.5)
    np.testing.assert_allclose(result, [-sign / 5, sign / 5], rtol=1e-6)


def test_the_floor_keeps_noise_small():
    scores = 1e6 + np.array([0.0, 1e-3, 0.0, 1e-3])
    np.testing.assert_allclose(np.abs(group_advantages(scores, [0] * 4, eps=0.0, floor=0.0)), 1.0, rtol=1e-4)
    # which has none
    np.testing.assert_allclose(np.abs(group_normalised(scores, [0] * 4, eps=0.0)), 1.0, rtol=1e-4)
    assert np.abs(group_advantages(scores, [0] * 4, eps=0.0)).max() == pytest.approx(0.5e-3 / 100, rel=1e-3)


def test_arguments_that_disagree_or_exceed_their_range_are_refused():
    with pytest.raises(ValueError, match=r"\(3,\).*\(2,\)"):
        leave_one_out([1.0, 2.0, 3.0], [0, 0])
    with pytest.raises(ValueError, match=r'scale is \'variance\': "std" or "none"'):
        group_advantages([1.0], [0], scale="variance")
    with pytest.raises(ValueError, match=r"1\.0 \.\. 2\.0 does not hold 0"):
        clip_to_range([1.5], 1.0, 2.0)
    with pytest.raises(ValueError, match="does not hold 0"):
        clip_to_range([1.5], -1.0, np.nan)
    with pytest.raises(ValueError, match=r"own \(2,\)"):
        override_tokens([1.0], [1.0, 2.0], [1], [1])
    with pytest.raises(ValueError, match=r"\(2,\), loss_mask \(3,\)"):
        batch_normalised([1.0, 2.0], [1, 1, 1])


TOKENS = st.lists(st.tuples(st.floats(-50, 50, width=16), st.booleans()), max_size=40)


@given(TOKENS, st.booleans(), st.sampled_from([0, 1]))
def test_batch_normalised_is_that_of_a_loop(tokens, centre, ddof):
    values, mask = np.array([t[0] for t in tokens], np.float32), np.array([t[1] for t in tokens], bool)
    counted = [float(v) for v, m in tokens if m]
    result = batch_normalised(values, mask, centre=centre, ddof=ddof)
    assert result.dtype == np.float32
    assert not result[~mask].any()
    if centre and len(set(counted)) < 2:
        assert not result.any()
        return
    assume(len(counted) > ddof)
    mean = sum(counted) / len(counted) if centre else 0.0
    deviation = (sum((v - mean) ** 2 for v in counted) / (len(counted) - ddof)) ** 0.5
    expected = [(v - mean) / (deviation + 1e-8) if m else 0.0 for v, m in tokens]
    np.testing.assert_allclose(result, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [0.1, -1 / 3, 3e8, 0.0])
def test_equal_advantages_become_exactly_zero(value):
    assert not batch_normalised([value] * 1000, [1] * 1000).any()
    assert not batch_normalised([value, 9.0], [1, 0]).any()


def test_batch_normalised_without_a_trained_token_is_zero():
    assert not batch_normalised([1.0, 2.0], [0, 0]).any()
    assert batch_normalised([], []).shape == (0,)


def on_ranks(parts, **options):
    """Every part on a thread of its own, with a sum over the threads: what a collective does."""
    barrier, sent, results = (
        threading.Barrier(len(parts), timeout=30),
        [None] * len(parts),
        [None] * len(parts),
    )

    def rank(number, values, mask):
        def reduce(sums):
            assert sums.dtype == np.float64
            assert sums.size <= 2
            sent[number] = sums
            barrier.wait()
            total = np.sum(sent, axis=0)
            barrier.wait()
            return total

        results[number] = batch_normalised(values, mask, reduce=reduce, **options)

    threads = [threading.Thread(target=rank, args=(number, *part)) for number, part in enumerate(parts)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return np.concatenate(results)


@pytest.mark.parametrize("options", [{}, {"centre": False}, {"ddof": 1}])
def test_ranks_normalise_as_one_batch_however_it_is_cut(options):
    rng = np.random.default_rng(5)
    values, mask = rng.normal(2.0, 3.0, 90).astype(np.float32), rng.random(90) < 0.7
    mask[:20] = False  # the first rank trains nothing, and must call all the same
    cuts = [slice(0, 20), slice(20, 31), slice(31, 90)]
    together = batch_normalised(values, mask, **options)
    np.testing.assert_allclose(
        on_ranks([(values[c], mask[c]) for c in cuts], **options), together, rtol=1e-5, atol=1e-6
    )
    assert not on_ranks([([0.1] * 3, [1] * 3), ([0.1] * 5, [1] * 5)]).any()


def test_reinforce_with_a_baseline_is_two_calls():
    per_row = group_advantages([1.0, 0.0, 4.0, 2.0], [0, 0, 1, 1], scale="none")  # 0.5, -0.5, 1, -1
    mask = [0, 1, 1, 1, 1, 1]
    result = batch_normalised(spread_to_tokens(per_row, [0, 2, 4, 5, 6], mask), mask)
    expected = np.array([0.5, -0.5, -0.5, 1.0, -1.0])
    np.testing.assert_allclose(result, [0.0, *((expected - expected.mean()) / expected.std())], rtol=1e-5)


def test_clip_to_range_limits_a_copy():
    np.testing.assert_array_equal(clip_to_range([-9, -2, 0, 3, 9], -2, 5), [-2, -2, 0, 3, 5])
    np.testing.assert_array_equal(clip_to_range([-9, 9], -np.inf, 1), [-9, 1])
    values = np.array([9.0], np.float32)
    assert clip_to_range(values, -1, 1).dtype == np.float32
    assert values[0] == 9.0


def test_own_advantages_of_some_tokens_replace_only_those():
    base = np.array([0, 1, 1, 1, 4], np.float32)
    own = np.array([9, -7, 8, 0, 0], np.float32)
    result = override_tokens(base, own, own_mask=[1, 1, 0, 1, 0], loss_mask=[0, 1, 1, 1, 1])
    # An untrained token stays 0. The 8 is masked out; the record's own 0 on the fourth token counts.
    np.testing.assert_array_equal(result, [0, -7, 1, 0, 4])
    np.testing.assert_array_equal(base, [0, 1, 1, 1, 4])


def test_silenced_rows_get_zero():
    base = np.array([1, 2, 3, 4, 5], np.float32)
    np.testing.assert_array_equal(silence_rows(base, [False, True, False], [0, 2, 2 + 2, 5]), [1, 2, 0, 0, 5])
    assert base[2] == 3
