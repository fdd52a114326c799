"""Columns of a record, and the protocol by which an export reads a record."""

from typing import Any, Protocol

import numpy as np

from shmbridge._ext.record import Ragged, RecordMeta
from shmbridge.schema import Columns, Tag


class RaggedLists:
    """A list<list> column of one record: flat values in place, lists per row, values per list."""

    __slots__ = ("inner_lengths", "lengths", "valid", "values")

    def __init__(
        self,
        values: np.ndarray[Any, Any],
        lengths: np.ndarray[Any, Any],
        inner: np.ndarray[Any, Any],
        valid: np.ndarray[Any, Any] | None,
    ) -> None:
        self.values, self.lengths, self.inner_lengths, self.valid = values, lengths, inner, valid

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> Ragged:
        """Row `row` as a Ragged over the same values."""
        row = range(len(self))[row]
        first = int(self.lengths[:row].sum())
        inner = self.inner_lengths[first : first + int(self.lengths[row])]
        start = int(self.inner_lengths[:first].sum())
        return Ragged(self.values[start : start + int(inner.sum())], inner, None)

    def __repr__(self) -> str:
        said = f"{len(self)} rows, {len(self.inner_lengths)} lists, {len(self.values)} values"
        return f"<RaggedLists {self.values.dtype}: {said}>"


class ReadableRecord(Protocol):
    """A Record, as an export reads it; see Record."""

    @property
    def meta(self) -> RecordMeta:
        """Origin of the record."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are present."""

    @property
    def lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""

    def __len__(self) -> int:
        """Returns the number of rows."""

    def __contains__(self, name: object) -> bool:
        """Returns whether a column is present."""

    def __getitem__(self, name: str) -> Any:
        """Returns a column."""

    def valid(self, name: str) -> np.ndarray[Any, Any] | None:
        """Returns which rows are not null; None if all are."""

    def tag(self, name: str) -> Tag | None:
        """Returns whether a column holds values, null, [] or {}."""

    def json(self, name: str) -> Any:
        """Returns a column of JSON text, decoded."""
