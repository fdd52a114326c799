"""Splits a packed batch into micro-batches that fit a token budget: padded rectangles, or packs of rows.

Padded: rows of similar length share a rectangle, so little is padding. Right padding needs no mask: in a
causal model no real token attends to later positions, and no row sees another.

Packed: rows stand one after the other in (1, N), without padding. The model has to keep them apart, by
position ids that restart or by the rows' boundaries. `attention.py` tests whether it does.

Letters: B rows, N tokens of the whole batch, b rows of one micro-batch, T tokens of its longest row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmbridge.consumers.learner.data.training_rows import TrainingRows

Layout = Literal["padded", "packed"]

_PER_ROW = ("temperature",)


@dataclass(frozen=True)
class MicroBatch:
    """A few rows on the device, (b, T) padded or (1, N) packed; padding is 0 and not trained.

    A field that `TrainingRows` has too is a slice of it: the temperature per row, all others per token.
    Indexed with `trained`, a per-token column is (n,) in either layout, row after row.
    """

    tokens: Tensor  # int64
    trained: Tensor  # bool
    advantages: Tensor  # float32
    sampled_logprobs: Tensor  # float32
    temperature: Tensor  # (b,) float32
    trained_lengths: Tensor  # (b,) int64, trained tokens of each row
    row_lengths: tuple[int, ...]  # (b), tokens of each row
    row_numbers: tuple[int, ...] = ()  # (b), their row numbers in the batch
    position_ids: Tensor | None = None  # (1, N) int64, from 0 in each row; None if padded
    cu_seqlens: Tensor | None = None  # (b + 1,) int32, where each row begins, then N; None if padded
    reference_logprobs: Tensor | None = None  # float32; None if the batch has none
    fresh: Tensor | None = None  # bool; None if unknown

    @property
    def token_temperature(self) -> Tensor:
        """(n,) float32: the temperature of each trained token's row."""
        return self.temperature.repeat_interleave(self.trained_lengths)


def plan(lengths: npt.ArrayLike, token_budget: int) -> list[npt.NDArray[np.intp]]:
    """Returns row numbers, split so that each micro-batch, padded to its longest row, fits the budget.

    Args:
        lengths: int (B,), tokens of each row.
        token_budget: tokens of one forward pass, padding included; a longer row gets its own micro-batch.

    Returns:
        one array of row numbers per micro-batch, longest rows first, so that a budget too large for the
            device fails in the first forward pass, not in the last.
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


def plan_packs(lengths: npt.ArrayLike, token_budget: int) -> list[npt.NDArray[np.intp]]:
    """Returns row numbers, split so that each pack fits the budget (first fit, longest row first).

    Any two packs together hold more than one budget, so at most one is less than half full.

    Args:
        lengths: int (B,), tokens of each row.
        token_budget: tokens of one forward pass; a longer row gets its own pack.

    Returns:
        one array of row numbers per micro-batch, rows of equal length adjacent, the fullest pack first.
    """
    row_lengths = np.asarray(lengths, dtype=np.int64)
    room = np.empty(row_lengths.size, np.int64)
    parts: list[list[int]] = []
    for row in np.argsort(-row_lengths, kind="stable").tolist():
        length = int(row_lengths[row])
        fitting = room[: len(parts)] >= length
        part = int(fitting.argmax()) if fitting.any() else len(parts)
        if part == len(parts):
            parts.append([])
            room[part] = token_budget
        parts[part].append(row)
        room[part] -= length
    return [np.asarray(parts[part], np.intp) for part in np.argsort(room[: len(parts)], kind="stable")]


def micro_batches(
    rows: TrainingRows, token_budget: int, device: torch.device, layout: Layout = "padded"
) -> Iterator[MicroBatch]:
    """Yields the rows with trained tokens as micro-batches on the device. Blocks for the copies.

    Each column is copied to the device once, whole, and sliced there.

    Args:
        rows: the batch; its per-token columns may be arrays, or tensors already on the device.
        token_budget: tokens of one forward pass, padding included.
        device: where the tensors go.
        layout: "padded" or "packed".

    Yields:
        micro-batches that together hold each row with a trained token exactly once.
    """
    starts = rows.cu_seqlens[:-1].astype(np.int64)
    lengths = np.diff(rows.cu_seqlens).astype(np.int64)
    counts = rows.trained_lengths
    trains = np.flatnonzero(counts)
    cut = plan if layout == "padded" else plan_packs
    columns = {name: torch.as_tensor(getattr(rows, name)).to(device) for name in _shared_columns(rows)}
    for part in cut(lengths[trains], token_budget):
        chosen = trains[part]
        own = lengths[chosen]
        if layout == "padded":
            column = np.arange(int(own.max()))
            inside = column < own[:, None]
            places = np.where(inside, starts[chosen, None] + column, 0)
            within: Tensor | None = torch.from_numpy(inside).to(device)
            pack: dict[str, Tensor] = {}
        else:
            ends = np.cumsum(own)
            position = np.arange(int(ends[-1])) - np.repeat(ends - own, own)
            places, within = (np.repeat(starts[chosen], own) + position)[None], None
            pack = {
                "position_ids": torch.from_numpy(position[None]).to(device),
                "cu_seqlens": torch.from_numpy(np.concatenate([[0], ends]).astype(np.int32)).to(device),
            }
        source = torch.from_numpy(places).to(device)
        values = {name: _cut_out(each, source, within) for name, each in columns.items()}
        values["tokens"] = values["tokens"].long()
        yield MicroBatch(
            **values,
            **pack,
            **{name: torch.from_numpy(getattr(rows, name)[chosen]).to(device) for name in _PER_ROW},
            trained_lengths=torch.from_numpy(counts[chosen].astype(np.int64)).to(device),
            row_lengths=tuple(own.tolist()),
            row_numbers=tuple(chosen.tolist()),
        )


def _shared_columns(rows: TrainingRows) -> list[str]:
    """Returns the per-token columns that a micro-batch takes from the rows; an absent one stays None."""
    names = {each.name for each in fields(rows)} & {each.name for each in fields(MicroBatch)}
    return sorted(name for name in names - {*_PER_ROW, "cu_seqlens"} if getattr(rows, name) is not None)


def _cut_out(values: Tensor, source: Tensor, inside: Tensor | None) -> Tensor:
    """Gathers (N,) values into a tensor of the shape of `source`, 0 outside the rows; all on one device."""
    taken = values[source]
    return taken if inside is None else taken.masked_fill(~inside, 0)
