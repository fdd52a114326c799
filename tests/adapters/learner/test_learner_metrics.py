"""Metrics that the learner adds to a batch's own: ages, latencies, totals."""

from __future__ import annotations

import pytest

from shmbridge.consumers.learner.report.step_metrics import LearnerMetrics

SECOND = 1_000_000_000
STATS = {"records_total": 7, "dropped_total": 2, "discarded_total": 1, "lanes_live": 3}


def test_ages_of_a_batch(packed_batch):
    batch = packed_batch(
        [[1, 2]] * 5,
        groups=[0, 0, 1, 1, 1],
        published_ns=[7 * SECOND, 7 * SECOND, *[9 * SECOND] * 3],
        version=4,
    )
    found = LearnerMetrics(groups=2).taken(batch, 10 * SECOND, policy_version=6)
    assert (found["staleness_mean"], found["staleness_max"]) == (2.0, 2)
    assert (found["bridge/staleness_p90"], found["bridge/group_wait_s"]) == (2.0, 2.0)
    assert found["api_perf/latency_p50_ms"] == pytest.approx(2000.0)  # of two records: 3 s and 1 s
    assert found["api_perf/error_rate"] == 0.0


def test_versions_that_were_not_stamped_have_no_staleness(packed_batch):
    found = LearnerMetrics(groups=1).taken(packed_batch([[1, 2]], version=-1), 0, policy_version=6)
    assert (found["staleness_mean"], found["staleness_max"], found["bridge/staleness_max"]) == (0.0, 0, 0.0)


def test_versions_that_nobody_has_trained_yet_have_no_staleness(packed_batch):
    batch = packed_batch([[1, 2]] * 3, groups=range(3), version=4)
    batch.meta[1].min_policy_version, batch.meta[2].min_policy_version = 2**31 - 1, 7
    found = LearnerMetrics(groups=3).taken(batch, 0, policy_version=6)
    assert (found["staleness_mean"], found["staleness_max"], found["bridge/staleness_p90"]) == (2.0, 2, 2.0)
    assert (found["staleness_hist_2"], found["staleness_hist_0"], found["staleness_hist_unknown"]) == (
        1,
        0,
        2,
    )


def test_a_record_is_a_request_and_its_trajectories_are_items(packed_batch):
    describe = LearnerMetrics(groups=2)
    batch = packed_batch([[1, 2]] * 5, groups=[0, 0, 1, 1, 1])
    describe.taken(batch, 1 * SECOND, 0)
    found = describe.taken(batch, 3 * SECOND, 0)
    assert (found["api_perf/requests_per_sec"], found["api_perf/items_per_sec"]) == (1.0, 2.5)


def test_fragments_of_one_group_wait_from_the_first(packed_batch):
    batch = packed_batch([[1, 2]] * 2, groups=[0, 1], published_ns=[2 * SECOND, 6 * SECOND])
    batch.group_index[:] = 0
    assert LearnerMetrics(groups=1).taken(batch, 10 * SECOND, 0)["bridge/group_wait_s"] == 8.0


def test_a_step_says_who_was_waited_for_since_the_step_before():
    describe = LearnerMetrics(groups=2)
    measured = {"groups_fallback": 0}
    assert "bridge/waiting_for" not in describe.totals(measured, STATS)
    found = describe.totals(measured, STATS | {"batch_wait_s": 1e6})
    assert (found["bridge/waiting_for"], found["bridge/waiting_for_environments_frac"]) == (
        "environments",
        1.0,
    )
    assert describe.totals(measured, STATS | {"batch_wait_s": 1e6})["bridge/waiting_for"] == "nobody"


def test_totals_add_up_over_steps():
    describe = LearnerMetrics(groups=2)
    describe.totals({"groups_fallback": 3}, STATS)
    found = describe.totals({"groups_fallback": 2}, STATS)
    assert found["atropos/fallback_groups_total"] == 5
    assert (found["dropped_total"], found["discarded_total"]) == (2, 1)
    assert (found["bridge/records_total"], found["bridge/drops_total"], found["bridge/lanes_live"]) == (
        7,
        2,
        3,
    )


def test_staleness_is_told_apart_up_to_a_few_versions(packed_batch):
    batch = packed_batch(
        [[1, 2]] * 5, groups=range(5), published_ns=[7 * SECOND, 7 * SECOND, *[9 * SECOND] * 3], version=4
    )
    for meta, version in zip(batch.meta, (12, 11, 5, 4, -1), strict=True):
        meta.min_policy_version = version
    found = LearnerMetrics(groups=2).taken(batch, 10 * SECOND, policy_version=12)
    bars = {
        name.removeprefix("staleness_hist_"): count
        for name, count in found.items()
        if name.startswith("staleness_hist_")
    }
    assert {lag: count for lag, count in bars.items() if count} == {
        "0": 1,
        "1": 1,
        "7": 1,
        "over_7": 1,
        "unknown": 1,
    }
    assert len(bars) == 10
    assert (found["age_mean_s"], found["age_max_s"]) == (1.8, 3.0)
