"""DAPO's soft overlong punishment for lengths in tensors."""

from __future__ import annotations

import torch
from torch import Tensor

from shmbridge.consumers.advantages.overlong import overlong_penalty


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns `overlong_penalty` of a tensor of lengths, (B,) float32 on its device; the same errors."""
    return torch.from_numpy(overlong_penalty(lengths.cpu().numpy(), max_length, buffer)).to(lengths.device)
