"""What a record's columns are made of, and how whoever exports a record reads them.

Knows columns; knows nothing of leases. Used by record.py and by what makes other forms of records.
"""

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


class ReadableRecord(Protocol):
    """A Record, as an export sees it; see there."""

    @property
    def meta(self) -> RecordMeta:
        """Where it came from."""

    @property
    def columns(self) -> list[str]:
        """Names of the columns that are present."""

    @property
    def lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""

    def __len__(self) -> int:
        """Rows."""

    def __contains__(self, name: object) -> bool:
        """Whether a column is present."""

    def __getitem__(self, name: str) -> Any:
        """A column."""

    def valid(self, name: str) -> np.ndarray[Any, Any] | None:
        """Which rows are not null; None if all are."""

    def tag(self, name: str) -> Tag | None:
        """Whether a column stands there as values, null, [] or {}."""

    def json(self, name: str) -> Any:
        """A column of JSON text, decoded."""
