"""One packed batch, cut into right-padded micro-batches that fit a token budget.

Rows of similar length share a forward pass, so little is padding. Right padding plus a causal model needs no
mask: no real token can attend to what stands after it, and no row can see another row at all. That holds for
every causal language model, with or without a packing-aware attention kernel.

Knows nothing of models and losses. Called by `grpo_update.py`.

Letters: B rows, N tokens of the whole batch, b rows of one micro-batch, T tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmbridge.consumers.training_rows import TrainingRows


@dataclass(frozen=True)
class MicroBatch:
    """A few rows as rectangles on the device; right of each row's end everything is 0 and untrained."""

    tokens: Tensor  # (b, T) int64
    trained: Tensor  # (b, T) bool
    advantages: Tensor  # (b, T) float32
    sampled_logprobs: Tensor  # (b, T) float32
    temperature: Tensor  # (b,) float32
    trained_lengths: Tensor  # (b,) int64, trained tokens of each row
    reference_logprobs: Tensor | None = None  # (b, T) float32; None if the batch has none


def plan(lengths: npt.ArrayLike, token_budget: int) -> list[npt.NDArray[np.intp]]:
    """Return row numbers, split so that each part, padded to its longest row, fits the budget.

    Args:
        lengths: int (B,), tokens of each row.
        token_budget: tokens of one forward pass, padding included; a row longer than that goes alone.

    Returns:
        one array of row numbers for each micro-batch, longest rows first, so that a budget too large for the
        device fails in the first forward pass and not in the last.
    """
    row_lengths = np.asarray(lengths, dtype=np.int64)
    order = np.argsort(-row_lengths, kind="stable")
    parts = []
    start = 0
    while start < order.size:
        rows = max(1, token_budget // max(1, int(row_lengths[order[start]])))
        parts.append(order[start : start + rows])
        start += rows
    return parts


def micro_batches(rows: TrainingRows, token_budget: int, device: torch.device) -> Iterator[MicroBatch]:
    """Yield the rows that train anything as micro-batches on the device. Blocks for the copies.

    Args:
        rows: the batch.
        token_budget: tokens of one forward pass, padding included.
        device: where the tensors go.

    Yields:
        micro-batches that together hold each row with a trained token exactly once.
    """
    starts = rows.cu_seqlens[:-1].astype(np.int64)
    lengths = np.diff(rows.cu_seqlens).astype(np.int64)
    row_of_token = np.repeat(np.arange(lengths.size), lengths)
    trains = np.unique(row_of_token[rows.trained])
    for part in plan(lengths[trains], token_budget):
        chosen = trains[part]
        column = np.arange(int(lengths[chosen].max()))
        inside = column < lengths[chosen, None]
        source = np.where(inside, starts[chosen, None] + column, 0)
        reference = rows.reference_logprobs
        yield MicroBatch(
            tokens=_rectangle(rows.tokens, source, inside, device).long(),
            trained=_rectangle(rows.trained, source, inside, device),
            advantages=_rectangle(rows.advantages, source, inside, device),
            sampled_logprobs=_rectangle(rows.sampled_logprobs, source, inside, device),
            temperature=torch.from_numpy(rows.temperature[chosen]).to(device),
            trained_lengths=torch.from_numpy(np.bincount(row_of_token[rows.trained], minlength=lengths.size)[chosen]).to(device),
            reference_logprobs=None if reference is None else _rectangle(reference, source, inside, device),
        )


def _rectangle(
    values: npt.NDArray[Any],
    source: npt.NDArray[np.int64],
    inside: npt.NDArray[np.bool_],
    device: torch.device,
) -> Tensor:
    """Gather (N,) values into a (b, T) tensor, 0 outside the rows."""
    return torch.from_numpy(np.where(inside, values[source], values.dtype.type(0))).to(device)
