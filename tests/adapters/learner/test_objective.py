"""The objective: one batch is one gradient however it is cut, corrections follow their formulas, meaningless
options are refused.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch

from shmbridge.consumers import losses
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data.training_rows import TrainingRows
from shmbridge.consumers.learner.train.objective import SHARES, BadObjective, Counts, Objective, micro_loss

LENGTHS = (5, 1, 3, 8, 2, 4)
EVERY_LOSS = [
    *({"loss": name} for name in ("grpo", "dapo", "gspo", "cispo", "sft")),
    {"loss": "dr_grpo", "max_tokens": 10},
    {"loss": "gspo", "clip_low": 0.05, "clip_high": 0.05},
    *({"loss": name, "tis_cap": 1.5, "max_tokens": 10} for name in ("grpo", "dr_grpo", "dapo")),
    {"loss": "dapo", "tis_cap": 1.5, "tis_level": "sequence"},
    *({"loss": "grpo", "kl": 0.3, "kl_estimator": each, "entropy": 0.1} for each in ("k1", "k2", "k3")),
    {"loss": "cispo", "kl": 0.3, "entropy": 0.1},
    {
        "loss": "grpo",
        "kl": 0.3,
        "entropy": 0.1,
        "clip_dual": 1.2,
        "mask_ratio": (0.5, 2.0),
        "mask_ratio_sequence": (0.9, 1.1),
    },
]


class Answers:
    """Trained tokens of six answers, float64: what `micro_loss` takes of all of them, or of some."""

    def __init__(self):
        generator = torch.Generator().manual_seed(3)
        count = sum(LENGTHS)

        def noise(scale):
            return scale * torch.randn(count, generator=generator, dtype=torch.float64)

        self.logprobs = -noise(1.0).abs() - 0.1
        self.sampled = (self.logprobs + noise(0.4)).clamp(max=-1e-3)
        self.sampled[::7] = 1.0  # unknown
        self.reference = (self.logprobs + noise(0.4)).clamp(max=-1e-3)
        self.reference[3] = 1.0
        self.advantages = noise(1.0)
        self.entropy = noise(1.0).abs()
        self.cuts = np.concatenate([[0], np.cumsum(LENGTHS)])
        self.counts = Counts(
            tokens=count, answers=len(LENGTHS), rows=len(LENGTHS) + 2, with_reference=count - 1
        )

    def loss(self, goal, rows, *, counts=None):
        """Return the loss of the rows, its gradient on all tokens, and the shares by name."""
        at, entropy = self.logprobs.clone().requires_grad_(), self.entropy.clone().requires_grad_()
        where = torch.cat([torch.arange(self.cuts[row], self.cuts[row + 1]) for row in rows])
        value, shares = micro_loss(
            goal,
            counts or self.counts,
            torch.tensor([LENGTHS[row] for row in rows]),
            at[where],
            self.sampled[where],
            self.advantages[where],
            entropy=entropy[where],
            reference_logprobs=self.reference[where] if goal.kl else None,
        )
        value.backward()
        gradients = [torch.zeros_like(each) if each.grad is None else each.grad for each in (at, entropy)]
        return value.detach(), torch.stack(gradients), shares


ANSWERS = Answers()
WHOLE = list(range(len(LENGTHS)))


@pytest.mark.parametrize("options", EVERY_LOSS, ids=str)
@pytest.mark.parametrize("parts", [[[0, 1, 2], [3, 4, 5]], [[5], [3, 0], [1], [4, 2]]])
def test_a_batch_cut_into_micro_batches_has_the_same_gradient(options, parts):
    goal = Objective(**options)
    value, gradient, shares = ANSWERS.loss(goal, WHOLE)
    cut = [ANSWERS.loss(goal, rows) for rows in parts]
    torch.testing.assert_close(sum(each[0] for each in cut), value, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(each[1] for each in cut), gradient, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(sum(each[2] for each in cut), shares, rtol=1e-5, atol=1e-6)
    assert gradient[0].abs().max() > 1e-3


@pytest.mark.parametrize(
    "options", [each for each in EVERY_LOSS if "entropy" not in each and "kl" not in each], ids=str
)
def test_the_loss_is_the_named_one(options):
    goal = Objective(**options)
    mask, cuts = torch.ones(sum(LENGTHS)), torch.from_numpy(ANSWERS.cuts)
    old, weights = ANSWERS.sampled, None
    if goal.tis_cap:
        old = ANSWERS.logprobs
        weights = losses.truncated_weights(old, ANSWERS.sampled, mask, cuts, goal.tis_cap, goal.tis_level)
    expected = losses.NAMED[goal.loss](
        ANSWERS.logprobs,
        old,
        ANSWERS.advantages,
        mask,
        cuts,
        clip_low=goal.clip_low,
        clip_high=goal.clip_high,
        clip_dual=goal.clip_dual,
        weights=weights,
        answers_only=True,
        divisor=ANSWERS.counts.divisor(goal.loss),
        max_tokens=goal.max_tokens,
    )
    torch.testing.assert_close(ANSWERS.loss(goal, WHOLE)[0], expected)


def named(goal, rows=None):
    return dict(zip(SHARES, ANSWERS.loss(goal, rows or WHOLE)[2].tolist(), strict=True))


def test_shares_say_what_the_bounds_and_the_cap_held():
    ratio = losses.importance_ratio(ANSWERS.logprobs, ANSWERS.sampled)
    high = ((ratio > 1.28) & (ANSWERS.advantages > 0)).double().mean().item()
    low = ((ratio < 0.8) & (ANSWERS.advantages < 0)).double().mean().item()
    said = named(Objective())
    assert (said["clip_frac_low"], said["clip_frac_high"]) == (pytest.approx(low), pytest.approx(high))
    assert said["clip_frac"] == pytest.approx(low + high)
    assert min(low, high) > 0.0
    assert said["ratio_mean"] == pytest.approx(ratio.mean().item())
    assert (said["tis_weight_mean"], said["tis_frac"], said["kl"]) == (1.0, 0.0, 0.0)
    capped = named(Objective(tis_cap=1.5))
    assert capped["tis_frac"] == pytest.approx((ratio >= 1.5).double().mean().item())
    assert capped["tis_weight_mean"] == pytest.approx(ratio.clamp(max=1.5).mean().item())
    assert (capped["clip_frac"], capped["ratio_mean"]) == (0.0, said["ratio_mean"])
    # where a log-probability is unknown the weight is 1 and counts as uncut
    at_one = (ratio >= 1.0) & losses.known(ANSWERS.sampled)
    assert named(Objective(tis_cap=1.0))["tis_frac"] == pytest.approx(at_one.double().mean().item())


def test_a_token_of_an_unlikely_sampler_does_not_own_the_gradient():
    """One of four tokens was 14 nats less likely to the sampler, and its answer was bad."""
    sampled = torch.tensor([-1.0, -15.0, -1.0, -1.0])
    advantages, lengths = torch.tensor([-1.0, -1.0, 1.0, 1.0]), torch.tensor([4])

    def share_of_it(**options):
        at = torch.full((4,), -1.0, requires_grad=True)
        counts = Counts(tokens=4, answers=1, rows=1, with_reference=0)
        value, shares = micro_loss(Objective(**options), counts, lengths, at, sampled, advantages)
        value.backward()
        pushes = at.grad.abs()
        return (pushes[1] / pushes.sum()).item(), dict(zip(SHARES, shares.tolist(), strict=True))

    assert share_of_it(clip_dual=None)[0] > 0.99
    held, said = share_of_it()
    assert (held, said["clip_frac_dual"], said["clip_frac"]) == (0.0, 0.25, 0.25)
    assert said["policy_loss"] == pytest.approx((1.0 + 3.0 - 1.0 - 1.0) / 4)


def test_tokens_and_answers_far_from_their_sampler_are_not_trained():
    goal = Objective(mask_ratio=(0.8, 1.5), mask_ratio_sequence=(0.95, 1.05), kl=0.3, entropy=0.1)
    ratio = losses.importance_ratio(ANSWERS.logprobs, ANSWERS.sampled)
    far = (ratio < 0.8) | (ratio > 1.5)
    means = [ratio[a:b].log().mean().exp() for a, b in zip(ANSWERS.cuts, ANSWERS.cuts[1:], strict=False)]
    answers = torch.repeat_interleave(
        torch.tensor([not 0.95 <= mean <= 1.05 for mean in means]), torch.tensor(LENGTHS)
    )
    assert 0 < far.sum() < far.numel()
    assert 0 < answers.sum() < answers.numel()
    _, gradient, _ = ANSWERS.loss(goal, WHOLE)
    assert (gradient[:, far | answers] == 0.0).all()
    assert (gradient[1, ~(far | answers)] != 0.0).all()
    said = named(goal)
    assert said["mask_frac"] == pytest.approx((far | answers).double().mean().item())
    assert said["mask_frac_sequence"] == pytest.approx(answers.double().mean().item())
    only_tokens = named(Objective(mask_ratio=(0.8, 1.5)))
    assert (only_tokens["mask_frac"], only_tokens["mask_frac_sequence"]) == (
        pytest.approx(far.double().mean().item()),
        0.0,
    )
    assert named(Objective())["mask_frac"] == 0.0


def test_a_weight_is_held_whatever_the_advantage():
    ratio = losses.importance_ratio(ANSWERS.logprobs, ANSWERS.sampled)
    said = named(Objective(loss="cispo", clip_low=0.2, clip_high=0.28))
    assert said["clip_frac_low"] == pytest.approx((ratio < 0.8).double().mean().item())
    assert said["clip_frac_high"] == pytest.approx((ratio > 1.28).double().mean().item())


def test_the_parts_of_the_loss_add_up():
    said = named(Objective(kl=0.3, entropy=0.1))
    assert said["loss"] == pytest.approx(
        said["policy_loss"] + 0.3 * said["kl"] - 0.1 * said["entropy"], abs=1e-6
    )
    assert said["kl"] == pytest.approx(
        losses.kl_estimate(ANSWERS.logprobs, ANSWERS.reference, "k3").mean().item()
    )


def test_fine_tuning_is_that_from_logits():
    """Rows of one prompt token and then the answer, normalised over the batch and clipped."""
    generator = torch.Generator().manual_seed(1)
    rows, longest, vocabulary = 3, 5, 7
    ids = torch.randint(vocabulary, (rows, longest), generator=generator)
    logits = torch.randn(rows, longest, vocabulary, generator=generator, requires_grad=True)
    advantages, mask = torch.randn(rows, longest, generator=generator), torch.ones(rows, longest)
    expected = losses.compute_advantage_weighted_sft_loss(ids, advantages, mask, logits, clipping=(-1.0, 1.0))
    weights = losses.normalised(advantages[:, 1:].flatten()).clamp(-1.0, 1.0)
    logprobs = torch.log_softmax(logits[:, :-1], -1).gather(-1, ids[:, 1:, None]).flatten()
    counts = Counts(tokens=12, answers=3, rows=3, with_reference=0)
    mine, _ = micro_loss(
        Objective(loss="sft"), counts, torch.tensor([4, 4, 4]), logprobs, torch.ones(12), weights
    )
    torch.testing.assert_close(mine, expected)
    ours, theirs = (torch.autograd.grad(each, logits, retain_graph=True)[0] for each in (mine, expected))
    torch.testing.assert_close(ours, theirs)


def test_counts_are_those_of_all_ranks(on_ranks):
    def rows(trained, cuts, reference=None):
        count = len(trained)
        return TrainingRows(
            np.zeros(count, np.int32),
            np.array(cuts, np.int32),
            np.array(trained, bool),
            np.zeros(count, np.float32),
            np.zeros(count, np.float32),
            np.ones(len(cuts) - 1, np.float32),
            reference,
        )

    known = np.array([-1, -1, 1, np.nan, -1], np.float32)
    parts = rows([0, 1, 1, 1, 0], [0, 3, 5], known), rows([0, 0, 0, 1], [0, 2, 4])
    alone = Counts.of(parts[0])
    assert dataclasses.astuple(alone) == (3, 2, 2, 1)
    both = on_ranks(2, lambda number, reduce: Counts.of(parts[number], reduce))
    assert both[0] == both[1] == Counts(tokens=4, answers=3, rows=4, with_reference=1)
    assert [both[0].divisor(name) for name in ("dapo", "cispo", "sft", "grpo", "gspo", "dr_grpo")] == [
        4,
        4,
        4,
        3,
        3,
        4,
    ]


def options(*flags):
    return parse(["--bridge", "b", "--model", "m", "--steps", "1", *flags])


def test_the_command_lines_defaults_are_the_objectives():
    assert Objective.of(options()) == Objective(max_tokens=2048, longest_row=2048)


def test_the_command_line_says_all_of_it():
    flags = """
        --loss dr_grpo --max-answer-tokens 99 --tis-cap 2 --tis-level sequence --max-token-staleness 3
        --kl-coef 0.1 --kl-estimator k2 --entropy 0.2 --temperature 0.9 --micro-tokens 77
        --advantages rloo --no-use-advantages --no-fallback-to-grpo
        --clip-advantages -2 3 --process-rewards to_go --process-over place --process-discount 0.9
        --process-weight 0.3 --token-rewards batch --token-discount 0.8 --token-weight 0.4
        --overlong-length 50 --overlong-buffer 10
    """
    made = Objective.of(options(*flags.split()))
    credit = Credit(
        estimator="rloo",
        use_own=False,
        fallback=False,
        steps="to_go",
        step_over="place",
        step_discount=0.9,
        step_weight=0.3,
        token_rewards="batch",
        token_discount=0.8,
        token_weight=0.4,
        overlong_length=50,
        overlong_buffer=10,
        clip=(-2.0, 3.0),
    )
    assert made == Objective(
        loss="dr_grpo",
        max_tokens=99,
        longest_row=2048,
        tis_cap=2.0,
        tis_level="sequence",
        max_token_staleness=3,
        kl=0.1,
        kl_estimator="k2",
        entropy=0.2,
        temperature=0.9,
        micro_tokens=77,
        credit=credit,
    )


def test_fine_tuning_normalises_over_the_batch_unless_told_otherwise():
    assert Objective.of(options("--loss", "sft")).credit.normalise == "batch"
    assert (
        Objective.of(options("--loss", "sft", "--sft-normalization", "global")).credit.normalise == "global"
    )
    assert Objective.of(options("--loss", "sft", "--sft-normalization", "none")).credit.normalise == "none"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--loss sft --tis-cap 2", "sft has no ratio"),
        ("--loss sft --clip-high 0.2", "sft has no ratio"),
        ("--loss gspo --tis-cap 2", "gspo: its own ratio corrects"),
        ("--loss cispo --tis-cap 2", "cispo: its own ratio corrects"),
        ("--tis-cap 2 --clip-low 0.1", "leaves the ratio at 1"),
        ("--sft-normalization batch", "for --loss sft alone, not for dapo"),
        ("--clip-advantages 1 2", "1.0 .. 2.0 does not hold 0"),
        ("--overlong-buffer 5", "5 is longer than --overlong-length None"),
        ("--overlong-length 4 --overlong-buffer 5", "5 is longer than --overlong-length 4"),
        ("--overlong-length 4", "cut at 4 tokens would lose nothing -> give --overlong-buffer"),
        ("--clip-dual 1", "--clip-dual 1.0 is not above 1"),
        ("--mask-ratio 1.5 2", "--mask-ratio 1.5 2.0 does not hold 1"),
        ("--mask-ratio-sequence 0.5 0.9", "--mask-ratio-sequence 0.5 0.9 does not hold 1"),
        ("--loss sft --mask-ratio 0.5 2", "--loss sft has no ratio"),
    ],
)
def test_options_that_mean_nothing_are_refused(flags, words):
    with pytest.raises(BadObjective) as refused:
        Objective.of(options(*flags.split()))
    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "ppo"}, "none of grpo"),
        ({"loss": "dr_grpo"}, "max-answer-tokens"),
        ({"kl": -1.0}, "negative"),
        ({"tis_cap": 0.0}, "not above 0"),
    ],
)
def test_a_program_is_refused_too(fields, words):
    with pytest.raises(BadObjective, match=words):
        Objective(**fields)
