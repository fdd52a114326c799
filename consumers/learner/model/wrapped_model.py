"""The model that a trainer's wrappers are around, under the names that everybody else knows its parameters
by.

Knows torch's wrappers and peft's; nothing of weights segments and engines.
"""

from __future__ import annotations

import sys

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shmbridge.errors import WeightsMismatch

# of layers that were compiled, or are computed again
_IN_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")


def unwrapped(model: Module) -> Module:
    """Returns the module without torch.compile, DDP, DataParallel and peft's PeftModel around it, its
    adapters in it.

    Raises:
        WeightsMismatch: this process has a part of it: FSDP, tensor parallel, DeepSpeed's ZeRO-3; or a prompt
            is learned beside it.
    """
    while (inner := _inside(model)) is not None:
        model = inner
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or "_fsdp_wrapped_module" in name:
            raise WeightsMismatch(
                f"{type(model).__name__} has {name!r}, of which this process has a part",
                hint="on every rank gather each parameter, as by full_tensor(), and push (name, tensor) "
                "pairs from one rank",
            )
    return model


def _inside(model: Module) -> Module | None:
    """What one wrapper is around; None if that is no wrapper."""
    if isinstance(model, (DataParallel, DistributedDataParallel)):
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
    """Returns a parameter's name without the wrappers of single layers."""
    for each in _IN_NAMES:
        name = name.replace(each, "")
    return name
