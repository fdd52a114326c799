"""The numbers of a batch as named arrays: columns, and what says which row each value belongs to."""

from collections.abc import Collection, Iterable
from typing import Any, Protocol

import numpy as np

from shmbridge._ext.record import Ragged, RecordMeta
from shmbridge.errors import SchemaMismatch
from shmbridge.record.columns import RaggedLists

# Keys that are no columns.
KEYS_OF_ROWS = frozenset({"policy_version", "redelivered"})
KEYS_OF_BATCHES = KEYS_OF_ROWS | {"lengths", "cu_seqlens", "position_ids", "group_index"}


class ReadableBatch(Protocol):
    """A Batch, as an export reads it; see Batch."""

    @property
    def layout(self) -> str:
        """`packed` or `padded`."""

    @property
    def lengths(self) -> np.ndarray[Any, Any]:
        """Tokens of each row."""

    @property
    def cu_seqlens(self) -> np.ndarray[Any, Any]:
        """Start of each row and the end of the last."""

    @property
    def group_index(self) -> np.ndarray[Any, Any]:
        """Number of each row's group."""

    @property
    def position_ids(self) -> np.ndarray[Any, Any]:
        """Position of each token in its row."""

    @property
    def meta(self) -> list[RecordMeta]:
        """Origin of each row."""

    @property
    def columns(self) -> list[str]:
        """Columns that at least one record has."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __contains__(self, name: object) -> bool:
        """Returns whether at least one record has a column."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""

    def has(self, name: str) -> np.ndarray[Any, Any]:
        """Returns which rows have a column."""


def batch_columns(batch: ReadableBatch) -> list[str]:
    """Returns the columns to hand out; `loss_mask` is always among them."""
    return batch.columns if "loss_mask" in batch else [*batch.columns, "loss_mask"]


def check_names(names: Iterable[str], keys: Collection[str]) -> None:
    """Raises SchemaMismatch for a column that has the name of another key."""
    for name in names:
        if name in keys:
            raise name_taken(name)


def name_taken(name: str, beside: str = "") -> SchemaMismatch:
    """Returns the error for a column with the name of another key, or of one that `beside` brings along."""
    return SchemaMismatch(
        f"column {name!r} has the name of a key that every batch or row has as "
        f"tensors{beside and f', beside the column {beside!r}'}",
        hint=f"rename the column, where it is put and in schema=: 'my_{name}'",
    )


def number_columns(batch: ReadableBatch) -> dict[str, Any]:
    """Returns the columns that hold numbers: an array, Ragged or RaggedLists by name."""
    columns = {name: batch[name] for name in batch_columns(batch)}
    return {
        name: column
        for name, column in columns.items()
        if isinstance(column, (Ragged, RaggedLists, np.ndarray))
    }


def batch_numbers(batch: ReadableBatch) -> dict[str, np.ndarray[Any, Any]]:
    """Returns the batch's own arrays by key, without a copy; the keys are those of `Batch.to_torch`.

    Never blocks. SchemaMismatch for a column that has the name of another key.
    """
    found: dict[str, np.ndarray[Any, Any]] = {
        "lengths": batch.lengths,
        "cu_seqlens": batch.cu_seqlens,
        "position_ids": batch.position_ids,
        "group_index": batch.group_index,
        "policy_version": np.array([meta.min_policy_version for meta in batch.meta], np.int64),
        "redelivered": np.array([meta.redelivered for meta in batch.meta], np.bool_),
    }
    columns = number_columns(batch)
    check_names(columns, KEYS_OF_BATCHES)
    for name, column in columns.items():
        arrays = _arrays(name, column)
        for key in (f"has_{name}", *arrays):
            if key != name and key in columns:
                raise name_taken(key, name)
        found |= arrays
        if not (has := batch.has(name)).all():
            found[f"has_{name}"] = has
    return found


def _arrays(name: str, column: Any) -> dict[str, np.ndarray[Any, Any]]:
    if isinstance(column, RaggedLists):
        return {
            name: column.values,
            f"{name}_lengths": column.lengths,
            f"{name}_inner_lengths": column.inner_lengths,
        }
    if isinstance(column, Ragged):
        return {name: column.values, f"{name}_lengths": column.lengths}
    return {name: column}
