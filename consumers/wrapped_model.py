"""The model that a trainer's wrappers are around, under the names that everybody else knows its parameters by.

Knows torch's wrappers; nothing of weights segments and engines.
"""

from __future__ import annotations

from torch.nn import Module
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shmbridge.errors import WeightsMismatch

_IN_NAMES = ("_orig_mod.", "_checkpoint_wrapped_module.")  # of layers that were compiled, or are computed again


def unwrapped(model: Module) -> Module:
    """Return the module without torch.compile, DDP and DataParallel around it.

    Raises:
        WeightsMismatch: this process has a part of it: FSDP, tensor parallel, DeepSpeed's ZeRO-3.
    """
    while True:
        inner = model.module if isinstance(model, (DataParallel, DistributedDataParallel)) else getattr(model, "_orig_mod", None)
        if not isinstance(inner, Module):
            break
        model = inner
    for name, parameter in model.named_parameters():
        if hasattr(parameter, "full_tensor") or hasattr(parameter, "ds_id") or "_fsdp_wrapped_module" in name:
            raise WeightsMismatch(
                f"{type(model).__name__} has {name!r}, of which this process has a part",
                hint="on every rank gather each parameter, as by full_tensor(), and push (name, tensor) pairs from one rank",
            )
    return model


def public_name(name: str) -> str:
    """Return a parameter's name without the wrappers of single layers."""
    for each in _IN_NAMES:
        name = name.replace(each, "")
    return name
