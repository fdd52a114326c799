"""Columns of a record, and the protocol by which an export reads a record."""

from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from shmbridge._ext.record import Ragged, RecordMeta, list_array
from shmbridge.schema import Columns, Tag

if TYPE_CHECKING:
    import pyarrow as pa


class RaggedLists:
    """A list<list> column of one record: flat values in place, lists per row, values per list.

    Attributes:
        values: the values of all rows, flat: a read-only view of the lane.
        lengths: lists in each row, uint32[rows].
        inner_lengths: values in each list, uint32.
        valid: bool[rows] where some rows are null, None where none is.
    """

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

    def tolist(self) -> list[list[list[Any]] | None]:
        """Returns the rows as lists of lists of Python numbers, a copy; None for a null row."""
        lists: list[list[Any]] = Ragged(self.values, self.inner_lengths, None).tolist()  # type: ignore[assignment]
        ends = np.cumsum(self.lengths, dtype=np.int64).tolist()
        rows = [lists[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        valid = self.valid if self.valid is not None else [True] * len(rows)
        return [row if there else None for row, there in zip(rows, valid, strict=True)]

    def to_arrow(self) -> "pa.ListArray":
        """Returns a pyarrow.ListArray of lists over the same values, null where a row is null.

        It keeps the lease until it is dropped. ValueError for more values than Arrow counts.
        """
        lists = Ragged(self.values, self.inner_lengths, None).to_arrow()
        return list_array(self.lengths, lists, self.valid)

    def __arrow_c_array__(self, requested_schema: object | None = None) -> tuple[object, object]:
        """Returns to_arrow() as capsules of Arrow's C interface."""
        capsules: tuple[object, object] = self.to_arrow().__arrow_c_array__(requested_schema)
        return capsules

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
    def _lane_columns(self) -> Columns:
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
