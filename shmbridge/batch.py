"""Batches: many groups gathered into padded or packed arrays, one host copy per column.

Knows columns and rows; knows nothing of torch, advantages or where groups come from. Called by the consumer.
"""

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from shmbridge.groups import Group
from shmbridge.record import Ragged, RaggedLists, Record, RecordMeta
from shmbridge.schema import Column, Kind

if TYPE_CHECKING:
    from shmbridge.messages import Manifest

Layout = Literal["padded", "packed"]
_NAMES = {"scores": "score"}


class Batch:
    """Rows of several groups as arrays; B rows, N tokens in all, T tokens in the longest row.

    Per-token columns are (N,) packed or (B, T) padded on the right with zeros; scalar columns are (B,); other lists are
    Ragged or RaggedLists with B rows; text and maps are lists of B. A column no record has is None as an attribute (`batch.advantages`)
    and a KeyError as `batch["advantages"]`. Where only some records have it, the others' rows are zero: see `has`.
    All arrays are the batch's own copies; under hold="step" the batch also keeps its records' leases until release().
    """

    def __init__(self, groups: list[Group], layout: Layout) -> None:
        self.layout = layout
        self.groups = groups
        self.manifest: Manifest | None = None  # what a learner rank got it by
        self.records: list[Record] = [record for group in groups for record in group.records]
        self.meta: list[RecordMeta] = [record.meta for record in self.records for _ in range(record.rows)]
        self.group_index = np.repeat(np.arange(len(groups), dtype=np.int32), [group.rows for group in groups])
        self.lengths = np.concatenate([record["tokens"].lengths for record in self.records]).astype(np.int32)
        self.cu_seqlens = np.concatenate(([0], np.cumsum(self.lengths, dtype=np.int64))).astype(np.int32)
        starts = np.repeat(self.cu_seqlens[:-1], self.lengths)
        positions = np.arange(self.cu_seqlens[-1], dtype=np.int32) - starts
        self.position_ids = positions if layout == "packed" else self._pad(positions)
        self._present: dict[str, np.ndarray[Any, Any]] = {}
        self._columns: dict[str, Any] = {}
        for column in self._all_columns():
            self._gather(column)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def token_count(self) -> int:
        """Tokens of all rows, without padding."""
        return int(self.cu_seqlens[-1])

    @property
    def group_count(self) -> int:
        """Groups in the batch."""
        return int(self.group_index[-1]) + 1

    @property
    def columns(self) -> list[str]:
        """Columns that at least one record has."""
        return list(self._columns)

    def has(self, name: str) -> np.ndarray[Any, Any]:
        """bool (B,): which rows carried the column: their record has it, and there it is not null."""
        return self._present.get(_NAMES.get(name, name), np.zeros(len(self), bool))

    def __contains__(self, name: object) -> bool:
        return _NAMES.get(name, name) in self._columns  # type: ignore[call-overload]

    def __getitem__(self, name: str) -> Any:
        return self._columns[_NAMES.get(name, name)]

    def __getattr__(self, name: str) -> Any:
        from shmbridge.schema import STANDARD

        name = _NAMES.get(name, name)
        if name.startswith("_") or not (name in STANDARD or name in self._columns):
            raise AttributeError(f"Batch has no column {name!r}")
        return self._columns.get(name)

    def release(self) -> None:
        """Ends the leases of the batch's records; its arrays stay. Idempotent."""
        for record in self.records:
            record.release()
        self.records = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()

    def __repr__(self) -> str:
        return f"<Batch {self.layout}: {self.group_count} groups, {len(self)} rows, {self.token_count} tokens, {', '.join(self.columns)}>"

    def _all_columns(self) -> list[Column]:
        found: dict[str, Column] = {}
        for record in self.records:
            for name in record.columns:
                found.setdefault(name, record.lane_columns[name])
        return list(found.values())

    def _gather(self, column: Column) -> None:
        name = column.name
        have = [name in record for record in self.records]
        self._present[name] = np.concatenate([_present_rows(record, name) for record in self.records])
        if column.per_token and column.kind is Kind.LIST:
            flat = np.concatenate([self._token_values(record, column) for record in self.records])
            self._columns[name] = flat if self.layout == "packed" else self._pad(flat)
        elif column.kind is Kind.SCALAR:
            self._columns[name] = np.concatenate(
                [
                    _fit(record[name], record.rows, column.per_record) if there else np.zeros(record.rows, column.dtype)
                    for record, there in zip(self.records, have, strict=True)
                ]
            )
        elif column.kind is Kind.LIST:
            self._columns[name] = _join(self.records, column)
        elif column.kind is Kind.LIST_LIST:
            self._columns[name] = _join_lists(self.records, column)
        else:
            self._columns[name] = [
                row
                for record, there in zip(self.records, have, strict=True)
                for row in (_rows(record, column) if there else [None] * record.rows)
            ]

    def _token_values(self, record: Record, column: Column) -> np.ndarray[Any, Any]:
        """One value per token; rows that disagree with their tokens (uneven records) are cut or filled with zeros."""
        tokens = record["tokens"].lengths
        if column.name not in record:
            return np.zeros(int(tokens.sum()), column.dtype)
        values: Ragged = record[column.name]
        if np.array_equal(values.lengths, tokens):
            return values.values
        flat, at = np.zeros(int(tokens.sum()), column.dtype), 0
        for row, length in enumerate(tokens.tolist()):
            source = values[row][:length] if row < len(values) else values.values[:0]
            flat[at : at + len(source)] = source
            at += length
        return flat

    def _pad(self, flat: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        padded = np.zeros((len(self), int(self.lengths.max())), flat.dtype)
        padded[np.arange(padded.shape[1]) < self.lengths[:, None]] = flat
        return padded


def unreadable(groups: list[Group], layout: Layout) -> list[tuple[Group, Exception]]:
    """The groups that no batch can be made of, each with the reason. A group's fault must not cost the others."""
    found: list[tuple[Group, Exception]] = []
    for group in groups:
        try:
            Batch([group], layout)
        except MemoryError:
            raise
        except Exception as wrong:
            found.append((group, wrong))
    return found


def _present_rows(record: Record, name: str) -> np.ndarray[Any, Any]:
    """bool (rows,): where the record has a value in this column."""
    if name not in record:
        return np.zeros(record.rows, bool)
    valid = record.valid(name)
    return np.ones(record.rows, bool) if valid is None else _fit(valid, record.rows, record.lane_columns[name].per_record)


def _fit(values: np.ndarray[Any, Any], rows: int, repeated: bool) -> np.ndarray[Any, Any]:
    """One value per row: cut or filled with zeros in uneven records; a per-record value is repeated."""
    if repeated:
        return np.repeat(values, rows)
    return values if len(values) == rows else np.concatenate((values, np.zeros(rows, values.dtype)))[:rows]


def _join(records: list[Record], column: Column) -> Ragged:
    nothing = np.empty(0, column.dtype)
    parts = [
        record[column.name] if column.name in record else Ragged(nothing, np.zeros(record.rows, np.uint32), None)
        for record in records
    ]
    return Ragged(np.concatenate([part.values for part in parts]), np.concatenate([part.lengths for part in parts]), None)


def _join_lists(records: list[Record], column: Column) -> RaggedLists:
    nothing, no_lengths = np.empty(0, column.dtype), np.empty(0, np.uint32)
    parts = [
        record[column.name] if column.name in record else RaggedLists(nothing, np.zeros(record.rows, np.uint32), no_lengths, None)
        for record in records
    ]
    return RaggedLists(
        np.concatenate([part.values for part in parts]),
        np.concatenate([part.lengths for part in parts]),
        np.concatenate([part.inner_lengths for part in parts]),
        None,
    )


def _rows(record: Record, column: Column) -> list[Any]:
    value = record[column.name]
    return list(value) * record.rows if column.per_record else list(value)
