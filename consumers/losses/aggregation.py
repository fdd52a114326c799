"""The three aggregations of token values into one number that the losses use.

Letters: N tokens of B sequences, one after the other; sequence b owns cu_seqlens[b] .. cu_seqlens[b + 1].
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

Mode = Literal["token_mean", "sequence_mean", "constant"]


def token_mean(values: Tensor, token_count: int) -> Tensor:
    """Returns this micro-batch's share of the mean over all trained tokens of the batch, () float32.

    Every token has the same weight, whatever its trajectory's length, and the shares of all micro-batches add
    up to the mean over the batch, so the token budget of a forward pass does not change the gradient.

    Args:
        values: (n,) float32, one per trained token of this micro-batch.
        token_count: trained tokens of the whole batch; 0 counts as 1.

    Source: DAPO, arXiv 2503.14476 (token-level policy gradient loss).
    """
    return values.sum() / max(token_count, 1)


def sequence_sums(values: Tensor, mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns the sum over each sequence's trained tokens.

    Args:
        values: (N,) floating; values outside the mask are ignored, even NaN.
        mask: (N,) bool or 0/1, the trained tokens.
        cu_seqlens: (B + 1,) integer, where each sequence begins, then N.

    Returns:
        (B,), type of `values`, 0 for a sequence without a trained token.
    """
    counted = torch.where(mask.bool(), values, 0.0)
    owner = _owner(cu_seqlens, values)
    return counted.new_zeros(cu_seqlens.numel() - 1).index_add(0, owner, counted)


def predicted(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns bool (N,): the mask without the first token of each sequence, which nothing predicts."""
    inside = mask.bool().clone()
    starts = cu_seqlens[:-1].to(inside.device, torch.int64)
    inside[starts[starts < inside.numel()]] = False
    return inside


def sequence_counts(mask: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Returns how many trained tokens each sequence has: (N,), (B + 1,) -> (B,) float32."""
    return sequence_sums(torch.ones_like(mask, dtype=torch.float32), mask, cu_seqlens)


def spread(per_sequence: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Gives every token the value of its sequence: (B,), (B + 1,) -> (N,), with gradient."""
    return per_sequence[_owner(cu_seqlens, per_sequence)]


def aggregate(
    values: Tensor, mask: Tensor, cu_seqlens: Tensor, mode: Mode, divisor: float | None = None
) -> Tensor:
    """Returns one number from the values of all trained tokens.

    `token_mean`: their sum / trained tokens; every token weighs the same. `sequence_mean`: the sum of the
    sequences' own means / sequences; a token of a long completion weighs less. `constant`: their sum /
    divisor.

    Args:
        values: (N,) floating, any unit.
        mask: (N,) bool or 0/1, the trained tokens.
        cu_seqlens: (B + 1,) integer, where each sequence begins, then N.
        mode: as above.
        divisor: the number to divide by. For a micro-batch, that of the *whole* batch (its trained tokens,
            its sequences): then the shares of all micro-batches add up. None counts those given here that
            have a trained token; `constant` has no such default. Below 1 counts as 1, except under
            `constant`.

    Returns:
        (), type and unit of `values`; 0, with a gradient of 0, if no token is trained.

    Raises:
        ValueError: an unknown mode; `constant` without a divisor above 0.

    Source: GRPO, arXiv 2402.03300 (`sequence_mean`); DAPO, arXiv 2503.14476 (`token_mean`); Dr. GRPO, arXiv
    2503.20783 (`constant`).
    """
    if mode == "constant":
        if divisor is None or not divisor > 0.0:
            raise ValueError(
                f"mode 'constant' divides by {divisor}: give a divisor above 0, as sequences x longest answer"
            )
        return torch.where(mask.bool(), values, 0.0).sum() / divisor
    if mode == "token_mean":
        total, count = torch.where(mask.bool(), values, 0.0).sum(), mask.bool().sum()
    elif mode == "sequence_mean":
        counts = sequence_counts(mask, cu_seqlens)
        total = (sequence_sums(values, mask, cu_seqlens) / counts.clamp(min=1.0)).sum()
        count = (counts > 0).sum()
    else:
        raise ValueError(f"mode {mode!r} is none of 'token_mean', 'sequence_mean', 'constant'")
    return total / (count.clamp(min=1) if divisor is None else max(divisor, 1.0))


def _owner(cu_seqlens: Tensor, like: Tensor) -> Tensor:
    """Returns int64 (N,): the sequence of each token."""
    lengths = cu_seqlens.to(like.device, torch.int64).diff()
    return torch.repeat_interleave(torch.arange(lengths.numel(), device=like.device), lengths)
