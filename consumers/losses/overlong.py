"""The reward that an answer loses by being too long: DAPO's soft overlong punishment.

Knows lengths; knows nothing of losses. Add it to the scores before advantages are made of them.
"""

from __future__ import annotations

import torch
from torch import Tensor


def soft_overlong_penalty(lengths: Tensor, max_length: int, buffer: int) -> Tensor:
    """Return what to add to each answer's reward: 0, then falling in a line to -1 over the last `buffer` tokens.

    Args:
        lengths: (B,) integer, tokens of each answer without its prompt.
        max_length: tokens; an answer longer than that, which only another limit can let pass, gets -1 too.
        buffer: tokens before `max_length` in which the penalty grows; 0 is a step at `max_length`.

    Returns:
        (B,) float32, in [-1, 0], in units of the reward of a right answer.

    Raises:
        ValueError: buffer is negative or larger than max_length.

    Source: DAPO, arXiv 2503.14476, equation 13.
    """
    if not 0 <= buffer <= max_length:
        raise ValueError(f"buffer {buffer} is not within 0 and max_length {max_length}")
    over = (lengths - (max_length - buffer)).to(torch.float32)
    return -(over / max(buffer, 1)).clamp(0.0, 1.0)
