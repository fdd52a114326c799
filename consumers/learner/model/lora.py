"""Low-rank adapters with peft, and the public names and values of a model's parameters inside its wrappers.

The adapters are inside the Hugging Face model itself, so other code uses it as before; its `save_pretrained`
writes the adapter and the name of its base. peft is imported only if adapters are used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shmbridge.consumers.learner import Refusal
from shmbridge.errors import WeightsMismatch

ALL_LINEAR = "all-linear"
_DEEPSPEED = "DeepSpeedEngine"
# prefixes from compiled, checkpointed or sharded layers
_IN_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


class PeftMissing(Refusal):
    """The peft package is not installed; the message says how to get it."""


class BadAdapter(Refusal):
    """The model cannot have these adapters; the message says why."""


@dataclass(frozen=True)
class Lora:
    """The configuration of low-rank adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    # suffixes of module names, or ALL_LINEAR: every linear layer but the head
    targets: tuple[str, ...] = (ALL_LINEAR,)


def add_adapters(model: Any, lora: Lora, base: str) -> None:
    """Adds fresh adapters to a model in place, without effect until trained; freezes everything else.

    Args:
        model: a causal language model without adapters; its dtype is kept, adapters are float32.
        lora: the adapters' configuration.
        base: the base model to write into the adapter's file: a Hugging Face id, or a folder (stored as an
            absolute path).

    Raises:
        PeftMissing: the package is not installed.
        BadAdapter: no module has such a name, or the module's weights are tied to another's.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise PeftMissing(
            f"--lora-rank needs the peft package ({error}) -> pip install 'shmbridge[lora]'"
        ) from error
    _check_ties(model, lora.targets)
    config = LoraConfig(
        r=lora.rank,
        lora_alpha=lora.alpha,  # type: ignore[arg-type]  # used as a number
        lora_dropout=lora.dropout,
        target_modules=ALL_LINEAR if lora.targets == (ALL_LINEAR,) else list(lora.targets),
        task_type="CAUSAL_LM",
    )
    model.name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    try:
        model.add_adapter(config)
    except ValueError as error:
        hint = "pip install -U peft" if "PEFT" in str(error) else "name layers of the model: --lora-targets"
        raise BadAdapter(
            f"no adapters on {', '.join(lora.targets)}: {str(error).splitlines()[0]} -> {hint}"
        ) from error
    prepare_adapters(model)


def is_adapter(name: str) -> bool:
    """Returns whether a parameter name belongs to an adapter."""
    return "lora_" in name


def has_adapters(model: torch.nn.Module) -> bool:
    """Returns whether a model has low-rank adapters."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def differences(model: Any, lora: Lora) -> list[str]:
    """Returns the options of a loaded model's adapters that differ from the wanted ones."""
    (made,) = model.peft_config.values()
    wanted = {"rank": lora.rank, "alpha": lora.alpha, "dropout": lora.dropout}
    there = {"rank": made.r, "alpha": made.lora_alpha, "dropout": made.lora_dropout}
    found = [
        f"--lora-{option} {there[option]:g}" for option, value in wanted.items() if there[option] != value
    ]
    layers = {id(layer) for layer in _layers(model)}
    head = model.get_output_embeddings()
    for name, module in model.named_modules():
        adapted = id(module) in layers
        linear = adapted or (
            isinstance(module, torch.nn.Linear) and not (is_adapter(name) or name.endswith(".base_layer"))
        )
        named = any(name == target or name.endswith("." + target) for target in lora.targets)
        if linear and adapted != (named or (lora.targets == (ALL_LINEAR,) and module is not head)):
            return [*found, f"--lora-targets {','.join(sorted(made.target_modules))}"]
    return found


def prepare_adapters(model: torch.nn.Module) -> None:
    """Prepares adapters for training: float32, with dropout; freezes everything else."""
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
    for layer in _layers(model):
        layer.lora_dropout.train()


def published_parameters(
    model: torch.nn.Module,
    *,
    merged: bool = True,
    only: Collection[str] | None = None,
    whole: Callable[[list[Tensor]], AbstractContextManager[Any]] = nullcontext,
) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter of the model under its public name, with adapters merged into a copy.

    The yielded parameters compute what the model computes: adapters that are disabled or already merged are
    not added. Without adapters they are the parameters themselves. A merged copy has its parameter's dtype;
    at most one exists at a time.

    Args:
        model: any module.
        merged: False ignores the adapters, if only names and shapes are needed.
        only: public names to yield; None: all.
        whole: in its context parameters have their values, if they have none outside of it.

    Raises:
        WeightsMismatch: the adapters cannot be merged by adding a product of two matrices; names the module.
    """
    _require_mergeable(model)
    deltas = (
        {id(layer.get_base_layer().weight): layer for layer in _layers(model)}
        if merged and has_adapters(model)
        else {}
    )
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            public = name.replace(".base_layer.", ".")
            if is_adapter(name) or (only is not None and public not in only):
                continue
            layer = deltas.get(id(parameter))
            with whole([parameter] if layer is None else list(layer.parameters())):
                value = parameter.detach()
                if layer is not None:
                    for adapter in _to_add(layer):
                        value = value + layer.get_delta_weight(adapter)
                yield public, value.to(parameter.dtype)  # adapters have another dtype


def adapted_names(model: torch.nn.Module) -> frozenset[str]:
    """Returns the public names of the parameters that adapters change; empty without adapters."""
    if not has_adapters(model):
        return frozenset()
    adapted = {id(layer.get_base_layer().weight) for layer in _layers(model)}
    return frozenset(
        name.replace(".base_layer.", ".")
        for name, parameter in model.named_parameters()
        if id(parameter) in adapted
    )


@contextmanager
def without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model compute as its base in the block. One thread, no gradients."""
    for layer in _layers(model):
        layer.enable_adapters(False)
    try:
        yield
    finally:
        for layer in _layers(model):
            layer.enable_adapters(True)


def _layers(model: torch.nn.Module) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


def _to_add(layer: Any) -> list[str]:
    """Returns the adapters whose product the layer adds to its base weight."""
    if layer.disable_adapters or layer.merged:
        return []
    there = {*layer.lora_A, *layer.lora_embedding_A}
    return [adapter for adapter in layer.active_adapters if adapter in there]


def _require_mergeable(model: torch.nn.Module) -> None:
    if (tuners := sys.modules.get("peft.tuners.tuners_utils")) is None:
        return
    low_rank = {id(layer) for layer in _layers(model)}
    for name, module in model.named_modules():
        if id(module) in low_rank:
            why = _not_a_sum(module)
        elif isinstance(module, tuners.BaseTunerLayer):
            why = "is no low-rank adapter"
        else:
            saved = type(module).__module__.startswith("peft.") and any(
                hasattr(module, of) for of in ("original_module", "token_adapter")
            )
            why = "is trained beside its original" if saved else ""
        if why:
            raise WeightsMismatch(
                f"{name} ({type(module).__name__}) {why}: what it computes with is not known here",
                hint="push a merged copy: copy.deepcopy(peft_model).merge_and_unload()",
            )


def _not_a_sum(layer: Any) -> str:
    """Returns why a layer's weight is not its base weight plus the adapters of `_to_add`; "" if it is."""
    if layer.disable_adapters and layer.merged:
        return "has adapters that are merged, and switched off"
    variants, dora, biased = (getattr(layer, name, {}) for name in ("lora_variant", "use_dora", "lora_bias"))
    for adapter in _to_add(layer):
        if adapter in variants or dora.get(adapter):
            return "has a variant of low-rank adapters, as DoRA"
        if biased.get(adapter):
            return "has an adapter with a bias"
    return ""


def _check_ties(model: Any, targets: Sequence[str]) -> None:
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    if head is None or head.weight is not embedding.weight:
        return
    tied = [name for name, module in model.named_modules() if module is head or module is embedding]
    if wrong := [
        target for target in targets if any(name == target or name.endswith("." + target) for name in tied)
    ]:
        raise BadAdapter(
            f"{wrong[0]} shares its weights with another layer of this model, so that no adapter on it can "
            "be merged"
        )


def unwrapped(model: Module, *, sharded: bool = False) -> Module:
    """Returns the module, adapters included, inside torch.compile, DDP, DataParallel, DeepSpeed's engine and
    peft's PeftModel.

    Args:
        model: any module.
        sharded: whether the caller gathers what this process has a part of.

    Raises:
        WeightsMismatch: this process has only a shard (FSDP, tensor parallel, DeepSpeed's ZeRO-3), or a
            prompt is learned beside the model.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    for name, parameter in () if sharded else model.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or "_fsdp_wrapped_module" in name:
            raise WeightsMismatch(
                f"{type(model).__name__} has {name!r}, of which this process has a part",
                hint="on every rank gather each parameter, as by full_tensor(), and push (name, tensor) "
                "pairs from one rank",
            )
    return model


def _inside(model: Module) -> Module | None:
    """Returns the module inside one wrapper; None if it is not a wrapper."""
    if isinstance(model, (DataParallel, DistributedDataParallel)) or type(model).__name__ == _DEEPSPEED:
        inner: object = model.module
    elif (peft := sys.modules.get("peft")) is not None and isinstance(model, peft.PeftModel):
        if model.active_peft_config.is_prompt_learning:
            raise WeightsMismatch(
                f"{type(model).__name__} learns a prompt ({model.active_peft_config.peft_type.value}), "
                "which no parameter of the model has",
                hint="train low-rank adapters, which can be merged",
            )
        inner = model.get_base_model()
    else:
        inner = getattr(model, "_orig_mod", None)
    return inner if isinstance(inner, Module) else None


def public_name(name: str) -> str:
    """Returns a parameter's name without the prefixes of layer wrappers."""
    for each in _IN_NAMES:
        name = name.replace(each, "")
    return name
