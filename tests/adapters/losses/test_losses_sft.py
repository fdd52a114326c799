"""Advantage-weighted fine-tuning: which logits a weight meets, the normalisations, and no division by
zero.
"""

from __future__ import annotations

import math
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from shmbridge.consumers.losses import compute_advantage_weighted_sft_loss as sft_loss
from shmbridge.consumers.losses import normalised

VOCABULARY = 7


def batch(rows=2, columns=5):
    generator = torch.Generator().manual_seed(11)
    return (
        torch.randint(VOCABULARY, (rows, columns), generator=generator),
        torch.randn(rows, columns, generator=generator),
        torch.tensor([[0, 0, 1, 1, 1], [0, 1, 1, 0, 0]])[:rows],
        torch.randn(rows, columns, VOCABULARY, generator=generator),
    )


def surprise(logits, token):
    return -math.log(math.exp(logits[token]) / sum(math.exp(x) for x in logits.tolist()))


def test_weight_i_belongs_to_token_i_which_the_logits_before_it_predict():
    tokens, advantages, mask, logits = batch()
    expected = sum(
        advantages[row, i].item() * surprise(logits[row, i - 1], tokens[row, i])
        for row, i in mask.nonzero().tolist()
    )
    loss = sft_loss(tokens, advantages, mask, logits=logits, normalization="none")
    assert loss.item() == pytest.approx(expected / 5, rel=1e-5)


def test_only_the_logits_before_a_trained_token_get_a_gradient():
    tokens, advantages, mask, logits = batch()
    logits.requires_grad_()
    sft_loss(tokens, advantages, mask, logits, normalization="none").backward()
    touched = logits.grad.abs().sum(-1) > 0
    assert touched.tolist() == [[False, True, True, True, False], [True, True, False, False, False]]


def test_packed_sequences_are_the_rows_one_after_the_other():
    tokens, advantages, mask, logits = batch()
    mask[:, 0] = 1  # never trained: nothing predicts it, or, packed, the sequence before it does
    rows = sft_loss(tokens, advantages, mask, logits)
    packed = sft_loss(
        tokens.flatten(),
        advantages.flatten(),
        mask.flatten(),
        logits.flatten(0, 1),
        cu_seqlens=torch.tensor([0, 5, 10, 10]),
    )
    torch.testing.assert_close(packed, rows)
    assert mask[:, 0].tolist() == [1, 1]  # the caller's mask is left alone
    mask[:, 0] = 0
    torch.testing.assert_close(sft_loss(tokens, advantages, mask, logits), rows)


def test_batch_normalisation_is_over_trained_tokens():
    tokens, advantages, mask, logits = batch()
    own = advantages[mask.bool()].double()
    even = (advantages.double() - own.mean()) / own.std(correction=0)
    wanted = sft_loss(tokens, even, mask, logits, normalization="none")
    torch.testing.assert_close(sft_loss(tokens, advantages, mask, logits, normalization="batch"), wanted)
    outside = torch.where(mask.bool(), advantages, math.nan)
    torch.testing.assert_close(sft_loss(tokens, outside, mask, logits, normalization="batch"), wanted)


class Ranks:
    """Two threads that add a tensor up, as two ranks would."""

    def __init__(self):
        self.barrier = threading.Barrier(2, timeout=30)
        self.sums = []

    def reduce(self, own):
        self.sums.append(own.clone())
        self.barrier.wait()
        total = sum(self.sums)
        if self.barrier.wait() == 0:
            self.sums.clear()
        self.barrier.wait()
        return own.copy_(total)  # in place, as all_reduce


@pytest.mark.parametrize("second_trains", [True, False])
def test_global_normalisation_is_that_of_all_ranks_together(second_trains):
    tokens, advantages, mask, logits = batch()
    if not second_trains:
        mask[1] = 0
    wanted = sft_loss(tokens, advantages, mask, logits, normalization="batch")
    ranks, count = Ranks(), int(mask.sum())

    def share(rank):
        mine = (each[rank : rank + 1] for each in (tokens, advantages, mask, logits))
        return sft_loss(*mine, normalization="global", reduce=ranks.reduce, divisor=count)

    with ThreadPoolExecutor(2) as pool:
        torch.testing.assert_close(sum(pool.map(share, (0, 1))), wanted)


def test_clipping_comes_after_normalisation():
    tokens, advantages, mask, logits = batch()
    advantages = 100.0 * advantages
    own = advantages[mask.bool()]
    even = ((advantages - own.mean()) / own.std(correction=0)).clamp(-0.5, 1.0)
    wanted = sft_loss(tokens, even, mask, logits, normalization="none")
    torch.testing.assert_close(sft_loss(tokens, advantages, mask, logits, clipping=(-0.5, 1.0)), wanted)


@pytest.mark.parametrize("value", [0.0, 0.1, -3.7, 1e30])
@pytest.mark.parametrize("count", [1, 2, 7, 1000])
def test_equal_advantages_are_exactly_zero(value, count):
    assert normalised(torch.full((count,), value)).tolist() == [0.0] * count


@pytest.mark.parametrize("normalization", ["none", "batch", "global"])
@pytest.mark.parametrize("divisor", [None, 0.0])
def test_nothing_trained_is_a_loss_of_zero(normalization, divisor):
    tokens, advantages, mask, logits = batch()
    logits.requires_grad_()
    loss = sft_loss(
        tokens,
        advantages,
        0 * mask,
        logits,
        normalization=normalization,
        reduce=lambda own: own,
        divisor=divisor,
    )
    loss.backward()
    assert loss.item() == 0.0
    assert (logits.grad == 0).all()


def test_padding_may_hold_any_id():
    tokens, advantages, mask, logits = batch()
    wanted = sft_loss(tokens, advantages, mask, logits)
    torch.testing.assert_close(
        sft_loss(torch.where(mask.bool(), tokens, -100), advantages, mask, logits), wanted
    )


def test_shares_of_micro_batches_add_up():
    tokens, advantages, mask, logits = batch()
    whole = sft_loss(tokens, advantages, mask, logits, normalization="none")
    parts = [
        sft_loss(tokens[i], advantages[i], mask[i], logits[i], normalization="none", divisor=5)
        for i in (slice(1), slice(1, 2))
    ]
    torch.testing.assert_close(parts[0] + parts[1], whole)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"normalization": "layer"}, "layer"),
        ({"normalization": "global"}, "reduce"),
        ({"clipping": (1.0, -1.0)}, "clipping"),
        ({"advantages": torch.zeros(2)}, "advantages"),
        ({"cu_seqlens": torch.tensor([0, 5])}, "cu_seqlens"),
    ],
)
def test_arguments_that_have_no_meaning_are_refused(change, complaint):
    names = ("input_ids", "advantages", "loss_mask", "logits")
    with pytest.raises(ValueError, match=complaint):
        sft_loss(**{**dict(zip(names, batch(), strict=True)), **change})
