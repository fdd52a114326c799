"""When a run ends early: good enough for long enough, or no better for too long."""

from __future__ import annotations

import pytest

from shmbridge.consumers.learner.config.options import parse_condition, parse_goal
from shmbridge.consumers.learner.train.training_step import EarlyStop


def reasons(stop, name, values):
    return [stop.reason({name: value}) for value in values]


def test_a_condition_that_holds_in_consecutive_steps_stops():
    stop = EarlyStop(parse_condition("reward_mean>=0.9"), patience=2)
    found = reasons(stop, "reward_mean", [0.9, 0.8, 0.95, 0.97])
    assert found[:3] == [None, None, None]
    assert found[3] == "reward_mean>=0.9 in 2 steps one after the other, 0.97 in the last"


def test_a_metric_that_is_not_there_counts_for_nothing():
    stop = EarlyStop(parse_condition("eval/mean_score > 0.5"), patience=2)
    assert stop.reason({"eval/mean_score": 0.6}) is None
    assert stop.reason({"reward_mean": 0.1}) is None
    assert stop.reason({"eval/mean_score": float("nan")}) is None
    assert stop.reason({"eval/mean_score": 0.7}) is not None


@pytest.mark.parametrize(("goal", "values"), [("score:max", [1, 3, 2, 3, 3]), ("loss:min", [3, 1, 2, 1, 1])])
def test_a_goal_without_improvement_for_so_many_steps_stops(goal, values):
    stop = EarlyStop(None, goal=parse_goal(goal), stall=3)
    found = reasons(stop, goal.split(":")[0], values)
    assert found[:4] == [None] * 4
    assert "has not become better than" in found[4]


def test_early_stop_without_options_never_stops():
    assert reasons(EarlyStop(None), "loss", [1, 1, 1]) == [None] * 3


@pytest.mark.parametrize(
    ("text", "holds", "fails"), [("a<=1", 1, 2), ("a<1", 0, 1), ("a>1", 2, 1), (" x/y >= -1e-3 ", 0, -1)]
)
def test_conditions_are_parsed_and_compared(text, holds, fails):
    condition = parse_condition(text)
    assert condition.holds(holds)
    assert not condition.holds(fails)


@pytest.mark.parametrize("text", ["reward", "reward==1", ">=1", "reward>=much"])
def test_a_text_that_is_no_condition_is_refused(text):
    with pytest.raises(ValueError, match=r"such as|not a finite number"):
        parse_condition(text)


@pytest.mark.parametrize("text", ["reward", "reward:more", ":max"])
def test_a_text_that_is_no_goal_is_refused(text):
    with pytest.raises(ValueError, match="such as"):
        parse_goal(text)


@pytest.mark.parametrize("text", ["reward_mean>=high", "reward_mean>=nan", "reward_mean>inf"])
def test_a_bound_that_is_no_number_is_refused(text):
    with pytest.raises(ValueError, match="is not a finite number"):
        parse_condition(text)


def test_a_name_that_the_first_step_does_not_know_is_said_once():
    said = []
    stop = EarlyStop(parse_condition("reward_men>=1"), goal=parse_goal("loss:min"), stall=9, say=said.append)
    assert [stop.reason({"loss": loss}) for loss in (1.0, 0.5)] == [None, None]
    assert said == [
        "no metric reward_men in the first step: until there is one, it does not end this run early"
    ]
