"""A committed trajectory group (or a fragment of one) as its reader sees it: zero-copy columns, Arrow, Atropos.

Knows the record layout and the lease; knows nothing of lanes, groups or batches. Made by the consumer, used by everybody downstream.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shmbridge._ext.ring import Lease
from shmbridge.errors import LeaseReleased, RecordUnreadable
from shmbridge.one_process import OneProcess
from shmbridge.schema import JSON_COLUMNS, Column, Columns, Kind, Tag

if TYPE_CHECKING:
    import pyarrow as pa

_ENTRY = struct.Struct("<HBBIIIIII4xQQQ8x")  # directory_entry of layout.h
_LINE = 64
_EVAL, _UNEVEN = 1, 2


@dataclass(frozen=True, slots=True)
class RecordMeta:
    """Where a record came from and when. Times are CLOCK_MONOTONIC nanoseconds; versions are -1 where nobody stamped one."""

    producer_id: str
    env_name: str
    sequence: int
    group_id: str
    group_size: int
    env_id: int | None
    min_policy_version: int
    max_policy_version: int
    t_created_ns: int
    t_publish_ns: int
    split: str
    redelivered: bool
    uneven: bool


@dataclass(frozen=True, slots=True)
class Lane:
    """What every record of one lane shares."""

    producer_id: str
    env_name: str
    columns: Columns
    name: str = ""  # of the segment


@dataclass(frozen=True, slots=True)
class _Entry:
    column: Column
    tag: Tag
    entries: int
    values_at: int
    lengths_at: int
    inner_at: int
    keys_at: int
    validity_at: int
    values_bytes: int
    inner_count: int
    keys_bytes: int


class Ragged:
    """A list column of one record: flat values in place, and the length of each row.

    `values` is a read-only view of the lane, valid as long as it is referenced, also after the record's release().
    `lengths` is uint32[rows].
    """

    __slots__ = ("_ends", "lengths", "valid", "values")

    def __init__(self, values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None) -> None:
        self.values, self.lengths, self.valid = values, lengths, valid
        self._ends = np.cumsum(lengths, dtype=np.int64)

    def __repr__(self) -> str:
        return f"<Ragged {self.values.dtype}: {', '.join(map(str, list(self)[:8]))}{', …' if len(self) > 8 else ''}>"

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, row: int) -> np.ndarray[Any, Any]:
        """Row `row` as a read-only view of the values."""
        end = int(self._ends[row])
        return self.values[end - int(self.lengths[row]) : end]

    def __iter__(self) -> Iterator[np.ndarray[Any, Any]]:
        return (self[row] for row in range(len(self)))

    @property
    def offsets(self) -> np.ndarray[Any, Any]:
        """Start of each row and the end of the last, int64[rows + 1]."""
        return np.concatenate(([0], self._ends))


class RaggedLists:
    """A list<list> column of one record: flat values in place, lists per row, values per list."""

    __slots__ = ("inner_lengths", "lengths", "valid", "values")

    def __init__(
        self, values: np.ndarray[Any, Any], lengths: np.ndarray[Any, Any], inner: np.ndarray[Any, Any], valid: np.ndarray[Any, Any] | None
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


class Record(OneProcess, Lease):
    """One record, leased: its memory does not change until release() was called and the last view of it is gone.

    `len(record)` counts rows; `record[name]` is a column; `name in record` and `record.columns` say which are present. Use
    it as a context manager, or call release(), or let it go: the lease ends with the last of the record and its views. One
    thread at a time; views may go anywhere.
    """

    __slots__ = ("_directory", "_lane", "_meta")
    _instead = "pass copies of its columns: to_arrow(), to_scored_data(), or numpy arrays"
    _lane: Lane

    @property
    def lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""
        return self._lane.columns

    @property
    def lane_name(self) -> str:
        """Name of the segment it lies in."""
        return self._lane.name

    def bind(self, lane: Lane) -> "Record":
        """Ties the record to what its lane says of all records; for the consumer only."""
        self._lane = lane
        self._directory: dict[str, _Entry] | None = None
        self._meta: RecordMeta | None = None
        return self

    def __len__(self) -> int:
        return self.rows

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"<Record {meta.producer_id}#{meta.sequence} group {meta.group_id} {self.rows}/{meta.group_size} rows "
            f"{self.token_count} tokens v{meta.min_policy_version}{' redelivered' if meta.redelivered else ''}>"
        )

    @property
    def meta(self) -> RecordMeta:
        """Who, when, which group, which policy version. Valid also after release()."""
        if self._meta is None:
            self._meta = RecordMeta(
                producer_id=self._lane.producer_id,
                env_name=self._lane.env_name,
                sequence=self.sequence,
                group_id=self.group_id,
                group_size=self.group_size,
                env_id=None if self.env_id < 0 else self.env_id,
                min_policy_version=self.min_policy_version,
                max_policy_version=self.max_policy_version,
                t_created_ns=self.t_created_ns,
                t_publish_ns=self.t_publish_ns,
                split="eval" if self.flags & _EVAL else "train",
                redelivered=bool(self.redelivered),
                uneven=bool(self.flags & _UNEVEN),
            )
        return self._meta

    @property
    def columns(self) -> list[str]:
        """Names of the columns that have values in this record."""
        return [name for name, entry in self._entries().items() if entry.tag is Tag.VALUES]

    def tag(self, name: str) -> Tag | None:
        """Whether a column stands there as values, null, [] or {}; None if it is absent."""
        entry = self._entries().get(name)
        return None if entry is None else entry.tag

    def __contains__(self, name: object) -> bool:
        entry = self._entries().get(name)  # type: ignore[call-overload]
        return entry is not None and entry.tag is Tag.VALUES

    def __getitem__(self, name: str) -> Any:
        """A column: Ragged (lists), RaggedLists, ndarray (rows,) of scalars, or a list of dict, str or bytes.

        Raises KeyError if it is absent, RecordUnreadable for text that is none. Numbers are read-only views of the lane; dicts, str
        and bytes are copies.
        """
        entry = self._entries().get(name)
        if entry is None or entry.tag is not Tag.VALUES:
            raise KeyError(f"{name}: absent from this record, which has {', '.join(self.columns)}")
        if self.is_released:
            raise LeaseReleased(f"column {name!r} was read after release()", hint="take the views you need before release()")
        kind = entry.column.kind
        if kind is Kind.SCALAR:
            return self._values(entry)
        if kind is Kind.LIST:
            return Ragged(self._values(entry), self._lengths(entry), self._validity(entry))
        if kind is Kind.LIST_LIST:
            return RaggedLists(self._values(entry), self._lengths(entry), self._inner(entry), self._validity(entry))
        return self._maps(entry) if kind is Kind.MAP else self._texts(entry)

    def to_arrow(self) -> "pa.RecordBatch":
        """The record as a pyarrow.RecordBatch over the lane's own buffers; it holds the lease until it is dropped.

        Columns with one value per record repeat it. Raises ValueError for uneven records, which have no rectangular form, and
        RecordUnreadable for text that is none.
        """
        from shmbridge.arrow import record_batch

        return record_batch(self)

    def to_scored_data(self) -> dict[str, Any]:
        """The Atropos ScoredDataGroup this record came from, as a new dict; per-token floats are rounded to float32."""
        from shmbridge.scored_data import scored_data

        return scored_data(self)

    def valid(self, name: str) -> np.ndarray[Any, Any] | None:
        """bool[rows] where some rows of the column are null, None where none is."""
        return self._validity(self._entries()[name])

    def json(self, name: str) -> Any:
        """A column of JSON text, decoded: one value, or a list with one per row. KeyError if absent, RecordUnreadable if it is none."""
        if name not in JSON_COLUMNS:
            raise KeyError(f"{name} is not JSON")
        try:
            values = [None if text is None else msgspec.json.decode(text) for text in self[name]]
            return values[0] if self._lane.columns[name].per_record else values
        except (msgspec.MsgspecError, RecursionError, IndexError) as wrong:
            raise self._unreadable(name, f"is no JSON: {wrong}") from None

    def _unreadable(self, name: str, why: object) -> RecordUnreadable:
        return RecordUnreadable(
            f"column {name!r} of record {self.sequence} of producer {self._lane.producer_id} {why}",
            hint="end that producer: it is broken, or something overwrites shared memory",
        )

    def _entries(self) -> dict[str, _Entry]:
        if self._directory is None:
            table, directory = self._lane.columns.order, {}
            for at in range(0, self.column_entries * _ENTRY.size, _ENTRY.size):
                number, _, tag, entries, values, lengths, inner, keys, validity, *sizes = _ENTRY.unpack_from(self.index, at)
                directory[table[number].name] = _Entry(
                    table[number], Tag(tag), entries, values * _LINE, lengths * _LINE, inner * _LINE, keys * _LINE, validity * _LINE, *sizes
                )
            self._directory = directory
        return self._directory

    def _values(self, entry: _Entry) -> np.ndarray[Any, Any]:
        count = entry.values_bytes // entry.column.dtype.itemsize
        return np.frombuffer(memoryview(self), entry.column.dtype, count, entry.values_at) if count else _nothing(entry.column.dtype)

    def _lengths(self, entry: _Entry) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.index, np.uint32, entry.entries, entry.lengths_at)

    def _inner(self, entry: _Entry) -> np.ndarray[Any, Any]:
        return np.frombuffer(self.index, np.uint32, entry.inner_count, entry.inner_at)

    def _validity(self, entry: _Entry) -> np.ndarray[Any, Any] | None:
        if not entry.validity_at:
            return None
        return np.frombuffer(memoryview(self), np.uint8, entry.entries, entry.validity_at).astype(np.bool_)

    def _texts(self, entry: _Entry) -> list[Any]:
        raw, valid = self._values(entry).tobytes(), self._validity(entry)
        ends = np.cumsum(self._lengths(entry), dtype=np.int64).tolist()
        rows: list[Any] = [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
        if entry.column.text:
            rows = self._decoded(entry, rows)
        return rows if valid is None else [row if there else None for row, there in zip(rows, valid, strict=True)]

    def _decoded(self, entry: _Entry, raw: list[bytes]) -> list[str]:
        try:
            return [each.decode() for each in raw]
        except UnicodeDecodeError as wrong:
            raise self._unreadable(entry.column.name, f"is no text: {wrong}") from None

    def _maps(self, entry: _Entry) -> list[dict[str, float]]:
        raw = bytes(memoryview(self)[entry.keys_at : entry.keys_at + entry.keys_bytes]) if entry.keys_bytes else b""
        ends = np.cumsum(self._inner(entry), dtype=np.int64).tolist()
        keys = self._decoded(entry, [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        pairs = iter(zip(keys, self._values(entry).tolist(), strict=True))
        return [dict(next(pairs) for _ in range(count)) for count in self._lengths(entry).tolist()]


def _nothing(dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    empty = np.empty(0, dtype)
    empty.flags.writeable = False
    return empty
