"""Low-rank adapters in a model, by peft: put in, recognised, cast, and read out merged, with the adapter left
as it is.

The adapters sit in the Hugging Face model itself, which stays what it was for everybody else; its
`save_pretrained` writes the adapter and the name of its base. peft is imported when adapters are asked for.
Called by the GRPO learner.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from shmbridge.errors import WeightsMismatch

ALL_LINEAR = "all-linear"
ADAPTER_FILE = "adapter_config.json"


class PeftMissing(Exception):
    """The peft package is not installed; the message says how to get it."""


class BadAdapter(Exception):
    """These adapters cannot be in this model; the message says why."""


@dataclass(frozen=True)
class Lora:
    """What kind of adapters."""

    rank: int
    alpha: float
    dropout: float = 0.0
    # ends of module names, or ALL_LINEAR: every linear layer but the head
    targets: tuple[str, ...] = (ALL_LINEAR,)


def add_adapters(model: Any, lora: Lora, base: str) -> None:
    """Puts fresh adapters into a Hugging Face model, in place, and freeze everything else; they change
    nothing until trained.

    Args:
        model: a causal language model without adapters; its dtype is kept, adapters are float32.
        lora: which.
        base: what the adapter's file names as its base model: a Hugging Face id, or a folder, written as an
            absolute path.

    Raises:
        PeftMissing: the package is not there.
        BadAdapter: no module has such a name, or it is one whose weights are tied to another's.
    """
    try:
        from peft import LoraConfig
    except ImportError as error:
        raise PeftMissing(
            f"--lora-rank needs the peft package ({error}): pip install 'shmbridge[lora]'"
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
        raise BadAdapter(f"no adapters on {', '.join(lora.targets)}: {str(error).splitlines()[0]}") from error
    prepare_adapters(model)


def is_adapter(name: str) -> bool:
    """Whether a parameter of this name is of an adapter."""
    return "lora_" in name


def has_adapters(model: torch.nn.Module) -> bool:
    """Whether there are low-rank adapters in a model."""
    return any(is_adapter(name) for name, _ in model.named_parameters())


def differences(model: Any, lora: Lora) -> list[str]:
    """Returns the options that the adapters of a loaded model were made with, of those that are not as wanted
    now.
    """
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
    """Makes the adapters of a model, fresh or loaded, what is trained: float32, with dropout at work; all
    else is frozen.
    """
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_adapter(name))
        if is_adapter(name):
            parameter.data = parameter.data.float()
    for layer in _layers(model):
        layer.lora_dropout.train()


def published_parameters(
    model: torch.nn.Module, *, merged: bool = True, only: Collection[str] | None = None
) -> Iterator[tuple[str, Tensor]]:
    """Yields each parameter of the model as everybody else knows it: under its own name, adapters merged into
    a copy.

    What is yielded computes what the model computes: adapters that are switched off, or merged already, are
    not added. Without adapters these are the parameters themselves. A merged copy has its parameter's type;
    one lives at a time.

    Args:
        model: any module.
        merged: False leaves the adapters out: for names and shapes.
        only: names, as they are yielded; None: all.

    Raises:
        WeightsMismatch: adapters of another kind, which adding a product of two matrices does not merge;
            names the module.
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
            value = parameter.detach()
            if (layer := deltas.get(id(parameter))) is not None:
                for adapter in _to_add(layer):
                    value = value + layer.get_delta_weight(adapter)
            yield public, value.to(parameter.dtype)  # adapters have a type of their own


def adapted_names(model: torch.nn.Module) -> frozenset[str]:
    """Returns the names, as published, of the parameters that adapters change; none without adapters."""
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
    """Lets the model compute as its base does; one thread, and no gradient is to be taken meanwhile."""
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
    """The adapters whose product the layer adds to its base's weight when it computes."""
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
    """Why a layer computes with something else than its base's weight and what `_to_add` names; "" if it does
    not.
    """
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
