"""`WeightSync.push` of a model with peft adapters: it pushes the merged weights under the base model's names,
or refuses.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

pytest.importorskip("peft")

from peft import IA3Config, LoraConfig, PromptTuningConfig, get_peft_model
from transformers import AutoModelForCausalLM

import shmbridge
from shmbridge.consumers.engines.engine import Engine
from shmbridge.consumers.weight_sync import WeightSync
from shmbridge.weights import WeightsReader


class Anything(Engine):
    """Takes every version."""

    address = "http://anything"

    def update(self, update):
        pass

    def version(self):
        return None


@pytest.fixture
def base(tiny_model, tmp_path):
    tiny_model(1).save_pretrained(tmp_path / "base")
    return AutoModelForCausalLM.from_pretrained(tmp_path / "base").float()


def lora(**more):
    return LoraConfig(**({"r": 4, "target_modules": "all-linear", "task_type": "CAUSAL_LM"} | more))


def trained(model):
    """A model whose adapters differ from their initial values, which have no effect."""
    torch.manual_seed(5)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.add_(0.05 * torch.randn_like(parameter))
    return model


@pytest.fixture
def pushed(bridge):
    def push(model):
        with WeightSync(bridge, Anything()) as sync, WeightsReader(bridge) as reader:
            sync.push(model)
            with reader.lease() as lease:
                types = set(lease.dtypes.values())
            return {name: torch.from_numpy(array) for name, array in reader.copy()[1].items()}, types

    return push


def expect(found, model):
    wanted = dict(model.named_parameters())
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        torch.testing.assert_close(value, wanted[name].detach(), rtol=0, atol=1e-6, msg=name)


@pytest.mark.parametrize("around", ["peft", "data parallel", "compiled"])
def test_a_peft_model_is_pushed_as_its_base_with_the_adapters_merged(base, pushed, around):
    model = trained(get_peft_model(base, lora()))
    merged = copy.deepcopy(model).merge_and_unload()
    wrap = {"peft": lambda model: model, "data parallel": nn.DataParallel, "compiled": torch.compile}[around]
    expect(pushed(wrap(model))[0], merged)


def test_adapters_that_the_base_has_taken_in_are_not_added_once_more(base, pushed):
    model = trained(get_peft_model(base, lora()))
    merged = copy.deepcopy(model).merge_and_unload()
    model.merge_adapter()
    expect(pushed(model)[0], merged)


def test_adapters_that_are_switched_off_are_left_out(base, pushed):
    plain = copy.deepcopy(base)
    model = trained(get_peft_model(base, lora()))
    with model.disable_adapter():
        expect(pushed(model)[0], plain)


def test_each_layer_has_the_adapters_that_work_in_it(base, pushed):
    model = get_peft_model(base, lora())
    model.add_adapter("second", lora(target_modules=["q_proj"]))
    model.base_model.set_adapter(["default", "second"])
    expect(pushed(trained(model))[0], copy.deepcopy(model).merge_and_unload())


def test_a_merged_tensor_has_the_type_of_its_base(base, pushed):
    model = get_peft_model(base.bfloat16(), lora())
    assert any(parameter.dtype == torch.float32 for parameter in model.parameters())
    assert pushed(model)[1] == {"bfloat16"}


REFUSED = {
    "variant": (lambda: lora(use_dora=True), "q_proj .* has a variant"),
    "bias": (lambda: lora(lora_bias=True, target_modules=["q_proj"]), "q_proj .* an adapter with a bias"),
    "saved": (lambda: lora(modules_to_save=["lm_head"]), "lm_head .* beside its original"),
    "tokens": (
        lambda: lora(trainable_token_indices={"embed_tokens": [1, 2]}),
        "embed_tokens .* beside its original",
    ),
    "other": (
        lambda: IA3Config(target_modules=["q_proj"], feedforward_modules=[]),
        "q_proj .* is no low-rank adapter",
    ),
    "prompt": (lambda: PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2), "learns a prompt"),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_adapters_that_a_sum_does_not_merge_are_refused_by_name_and_taken_as_a_merged_copy(
    base, bridge, pushed, kind
):
    config, told = REFUSED[kind]
    model = trained(get_peft_model(base, config()))
    if kind != "prompt":
        merged = copy.deepcopy(model).merge_and_unload()
        expect(pushed(merged)[0], merged)
    with WeightSync(bridge, Anything()) as sync:
        with pytest.raises(shmbridge.WeightsMismatch, match=told):
            sync.push(model)
        assert sync.version is None


def test_adapters_that_are_merged_and_switched_off_are_refused(base, bridge):
    model = trained(get_peft_model(base, lora()))
    model.merge_adapter()
    with (
        WeightSync(bridge, Anything()) as sync,
        model.disable_adapter(),
        pytest.raises(shmbridge.WeightsMismatch, match="switched off"),
    ):
        sync.push(model)
