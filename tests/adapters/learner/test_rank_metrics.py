"""Merged metrics of shares equal those of the whole batch, whatever share a row was in."""

from __future__ import annotations

import math

import numpy as np
import pytest

from shmbridge.consumers.learner.data.sources import empty_batch
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.report.learner_metrics import LearnerMetrics, rows_of_environments
from shmbridge.consumers.learner.report.rank_metrics import merged

ROWS = [[3, 4, 5, 6], [3, 4], [9, 1, 2], [9, 1], [7, 7, 7, 7, 7], [7, 7, 2], [1, 2, 3], [1, 5]]
SCORES = [1.0, 0.0, 0.25, None, 0.5, 0.5, 1.0, 0.75]
GROUPS = [0, 0, 1, 1, 2, 2, 3, 3]
ENVS = ["a_std_env", "a_std_env", "b", "b", "b", "b", "a_std_env", "a_std_env"]
EXACT_BUT = ("latency", "p90", "_per_sec")  # of a rank's own window, or the highest of all


def described(packed_batch, chosen):
    batch = packed_batch(
        [ROWS[row] for row in chosen],
        scores=[SCORES[row] for row in chosen],
        groups=[GROUPS[row] - GROUPS[chosen[0]] for row in chosen],
        envs=[ENVS[row] for row in chosen],
        published_ns=[row * 10**9 for row in chosen],
    )
    aged = LearnerMetrics(4).taken(batch, 20 * 10**9, 3)
    return prepare(batch, 1.0)[1] | aged, rows_of_environments(batch)


@pytest.mark.parametrize("cut", [2, 4, 6])
def test_two_shares_say_what_the_whole_batch_says(packed_batch, cut):
    whole, _ = described(packed_batch, range(8))
    shares = [described(packed_batch, range(cut)), described(packed_batch, range(cut, 8))]
    found = merged([each[0] for each in shares], [each[1] for each in shares])
    assert found.keys() == whole.keys()
    for name, value in whole.items():
        if not any(part in name for part in EXACT_BUT):
            assert found[name] == pytest.approx(value, rel=1e-6, abs=1e-7, nan_ok=True), name
            assert type(found[name]) is type(value), name


def test_means_are_of_those_rows_that_have_a_value(packed_batch):
    """In the first share one row has a score, and one other is trained; in the second all are scored, and one
    is trained.
    """
    one = packed_batch(
        [[1, 2]] * 8,
        scores=[1.0, *[None] * 7],
        masks=[*[[0, 0]] * 7, [0, 1]],
        advantages=[*[None] * 7, [0.0, 3.0]],
    )
    all_of_them = packed_batch(
        [[1, 2]] * 8, scores=[0.0] * 8, masks=[*[[0, 0]] * 6, *[[0, 1]] * 2], groups=[0, 0, 1, 1, 2, 2, 3, 3]
    )
    shares = [prepare(batch, 1.0)[1] for batch in (one, all_of_them)]
    found = merged(shares, [{"test": 8}] * 2)
    scores = [1.0] + [0.0] * 8
    for mean, deviation in (
        ("reward_mean", "reward_std"),
        ("atropos/test/mean_score", "atropos/test/std_score"),
    ):
        assert found[mean] == pytest.approx(np.mean(scores))
        assert found[deviation] == pytest.approx(np.std(scores))
    assert found["atropos/mean_score"] == pytest.approx(np.mean(scores))
    assert found["atropos/test/mean_advantage"] == pytest.approx(1.0)
    assert found["atropos/test/std_advantage"] == pytest.approx(np.std([3.0, 0.0, 0.0]))
    assert (found["trajectories_scored"], found["atropos/test/trajectories_scored"]) == (9, 9)
    assert found["atropos/test/trajectories_trained"] == 3


def test_a_rank_without_rows_changes_nothing(packed_batch):
    share, rows = described(packed_batch, range(8))
    nothing = prepare(empty_batch(), 1.0)[1] | LearnerMetrics(4).taken(empty_batch(), 20 * 10**9, 3)
    found = merged([share, nothing], [rows, rows_of_environments(empty_batch())])
    for name, value in share.items():
        if not name.startswith("api_perf/"):
            assert found[name] == pytest.approx(value, nan_ok=True), name
    assert found["atropos/num_environments"] == 2.0


def test_a_metric_that_is_known_nowhere_stays_unknown():
    found = merged(
        [{"reward_mean": math.nan, "trajectories": 2}, {"reward_mean": math.nan, "trajectories": 0}], [{}, {}]
    )
    assert math.isnan(found["reward_mean"])


def test_the_host_pays_for_all_ranks():
    shares = [
        {"host_cpu_s": 0.5, "tokens": 100, "trajectories": 2},
        {"host_cpu_s": 0.25, "tokens": 0, "trajectories": 0},
    ]
    found = merged(shares, [{}, {}])
    assert found["host_cpu_s"] == 0.75
    assert found["tokens"] == 100


def test_metrics_of_the_whole_batch_are_not_added_up_over_ranks():
    assert merged([{"loss": 0.1}] * 2, [{}, {}]) == {"loss": 0.1}


def test_counts_of_tokens_add_up_and_their_age_is_that_of_those_that_have_one(packed_batch):
    """The same over ranks, and over the batches that one step accumulates."""
    known = packed_batch([[1, 2, 3]], token_versions=[[2, 2, 2]], ref_logprobs=[[0.0, -1.0, 1.0]])
    unknown = packed_batch([[1, 2, 3, 4]], version=None)
    shares = [prepare(batch, 1.0, with_reference=True, policy_version=6)[1] for batch in (known, unknown)]
    found = merged(shares, [{}, {}])
    assert found["tokens_without_reference"] == 1 + 3
    assert found["tokens_without_version"] == 3
    assert found["token_staleness_mean"] == 4.0
