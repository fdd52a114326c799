"""Metrics that the learner adds to a batch's own, those of all ranks together, and the times of a step."""

from __future__ import annotations

import math
import time

import numpy as np
import pytest
import torch

from shmbridge.consumers.learner.data.sources import empty_batch
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.report import step_metrics
from shmbridge.consumers.learner.report.step_metrics import (
    LearnerMetrics,
    StepCost,
    StepTimes,
    merged,
    rows_of_environments,
)

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
    assert (found["age_mean_s"], found["age_max_s"]) == (1.8, 3.0)
    assert (found["bridge/staleness_p90"], found["bridge/group_wait_s"]) == (2.0, 2.0)
    assert found["api_perf/latency_p50_ms"] == pytest.approx(2000.0)  # of two records: 3 s and 1 s
    assert found["api_perf/error_rate"] == 0.0


def test_staleness_is_told_apart_up_to_a_few_versions_and_unknown_where_none_is_valid(packed_batch):
    """The last two rows were not stamped, and stamped with a version that is not trained yet."""
    batch = packed_batch([[1, 2]] * 6, groups=range(6))
    for meta, version in zip(batch.meta, (12, 11, 5, 4, -1, 2**31 - 1), strict=True):
        meta.min_policy_version = version
    found = LearnerMetrics(groups=6).taken(batch, 0, policy_version=12)
    bars = {
        name.removeprefix("staleness_hist_"): count
        for name, count in found.items()
        if name.startswith("staleness_hist_")
    }
    assert len(bars) == 10
    some = {"0": 1, "1": 1, "7": 1, "over_7": 1, "unknown": 2}
    assert {lag: count for lag, count in bars.items() if count} == some
    assert (found["staleness_mean"], found["staleness_max"]) == (4.0, 8)
    none = LearnerMetrics(groups=1).taken(packed_batch([[1, 2]], version=-1), 0, policy_version=6)
    assert (none["staleness_mean"], none["staleness_max"], none["bridge/staleness_max"]) == (0.0, 0, 0.0)


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


def test_totals_add_up_over_steps_and_say_who_was_waited_for_since_the_step_before():
    describe = LearnerMetrics(groups=2)
    assert "bridge/waiting_for" not in describe.totals({"groups_fallback": 3}, STATS)
    found = describe.totals({"groups_fallback": 2}, STATS | {"batch_wait_s": 1e6})
    assert found["atropos/fallback_groups_total"] == 5
    assert (found["dropped_total"], found["discarded_total"]) == (2, 1)
    assert [found[f"bridge/{name}"] for name in ("records_total", "drops_total", "lanes_live")] == [7, 2, 3]
    waiting = ("bridge/waiting_for", "bridge/waiting_for_environments_frac")
    assert [found[name] for name in waiting] == ["environments", 1.0]
    again = describe.totals({"groups_fallback": 0}, STATS | {"batch_wait_s": 1e6})
    assert again["bridge/waiting_for"] == "nobody"


# --- all ranks --------------------------------------------------------------------------------------------

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
    masks = [*[[0, 0]] * 6, *[[0, 1]] * 2]
    all_of_them = packed_batch([[1, 2]] * 8, scores=[0.0] * 8, masks=masks, groups=GROUPS)
    shares = [prepare(batch, 1.0)[1] for batch in (one, all_of_them)]
    found = merged(shares, [{"test": 8}] * 2)
    scores = [1.0] + [0.0] * 8
    for what, ending in (("reward_{}", ""), ("atropos/test/{}", "_score")):
        assert found[what.format("mean") + ending] == pytest.approx(np.mean(scores))
        assert found[what.format("std") + ending] == pytest.approx(np.std(scores))
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


def test_counts_are_added_up_over_ranks_and_metrics_of_the_whole_batch_are_not():
    one = {"host_cpu_s": 0.5, "tokens": 100, "trajectories": 2, "loss": 0.1, "reward_mean": math.nan}
    other = {"host_cpu_s": 0.25, "tokens": 0, "trajectories": 0, "loss": 0.1, "reward_mean": math.nan}
    found = merged([one, other], [{}, {}])
    assert (found["host_cpu_s"], found["tokens"], found["loss"]) == (0.75, 100, 0.1)
    assert math.isnan(found["reward_mean"])


def test_counts_of_tokens_add_up_and_their_age_is_that_of_those_that_have_one(packed_batch):
    """The same over ranks, and over the batches that one step accumulates."""
    known = packed_batch([[1, 2, 3]], token_versions=[[2, 2, 2]], ref_logprobs=[[0.0, -1.0, 1.0]])
    unknown = packed_batch([[1, 2, 3, 4]], version=None)
    shares = [prepare(batch, 1.0, with_reference=True, policy_version=6)[1] for batch in (known, unknown)]
    found = merged(shares, [{}, {}])
    assert found["tokens_without_reference"] == 1 + 3
    assert found["tokens_without_version"] == 3
    assert found["token_staleness_mean"] == 4.0


# --- times ------------------------------------------------------------------------------------------------


def test_phases_add_up_and_are_taken_once_and_making_items_is_one(monkeypatch):
    now = [100.0]
    monkeypatch.setattr(step_metrics.time, "perf_counter", lambda: now[0])

    def make():
        for number in range(3):
            now[0] += 2.0
            yield number

    times, seen = StepTimes(torch.device("cpu")), []
    for item in times.each("copy", make()):
        seen.append(item)
        with times.of("forward"):
            now[0] += 3.0
        now[0] += 10.0
    assert seen == [0, 1, 2]
    assert times.taken() == {"copy_s": 6.0, "forward_s": 9.0, "backward_s": 0.0, "sync_s": 0.0}
    assert set(times.taken().values()) == {0.0}


def test_a_step_costs_what_went_by_since_the_last():
    cost = StepCost()
    until = time.process_time() + 0.02
    while time.process_time() < until:
        pass
    spent = cost.cpu_s()
    assert 0.02 <= spent < 1.0
    assert cost.cpu_s() < spent
    found = cost.step(waited_s=0.0, cpu_s=0.02, tokens=1000)
    assert found["idle_frac"] == 0.0
    assert found["step_s"] > 0.0
    assert found["host_cpu_s_per_mtoken"] == pytest.approx(20.0)
    assert math.isnan(cost.step(waited_s=0.0, cpu_s=0.02, tokens=0)["host_cpu_s_per_mtoken"])
