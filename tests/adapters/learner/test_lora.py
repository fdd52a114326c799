"""Adapters: only they are trained, the published model is merged, and any program loads their checkpoint."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("peft")

from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Progress
from shmbridge.consumers.learner.model.lora import (
    BadAdapter,
    Lora,
    add_adapters,
    differences,
    has_adapters,
    prepare_adapters,
    published_parameters,
)
from shmbridge.consumers.learner.model.optimizer import new_optimizer
from shmbridge.consumers.learner.train.grpo_update import Learner, Objective

ROWS = [[3, 4, 5, 6], [3, 4, 7, 8], [9, 1, 2], [9, 1, 3]]
PROMPT = torch.tensor([[3, 4, 9, 1]])


@pytest.fixture
def base(tiny_model, tmp_path):
    tiny_model(1).save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def batch(packed_batch):
    return packed_batch(ROWS, scores=[1.0, 0.0, 0.0, 1.0], groups=[0, 0, 1, 1])


def adapted(base, **more):
    torch.manual_seed(8)
    model = AutoModelForCausalLM.from_pretrained(base).float()
    add_adapters(model, Lora(rank=4, alpha=8.0, **more), str(base))
    return model


def learner(model):
    own = Learner(model, Objective(entropy=0.1), lambda step: 1e-2)
    own.optimizer = new_optimizer(model.parameters(), 0.0)
    return own


def train(own, batch, steps):
    for _ in range(steps):
        own.accumulate(batch)
        own.apply()
    return own


def test_only_the_adapters_are_trained(base, batch):
    own = learner(adapted(base))
    before = copy.deepcopy(dict(own.model.named_parameters()))
    train(own, batch, 3)
    changed = {name for name, value in own.model.named_parameters() if not torch.equal(value, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    assert all(("lora_" in name) == value.requires_grad for name, value in own.model.named_parameters())


def test_the_published_model_is_merged_and_the_adapter_is_left_alone(base, batch):
    own = train(learner(adapted(base)), batch, 3)
    before = {name: value.clone() for name, value in own.model.named_parameters()}
    published = dict(published_parameters(own.model))
    assert all(torch.equal(value, before[name]) for name, value in own.model.named_parameters())

    plain = AutoModelForCausalLM.from_pretrained(base).float()
    names = {name for name, _ in plain.named_parameters()}
    assert published.keys() == names
    moved = {name for name, value in plain.named_parameters() if not torch.equal(value, published[name])}
    assert {name.split(".")[-2] for name in moved} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }

    from peft import PeftModel

    path = base.parent / "adapter"
    own.model.save_pretrained(path)
    merged = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(base).float(), path
    ).merge_and_unload()
    for name, value in merged.named_parameters():
        assert torch.equal(value, published[name]), name
    plain.load_state_dict(published)
    with torch.no_grad():
        torch.testing.assert_close(plain(PROMPT).logits, own.model(PROMPT).logits, rtol=1e-4, atol=1e-5)


def test_parameters_without_adapters_are_published_themselves(base):
    model = AutoModelForCausalLM.from_pretrained(base)
    own = dict(model.named_parameters())
    assert all(value.data_ptr() == own[name].data_ptr() for name, value in published_parameters(model))
    assert not has_adapters(model)


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_a_checkpoint_is_an_adapter_that_training_goes_on_from_and_that_anybody_loads(
    base, batch, tmp_path, dropout
):
    torch.manual_seed(2)
    through = train(learner(adapted(base, dropout=dropout)), batch, 4)

    first = train(learner(adapted(base, dropout=dropout)), batch, 2)
    state = torch.get_rng_state()
    path = checkpoint.save(tmp_path / "run", Progress(2, 2), first.model, None, first.optimizer)
    assert not (path / "model.safetensors").exists()
    assert json.loads((path / "adapter_config.json").read_text())["base_model_name_or_path"] == str(base)

    model = AutoModelForCausalLM.from_pretrained(path).float()
    with torch.no_grad():
        torch.testing.assert_close(model(PROMPT).logits, first.model.eval()(PROMPT).logits, rtol=0, atol=0)
    prepare_adapters(model)
    second = learner(model)
    checkpoint.load_optimizer(path, second.model, second.optimizer)
    torch.set_rng_state(state)
    train(second, batch, 2)
    expected = dict(through.model.named_parameters())
    for name, value in second.model.named_parameters():
        assert torch.equal(value, expected[name]), name


def test_dropout_is_at_work_and_only_in_the_adapters(base, batch):
    plain, dropping = (train(learner(adapted(base, dropout=dropout)), batch, 2) for dropout in (0.0, 0.5))
    pairs = zip(plain.model.parameters(), dropping.model.parameters(), strict=True)
    assert not all(torch.equal(a, b) for a, b in pairs)


def test_targets_are_found_by_name_and_missing_ones_refused(base, tiny_model):
    model = adapted(base, targets=("q_proj", "v_proj"))
    layers = {name.split(".")[-4] for name, _ in model.named_parameters() if "lora_" in name}
    assert layers == {"q_proj", "v_proj"}
    with pytest.raises(BadAdapter, match="no adapters on moons"):
        adapted(base, targets=("moons",))


def test_a_head_that_is_the_embedding_gets_no_adapter(tiny_model):
    model = tiny_model(1)
    model.lm_head.weight = model.model.embed_tokens.weight
    with pytest.raises(BadAdapter, match="lm_head shares its weights"):
        add_adapters(model, Lora(rank=2, alpha=4.0, targets=("lm_head",)), "somewhere")


@pytest.mark.parametrize(
    ("made", "now", "expected"),
    [
        (Lora(4, 8.0), Lora(4, 8.0), []),
        (Lora(4, 8.0, 0.0, ("q_proj", "v_proj")), Lora(4, 8.0, 0.0, ("v_proj", "q_proj")), []),
        (Lora(4, 8.0), Lora(2, 4.0), ["--lora-rank 4", "--lora-alpha 8"]),
        (Lora(4, 8.0, 0.25), Lora(4, 8.0), ["--lora-dropout 0.25"]),
        (Lora(4, 8.0, 0.0, ("q_proj", "v_proj")), Lora(4, 8.0), ["--lora-targets q_proj,v_proj"]),
        (Lora(4, 8.0, 0.0, ("q_proj",)), Lora(4, 8.0, 0.0, ("q_proj", "up_proj")), ["--lora-targets q_proj"]),
    ],
)
def test_adapters_that_were_made_with_other_options_are_told_from_those_that_were_not(
    tiny_model, tmp_path, made, now, expected
):
    tiny_model(1).save_pretrained(tmp_path / "base")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    add_adapters(model, made, str(tmp_path / "base"))
    assert differences(model, now) == expected
    model.save_pretrained(tmp_path / "adapter")
    assert differences(AutoModelForCausalLM.from_pretrained(tmp_path / "adapter"), now) == expected
