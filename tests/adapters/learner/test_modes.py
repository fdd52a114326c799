"""The policy that is trained is the one that samples: no dropout except that of adapters, and none at all in
evaluation.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, OPTConfig, OPTForCausalLM

from shmbridge.consumers.learner.checkpoint import Consumed, Progress
from shmbridge.consumers.learner.config.flags import parse
from shmbridge.consumers.learner.config.options import EarlyStopConfig, EvaluationConfig
from shmbridge.consumers.learner.data.microbatch import micro_batches
from shmbridge.consumers.learner.data.training_rows import prepare
from shmbridge.consumers.learner.model import forward
from shmbridge.consumers.learner.model.load import load_model
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective
from shmbridge.consumers.learner.train.training_step import RunHooks

CPU = torch.device("cpu")
ROWS = [[3, 4, 5, 6, 7], [3, 4, 7], [9, 1, 2, 2], [9, 1, 3]]
SMALL = {"vocab_size": 28, "n_embd": 32, "n_layer": 2, "n_head": 2}


def options(folder, *more):
    config = parse(["--bridge", "unused", "--model", str(folder), "--steps", "2", "--device", "cpu", *more])
    return config.compute, config.adapters


def gradients(model, packed_batch):
    metrics = Learner(model, Objective(), lambda step: 1e-2).accumulate(
        packed_batch(ROWS, scores=[1.0, 0.0, 0.0, 1.0])
    )
    return metrics, {name: each.grad for name, each in model.named_parameters()}


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_gradient_checkpointing_brings_no_dropout(packed_batch, tmp_path, family):
    torch.manual_seed(1)
    if family == "gpt2":
        made = GPT2LMHeadModel(GPT2Config(**SMALL))
    else:
        made = OPTForCausalLM(
            OPTConfig(
                vocab_size=28,
                hidden_size=32,
                word_embed_proj_dim=32,
                ffn_dim=32,
                num_hidden_layers=2,
                num_attention_heads=2,
            )
        )
    made.save_pretrained(tmp_path)
    plain_metrics, plain = gradients(load_model(tmp_path, *options(tmp_path), CPU), packed_batch)
    frugal_model, calls = load_model(tmp_path, *options(tmp_path, "--gradient-checkpointing"), CPU), []
    inner = next(
        module
        for name, module in frugal_model.named_modules()
        if name.endswith(("attn.c_proj", "self_attn.out_proj"))
    )
    inner.register_forward_hook(lambda *_: calls.append(None))
    frugal_metrics, frugal = gradients(frugal_model, packed_batch)
    assert len(calls) == 2  # once more in the backward pass
    assert frugal_metrics["entropy"] == pytest.approx(plain_metrics["entropy"], abs=1e-5)
    for name, each in plain.items():
        torch.testing.assert_close(frugal[name], each, rtol=1e-4, atol=1e-6)


def adapted(tiny_model, *targets):
    pytest.importorskip("peft")
    from shmbridge.consumers.learner.model.lora import Lora, add_adapters

    model = tiny_model(1)
    add_adapters(model, Lora(rank=4, alpha=8.0, dropout=0.5, targets=targets), "unused")
    for name, each in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(each, std=0.3)
    return model


def test_the_evaluation_hook_sees_the_policy_without_dropout_and_training_has_it_again(
    tiny_model, monkeypatch, tmp_path
):
    model = adapted(tiny_model, "q_proj")
    modes = [module.training for module in model.modules()]
    assert any(modes)
    same = []

    def hook(step, model, tokenizer):
        own = [model(torch.tensor([[1, 2, 3]])).logits for _ in range(2)]
        same.append(torch.equal(*own))
        model.train()
        return {"x": 1.0}

    monkeypatch.setattr("shmbridge.consumers.learner.train.training_step.load_hook", lambda name: hook)
    saver = SimpleNamespace(consumed=Consumed(Progress(step=0, policy_version=-1)))
    around = RunHooks(EvaluationConfig(eval_hook="my:hook", eval_every=1), EarlyStopConfig(), saver)
    assert (
        around.metrics(SimpleNamespace(step=1, model=model, read=lambda asked: asked(model)))["eval/x"] == 1.0
    )
    assert same == [True]
    assert [module.training for module in model.modules()] == modes


def test_asking_a_model_whether_chunks_are_right_draws_no_random_numbers(tiny_model):
    model = adapted(tiny_model, "q_proj")
    before = torch.get_rng_state()
    assert forward.leaves_logits_alone(model)
    assert torch.equal(torch.get_rng_state(), before)


def test_dropout_of_an_adapter_on_the_output_layer_is_the_same_in_the_backward_pass(
    tiny_model, packed_batch, monkeypatch
):
    model = adapted(tiny_model, "lm_head")
    rows, _ = prepare(packed_batch(ROWS), 1.0)
    (micro,) = micro_batches(rows, 1000, CPU)

    def results():
        model.zero_grad()
        torch.manual_seed(3)
        own, _ = forward.trained_logprobs(
            model, micro, precision=torch.float32, chunk_tokens=4, with_entropy=False
        )
        own.sum().backward()
        return own.detach(), {
            name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None
        }

    forward.leaves_logits_alone(model)
    frugal = results()
    monkeypatch.setattr(forward, "checkpoint", lambda part, *piece, **how: part(*piece))
    kept = results()
    assert torch.equal(frugal[0], kept[0])
    for name, each in kept[1].items():
        torch.testing.assert_close(frugal[1][name], each)
