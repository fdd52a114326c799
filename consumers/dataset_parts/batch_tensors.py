"""A batch as torch tensors by column name: whole, or trajectory by trajectory.

Used by `dataset.py`.

Letters: B rows (trajectories), N tokens of the whole batch, L tokens of one row.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from shmbridge import Batch, SchemaMismatch
from shmbridge.record.record import Ragged, RaggedLists
from shmbridge.schema import STANDARD

Tensors = dict[str, Tensor]

# Keys of items that are no columns.
_OF_ROWS = frozenset({"policy_version", "redelivered"})
_OF_BATCHES = _OF_ROWS | {"lengths", "cu_seqlens", "position_ids", "group_index"}


def check_names(names: Iterable[str], items: Literal["batches", "rows"]) -> None:
    """Raises SchemaMismatch for a column under whose name each item has something else."""
    for name in names:
        if name in (_OF_ROWS if items == "rows" else _OF_BATCHES):
            raise _taken(name, "")


def _taken(name: str, beside: str) -> SchemaMismatch:
    return SchemaMismatch(
        f"column {name!r} has the name of a key that the data set itself gives its "
        f"items{beside and f', beside the column {beside!r}'}",
        hint=f"rename the column, where it is put and in schema=: 'my_{name}'",
    )


def _checked(columns: dict[str, Any], items: Literal["batches", "rows"]) -> dict[str, Any]:
    """Those of the columns that become tensors. SchemaMismatch if one has the name of another key."""
    check_names(columns, items)
    tensors = {
        name: column
        for name, column in columns.items()
        if isinstance(column, (Ragged, RaggedLists, np.ndarray))
    }
    for name, column in tensors.items():
        beside = [f"{name}_inner_lengths"] if isinstance(column, RaggedLists) else []
        if items == "batches":
            beside += [
                f"has_{name}",
                *([f"{name}_lengths"] if isinstance(column, (Ragged, RaggedLists)) else []),
            ]
        for key in beside:
            if key in tensors:
                raise _taken(key, name)
    return tensors


def batch_tensors(batch: Batch) -> Tensors:
    """Returns a batch's numbers as tensors over the batch's own arrays, without a copy. Never blocks.

    Always there: `tokens`, `loss_mask` (0 in rows without one), `lengths`, `cu_seqlens`, `position_ids`,
    `group_index`, `policy_version` (int64 (B,), when generation began, -1 if unknown) and `redelivered` (bool
    (B,)). Beside them every column of numbers that some row has, under its own name; of lists that are not
    one value per token the values of all rows, and `NAME_lengths` (B,); of lists of lists also
    `NAME_inner_lengths`. Where only some rows have a column there is `has_NAME`, bool (B,). Text, bytes and
    maps are no tensors and are left out. SchemaMismatch for a column that has the name of another key.
    """
    found: dict[str, npt.NDArray[Any]] = {
        "lengths": batch.lengths,
        "cu_seqlens": batch.cu_seqlens,
        "position_ids": batch.position_ids,
        "group_index": batch.group_index,
        "policy_version": np.array([meta.min_policy_version for meta in batch.meta], np.int64),
        "redelivered": np.array([meta.redelivered for meta in batch.meta], np.bool_),
    }
    for name, column in _checked({name: batch[name] for name in _names(batch)}, "batches").items():
        if isinstance(column, RaggedLists):
            found |= {
                name: column.values,
                f"{name}_lengths": column.lengths,
                f"{name}_inner_lengths": column.inner_lengths,
            }
        elif isinstance(column, Ragged):
            found |= {name: column.values, f"{name}_lengths": column.lengths}
        else:
            found[name] = column
        if not (has := batch.has(name)).all():
            found[f"has_{name}"] = has
    return {name: torch.from_numpy(array) for name, array in found.items()}


def row_tensors(batch: Batch) -> Iterator[Tensors]:
    """Yields the rows of a packed batch, each as tensors over the batch's own arrays, without a copy.

    Never blocks.

    A row has `tokens`, `loss_mask` (0 where the row has none) and the other columns with one value per token
    as (L,), lists as they are, scalars without dimensions, and `policy_version` and `redelivered`. A column
    that the row lacks is not in its dictionary. SchemaMismatch as in `batch_tensors`.
    """
    starts = batch.cu_seqlens.tolist()
    columns = _checked({name: batch[name] for name in _names(batch)}, "rows")
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


def _names(batch: Batch) -> list[str]:
    """Returns the columns to hand out; `loss_mask` is always among them."""
    return batch.columns if "loss_mask" in batch else [*batch.columns, "loss_mask"]
