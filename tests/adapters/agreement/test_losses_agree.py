"""The losses and what TRL and verl compute for the same batch, where those packages are installed.

Both work on padded rows of answers, and differ from the formulas at the edges: verl adds 1e-8 to lengths, and
sets a third clip bound for negative advantages by default, far away here but where it is compared; TRL takes
no mean over rows without tokens out.
"""

from __future__ import annotations

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch

from shmbridge.consumers import losses

LENGTHS = (7, 3, 12, 1, 9, 5)
ROWS, LONGEST = len(LENGTHS), max(LENGTHS)
LOW, HIGH = 0.2, 0.28
TOLERANCE = 1e-6  # float32; losses and gradients are of the order of 1 and below
CHUNKED_TOLERANCE = 1e-5  # log-probabilities and entropies are of the order of 10


class Answers:
    """One batch, padded for them and packed for us; the same numbers in both."""

    def __init__(self):
        generator = torch.Generator().manual_seed(19)

        def noise(scale):
            return scale * torch.randn(ROWS, LONGEST, generator=generator)

        self.mask = (torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]).float()
        self.mask[2, 4:7] = 0.0  # a tool's answer in the middle of a row
        self.logprobs = -noise(1.0).abs()
        self.old = (self.logprobs + noise(0.3)).clamp(max=-1e-3)
        self.sampled = (self.old + noise(0.2)).clamp(max=-1e-3)
        self.reference = (self.logprobs + noise(0.4)).clamp(max=-1e-3)
        self.advantages = torch.tensor([-0.9, 1.3, -0.6, -1.7, 0.8, 1.1])[:, None].expand(ROWS, LONGEST)
        self.inside = torch.arange(LONGEST) < torch.tensor(LENGTHS)[:, None]
        self.cuts = torch.tensor([0, *LENGTHS]).cumsum(0)

    def packed(self, padded):
        return padded[self.inside]


ANSWERS = Answers()


def ours(loss, **options):
    """Return our loss of the batch and its gradient, padded."""
    batch, logprobs = ANSWERS, ANSWERS.logprobs.clone().requires_grad_()
    value = loss(
        batch.packed(logprobs),
        batch.packed(batch.old),
        batch.packed(batch.advantages),
        batch.packed(batch.mask),
        batch.cuts,
        answers_only=True,
        **options,
    )
    value.backward()
    return value.detach(), logprobs.grad


def agree(agreement, package, what, mine, theirs):
    (value, gradient), (their_value, their_gradient) = mine, theirs
    differences = [(value - their_value).abs().max().item(), (gradient - their_gradient).abs().max().item()]
    agreement(package, what, *differences, TOLERANCE)
    assert their_gradient.abs().max() > 1e-4
    assert max(differences) < TOLERANCE


def weights(level):
    batch = ANSWERS
    flat = losses.truncated_weights(
        batch.packed(batch.old), batch.packed(batch.sampled), batch.packed(batch.mask), batch.cuts, 1.2, level
    )
    return flat, torch.zeros(ROWS, LONGEST).masked_scatter(batch.inside, flat)


def with_gradient(function):
    logprobs = ANSWERS.logprobs.clone().requires_grad_()
    value = function(logprobs)
    value.backward()
    return value.detach(), logprobs.grad


def test_the_batch_meets_every_bound():
    batch = ANSWERS
    trained = batch.mask.bool()
    ratio = losses.importance_ratio(batch.logprobs, batch.old)
    clipped = losses.clipped(ratio, batch.advantages, LOW, HIGH) & trained
    assert (clipped & (ratio > 1)).any()
    assert (clipped & (ratio < 1)).any()
    flat = [batch.packed(each) for each in (batch.logprobs, batch.old, batch.mask, batch.advantages)]
    sequence = losses.sequence_ratio(flat[0], flat[1], flat[2], batch.cuts)
    clipped = losses.clipped(sequence, flat[3], 0.05, 0.08)
    assert clipped.any()
    assert not clipped.all()


# ---- verl


@pytest.fixture(scope="module")
def verl():
    return pytest.importorskip(
        "verl.trainer.ppo.core_algos", reason="verl is not installed", exc_type=ImportError
    )


def verl_loss(verl, name, mode, low, high, is_weights=None, dual=1e9, **batch_info):
    from verl.workers.config import ActorConfig

    config = ActorConfig(
        strategy="fsdp",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=low,
        clip_ratio_high=high,
        clip_ratio_c=dual,
        global_batch_info=batch_info,
    )
    loss = verl.get_policy_loss_fn(name)
    batch = ANSWERS
    return with_gradient(
        lambda at: loss(
            batch.old, at, batch.advantages, batch.mask, mode, config, rollout_is_weights=is_weights
        )[0]
    )


@pytest.mark.parametrize(
    ("what", "loss", "options", "name", "mode", "bounds"),
    [
        ("grpo", losses.grpo_loss, {}, "vanilla", "seq-mean-token-mean", (0.2, 0.2)),
        ("dapo", losses.dapo_loss, {}, "vanilla", "token-mean", (LOW, HIGH)),
        (
            "gspo",
            losses.gspo_loss,
            {"clip_low": 0.05, "clip_high": 0.08},
            "gspo",
            "seq-mean-token-mean",
            (0.05, 0.08),
        ),
        (
            "cispo",
            losses.cispo_loss,
            {"clip_low": LOW, "clip_high": HIGH},
            "cispo",
            "token-mean",
            (LOW, HIGH),
        ),
        ("cispo without a lower bound", losses.cispo_loss, {}, "cispo", "token-mean", (1.0, 4.0)),
    ],
)
def test_verl_losses(agreement, verl, what, loss, options, name, mode, bounds):
    agree(
        agreement,
        "verl",
        f"{what} ({name}, {mode})",
        ours(loss, **options),
        verl_loss(verl, name, mode, *bounds),
    )


def test_verl_dual_clip(agreement, verl):
    """The bound is one that some ratios exceed; no ratio of the batch exceeds the default of 3."""
    batch = ANSWERS
    ratio = losses.importance_ratio(batch.logprobs, batch.old)
    assert (losses.dual_clipped(ratio, batch.advantages, 1.25) & batch.mask.bool()).any()
    theirs = verl_loss(verl, "vanilla", "token-mean", LOW, HIGH, dual=1.25)
    agree(
        agreement,
        "verl",
        "dapo with clip_dual (clip_ratio_c)",
        ours(losses.dapo_loss, clip_dual=1.25),
        theirs,
    )


def test_verl_dr_grpo(agreement, verl):
    theirs = verl_loss(verl, "vanilla", "seq-mean-token-sum-norm", 0.2, 0.2, loss_scale_factor=20)
    agree(
        agreement,
        "verl",
        "dr_grpo (vanilla, seq-mean-token-sum-norm)",
        ours(losses.dr_grpo_loss, max_tokens=20),
        theirs,
    )


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize(("loss", "name"), [(losses.dapo_loss, "vanilla"), (losses.cispo_loss, "cispo")])
def test_verl_truncated_weights(agreement, verl, level, loss, name):
    correction = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
    batch = ANSWERS
    theirs, _ = correction.compute_rollout_correction_weights(
        batch.old - batch.sampled, batch.mask, rollout_is=level, rollout_is_threshold=1.2
    )
    flat, padded = weights(level)
    assert (padded - theirs).abs().max() < TOLERANCE
    assert (padded == 1.2).any()  # the cap is met
    bounds = (LOW, HIGH) if name == "vanilla" else (1.0, 4.0)
    agree(
        agreement,
        "verl",
        f"truncated weights, {level} ({name})",
        ours(loss, weights=flat),
        verl_loss(verl, name, "token-mean", *bounds, is_weights=theirs),
    )


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_verl_kl(agreement, verl, estimator):
    batch = ANSWERS
    mine = with_gradient(
        lambda at: (losses.kl_estimate(at, batch.reference, estimator) * batch.mask).sum() / 30
    )
    theirs = with_gradient(
        lambda at: (verl.kl_penalty(at, batch.reference, estimator) * batch.mask).sum() / 30
    )
    agree(agreement, "verl", f"kl {estimator}", mine, theirs)


@pytest.mark.parametrize(
    ("mode", "theirs", "divisor"),
    [
        ("token_mean", "token-mean", None),
        ("sequence_mean", "seq-mean-token-mean", None),
        ("constant", "token-sum", 1.0),
    ],
)
def test_verl_aggregation(agreement, verl, mode, theirs, divisor):
    batch = ANSWERS
    mine = with_gradient(
        lambda at: (
            losses.aggregate(batch.packed(at), batch.packed(batch.mask), batch.cuts, mode, divisor) / 30
        )
    )
    agree(
        agreement,
        "verl",
        f"aggregate {mode} ({theirs})",
        mine,
        with_gradient(lambda at: verl.agg_loss(at, batch.mask, theirs) / 30),
    )


# ---- TRL


@pytest.fixture(scope="module")
def trl():
    return pytest.importorskip(
        "trl.trainer.grpo_trainer", reason="TRL is not installed", exc_type=ImportError
    )


def trl_loss(trl, loss_type, low, high, *, level="token", beta=0.0, is_weights=None, longest=20):
    """Call GRPOTrainer's own loss on an object that has what the loss reads of a trainer, and no model behind
    it.
    """
    batch = ANSWERS
    trainer = SimpleNamespace(
        aux_loss_enabled=False,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        importance_sampling_level=level,
        beta=beta,
        loss_type=loss_type,
        epsilon_low=low,
        epsilon_high=high,
        max_completion_length=longest,
        use_vllm=is_weights is not None,
        vllm_importance_sampling_correction=True,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
        model=SimpleNamespace(training=True),
        args=SimpleNamespace(use_bias_correction_kl=False, delta=None, steps_per_generation=1),
        accelerator=SimpleNamespace(
            num_processes=1, gather=lambda value: value, reduce=lambda value, reduction: value
        ),
    )
    nothing = torch.zeros(ROWS, 1, dtype=torch.int64)
    given = {
        "prompt_ids": nothing,
        "prompt_mask": nothing,
        "completion_ids": batch.mask.long(),
        "completion_mask": batch.mask,
        "advantages": batch.advantages[:, 0],
        "old_per_token_logps": batch.old,
        "ref_per_token_logps": batch.reference,
        "num_items_in_batch": batch.mask.sum(),
        "importance_sampling_ratio": is_weights,
    }

    def value(at):
        trainer._get_per_token_logps_and_entropies = lambda *args, **kwargs: (at, torch.zeros_like(at), None)
        return trl.GRPOTrainer._compute_loss(trainer, None, given)

    return with_gradient(value)


@pytest.mark.parametrize(
    ("what", "loss", "options", "loss_type", "bounds", "level"),
    [
        ("grpo", losses.grpo_loss, {}, "grpo", (0.2, 0.2), "token"),
        ("dr_grpo", losses.dr_grpo_loss, {"max_tokens": 20}, "dr_grpo", (0.2, 0.2), "token"),
        ("dapo", losses.dapo_loss, {}, "dapo", (LOW, HIGH), "token"),
        ("gspo", losses.gspo_loss, {"clip_low": 0.05, "clip_high": 0.08}, "grpo", (0.05, 0.08), "sequence"),
        ("cispo", losses.cispo_loss, {}, "cispo", (None, 5.0), "token"),
        ("cispo, bound met", losses.cispo_loss, {"clip_high": HIGH}, "cispo", (None, 1.0 + HIGH), "token"),
    ],
)
def test_trl_losses(agreement, trl, what, loss, options, loss_type, bounds, level):
    theirs = trl_loss(trl, loss_type, *bounds, level=level)
    agree(agreement, "TRL", f"{what} (loss_type {loss_type}, {level})", ours(loss, **options), theirs)


@pytest.mark.parametrize("level", ["token", "sequence"])
def test_trl_weights(agreement, trl, level):
    """The effect of a weight on the loss; TRL makes its weights within generation, where a test cannot get
    them.
    """
    flat, padded = weights(level)
    theirs = trl_loss(trl, "dapo", LOW, HIGH, is_weights=padded)
    agree(agreement, "TRL", f"dapo, weighed per {level}", ours(losses.dapo_loss, weights=flat), theirs)


def test_trl_kl(agreement, trl):
    batch, beta = ANSWERS, 0.3
    value, gradient = ours(losses.dapo_loss)
    kl, kl_gradient = with_gradient(
        lambda at: losses.aggregate(
            losses.kl_estimate(batch.packed(at), batch.packed(batch.reference), "k3"),
            batch.packed(batch.mask),
            batch.cuts,
            "token_mean",
        )
    )
    mine = value + beta * kl, gradient + beta * kl_gradient
    agree(agreement, "TRL", "dapo + 0.3 x k3", mine, trl_loss(trl, "dapo", LOW, HIGH, beta=beta))


def test_trl_overlong_penalty(agreement, trl):
    rewards = pytest.importorskip("trl.rewards", exc_type=ImportError)
    lengths = list(range(120))
    theirs = torch.tensor(rewards.get_soft_overlong_punishment(100, 20)([[1] * length for length in lengths]))
    mine = losses.soft_overlong_penalty(torch.tensor(lengths), 100, 20)
    agreement("TRL", "soft overlong penalty", (mine - theirs).abs().max().item(), None, TOLERANCE)
    assert (mine - theirs).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    ("module", "logprob_name"),
    [
        ("trl.trainer.utils", "selective_log_softmax"),
        ("verl.utils.torch_functional", "logprobs_from_logits_v2"),
    ],
)
def test_chunked_logprobs_and_entropy(agreement, module, logprob_name):
    """Ours from hidden states and output layer, compared with theirs from all logits."""
    theirs = pytest.importorskip(module, exc_type=ImportError)
    package = module.partition(".")[0]
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(40, 16, generator=generator, requires_grad=True)
    weight = torch.randn(60, 16, generator=generator, requires_grad=True)
    targets = torch.randint(60, (40,), generator=generator)
    results = []
    for chunked in (True, False):
        if chunked:
            logprobs, entropy = losses.chosen_logprobs_chunked(
                hidden, weight, targets, 0.7, 7, with_entropy=True
            )
        else:
            logits = hidden @ weight.T / 0.7
            logprobs, entropy = (
                getattr(theirs, logprob_name)(logits, targets),
                theirs.entropy_from_logits(logits),
            )
        gradient = torch.autograd.grad((logprobs + entropy).sum() / 40, (hidden, weight))
        results.append((torch.stack([logprobs, entropy]).detach(), torch.cat(gradient)))
    (mine, my_gradient), (value, gradient) = results
    differences = (mine - value).abs().max().item(), (my_gradient - gradient).abs().max().item()
    agreement(
        {"trl": "TRL"}.get(package, package),
        f"chunked log-probabilities ({logprob_name})",
        *differences,
        CHUNKED_TOLERANCE,
    )
    assert max(differences) < CHUNKED_TOLERANCE
