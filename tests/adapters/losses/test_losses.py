"""The objective's formulas: signs, clipping, the stand-in for unknown log-probabilities, the token mean."""

from __future__ import annotations

import math

import pytest
import torch

from shmbridge.consumers import losses

LOW, HIGH = 0.2, 0.28


def test_log_distribution_is_the_tempered_softmax():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(4, 9, generator=generator, dtype=torch.float64)
    temperature = torch.tensor([1.0, 0.5, 2.0, 1.3])

    result = losses.log_distribution(logits, temperature)

    assert result.dtype == torch.float32
    for row in range(4):
        expected = torch.softmax(logits[row] / temperature[row].double(), dim=0).log()
        torch.testing.assert_close(result[row], expected.float())


def test_chosen_logprobs_and_entropy_of_a_known_distribution():
    log_probabilities = torch.tensor([[0.5, 0.25, 0.25], [1 / 3, 1 / 3, 1 / 3]]).log()
    chosen = losses.chosen_logprobs(log_probabilities, torch.tensor([1, 2]))
    torch.testing.assert_close(chosen, torch.tensor([math.log(0.25), math.log(1 / 3)]))
    expected = torch.tensor([1.5 * math.log(2.0), math.log(3.0)])
    torch.testing.assert_close(losses.entropy(log_probabilities), expected)


def test_ratio_compares_with_the_sampler():
    logprobs = torch.tensor([-1.0, -2.0])
    ratio = losses.importance_ratio(logprobs, torch.tensor([-1.5, -2.0]))
    torch.testing.assert_close(ratio, torch.tensor([math.exp(0.5), 1.0]))


@pytest.mark.parametrize("unknown", [1.0, math.nan, math.inf, -math.inf])
def test_unknown_sampler_logprob_means_ratio_one_with_the_plain_gradient(unknown):
    logprobs = torch.tensor([-3.0, -0.5], requires_grad=True)
    ratio = losses.importance_ratio(logprobs, torch.tensor([unknown, -0.5]))
    ratio.sum().backward()
    torch.testing.assert_close(ratio.detach(), torch.ones(2))
    torch.testing.assert_close(logprobs.grad, torch.ones(2))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.0, 1.0, -1.0, -1.0),
        (1.25, 1.0, -1.25, -1.0),  # beyond 1.2 but within 1.28: the upper bound is its own
        (1.5, 1.0, -1.28, 0.0),
        (0.5, 1.0, -0.5, -1.0),  # a token that fell too far may still be pulled up
        (1.5, -1.0, 1.5, 1.0),  # and one that rose too far pushed down
        (0.75, -1.0, 0.8, 0.0),
        (0.9, -2.0, 1.8, 2.0),
    ],
)
def test_clipping_table(ratio, advantage, loss, slope):
    ratio_tensor = torch.tensor([ratio], requires_grad=True)
    advantages = torch.tensor([advantage])
    result = losses.clipped_policy_loss(ratio_tensor, advantages, LOW, HIGH)
    result.sum().backward()
    assert result.item() == pytest.approx(loss)
    assert ratio_tensor.grad.item() == pytest.approx(slope)
    assert losses.clipped(ratio_tensor, advantages, LOW, HIGH).item() == (slope == 0.0)


@pytest.mark.parametrize("sampled", [-1e30, 0.0])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_an_absurd_logprob_leaves_everything_finite(sampled, advantage):
    logprobs = torch.tensor([-200.0], requires_grad=True)
    ratio = losses.importance_ratio(logprobs, torch.tensor([sampled]))
    loss = losses.clipped_policy_loss(ratio, torch.tensor([advantage]), LOW, HIGH).sum()
    loss.backward()
    assert torch.isfinite(loss)
    assert torch.isfinite(logprobs.grad).all()


def test_token_mean_shares_add_up_to_the_mean():
    values = torch.arange(10.0)
    shares = [losses.token_mean(part, 10) for part in values.split([1, 6, 3])]
    torch.testing.assert_close(torch.stack(shares).sum(), values.mean())
    assert losses.token_mean(values[:0], 0).item() == 0.0
