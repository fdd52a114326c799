"""The named losses: one batch worked out by hand for each."""

from __future__ import annotations

import math

import pytest
import torch

from shmbridge.consumers import losses

# Answers of 3 tokens and 1 token, a prompt token in front of each. Ratios 1.25, 1.5, 0.5 and 0.7.
CUTS = torch.tensor([0, 4, 6])
MASK = torch.tensor([0, 1, 1, 1, 0, 1])
RATIOS = torch.tensor([9.0, 1.25, 1.5, 0.5, 9.0, 0.7])
OLD = torch.full((6,), -1.0)
NEW = OLD + RATIOS.log()
UP_DOWN = torch.tensor([9.0, 2.0, 2.0, 2.0, 9.0, -1.0])
ALL = (losses.grpo_loss, losses.dapo_loss, losses.gspo_loss, losses.cispo_loss)


def _dr_grpo(*args, **kwargs):
    return losses.dr_grpo_loss(*args, max_tokens=10, **kwargs)


def test_grpo_by_hand():
    loss = losses.grpo_loss(NEW, OLD, UP_DOWN, MASK, CUTS)
    assert loss.item() == pytest.approx((-2 * (1.2 + 1.2 + 0.5) / 3 + 0.8) / 2)


def test_dr_grpo_by_hand():
    loss = losses.dr_grpo_loss(NEW, OLD, UP_DOWN, MASK, CUTS, max_tokens=10)
    assert loss.item() == pytest.approx((-2 * (1.2 + 1.2 + 0.5) + 0.8) / 20)


def test_dapo_by_hand():
    loss = losses.dapo_loss(NEW, OLD, UP_DOWN, MASK, CUTS)
    assert loss.item() == pytest.approx((-2 * (1.25 + 1.28 + 0.5) + 0.8) / 4)


@pytest.mark.parametrize(
    ("clip", "first", "second"), [(0.2, (1.25 * 1.5 * 0.5) ** (1 / 3), 0.8), (0.01, 0.9787, 0.99)]
)
def test_gspo_by_hand(clip, first, second):
    loss = losses.gspo_loss(NEW, OLD, UP_DOWN, MASK, CUTS, clip_low=clip, clip_high=clip)
    assert loss.item() == pytest.approx((-2 * first + second) / 2, abs=1e-4)


def test_cispo_by_hand():
    loss = losses.cispo_loss(NEW, OLD, UP_DOWN, MASK, CUTS, clip_high=0.28)
    weights = [1.25, 1.28, 0.5, 0.7]
    expected = (
        -sum(w * a * p for w, a, p in zip(weights, [2, 2, 2, -1], NEW[MASK.bool()].tolist(), strict=True)) / 4
    )
    assert loss.item() == pytest.approx(expected)


def test_cispo_clips_the_weight_and_not_the_gradient():
    logprobs = NEW.clone().requires_grad_()
    losses.cispo_loss(logprobs, OLD, UP_DOWN, MASK, CUTS, clip_low=0.2, clip_high=0.28).backward()
    torch.testing.assert_close(
        logprobs.grad, torch.tensor([0.0, -1.25 * 2, -1.28 * 2, -0.8 * 2, 0.0, 0.8]) / 4
    )


@pytest.mark.parametrize("loss", [*ALL, _dr_grpo])
def test_weights_scale_each_token(loss):
    ones = torch.ones(6)
    plain = loss(NEW, OLD, UP_DOWN, MASK, CUTS)
    torch.testing.assert_close(loss(NEW, OLD, UP_DOWN, MASK, CUTS, weights=ones), plain)
    torch.testing.assert_close(loss(NEW, OLD, UP_DOWN, MASK, CUTS, weights=2 * ones), 2 * plain)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("where", [(0,), (1,), (2,), (3,), (0, 1, 2, 3)])
@pytest.mark.parametrize("loss", [*ALL, _dr_grpo])
def test_values_at_untrained_tokens_change_nothing(loss, where, odd):
    def outcome(outside):
        logprobs, old, advantages, weights = (
            torch.where(MASK.bool(), values, outside if i in where else -1.0)
            for i, values in enumerate((NEW, OLD, UP_DOWN, torch.full((6,), 0.5)))
        )
        logprobs.requires_grad_()
        value = loss(logprobs, old, advantages, MASK, CUTS, weights=weights)
        value.backward()
        return value.detach(), logprobs.grad

    torch.testing.assert_close(outcome(odd), outcome(-1.0), atol=0.0, rtol=0.0)


@pytest.mark.parametrize("loss", [*ALL, _dr_grpo, losses.sft_loss])
def test_the_first_token_of_a_packed_row_is_never_trained(loss):
    """The prediction at its place comes from the row before, even if the mask says otherwise."""
    logprobs, careless = NEW.clone().requires_grad_(), torch.ones(6)
    value = loss(logprobs, OLD, UP_DOWN, careless, CUTS)
    value.backward()
    assert logprobs.grad[CUTS[:-1]].tolist() == [0.0, 0.0]
    assert value.item() == loss(NEW, OLD, UP_DOWN, MASK, CUTS).item()  # nor counted
    answers = torch.tensor([0, 3, 4])
    inside = MASK.bool()
    cut_out = loss(NEW[inside], OLD[inside], UP_DOWN[inside], MASK[inside], answers, answers_only=True)
    torch.testing.assert_close(cut_out, value.detach())


def test_the_loss_of_a_bad_token_has_a_bound():
    old = torch.tensor([-1.0, -9.0, -9.0])
    new = torch.full((3,), -1.0, requires_grad=True)
    args = (new, old, torch.tensor([0.0, -2.0, 2.0]), torch.tensor([0, 1, 1]), torch.tensor([0, 3]))
    assert losses.dapo_loss(*args).item() > 1000.0
    held = losses.dapo_loss(*args, clip_dual=3.0)
    held.backward()
    assert held.item() == pytest.approx((3.0 * 2.0 - 1.28 * 2.0) / 2)
    assert new.grad.tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("low", "high", "level"),
    [(1.1, 2.0, "token"), (0.1, 0.9, "token"), (-1.0, 2.0, "token"), (0.5, 2.0, "row")],
)
def test_bounds_of_a_mask_that_mean_nothing_are_refused(low, high, level):
    with pytest.raises(ValueError, match=r"bounds|level"):
        losses.outside(NEW, OLD, MASK, CUTS, low, high, level)


@pytest.mark.parametrize(
    ("loss", "divisor"),
    [
        (losses.grpo_loss, 2),
        (losses.dapo_loss, 4),
        (losses.gspo_loss, 2),
        (losses.cispo_loss, 4),
        (_dr_grpo, 2),
    ],
)
def test_a_batch_in_two_micro_batches_has_the_same_gradient(loss, divisor):
    whole, halves = NEW.clone().requires_grad_(), NEW.clone().requires_grad_()
    loss(whole, OLD, UP_DOWN, MASK, CUTS).backward()
    for begin, end in ((0, 4), (4, 6)):
        cuts = torch.tensor([0, end - begin])
        part = slice(begin, end)
        loss(halves[part], OLD[part], UP_DOWN[part], MASK[part], cuts, divisor=divisor).backward()
    torch.testing.assert_close(halves.grad, whole.grad)


@pytest.mark.parametrize("loss", [*ALL, _dr_grpo])
def test_all_losses_on_policy_push_up_good_answers_and_down_bad_ones(loss):
    logprobs = OLD.clone().requires_grad_()
    loss(logprobs, OLD, UP_DOWN, MASK, CUTS).backward()
    trained = MASK.bool()
    assert (logprobs.grad[trained] * UP_DOWN[trained] < 0).all()
    assert (logprobs.grad[~trained] == 0).all()


@pytest.mark.parametrize("loss", [*ALL, _dr_grpo])
def test_nothing_trained_is_a_loss_of_zero(loss):
    logprobs = torch.full((2,), -1.0, requires_grad=True)
    result = loss(logprobs, torch.ones(2), torch.ones(2), torch.zeros(2), torch.tensor([0, 2]))
    result.backward()
    assert result.item() == 0.0
    assert logprobs.grad.tolist() == [0.0, 0.0]


def test_dr_grpo_without_a_length_is_refused():
    with pytest.raises(ValueError, match="divisor"):
        losses.dr_grpo_loss(NEW, OLD, UP_DOWN, MASK, CUTS, max_tokens=0)
