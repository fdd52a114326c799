"""The tensors of a weights lease, as torch tensors."""

from __future__ import annotations

import warnings
from typing import Any

import numpy.typing as npt
import torch
from torch import Tensor


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
