"""Objectives on a real model: the gradient is the same for any token budget and ranks, the reference stays,
stale tokens are left out.
"""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch

from shmbridge.consumers import grpo
from shmbridge.consumers.advantages.credit import Credit
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model.forward import trained_logprobs
from shmbridge.consumers.learner.model.load import Reference
from shmbridge.consumers.learner.model.sharding import Parallel
from shmbridge.consumers.learner.train.grpo_update import Learner, NoReference, Objective
from shmbridge.consumers.learner.train.starting_point import load_learner
from shmbridge.consumers.learner.world import ALONE

ROWS = [
    [3, 4, 5, 6, 7, 8, 9],
    [10, 11, 12],
    [1, 2, 3, 4, 5],
    [20, 21],
    [8, 8, 8, 9, 9, 1, 2, 3, 4, 5, 6],
    [5, 6, 7],
]
SCORES, GROUPS = [1.0, 0.0, 0.5, 1.0, 0.0, 0.25], [0, 0, 0, 1, 1, 1]
LOGPROBS = [[1.0] + [-2.0 - 0.3 * (token % 5) for token in row[1:]] for row in ROWS]
CPU = torch.device("cpu")


def gradients(model, batch, reference=None, parallel=None, version=None, **objective):
    own = Learner(model, Objective(**objective), lambda step: 1e-2, reference=reference, parallel=parallel)
    metrics = own.accumulate(batch, version)
    return metrics, {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def close(one, other):
    for name, gradient in other.items():
        torch.testing.assert_close(one[name], gradient, rtol=1e-4, atol=1e-6)


OBJECTIVES = [
    {"loss": "grpo", "kl": 0.1, "kl_estimator": "k3"},
    {"loss": "dr_grpo", "max_tokens": 12, "credit": Credit(estimator="dr_grpo")},
    {"loss": "dapo", "tis_cap": 1.2, "credit": Credit(estimator="batch")},
    {"loss": "gspo", "entropy": 0.05},
    {"loss": "cispo", "kl": 0.1, "kl_estimator": "k2", "credit": Credit(estimator="rloo")},
    {"loss": "sft", "credit": Credit(normalise="global", clip=(-1.0, 1.0))},
]


@pytest.mark.parametrize("objective", OBJECTIVES, ids=lambda objective: objective["loss"])
def test_the_gradient_is_the_same_for_any_token_budget_and_number_of_ranks(
    tiny_model, packed_batch, on_ranks, objective
):
    reference = Reference(tiny_model(9)) if "kl" in objective else None

    def batch(begin, end):
        groups = [group - GROUPS[begin] for group in GROUPS[begin:end]]
        return packed_batch(
            ROWS[begin:end], scores=SCORES[begin:end], groups=groups, logprobs=LOGPROBS[begin:end]
        )

    whole_metrics, whole = gradients(tiny_model(2), batch(0, 6), reference, **objective)
    cut_metrics, cut = gradients(tiny_model(2), batch(0, 6), reference, micro_tokens=9, **objective)
    close(cut, whole)

    def rank(number, reduce):
        parallel = Parallel(model := models[number])
        parallel.world = Threads(reduce)
        return gradients(model, batch(3 * number, 3 * number + 3), reference, parallel, **objective)

    models = [tiny_model(2) for _ in range(2)]
    (first, one), (second, two) = on_ranks(2, rank)
    close({name: one[name] + two[name] for name in whole}, whole)
    for name in (
        "loss",
        "policy_loss",
        "entropy",
        "kl",
        "ratio_mean",
        "clip_frac",
        "tis_weight_mean",
        "tis_frac",
    ):
        assert first[name] == second[name] == pytest.approx(whole_metrics[name], abs=1e-5)
        assert cut_metrics[name] == pytest.approx(whole_metrics[name], abs=1e-5)
    assert max(gradient.abs().max() for gradient in whole.values()) > 1e-4


class Threads:
    """A world whose ranks are threads."""

    def __init__(self, reduce):
        self.all_reduce_sum = reduce

    def together(self):
        return nullcontext()


def logprobs_of(model, batch):
    (micro,) = micro_batches(prepare(batch, 1.0, with_reference=True)[0], 10_000, CPU)
    values, _ = trained_logprobs(model, micro, precision=torch.float32, chunk_tokens=None, with_entropy=False)
    return micro, values.detach()


def test_the_divergence_from_oneself_is_nothing_and_grows_as_one_learns(tiny_model, packed_batch):
    model = tiny_model(2)
    own = Learner(model, Objective(kl=0.01), lambda step: 1e-2, reference=Reference(model))
    batch = packed_batch(ROWS, scores=SCORES, groups=GROUPS)
    first = own.accumulate(batch) | own.apply()
    assert first["kl"] == pytest.approx(0.0, abs=1e-6)
    assert first["tokens_without_reference"] == first["trained_tokens"]
    for _ in range(4):
        own.accumulate(batch)
        own.apply()
    assert own.accumulate(batch)["kl"] > 1e-3


@pytest.mark.parametrize("estimator", ["k2", "k3"])
def test_the_divergence_alone_draws_the_policy_to_the_reference(tiny_model, packed_batch, estimator):
    own = Learner(
        tiny_model(2),
        Objective(kl=1.0, kl_estimator=estimator),
        lambda step: 5e-3,
        reference=Reference(tiny_model(9)),
    )
    batch = packed_batch(ROWS, scores=[0.5] * 6, groups=GROUPS)
    seen = [(own.accumulate(batch) | own.apply())["kl"] for _ in range(12)]
    assert seen[-1] < 0.5 * seen[0]


def test_reference_logprobs_of_records_come_before_the_models(tiny_model, packed_batch):
    plain = packed_batch(ROWS, scores=SCORES, groups=GROUPS)
    _, asked = logprobs_of(tiny_model(9), plain)
    _, policy = logprobs_of(tiny_model(2), plain)
    lengths = sorted(range(6), key=lambda row: -len(ROWS[row]))
    given = dict(zip(lengths, asked.split([len(ROWS[row]) - 1 for row in lengths]), strict=True))
    written = [[1.0, *given[row].tolist()] for row in range(6)]
    expected = (torch.expm1(asked - policy) - (asked - policy)).mean().item()

    all_written = packed_batch(ROWS, scores=SCORES, groups=GROUPS, ref_logprobs=written)
    metrics, from_records = gradients(tiny_model(2), all_written, kl=0.1)
    assert (metrics["kl"], metrics["tokens_without_reference"]) == (pytest.approx(expected, rel=1e-4), 0)
    written[1] = written[4] = None
    half_written = packed_batch(ROWS, scores=SCORES, groups=GROUPS, ref_logprobs=written)
    metrics, mixed = gradients(tiny_model(2), half_written, Reference(tiny_model(9)), kl=0.1)
    assert (metrics["kl"], metrics["tokens_without_reference"]) == (pytest.approx(expected, rel=1e-4), 2 + 10)
    close(mixed, from_records)
    metrics, other = gradients(tiny_model(2), half_written, Reference(tiny_model(4)), kl=0.1)
    assert any((other[name] - each).abs().max() > 1e-6 for name, each in mixed.items())
    metrics, _ = gradients(tiny_model(2), all_written, Reference(tiny_model(4)), kl=0.1)
    assert metrics["kl"] == pytest.approx(expected, rel=1e-4)  # the model is not asked
    written[1] = [1.0, -9.0, -9.0]
    told = packed_batch(ROWS, scores=SCORES, groups=GROUPS, ref_logprobs=[None] * 1 + written[1:])
    metrics, _ = gradients(tiny_model(2), told, Reference(tiny_model(2)), kl=0.1)
    assert metrics["kl"] > 0.1  # though the model is the policy itself
    metrics, _ = gradients(tiny_model(2), half_written, kl=0.1)
    assert 0.0 < metrics["kl"] != pytest.approx(expected, rel=1e-4)  # nothing is known of two rows


def test_a_divergence_from_nothing_is_refused(tiny_model, packed_batch):
    with pytest.raises(NoReference, match=r"weight 0\.1, and none of 25 trained tokens has ref_logprobs"):
        gradients(tiny_model(2), packed_batch(ROWS, scores=SCORES, groups=GROUPS), kl=0.1)


def test_an_adapter_is_switched_off_for_the_reference(tiny_model, packed_batch):
    peft = pytest.importorskip("peft")
    batch = packed_batch(ROWS, scores=SCORES, groups=GROUPS)
    _, before = logprobs_of(tiny_model(2), batch)
    adapted = peft.get_peft_model(
        tiny_model(2), peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    )
    reference = Reference(adapted)
    micro, now = logprobs_of(adapted, batch)
    torch.testing.assert_close(reference.logprobs(micro, precision=torch.float32, chunk_tokens=None), before)
    assert (now - before).abs().max() > 1e-3
    torch.testing.assert_close(logprobs_of(adapted, batch)[1], now)  # and on again
    own = Learner(adapted, Objective(kl=0.1), lambda step: 1e-2, reference=reference)
    assert own.accumulate(batch)["kl"] > 1e-4
    assert (
        adapted.base_model.model.model.layers[0].self_attn.q_proj.lora_A["default"].weight.grad.abs().max()
        > 0
    )


def test_the_reference_of_a_resumed_run_is_the_model_it_began_with(tiny_model, packed_batch, tmp_path):
    batch = packed_batch(ROWS, scores=SCORES, groups=GROUPS)
    tiny_model(9).save_pretrained(tmp_path / "model")
    later = Learner(tiny_model(2), Objective(), lambda step: 1e-2)
    source = tmp_path / "checkpoints"
    checkpoint.save(source, Progress(step=1, policy_version=1), later.model, None, later.optimizer, keep=1)
    flags = [
        "--bridge",
        "b",
        "--model",
        str(tmp_path / "model"),
        "--steps",
        "9",
        "--device",
        "cpu",
        "--kl-coef",
        "0.1",
    ]
    for begin, policy in ((None, tiny_model(9)), (checkpoint.complete(source)[-1], tiny_model(2))):
        resumed, _, _ = load_learner(begin, parse(flags), ALONE)
        d = logprobs_of(tiny_model(9), batch)[1] - logprobs_of(policy, batch)[1]
        assert resumed.accumulate(batch)["kl"] == pytest.approx(
            (torch.expm1(d) - d).mean().item(), rel=1e-4, abs=1e-6
        )


VERSIONS = {
    "token_versions": [[-1, 3, 3, 5, 5, 5, 9], None, [-1, 7, 7, 7, 7], None, None, [-1, -1, 7]],
    "version": 6,
}


def test_stale_tokens_are_left_out_and_counted(tiny_model, packed_batch):
    batch = packed_batch(ROWS, scores=SCORES, groups=GROUPS, **VERSIONS)
    metrics, _ = gradients(tiny_model(2), batch, version=8, max_token_staleness=2)
    # versions 3 and 5; the others are of 6, 7 and, not trained yet, 9
    assert metrics["tokens_masked_stale"] == 5
    assert metrics["trained_tokens"] == 25 - 5
    assert metrics["token_staleness_max"] == 2
    masks = [[0, 0, 0, 0, 0, 0, 1], *([0, *[1] * (len(row) - 1)] for row in ROWS[1:])]
    _, masked = gradients(tiny_model(2), batch, version=8, max_token_staleness=2)
    _, expected = gradients(tiny_model(2), packed_batch(ROWS, scores=SCORES, groups=GROUPS, masks=masks))
    close(masked, expected)


def test_the_ratio_corrects_for_any_age_unless_told_otherwise(tiny_model, packed_batch):
    batch = packed_batch(ROWS, scores=SCORES, groups=GROUPS, **VERSIONS)
    metrics, _ = gradients(tiny_model(2), batch, version=8)
    assert (metrics["tokens_masked_stale"], metrics["trained_tokens"], metrics["token_staleness_max"]) == (
        0,
        25,
        5,
    )
    known = np.array([5, 5, 3, 3, 3, 2, 2, 1, 1, 1, 1, *[2] * 11, 2, 1])
    assert metrics["token_staleness_mean"] == pytest.approx(known.mean())
    unknown, _ = gradients(tiny_model(2), batch, max_token_staleness=0)
    assert (unknown["tokens_masked_stale"], unknown["token_staleness_max"]) == (0, 0)
    assert unknown["tokens_without_logprob"] == 25


def test_options_that_do_not_go_together_end_the_learner_before_anything_is_loaded(capsys, tmp_path):
    flags = [
        "--bridge",
        "nobody",
        "--model",
        str(tmp_path / "nothing"),
        "--steps",
        "1",
        "--run-dir",
        str(tmp_path),
    ]
    assert grpo.main([*flags, "--loss", "gspo", "--tis-cap", "2"]) == 1
    assert capsys.readouterr().err.startswith("grpo: error: --tis-cap beside --loss gspo")
