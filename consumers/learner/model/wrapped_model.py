"""Finds the model inside a trainer's wrappers, and the public names of its parameters."""

from __future__ import annotations

import sys

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shmbridge.errors import WeightsMismatch

_DEEPSPEED = "DeepSpeedEngine"
# prefixes from compiled, checkpointed or sharded layers
_IN_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


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
