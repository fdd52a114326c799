"""Ratios, truncated weights, KL estimates, aggregation and the overlong penalty: values worked out by
hand.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch.autograd import gradcheck

from shmbridge.consumers import losses

# Two sequences of 4 and 3 tokens, a prompt token first in each; a third one that trains nothing.
CUTS = torch.tensor([0, 4, 7, 9], dtype=torch.int32)
MASK = torch.tensor([0, 1, 1, 1, 0, 1, 0, 0, 0], dtype=torch.uint8)
VALUES = torch.tensor([math.nan, 1.0, 2.0, 6.0, math.inf, 5.0, -math.inf, math.nan, 7.0])


def test_sums_and_counts_see_the_trained_tokens_only():
    assert losses.sequence_sums(VALUES, MASK, CUTS).tolist() == [9.0, 5.0, 0.0]
    assert losses.sequence_counts(MASK, CUTS).tolist() == [3.0, 1.0, 0.0]
    assert losses.spread(torch.tensor([9.0, 5.0, 0.0]), CUTS).tolist() == [9.0] * 4 + [5.0] * 3 + [0.0] * 2


@pytest.mark.parametrize(
    ("mode", "divisor", "expected"),
    [
        ("token_mean", None, 14.0 / 4),
        ("token_mean", 28.0, 14.0 / 28),
        ("sequence_mean", None, (3.0 + 5.0) / 2),  # the third sequence trains nothing and does not count
        ("sequence_mean", 3.0, (3.0 + 5.0) / 3),
        ("constant", 7.0, 2.0),
        ("constant", 0.5, 28.0),
    ],
)
def test_aggregation_table(mode, divisor, expected):
    assert losses.aggregate(VALUES, MASK, CUTS, mode, divisor).item() == pytest.approx(expected)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_aggregation_has_the_gradient_of_its_formula(mode):
    values = torch.randn(
        9, dtype=torch.float64, generator=torch.Generator().manual_seed(1), requires_grad=True
    )
    assert gradcheck(lambda v: losses.aggregate(v, MASK, CUTS, mode, 3.0), values)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
def test_shares_of_micro_batches_add_up(mode):
    divisor = {"token_mean": 4.0, "sequence_mean": 2.0, "constant": 11.0}[mode]
    whole = losses.aggregate(VALUES, MASK, CUTS, mode, divisor)
    first = losses.aggregate(VALUES[:4], MASK[:4], torch.tensor([0, 4]), mode, divisor)
    rest = losses.aggregate(VALUES[4:], MASK[4:], torch.tensor([0, 3, 5]), mode, divisor)
    torch.testing.assert_close(first + rest, whole)


@pytest.mark.parametrize("mode", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("tokens", [0, 3])
def test_nothing_trained_is_a_loss_of_zero(mode, tokens):
    values = torch.full((tokens,), 2.0, requires_grad=True)
    for divisor in (1.0,) if mode == "constant" else (None, 0.0):
        result = losses.aggregate(values, torch.zeros(tokens), torch.tensor([0, tokens]), mode, divisor)
        result.backward()
        assert result.item() == 0.0
        assert values.grad.tolist() == [0.0] * tokens


@pytest.mark.parametrize(
    ("mode", "divisor"), [("constant", None), ("constant", 0.0), ("constant", math.nan), ("mean", 1.0)]
)
def test_aggregation_without_a_meaning_is_refused(mode, divisor):
    with pytest.raises(ValueError, match="mode"):
        losses.aggregate(VALUES, MASK, CUTS, mode, divisor)


OLD = torch.tensor([1.0, -1.0, -2.0, -3.0, 1.0, -1.0, -2.0, 1.0, 1.0])
NEW = torch.tensor([-9.0, -0.7, -2.3, -2.4, -9.0, -1.5, -9.0, -9.0, -9.0])


def test_sequence_ratio_is_the_geometric_mean_over_trained_tokens():
    ratio = losses.sequence_ratio(NEW, OLD, MASK, CUTS)
    first, second = math.exp((0.3 - 0.3 + 0.6) / 3), math.exp(-0.5)
    torch.testing.assert_close(ratio, torch.tensor([first] * 4 + [second] * 3 + [1.0] * 2))


def test_sequence_ratio_pushes_each_token_by_its_own_advantage():
    logprobs = NEW.clone().requires_grad_()
    ratio = losses.sequence_ratio(logprobs, OLD, MASK, CUTS)
    (ratio * torch.arange(9.0)).sum().backward()
    torch.testing.assert_close(logprobs.grad, ratio.detach() * torch.arange(9.0))


@pytest.mark.parametrize("unknown", [1.0, math.nan, -math.inf])
def test_an_unknown_old_logprob_counts_as_unchanged(unknown):
    old = OLD.clone()
    old[3] = unknown
    logprobs = NEW.clone().requires_grad_()
    ratio = losses.sequence_ratio(logprobs, old, MASK, CUTS)
    ratio[:4].sum().backward()
    assert ratio[1].item() == pytest.approx(math.exp((0.3 - 0.3 + 0.0) / 3))
    assert torch.isfinite(logprobs.grad).all()
    weights = losses.truncated_weights(NEW, old, MASK, CUTS, 2.0)
    assert weights[3].item() == 1.0


def test_an_absurd_sequence_leaves_everything_finite():
    logprobs = torch.full((3,), -0.1, requires_grad=True)
    ratio = losses.sequence_ratio(logprobs, torch.full((3,), -1e30), torch.ones(3), torch.tensor([0, 3]))
    ratio.sum().backward()
    assert torch.isfinite(ratio).all()
    assert torch.isfinite(logprobs.grad).all()


def test_truncated_weights_by_token_and_by_sequence():
    by_token = losses.truncated_weights(NEW, OLD, MASK, CUTS, 1.5)
    torch.testing.assert_close(
        by_token, torch.tensor([0, math.exp(0.3), math.exp(-0.3), 1.5, 0, math.exp(-0.5), 0, 0, 0])
    )
    by_sequence = losses.truncated_weights(NEW, OLD, MASK, CUTS, 1.5, "sequence")
    torch.testing.assert_close(by_sequence, torch.tensor([0, 1.5, 1.5, 1.5, 0, math.exp(-0.5), 0, 0, 0]))
    roomy = losses.truncated_weights(NEW, OLD, MASK, CUTS, 9.0, "sequence")
    assert roomy[1].item() == pytest.approx(math.exp(0.6))  # the product, not the mean


def test_truncated_weights_have_no_gradient():
    logprobs = NEW.clone().requires_grad_()
    assert not losses.truncated_weights(logprobs, OLD, MASK, CUTS, 2.0).requires_grad
    assert not losses.truncated_weights(logprobs, OLD, MASK, CUTS, 2.0, "sequence").requires_grad


@pytest.mark.parametrize(("cap", "level"), [(0.0, "token"), (math.nan, "token"), (2.0, "word")])
def test_weights_without_a_meaning_are_refused(cap, level):
    with pytest.raises(ValueError, match=r"cap|level"):
        losses.truncated_weights(NEW, OLD, MASK, CUTS, cap, level)


@pytest.mark.parametrize(
    ("estimator", "expected"),
    [("k1", math.log(2.0)), ("k2", 0.5 * math.log(2.0) ** 2), ("k3", 0.5 - 1.0 + math.log(2.0))],
)
def test_kl_estimates_where_the_policy_is_twice_as_sure(estimator, expected):
    policy, reference = torch.tensor([math.log(0.5)]), torch.tensor([math.log(0.25)])
    assert losses.kl_estimate(policy, reference, estimator).item() == pytest.approx(expected)


def test_kl_estimates_in_expectation():
    """Over all tokens: k1 and k3 give the divergence; k1's gradient is 0, k2's the divergence's, k3's the
    reverse one's.
    """
    generator = torch.Generator().manual_seed(4)
    logits = torch.randn(6, generator=generator, dtype=torch.float64, requires_grad=True)
    reference = torch.randn(6, generator=generator, dtype=torch.float64).log_softmax(0)
    policy = logits.log_softmax(0)
    divergence = (policy.exp() * (policy - reference)).sum()
    reverse = (reference.exp() * (reference - policy)).sum()
    gradients = {}
    for estimator in ("k1", "k2", "k3"):
        expected = (policy.exp().detach() * losses.kl_estimate(policy, reference, estimator)).sum()
        if estimator != "k2":
            torch.testing.assert_close(expected, divergence)
        gradients[estimator] = torch.autograd.grad(expected, logits, retain_graph=True)[0]
    torch.testing.assert_close(gradients["k1"], torch.zeros(6, dtype=torch.float64))
    torch.testing.assert_close(gradients["k2"], torch.autograd.grad(divergence, logits, retain_graph=True)[0])
    torch.testing.assert_close(gradients["k3"], torch.autograd.grad(reverse, logits)[0])


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_of_an_unknown_reference_is_zero_and_of_an_absurd_one_finite(estimator):
    logprobs = torch.tensor([-1.0, -1.0, -1.0, -1e9], requires_grad=True)
    estimate = losses.kl_estimate(logprobs, torch.tensor([1.0, math.nan, -math.inf, -1.0]), estimator)
    estimate.sum().backward()
    assert estimate[:3].tolist() == [0.0, 0.0, 0.0]
    assert logprobs.grad[:3].tolist() == [0.0, 0.0, 0.0]
    assert torch.isfinite(estimate).all()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_kl_gradients_by_finite_differences(estimator):
    logprobs = torch.tensor([-0.3, -1.0, -2.5], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([-0.9, -1.0, -0.2], dtype=torch.float64)
    assert gradcheck(lambda at: losses.kl_estimate(at, reference, estimator), logprobs)


def test_an_unknown_estimator_is_refused():
    with pytest.raises(ValueError, match="k4"):
        losses.kl_estimate(NEW, OLD, "k4")


@pytest.mark.parametrize(
    ("length", "penalty"),
    [(0, 0.0), (80, 0.0), (81, -0.05), (90, -0.5), (100, -1.0), (101, -1.0), (500, -1.0)],
)
def test_overlong_penalty_table(length, penalty):
    assert losses.soft_overlong_penalty(torch.tensor([length]), 100, 20).item() == pytest.approx(penalty)


def test_overlong_penalty_without_a_buffer_is_a_step():
    assert losses.soft_overlong_penalty(torch.tensor([99, 100, 101]), 100, 0).tolist() == [0.0, 0.0, -1.0]


@pytest.mark.parametrize("buffer", [-1, 101])
def test_an_overlong_buffer_outside_the_answer_is_refused(buffer):
    with pytest.raises(ValueError, match="buffer"):
        losses.soft_overlong_penalty(torch.tensor([1]), 100, buffer)


MARKS = [1.0, 0.5, -9999.0, -9998.0, -1e30, math.inf, -math.inf, math.nan]


@pytest.mark.parametrize("mark", MARKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_whatever_says_that_none_was_recorded_has_ratio_one_and_no_divergence(mark, dtype):
    logprobs = torch.tensor([-0.5, -1.0, -30.0, -0.25], dtype=dtype, requires_grad=True)
    others = torch.tensor([-0.5, mark, mark, -0.25], dtype=dtype)
    mask, cuts = torch.ones(4, dtype=torch.bool), torch.tensor([0, 4])
    assert losses.known(others).tolist() == [True, False, False, True]
    assert losses.importance_ratio(logprobs, others).tolist() == [1.0] * 4
    assert losses.sequence_ratio(logprobs, others, mask, cuts).tolist() == [1.0] * 4
    assert losses.truncated_weights(logprobs, others, mask, cuts, 2.0, "sequence").tolist() == [1.0] * 4
    assert not losses.outside(logprobs, others, mask, cuts, 0.5, 2.0).any()
    assert losses.kl_estimate(logprobs, others, "k3").tolist() == [0.0] * 4
    losses.grpo_loss(logprobs, others, torch.ones(4, dtype=dtype), mask, cuts).backward()
    assert torch.isfinite(logprobs.grad).all()


@pytest.mark.parametrize("above", [1e-7, 1e-3])
def test_rounding_above_zero_is_zero(above):
    logprobs, others = torch.tensor([-0.5]), torch.tensor([above])
    zero, mask, cuts = torch.zeros(1), torch.ones(1), torch.tensor([0, 1])
    assert losses.importance_ratio(logprobs, others) == losses.importance_ratio(logprobs, zero)
    assert losses.sequence_ratio(logprobs, others, mask, cuts) == losses.sequence_ratio(
        logprobs, zero, mask, cuts
    )
    assert losses.kl_estimate(logprobs, others, "k1") == losses.kl_estimate(logprobs, zero, "k1")
