"""The tensors of a weights lease: as torch tensors, and copied into a module."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor

import shmbridge

Tensors = Mapping[str, npt.NDArray[Any]]


def as_tensor(array: npt.NDArray[Any], dtype: str) -> Tensor:
    """Returns a view of a lease's array, valid only while the lease lasts; read-only.

    Args:
        array: of the lease's `tensors`; bfloat16 and float8 come as their bits.
        dtype: of the lease's `dtypes`: torch's word.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")  # it is only read
        tensor = torch.from_numpy(array)
    wanted: torch.dtype = getattr(torch, dtype)
    return tensor if tensor.dtype == wanted else tensor.view(wanted)


def copy_into(
    module: torch.nn.Module,
    tensors: Tensors,
    dtypes: Mapping[str, str],
    *,
    only: Collection[str] | None = None,
) -> None:
    """Copies published tensors into a module's parameters and buffers, converting dtypes. Blocks for the
    copy.

    Args:
        module: changed in place, and only if everything fits.
        tensors: by `state_dict` name; parameters that are tied may come under one of their names.
        dtypes: name -> torch's word for the dtype; bfloat16 and float8 come as arrays of their bits.
        only: names of those that are copied; None: all. All have to fit.

    Raises:
        WeightsMismatch: a parameter is missing, a name is unknown or a shape differs; nothing was copied.
    """
    targets = module.state_dict(keep_vars=True)
    _require_fit(module, targets, tensors, dtypes)
    with torch.no_grad():
        for name, array in tensors.items():
            if only is None or name in only:
                targets[name].copy_(as_tensor(array, dtypes[name]))


def _require_fit(
    module: torch.nn.Module, targets: Mapping[str, Tensor], tensors: Tensors, dtypes: Mapping[str, str]
) -> None:
    arrived = {id(targets[name]) for name in tensors if name in targets}
    missing = [name for name, parameter in module.named_parameters() if id(parameter) not in arrived]
    unknown = [name for name in tensors if name not in targets]
    reshaped = [
        f"{name} {tuple(array.shape)} here {tuple(targets[name].shape)}"
        for name, array in tensors.items()
        if name in targets and tuple(array.shape) != tuple(targets[name].shape)
    ]
    # torch cannot convert dtypes that pack two values into a byte.
    untaken = [
        f"{name} {dtypes[name]}"
        for name in tensors
        if not hasattr(torch, dtypes[name]) or dtypes[name].startswith("float4")
    ]
    faults = {
        "missing": missing,
        "unknown": unknown,
        "other shape": reshaped,
        "type that torch does not convert": untaken,
    }
    if any(faults.values()):
        found = "; ".join(
            f"{kind}: {', '.join(names[:3])}{f' and {len(names) - 3} more' if len(names) > 3 else ''}"
            for kind, names in faults.items()
            if names
        )
        raise shmbridge.WeightsMismatch(
            f"the published weights are of another model ({found})",
            hint="serve the model that the learner trains",
        )
