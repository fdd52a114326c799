"""What the report concludes from a run's numbers, in words."""

from __future__ import annotations

import json

import pytest

from shmbridge.consumers.learner.report.run import as_text, read_run, summary


@pytest.fixture
def conclude(tmp_path):
    def make(steps=40, **more):
        lines = []
        for step in range(1, steps + 1):
            said = {"step": step, "time": 2.0 * step, "tokens": 100, "reward_mean": 0.5, "wait_s": 0.2}
            said |= {"forward_s": 0.4, "backward_s": 0.4, "dropped_total": 0, "discarded_total": 0}
            lines.append(said | {k: v(step) if callable(v) else v for k, v in more.items()})
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(each) + "\n" for each in lines))
        found = summary(read_run(tmp_path))
        assert all(text in as_text(found) for text in found["conclusions"])
        return "\n".join(found["conclusions"])

    return make


@pytest.mark.parametrize(
    ("wait_s", "said"),
    [
        (1.2, "the learner waits for environments 60 % of the time: add environments"),
        (0.2, "the learner waits for environments 20 % of the time: a few more"),
        (0.0, "more environments would not make it faster"),
    ],
)
def test_where_the_time_goes_and_what_to_do(conclude, wait_s, said):
    assert said in conclude(wait_s=wait_s)


def test_the_wait_for_the_first_batch_is_no_reason_for_more_environments(conclude):
    assert "would not make it faster" in conclude(wait_s=lambda step: 500.0 if step == 1 else 0.0)


def test_a_phase_that_takes_too_much_is_named_with_its_option(conclude):
    assert "publishing weights takes 50 % of the time: raise --publish-every" in conclude(publish_s=1.0)


@pytest.mark.parametrize(
    ("slope", "said"),
    [(0.02, "the reward rose from"), (-0.02, "the reward fell from"), (0.0, "did not change")],
)
def test_a_reward_rises_falls_or_stays_within_its_noise(conclude, slope, said):
    noise = (0.1, -0.1, 0.05, -0.05)
    assert said in conclude(reward_mean=lambda step: 0.5 + slope * step + noise[step % 4])


def test_a_short_run_or_one_without_scores_says_nothing_of_learning(conclude):
    assert "reward" not in conclude(steps=5)
    assert "no trajectory has a score" in conclude(reward_mean=None)


def test_what_was_lost_comes_with_its_reason(conclude):
    assert "nothing was dropped or discarded" in conclude()
    lost = {"bridge/drops_full_total": 3.0, "dropped_total": 3}
    lost |= {"bridge/discards_stale_total": 1.0, "discarded_total": 1}
    said = conclude(**lost)
    assert "3 records were dropped by producers since their lane was full: raise lane_bytes" in said
    assert "1 record was discarded as too old: raise --max-staleness" in said
    assert "nothing was dropped" not in said


def test_faults_come_first(conclude):
    faults = {"mismatch_alarms_total": lambda step: step // 10, "update_skipped": lambda step: step == 3}
    faults |= {"rows_compared{maze}": 4, "rows_differ{maze}": lambda step: int(step == 9)}
    first = conclude(**faults).splitlines()[:3]
    assert any("in 4 steps the sampler was not the policy" in each for each in first)
    assert any("1 update was skipped" in each for each in first)
    assert any("trained with other values" in each for each in first)


def test_groups_that_teach_nothing_and_answers_that_are_cut(conclude):
    said = conclude(groups=10, groups_flat=7, trajectories=80, trajectories_truncated=60)
    assert "70 % of the groups teach nothing" in said
    assert "75 % of the completions were cut" in said
