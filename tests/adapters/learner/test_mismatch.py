"""The mismatch of sampler and policy: its numbers by hand, over micro-batches, batches and ranks, and its
warning.
"""

from __future__ import annotations

import math

import pytest
import torch

from shmbridge.consumers.learner.report.step_metrics import merged
from shmbridge.consumers.learner.train.grpo_update import MISMATCH, Mismatch, MismatchAlarm

POLICY = torch.tensor([-1.0, -2.0, -0.5, -3.0, -1.5])
SAMPLER = torch.tensor([-1.1, -1.7, 1.0, -3.0, float("-inf")])  # two of them unknown
FRESH = torch.tensor([True, False, True, True, True])


def expected(at):
    d = (POLICY - SAMPLER)[at].double()
    return [(d.exp() - 1 - d).mean().item(), d.abs().mean().item(), d.abs().max().item()]


def test_the_numbers_are_those_of_tokens_whose_sampler_is_known():
    found = Mismatch()
    found.add(POLICY, SAMPLER, FRESH)
    said = found.metrics()
    assert set(said) == set(MISMATCH)
    assert [said[name] for name in MISMATCH] == pytest.approx(
        [*expected([0, 1, 3]), *expected([0, 3]), 2.0], abs=1e-7
    )


@pytest.mark.parametrize("cuts", [[(0, 5)], [(0, 1), (1, 5)], [(0, 2), (2, 3), (3, 5)]])
def test_micro_batches_and_batches_add_up_to_one(cuts):
    whole, parts = Mismatch(), Mismatch()
    whole.add(POLICY, SAMPLER, FRESH)
    wanted = whole.metrics()
    for begin, end in cuts:
        parts.add(POLICY[begin:end], SAMPLER[begin:end], FRESH[begin:end])
        said = parts.metrics()  # of all batches so far
    assert said == pytest.approx(wanted)


def test_the_mismatch_without_a_known_token_is_no_number():
    nothing = Mismatch()
    assert all(math.isnan(nothing.metrics()[name]) for name in MISMATCH[:-1])
    nothing.add(POLICY[:0], SAMPLER[:0], FRESH[:0])
    nothing.add(POLICY, SAMPLER, None)  # nothing says how old they are
    said = nothing.metrics()
    assert said["logprob_diff_mean"] == pytest.approx(expected([0, 1, 3])[1])
    assert (math.isnan(said["logprob_diff_mean_fresh"]), said["tokens_fresh"]) == (True, 0.0)


def test_ranks_together_say_what_one_says(on_ranks):
    alone = Mismatch()
    alone.add(POLICY, SAMPLER, FRESH)
    wanted = alone.metrics()
    shares = (slice(0, 0), slice(0, 3), slice(3, 5))

    def of_rank(rank, reduce):
        own = Mismatch()
        if rank:
            own.add(POLICY[shares[rank]], SAMPLER[shares[rank]], FRESH[shares[rank]])
        return own.metrics(reduce)

    said = on_ranks(3, of_rank)
    step = merged(
        [each | {"trajectories": rows} for each, rows in zip(said, (0, 1, 5), strict=True)], [{}, {}, {}]
    )
    assert {name: step[name] for name in MISMATCH} == pytest.approx(wanted)


def test_the_warning_is_said_when_it_begins_and_counted_at_each_step():
    said = []
    alarm = MismatchAlarm(0.05, said.append)
    counted = []
    for mean in (0.001, 0.2, 0.3, float("nan"), 0.01, 0.4):
        counted.append(
            alarm.looked(
                {"logprob_diff_mean_fresh": mean, "logprob_diff_max_fresh": 4.0, "tokens_fresh": 12.0}
            )
        )
    assert [each["mismatch_alarms_total"] for each in counted] == [0, 1, 2, 2, 2, 3]
    assert len(said) == 2
    assert "over 12 tokens of this very version" in said[0]
    assert "0.2 nats" in said[0]
    assert "--mismatch-warn 0.05" in said[0]
    silent = MismatchAlarm(0.0, said.append)
    assert silent.looked({"logprob_diff_mean_fresh": 9.0}) == {"mismatch_alarms_total": 0}


NO_FRESH = {"logprob_diff_mean": 0.3, "logprob_diff_mean_fresh": float("nan"), "tokens_fresh": 0.0}


def test_a_run_in_which_nothing_can_be_compared_is_told_once():
    said = []
    alarm = MismatchAlarm(0.05, said.append)
    for _ in range(9):
        alarm.looked(NO_FRESH)
        alarm.looked(NO_FRESH | {"logprob_diff_mean": float("nan")})  # no recorded log-probability
    assert not said
    for _ in range(30):
        assert alarm.looked(NO_FRESH) == {"mismatch_alarms_total": 0}
    assert len(said) == 1
    assert "in 10 steps no token" in said[0]
    assert "token_versions" in said[0]


def test_no_warning_is_given_where_tokens_were_compared_or_need_not_be():
    said = []
    alarm = MismatchAlarm(0.05, said.append)
    alarm.looked({"logprob_diff_mean": 0.001, "logprob_diff_mean_fresh": 0.001, "tokens_fresh": 5.0})
    silent = MismatchAlarm(0.0, said.append)
    for _ in range(30):
        alarm.looked(NO_FRESH)
        silent.looked(NO_FRESH)
    assert not said
