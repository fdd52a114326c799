"""Advantage-weighted supervised fine-tuning: cross entropy x advantage over the tokens of the loss mask.

Letters: n trained tokens, V vocabulary; "..." is (B, T), a row per sequence, or (N,), packed sequences.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from shmbridge.consumers.losses.policy import predicted

# Added to the deviation of advantages, which are of the order of 1. Equal ones have deviation exactly 0:
# their distances from the mean are then 0 too.
EPSILON = 1e-8


def normalised(
    advantages: Tensor, *, reduce: Callable[[Tensor], Tensor] | None = None, eps: float = EPSILON
) -> Tensor:
    """Returns (advantages - mean) / (deviation + eps), with the population's deviation.

    Blocks only if `reduce` does.

    Args:
        advantages: (n,) floating, those of trained tokens only, dimensionless.
        reduce: takes a float64 tensor, returns its sum over all ranks; called twice by every rank, also by
            one with n = 0. None: this rank's own mean and deviation.
        eps: > 0, dimensionless.

    Returns:
        (n,), type of `advantages`; exactly 0 if all are equal.

    Source: the seed recipe's `advantage_normalization`; with ranks that is "global", without "batch".
    """
    total = reduce or (lambda own: own)
    # float64 adds up to 2^29 equal float32 without rounding, so that their mean is the number itself.
    exact = advantages.double()
    count, added = total(torch.stack([exact.new_tensor(exact.numel()), exact.sum()])).unbind()
    centred = exact - added / count.clamp(min=1.0)
    deviation = (total(centred.square().sum()) / count.clamp(min=1.0)).sqrt()
    return (centred / (deviation + eps)).to(advantages.dtype)


def compute_advantage_weighted_sft_loss(
    input_ids: Tensor,
    advantages: Tensor,
    loss_mask: Tensor,
    logits: Tensor,
    *,
    cu_seqlens: Tensor | None = None,
    normalization: Literal["none", "batch", "global"] = "batch",
    clipping: tuple[float, float] | None = None,
    reduce: Callable[[Tensor], Tensor] | None = None,
    divisor: float | None = None,
) -> Tensor:
    """Returns the mean over trained tokens of -log pi(token) x advantage. Blocks only if `reduce` does.

    Weight i belongs to token i, and the logits at i - 1 predict token i; the first token of a sequence is
    predicted by nothing and never trained, whatever its mask is. Advantages are normalised over the trained
    tokens, then clipped. With advantages of 1 and no normalisation this is plain fine-tuning.

    Args:
        input_ids: (...) int64, token ids; used only where trained, so padding may be anything.
        advantages: (...) floating, one per token, dimensionless.
        loss_mask: (...) bool or 0/1, the trained tokens.
        logits: (..., V) floating, those of the model for `input_ids`, unshifted, with gradient.
        cu_seqlens: (B + 1,) integer, where each of the packed sequences begins, then N; None for (B, T), or
            for one sequence.
        normalization: `none`; `batch`, over the tokens given here; `global`, over those of all ranks.
        clipping: lowest and highest weight, dimensionless; None for no bounds.
        reduce: for `global`: takes a float64 tensor, returns its sum over all ranks. Every rank must call.
        divisor: trained tokens of the whole batch, if this is a micro-batch; None counts those given here.
            Below 1 counts as 1.

    Returns:
        () float32 (float64 from float64 logits), nats; 0, with a gradient of 0, if nothing is trained.

    Raises:
        ValueError: shapes disagree; an unknown normalisation; `global` without `reduce`; an empty clipping
            range.

    Source: the Atropos recipe for verl, `compute_advantage_weighted_sft_loss`, whose weights lie one token
    early.
    """
    _check(input_ids, advantages, loss_mask, logits, cu_seqlens)
    trained = loss_mask.bool() if cu_seqlens is None else predicted(loss_mask, cu_seqlens)
    trained = trained[..., 1:]
    weights = _weights(advantages[..., 1:][trained], normalization, clipping, reduce)
    exact = torch.promote_types(logits.dtype, torch.float32)
    surprise = cross_entropy(
        logits[..., :-1, :][trained].to(exact), input_ids[..., 1:][trained], reduction="none"
    )
    count = float(weights.numel()) if divisor is None else divisor
    return (surprise * weights).sum() / max(count, 1.0)


def _weights(
    advantages: Tensor,
    normalization: str,
    clipping: tuple[float, float] | None,
    reduce: Callable[[Tensor], Tensor] | None,
) -> Tensor:
    """Returns float32 (n,): the factors of the trained tokens, without gradient."""
    weights = advantages.detach().float()
    if normalization == "batch":
        weights = normalised(weights)
    elif normalization == "global":
        if reduce is None:
            raise ValueError(
                "normalization 'global' needs reduce: a function that adds a tensor up over all ranks"
            )
        weights = normalised(weights, reduce=reduce)
    elif normalization != "none":
        raise ValueError(f"normalization {normalization!r} is none of 'none', 'batch', 'global'")
    if clipping is None:
        return weights
    low, high = clipping
    if not low <= high:
        raise ValueError(f"clipping from {low} to {high} leaves no weight: give (lowest, highest)")
    return weights.clamp(low, high)


def _check(
    input_ids: Tensor, advantages: Tensor, loss_mask: Tensor, logits: Tensor, cu_seqlens: Tensor | None
) -> None:
    shape = tuple(input_ids.shape)
    given = {"advantages": advantages.shape, "loss_mask": loss_mask.shape, "logits": logits.shape[:-1]}
    for name, other in given.items():
        if tuple(other) != shape:
            raise ValueError(
                f"{name} is for tokens of shape {tuple(other)}, input_ids has {shape}: one of each per token"
            )
    if len(shape) not in (1, 2) or (cu_seqlens is not None and len(shape) != 1):
        raise ValueError(f"input_ids has shape {shape}: give (B, T), or (N,) with cu_seqlens")
