"""One update: packing changes nothing, values belong to their tokens, a policy learns rewarded tokens."""

from __future__ import annotations

import math
from functools import cached_property

import numpy as np
import pytest
import torch

from shmbridge.consumers.advantages.batch_facts import BatchFacts
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model.forward import trained_logprobs as logprobs_of
from shmbridge.consumers.learner.train.grpo_update import Learner, NothingToLearn, Objective, UnknownTokens

CPU = torch.device("cpu")
ROWS = [[3, 4, 5, 6, 7, 8, 9], [10, 11, 12], [1, 2, 3, 4, 5], [20, 21], [8, 8, 8, 9, 9, 1, 2, 3, 4, 5, 6]]


def learner(model, rate=1e-2, **objective):
    return Learner(model, Objective(**objective), lambda step: rate)


def trained_logprobs(model, batch, budget):
    """Return {row's tokens: its trained tokens' log-probabilities} through the micro-batches."""
    rows, _ = prepare(batch, 1.0)
    found = {}
    with torch.no_grad():
        for micro in micro_batches(rows, budget, CPU):
            values, _ = logprobs_of(
                model, micro, precision=torch.float32, chunk_tokens=None, with_entropy=False
            )
            counts = micro.trained.sum(dim=1).tolist()
            for tokens, own in zip(micro.tokens.tolist(), values.split(counts), strict=True):
                found[tuple(tokens)[: len(own) + 1]] = own
    return found


def gradients(model, batch, **objective):
    own = learner(model, **objective)
    metrics = own.accumulate(batch)
    return metrics, {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("budget", [1, 12, 25, 1000])
def test_packed_logprobs_equal_those_of_each_trajectory_alone(tiny_model, packed_batch, budget):
    model = tiny_model(1)
    packed = trained_logprobs(model, packed_batch(ROWS), budget)
    assert set(packed) == {tuple(row) for row in ROWS}
    for row in ROWS:
        with torch.no_grad():
            logits = model(torch.tensor([row])).logits[0]
        # token i is predicted from position i - 1
        alone = (
            torch.log_softmax(logits, dim=-1)[:-1].gather(1, torch.tensor(row[1:]).unsqueeze(1)).squeeze(1)
        )
        torch.testing.assert_close(packed[tuple(row)], alone, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("budget", [1, 7, 30])
def test_the_token_budget_does_not_change_the_gradient(tiny_model, packed_batch, budget):
    batch = packed_batch(ROWS, scores=[1.0, 0.0, 0.5, 1.0, 0.0], groups=[0, 0, 1, 1, 1])
    whole_metrics, whole = gradients(tiny_model(2), batch, entropy=0.1)
    cut_metrics, cut = gradients(tiny_model(2), batch, entropy=0.1, micro_tokens=budget)
    for name, gradient in whole.items():
        torch.testing.assert_close(cut[name], gradient, rtol=1e-4, atol=1e-6)
    for name in ("loss", "policy_loss", "entropy", "ratio_mean", "clip_frac"):
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], abs=1e-5)


def test_gradient_checkpointing_does_not_change_the_gradient(tiny_model, packed_batch):
    batch = packed_batch(ROWS, scores=[1.0, 0.0, 0.5, 1.0, 0.0])
    _, plain = gradients(tiny_model(2), batch)
    model = tiny_model(2)
    model.gradient_checkpointing_enable()
    model.train()
    _, frugal = gradients(model, batch)
    for name, gradient in plain.items():
        torch.testing.assert_close(frugal[name], gradient, rtol=1e-4, atol=1e-6)


def test_a_batch_without_a_trained_token_is_a_step_without_a_change(tiny_model, packed_batch):
    model = tiny_model(2)
    before = [p.detach().clone() for p in model.parameters()]
    own = learner(model)
    metrics = own.accumulate(packed_batch([[1, 2]], masks=[[0, 0]], scores=[1.0])) | own.apply()
    assert metrics["step"] == 1
    assert metrics["loss"] == 0.0
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_the_records_temperature_reaches_ratio_and_entropy(tiny_model, packed_batch):
    row, model = [3, 4, 5, 6], tiny_model(1)
    with torch.no_grad():
        logits = model(torch.tensor([row])).logits[0, :-1] / 0.5
    tempered = torch.log_softmax(logits, dim=-1).gather(1, torch.tensor(row[1:]).unsqueeze(1)).squeeze(1)
    batch = packed_batch([row], scores=[1.0], logprobs=[[1.0, *tempered.tolist()]], temperatures=[0.5])

    metrics = learner(model).accumulate(batch)
    assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    expected = torch.distributions.Categorical(logits=logits).entropy().mean().item()
    assert metrics["entropy"] == pytest.approx(expected, abs=1e-4)


def test_ratio_and_clip_fraction_against_a_sampler_that_thought_differently(tiny_model, packed_batch):
    model = tiny_model(1)
    rows = [[3, 4, 5], [3, 4, 6]]
    current = trained_logprobs(model, packed_batch(rows), 1000)
    # Row 0 is now twice as likely as when sampled, and better than its group: clipped. Row 1 is unchanged.
    logprobs = [
        [1.0, *(current[tuple(rows[0])] - math.log(2.0)).tolist()],
        [1.0, *current[tuple(rows[1])].tolist()],
    ]
    metrics = learner(model).accumulate(packed_batch(rows, scores=[1.0, 0.0], logprobs=logprobs))
    assert metrics["ratio_mean"] == pytest.approx(1.5, abs=1e-4)
    assert metrics["clip_frac"] == pytest.approx(0.5)
    assert metrics["policy_loss"] == pytest.approx((-1.28 + 1.0) / 2, abs=1e-3)


def test_entropy_bonus_alone_flattens_the_policy(tiny_model, packed_batch):
    own = learner(tiny_model(3), entropy=0.1)
    batch = packed_batch(ROWS, scores=[1.0] * 5)
    first = own.accumulate(batch)
    for _ in range(5):
        own.accumulate(batch)
        own.apply()
    last = own.accumulate(batch)
    assert first["groups_flat"] == first["groups"] == 1
    assert first["policy_loss"] == 0.0
    assert last["entropy"] > first["entropy"] + 0.05


def test_a_gradient_that_is_not_finite_changes_nothing_and_says_so(tiny_model, packed_batch):
    model = tiny_model(2)
    before = [p.detach().clone() for p in model.parameters()]
    own = learner(model)
    own.accumulate(packed_batch([[1, 2, 3]], advantages=[[0.0, math.nan, 1.0]]))
    metrics = own.apply()
    assert metrics["update_skipped"] is True
    assert metrics["step"] == own.step == 1
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    own.accumulate(packed_batch([[1, 2, 3]], advantages=[[0.0, 1.0, 1.0]]))
    assert own.apply()["update_skipped"] is False
    assert all(torch.isfinite(p).all() for p in model.parameters())


def test_a_token_outside_the_vocabulary_is_named_also_where_it_lies_on_a_device(tiny_model, packed_batch):
    class OnDevice(torch.Tensor):
        def __array__(self, *args, **named):
            raise TypeError("can't convert cuda:0 device type tensor to numpy")

    batch = packed_batch([[1, 2], [1, 28]], scores=[1.0, 0.0])
    batch.tokens = torch.from_numpy(batch.tokens).as_subclass(OnDevice)
    with pytest.raises(UnknownTokens, match=r"28: environment .* uses another tokenizer .* first in group"):
        learner(tiny_model(1)).accumulate(batch)


@pytest.mark.parametrize(
    ("normalise", "way"), [("batch", "--sft-normalization none, if"), ("none", "scores that differ")]
)
def test_fine_tuning_with_nothing_to_learn_ends_with_words(tiny_model, packed_batch, normalise, way):
    """Equal advantages are 0 once they are normalised; the error needs every batch of a step to be so."""
    model = tiny_model(1)
    own = learner(model, loss="sft", credit=Credit(normalise=normalise))
    equal = 1.0 if normalise == "batch" else 0.0
    flat = packed_batch(ROWS, advantages=[[equal] * len(row) for row in ROWS])
    uneven = packed_batch(ROWS, advantages=[[float(at) for at in range(len(row))] for row in ROWS])
    before = [each.clone() for each in model.parameters()]
    own.accumulate(flat)
    with pytest.raises(NothingToLearn, match=way):
        own.apply()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    assert (own.step, own.consistent) == (0, True)
    own.accumulate(flat)
    own.accumulate(uneven, first=False)
    own.apply()
    own.accumulate(packed_batch([[1, 2]], masks=[[0, 0]]))  # nothing trained is nothing wrong
    own.apply()
    assert own.step == 2


def test_bfloat16_forward_is_close_and_leaves_float32_parameters(tiny_model, packed_batch):
    batch = packed_batch(ROWS, scores=[1.0, 0.0, 0.5, 1.0, 0.0])
    full, _ = gradients(tiny_model(2), batch)
    half, grads = gradients(tiny_model(2), batch, precision=torch.bfloat16)
    assert half["entropy"] == pytest.approx(full["entropy"], rel=0.05)
    assert half["entropy"] != full["entropy"]
    assert {gradient.dtype for gradient in grads.values()} == {torch.float32}


def sample(model, prompt, rows, generator):
    """Sample one token for each row; return tokens (rows,) and their log-probabilities."""
    with torch.no_grad():
        distribution = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], dim=-1)
    tokens = torch.multinomial(distribution.exp(), rows, replacement=True, generator=generator)
    return tokens, distribution[tokens]


def test_a_random_model_learns_the_rewarded_token(tiny_model, packed_batch):
    """GRPO from random weights: prompt p is answered by token p + 10; sampled from the model as it learns."""
    model = tiny_model(11)
    generator = torch.Generator().manual_seed(11)
    own = learner(model, rate=5e-3, entropy=0.1)
    prompts = [[1, first] for first in range(2, 6)]

    def chance():
        with torch.no_grad():
            logits = model(torch.tensor(prompts)).logits[:, -1]
        wanted = torch.tensor([[prompt[1] + 10] for prompt in prompts])
        return torch.log_softmax(logits, dim=-1).gather(1, wanted).exp().mean().item()

    before, rewards = chance(), []
    for _ in range(60):
        rows, logprobs, scores, groups = [], [], [], []
        for group, prompt in enumerate(prompts):
            tokens, chances = sample(model, prompt, 16, generator)
            rows += [[*prompt, token] for token in tokens.tolist()]
            logprobs += [[1.0, 1.0, value] for value in chances.tolist()]
            scores += [float(token == prompt[1] + 10) for token in tokens.tolist()]
            groups += [group] * 16
        masks = [[0, 0, 1]] * len(rows)
        batch = packed_batch(rows, masks=masks, groups=groups, scores=scores, logprobs=logprobs)
        metrics = own.accumulate(batch) | own.apply()
        assert metrics["ratio_mean"] == pytest.approx(1.0, abs=1e-3)  # on policy
        rewards.append(metrics["reward_mean"])

    assert before < 0.2
    assert chance() > 0.8
    assert rewards[0] < 0.4
    assert np.mean(rewards[-10:]) > 0.9


def test_trained_tokens_are_found_once_per_batch(tiny_model, packed_batch, monkeypatch):
    found, calls = BatchFacts.trained_tokens.func, []
    counted = cached_property(lambda facts: calls.append(1) or found(facts))
    counted.__set_name__(BatchFacts, "trained_tokens")
    monkeypatch.setattr(BatchFacts, "trained_tokens", counted)
    learner(tiny_model(1)).accumulate(packed_batch(ROWS, scores=[1.0, 0.0, 0.0, 1.0, 0.5]))
    assert len(calls) == 1
