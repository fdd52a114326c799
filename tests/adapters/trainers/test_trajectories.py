"""A batch's rows as trainers take them."""

import numpy as np
import pytest

import shmbridge
from shmbridge.consumers.advantages.credit import NoAdvantages
from shmbridge.consumers.trajectories import Credit, columns_ignored, trajectories
from shmbridge.testing.fixtures import known_groups


@pytest.fixture
def known(bridge):
    """(what was put, the packed batch of it)."""
    groups = known_groups()
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        for group in groups:
            group.put(producer)
        with next(consumer.batches(groups=len(groups), timeout_s=10)) as batch:
            yield groups, batch


def test_rows_are_those_that_were_put(known):
    groups, batch = known
    found, metrics = trajectories(batch)
    wanted = [(group, row) for group in groups for row in group.rows]
    assert len(found) == len(wanted) == 20
    for got, (group, row) in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(got.tokens, row.tokens)
        np.testing.assert_array_equal(got.trained, row.trained)
        np.testing.assert_allclose(got.advantages, row.advantages, rtol=1e-6)
        assert got.prompt_length == row.prompt_length, group.name
        assert (got.logprobs is None) == (row.logprobs is None)
        if row.logprobs is not None:
            np.testing.assert_array_equal(got.logprobs, row.logprobs)
        assert got.score == row.score
        assert got.meta.group_id == got.instance_id == group.group_id
        assert (got.meta.min_policy_version, got.meta.max_policy_version) == group.versions
        assert got.own_advantages == (group.name != "no columns")
    assert [got.repetition_id for got in found] == [0, 1, 2, 3] * 5
    assert metrics["groups_fallback"] == 1


def test_values_are_views_and_missing_ones_none(known):
    found, _ = trajectories(known[1])
    versions = [each.value("token_versions") for each in found]
    assert [each is None for each in versions] == [True] * 16 + [False] * 4
    assert np.shares_memory(versions[-1], known[1]["token_versions"])
    assert set(versions[-1].tolist()) == {-1, 2, 4}
    assert found[0].finish_reason is None
    assert columns_ignored(known[1], {"tokens", "loss_mask", "advantages", "score", "prompt_length"}) == {
        "inference_logprobs": 16,
        "token_versions": 4,
    }


def test_a_group_without_advantages_is_refused_if_scores_may_not_replace_them(known):
    with pytest.raises(NoAdvantages, match="known-3-2"):
        trajectories(known[1], Credit(fallback=False))


def test_a_response_begins_at_its_first_trained_token_at_the_latest(bridge):
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        masks = [[0, 1, 1], [0, 0, 1, 1]]
        producer.put({"tokens": [[1, 2, 3], [4, 5, 6, 7]], "loss_mask": masks, "prompt_length": [2, 1]})
        producer.put({"tokens": [[1, 2, 3]]})
        with next(consumer.batches(groups=2, timeout_s=10)) as batch:
            found, _ = trajectories(batch)
            whole, _ = trajectories(batch, whole_rows=True)
    assert [each.prompt_length for each in found] == [1, 1, 3]
    assert [each.prompt_length for each in whole] == [1, 1, 1]
    assert [each.tokens[each.response].tolist() for each in found] == [[2, 3], [5, 6, 7], []]


def test_a_row_with_an_unknown_log_probability_has_none(bridge):
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        group = {"tokens": [[1, 2, 3]] * 4, "loss_mask": [[0, 1, 1]] * 4}
        logprobs = [[1.0, -0.5, 1.0], [1.0, -0.5, -0.25], [None, 1e-7, -0.25], [-0.5, -0.5, -9999.0]]
        producer.put(group | {"inference_logprobs": logprobs})
        with next(consumer.batches(groups=1, timeout_s=10)) as batch:
            first, second, rounded, last = trajectories(batch)[0]
    assert first.logprobs is None
    assert second.logprobs.tolist() == [0.0, -0.5, -0.25]
    assert rounded.logprobs.tolist() == [0.0, 0.0, -0.25]
    assert last.logprobs is None


def test_a_padded_batch_is_refused(bridge):
    with shmbridge.Consumer(bridge) as consumer, shmbridge.Producer(bridge, lane_bytes="1M") as producer:
        producer.put({"tokens": [[1, 2, 3]]})
        with (
            next(consumer.batches(groups=1, layout="padded", timeout_s=10)) as batch,
            pytest.raises(ValueError, match="layout='packed'"),
        ):
            trajectories(batch)
