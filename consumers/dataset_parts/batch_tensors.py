"""A batch as torch tensors by column name: whole, or trajectory by trajectory.

Used by `dataset.py`.

Letters: B rows (trajectories), N tokens of the whole batch, L tokens of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from shmbridge import Batch
from shmbridge.record import batch_numbers
from shmbridge.record.record import Ragged, RaggedLists
from shmbridge.schema import STANDARD

Tensors = dict[str, Tensor]


def check_names(names: Iterable[str], items: Literal["batches", "rows"]) -> None:
    """Raises SchemaMismatch for a column under whose name each item has something else."""
    batch_numbers.check_names(
        names, batch_numbers.KEYS_OF_ROWS if items == "rows" else batch_numbers.KEYS_OF_BATCHES
    )


def batch_tensors(batch: Batch) -> Tensors:
    """Returns the tensors of `Batch.to_torch`, over the batch's own arrays, without a copy. Never blocks.

    SchemaMismatch for a column that has the name of another key.
    """
    return {name: torch.from_numpy(array) for name, array in batch_numbers.batch_numbers(batch).items()}


def row_tensors(batch: Batch) -> Iterator[Tensors]:
    """Yields the rows of a packed batch, each as tensors over the batch's own arrays, without a copy.

    Never blocks.

    A row has `tokens`, `loss_mask` (0 where the row has none) and the other columns with one value per token
    as (L,), lists as they are, scalars without dimensions, and `policy_version` and `redelivered`. A column
    that the row lacks is not in its dictionary. SchemaMismatch as in `batch_tensors`.
    """
    starts = batch.cu_seqlens.tolist()
    columns = _row_columns(batch)
    has = {name: batch.has(name) | (name == "loss_mask") for name in columns}
    for row, meta in enumerate(batch.meta):
        tensors = {
            "policy_version": torch.tensor(meta.min_policy_version),
            "redelivered": torch.tensor(meta.redelivered),
        }
        for name, column in columns.items():
            if not has[name][row]:
                continue
            if isinstance(column, RaggedLists):
                lists = column[row]
                tensors[name] = torch.from_numpy(lists.values)
                tensors[f"{name}_inner_lengths"] = torch.from_numpy(lists.lengths)
            elif isinstance(column, Ragged):
                tensors[name] = torch.from_numpy(column[row])
            else:
                per_token = name in STANDARD and STANDARD[name].per_token
                at = slice(starts[row], starts[row + 1]) if per_token else row
                tensors[name] = torch.from_numpy(np.asarray(column[at]))
        yield tensors


def _row_columns(batch: Batch) -> dict[str, Any]:
    columns = batch_numbers.number_columns(batch)
    check_names(columns, "rows")
    for name, column in columns.items():
        if isinstance(column, RaggedLists) and f"{name}_inner_lengths" in columns:
            raise batch_numbers.name_taken(f"{name}_inner_lengths", name)
    return columns
