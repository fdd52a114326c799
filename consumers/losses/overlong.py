"""DAPO's soft overlong punishment for lengths in tensors; the formula is in
`consumers/advantages/overlong.py`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from shmbridge.consumers.advantages.overlong import overlong_penalty


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Returns the value to add to each completion's reward, (B,) float32 on the device of `lengths`;
    arguments and errors as `overlong_penalty`.
    """
    return torch.from_numpy(overlong_penalty(lengths.cpu().numpy(), max_length, buffer)).to(lengths.device)
