"""Rewards of steps and of tokens as advantages: hand-made values, loops, which token gets what, and what is
refused.
"""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shmbridge.consumers.advantages.from_scores import spread_to_tokens
from shmbridge.consumers.advantages.process_rewards import (
    Steps,
    mixed,
    process_advantages,
    rewards_to_go,
    to_go,
    token_reward_advantages,
)

REWARD = st.sampled_from([0.0, 0.0, 1.0, -1.0, 0.5, 2.0, 0.1])
DISCOUNT = st.sampled_from([0.0, 0.5, 0.9, 1.0])


def flat(rows):
    return [value for row in rows for value in row], [len(row) for row in rows]


def starts_of(lengths):
    return np.concatenate([[0], np.cumsum(np.array(lengths, int))])


def steps_of(rewards, ends, lengths):
    return Steps.of(*flat(rewards), *flat(ends), starts_of(lengths))


@st.composite
def batches(draw):
    """Rows of (group, tokens' mask, rewards of steps, their ends or none, reward of each token, whether the
    row counts).
    """
    rows = []
    for _ in range(draw(st.integers(0, 6))):
        length = draw(st.integers(0, 9))
        ends = sorted(draw(st.sets(st.sampled_from(range(1, length + 1)), max_size=4))) if length else []
        rewards = [draw(REWARD) for _ in ends]
        if draw(st.sampled_from([False, False, False, True])):
            ends = []
        mask = draw(st.lists(st.booleans(), min_size=length, max_size=length))
        dense = [draw(REWARD) for _ in mask]
        rows.append((draw(st.integers(0, 2)), mask, rewards, ends, dense, draw(st.booleans())))
    return rows


def unpacked(rows):
    group, masks, rewards, ends, dense, usable = ([row[i] for row in rows] for i in range(6))
    lengths = [len(mask) for mask in masks]
    return (
        np.array(group, int),
        flat(masks)[0],
        steps_of(rewards, ends, lengths),
        flat(dense)[0],
        np.array(usable, bool),
        lengths,
    )


def normaliser(pool, scale="std", eps=1e-4, floor=1e-4):
    """Returns a function that normalises a reward over a pool: the formula and its guards, in a loop."""
    if len(set(pool)) < 2:
        return lambda reward: 0.0
    mean = sum(pool) / len(pool)
    deviation = (sum((r - mean) ** 2 for r in pool) / len(pool)) ** 0.5
    if scale == "none":
        return lambda reward: reward - mean
    return lambda reward: (reward - mean) / (max(deviation, floor * abs(mean)) + eps)


def slow_process(rows, reach, discount, scale):
    out = []
    for group, mask, rewards, ends, _, usable in rows:
        normal = normaliser([r for g, _, rs, _, _, u in rows if g == group and u for r in rs], scale)
        worth = [normal(r) if usable else 0.0 for r in rewards]
        for token, trained in enumerate(mask):
            value = 0.0
            if not ends:
                value = sum(worth)
            else:
                coming = [k for k in range(len(ends)) if ends[k] > token]
                if reach == "step":
                    coming = coming[:1]
                value = sum(discount ** (k - coming[0]) * worth[k] for k in coming)
            out.append(value if trained else 0.0)
    return out


@given(batches(), st.sampled_from(["to_go", "step"]), DISCOUNT, st.sampled_from(["std", "none"]))
def test_process_advantages_are_those_of_a_loop(rows, reach, discount, scale):
    group, mask, steps, _, usable, _ = unpacked(rows)
    result = process_advantages(
        steps, group, mask, usable=usable, reach=reach, discount=discount, scale=scale
    )
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, slow_process(rows, reach, discount, scale), rtol=1e-5, atol=1e-5)


# Six tokens in two steps, the first a prompt that is not trained, the last after the last step; the other row
# of the group has one step. Rewards 1, 0 | 2: mean 1, and 0, -1, 1 over the deviation.
TWO_ROWS = {"rewards": [[1.0, 0.0], [2.0]], "ends": [[3, 5], [2]], "lengths": [6, 2]}
MASK = [0, 1, 1, 1, 1, 1, 1, 1]
D = (2 / 3) ** 0.5


def test_step_rewards_of_six_tokens_by_hand():
    steps = steps_of(**TWO_ROWS)
    result = process_advantages(steps, [0, 0], MASK, eps=0.0)
    np.testing.assert_allclose(result, np.array([0, -1, -1, -1, -1, 0, 1, 1]) / D, rtol=1e-6)
    half = process_advantages(steps, [0, 0], MASK, eps=0.0, discount=0.5)
    np.testing.assert_allclose(half, np.array([0, -0.5, -0.5, -1, -1, 0, 1, 1]) / D, rtol=1e-6)
    own = process_advantages(steps, [0, 0], MASK, eps=0.0, reach="step")
    np.testing.assert_allclose(own, np.array([0, 0, 0, -1, -1, 0, 1, 1]) / D, rtol=1e-6)
    raw = process_advantages(steps, [0, 0], MASK, scale="none")
    np.testing.assert_array_equal(raw, [0, -1, -1, -1, -1, 0, 1, 1])


def test_options_of_the_group_hold_for_steps():
    steps = steps_of([[9.0, 11.0]], [[1, 2]], [2])
    for options, worth in [
        ({"eps": 0.0}, 1),
        ({"eps": 1.0}, 0.5),
        ({"eps": 0.0, "ddof": 1}, 0.5**0.5),
        ({"eps": 0.0, "floor": 0.2}, 0.5),
    ]:
        np.testing.assert_allclose(
            process_advantages(steps, [0], [1, 1], reach="step", **options), [-worth, worth], rtol=1e-6
        )


def test_a_step_without_trained_tokens_still_counts():
    steps = steps_of([[0.0, 4.0], [2.0]], [[1, 2], [1]], [2, 1])
    # -2 + 2
    np.testing.assert_array_equal(process_advantages(steps, [0, 0], [1, 0, 1], scale="none"), [0.0, 0.0, 0.0])
    np.testing.assert_array_equal(
        process_advantages(steps, [0, 0], [1, 0, 1], scale="none", reach="step"), [-2.0, 0.0, 0.0]
    )


def test_rewards_without_ends_count_for_the_whole_row():
    steps = Steps.of([1.0, 2.0, 6.0], [2, 1], [1], [0, 1], [0, 3, 5])
    assert steps.placed.tolist() == [False, True]
    for options in ({"reach": "to_go", "discount": 0.5}, {"reach": "step"}):
        result = process_advantages(steps, [0, 0], [0, 1, 1, 1, 1], scale="none", **options)
        np.testing.assert_array_equal(result, [0, -3, -3, 3, 0])  # (1 - 3) + (2 - 3)
    np.testing.assert_array_equal(Steps.of([1.0], [1], None, None, [0, 2]).ends, [2])


@pytest.mark.parametrize("rewards", [[[0.1] * 3, [0.1] * 5], [[7.0], []]])
def test_equal_step_rewards_and_a_single_one_give_exactly_zero(rewards):
    steps = steps_of(rewards, [list(range(1, len(row) + 1)) for row in rewards], [5, 5])
    assert not process_advantages(steps, [0, 0], [1] * 10, eps=0.0).any()


def test_the_columns_of_a_packed_batch(producer, consumer):
    """One record without steps, one with both columns, one whose steps have no ends: gathered, they are what
    `Steps.of` takes.
    """
    producer.put({"tokens": [[1, 2]], "score": [1.0]}, group_id="none")
    producer.put(
        {"tokens": [[3, 4, 5], [6]], "step_rewards": [[1.0, 0.0], [2.0]], "step_ends": [[1, 3], [1]]},
        group_id="both",
    )
    producer.put({"tokens": [[7, 8], []], "step_rewards": [[4.0], [2.0]]}, group_id="no ends")
    with next(consumer.batches(groups=3, prefetch=0)) as batch:
        rewards, ends = batch.step_rewards, batch.step_ends
        steps = Steps.of(rewards.values, rewards.lengths, ends.values, ends.lengths, batch.cu_seqlens)
        result = process_advantages(steps, batch.group_index, np.ones(batch.token_count), scale="none")
    assert steps.placed.tolist() == [False, True, True, False, False]
    np.testing.assert_array_equal(result, [0, 0, -1, -1, -1, 1, 1, 1])


def test_step_rewards_are_mixed_with_the_outcome():
    cu_seqlens, mask = [0, 6, 8, 9], [*MASK, 1]
    steps = steps_of([*TWO_ROWS["rewards"], []], [*TWO_ROWS["ends"], []], [6, 2, 1])
    outcome = spread_to_tokens([4.0, -4.0, 3.0], cu_seqlens, mask)
    process = process_advantages(steps, [0, 0, 0], mask, scale="none")
    result = mixed(outcome, process, steps.counts > 0, cu_seqlens, weight=0.25)
    # 3 of the outcome and a quarter of the steps; after the last end the outcome's share; without steps the
    # outcome.
    np.testing.assert_array_equal(result, [0, 2.75, 2.75, 2.75, 2.75, 3, -2.75, -2.75, 3])
    assert result.dtype == np.float32
    np.testing.assert_array_equal(mixed(outcome, process, steps.counts > 0, cu_seqlens, weight=0.0), outcome)
    alone = mixed(outcome, process, steps.counts > 0, cu_seqlens, weight=1.0)
    np.testing.assert_array_equal(alone, [*process[:8], 3])


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (([1, 2, 3], [1, 2], [1, 1], [1, 1], [0, 2, 4]), "row 1 has 2 step_rewards and 1 step_ends"),
        (([1], [1, 0], [1, 1], [1, 1], [0, 2, 4]), "row 1 has 0 step_rewards and 1 step_ends"),
        (
            ([1, 2, 3], [1, 2], [1, 1, 3], [1, 2], [0, 2, 4]),
            r"step 1 of row 1 ends at token 3, and the row has 2 tokens",
        ),
        (
            ([1, 2, 3], [1, 2], [1, 2, 2], [1, 2], [0, 2, 4]),
            r"step 1 of row 1 ends at token 2, where the step before it ends at 2",
        ),
        (
            ([1, 2, 3], [1, 2], [1, 2, 1], [1, 2], [0, 2, 4]),
            r"step 1 of row 1 ends at token 1, where the step before it ends at 2",
        ),
        (
            ([1, 2], [1, 1], [1, 0], [1, 1], [0, 2, 4]),
            r"step 0 of row 1 ends at token 0, where the step before it ends at 0",
        ),
        (([1, 2], [1, 1], [-1, 1], [1, 1], [0, 2, 4]), r"step 0 of row 0 ends at token -1"),
        (
            ([1, 2], [1, 2], [1, 1, 2], [1, 2], [0, 2, 4]),
            r"step_rewards has shape \(2,\), and its rows have 3",
        ),
        (([1, 2], [1, 1], [1, 1, 2], [1, 1], [0, 2, 4]), r"step_ends has shape \(3,\), and its rows have 2"),
        (
            ([1, 2], [1, 1], [1, 1], [1, 1], [0, 2]),
            r"counts of step_rewards have shape \(2,\), and cu_seqlens speaks of 1 rows",
        ),
    ],
)
def test_columns_that_disagree_are_refused(columns, words):
    with pytest.raises(ValueError, match=words):
        Steps.of(*columns)


def test_options_outside_their_range_are_refused():
    steps = steps_of([[1.0]], [[1]], [1])
    for options, words in [
        ({"discount": 1.5}, r"discount of 1\.5"),
        ({"reach": "past"}, "reach is 'past'"),
        ({"usable": [True, True]}, r"usable \(2,\)"),
        ({"scale": "l2"}, "scale is 'l2'"),
        ({"loss_mask": [1, 1]}, r"loss_mask has shape \(2,\)"),
        ({"group_index": [0, 0]}, "steps are of 1 rows"),
    ]:
        with pytest.raises(ValueError, match=words):
            process_advantages(steps, **{"group_index": [0], "loss_mask": [1], **options})
    with pytest.raises(ValueError, match=r"weight of -0\.1"):
        mixed([1.0], [1.0], [True], [0, 1], weight=-0.1)
    with pytest.raises(ValueError, match=r"has_process \(2,\)"):
        mixed([1.0], [1.0], [True, True], [0, 1], weight=0.5)
    with pytest.raises(ValueError, match=r"loss_mask \(1,\)"):
        rewards_to_go([1.0, 2.0], [0, 2], [1])
    with pytest.raises(ValueError, match="over is 'all'"):
        token_reward_advantages([1.0], [0], [0, 1], [1], over="all")
    with pytest.raises(ValueError, match=r"has_rewards \(2,\)"):
        token_reward_advantages([1.0], [0], [0, 1], [1], has_rewards=[True, True])
    with pytest.raises(ValueError, match=r"shape \(3,\), and their 2 rows have 2"):
        to_go([1.0, 2.0, 3.0], [1, 1])


@given(st.lists(st.lists(st.floats(-4, 4, width=16), max_size=40), max_size=5), DISCOUNT)
def test_reward_to_go_is_that_of_a_loop(rows, discount):
    expected = []
    for row in rows:
        sums = []
        for value in reversed(row):
            sums.append(value + discount * (sums[-1] if sums else 0.0))
        expected += reversed(sums)
    np.testing.assert_allclose(to_go(*flat(rows), discount), expected, rtol=1e-12, atol=1e-12)


def test_reward_to_go_keeps_its_digits_in_long_rows():
    # 0.5**5000 is 0 in float64: dividing by powers of the discount would give 0 / 0 here.
    result = to_go(np.ones(5001), [5000, 1], 0.5)
    np.testing.assert_allclose(result[[0, 2500, 4998, 4999, 5000]], [2, 2, 1.5, 1, 1])


def slow_returns(rows, discount):
    out = []
    for _, mask, _, _, dense, usable in rows:
        running, returns = 0.0, []
        for reward, trained in zip(reversed(dense), reversed(mask), strict=True):
            if trained and usable:
                running = reward + discount * running
            returns.append(running if trained and usable else 0.0)
        out.append(returns[::-1])
    return out


@given(batches(), DISCOUNT)
def test_token_rewards_are_those_of_a_loop(rows, discount):
    group, mask, _, dense, usable, lengths = unpacked(rows)
    starts = starts_of(lengths)
    returns = slow_returns([(*row[:5], True) for row in rows], discount)
    np.testing.assert_allclose(
        rewards_to_go(dense, starts, mask, discount=discount), flat(returns)[0], rtol=1e-6, atol=1e-6
    )

    returns = [[float(np.float32(value)) for value in row] for row in slow_returns(rows, discount)]
    for over, guards in (("group", {}), ("batch", {"eps": 1e-8, "floor": 0.0})):
        expected = []
        for mine, row in zip(rows, returns, strict=True):
            pool = [
                v
                for other, values in zip(rows, returns, strict=True)
                for v, m in zip(values, other[1], strict=True)
                if m and other[5] and (over == "batch" or other[0] == mine[0])
            ]
            normal = normaliser(pool, **guards)
            expected += [normal(v) if m and mine[5] else 0.0 for v, m in zip(row, mine[1], strict=True)]
        result = token_reward_advantages(
            dense, group, starts, mask, has_rewards=usable, discount=discount, over=over
        )
        np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
        assert not result[~np.array(mask, bool)].any()


def test_token_rewards_by_hand():
    # The untrained third token costs no discount, and its own 9 is ignored.
    result = rewards_to_go([0, 1, 9, 2, 4], [0, 4, 5], [0, 1, 0, 1, 1], discount=0.5)
    np.testing.assert_array_equal(result, [0, 2, 0, 2, 4])
    over_group = token_reward_advantages([0, 1, 9, 2, 4], [0, 1], [0, 4, 5], [0, 1, 0, 1, 1], discount=1.0)
    np.testing.assert_allclose(over_group, [0, 1, 0, -1, 0], rtol=1e-3)
    seen = []
    over_batch = token_reward_advantages(
        [3.0, 1.0], [0, 1], [0, 1, 2], [1, 1], over="batch", reduce=lambda sums: seen.append(sums) or sums
    )
    np.testing.assert_allclose(over_batch, [1, -1])
    assert len(seen) == 2
