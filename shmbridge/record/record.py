"""A committed trajectory group (or a fragment) as its reader sees it: zero-copy columns, Arrow, Atropos."""

import warnings
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import msgspec
import numpy as np

from shmbridge._ext.lane import LaneReader
from shmbridge._ext.record import LeasedRecord
from shmbridge._ext.record import Origin as Origin
from shmbridge._ext.record import Ragged as Ragged
from shmbridge._ext.record import RecordMeta as RecordMeta
from shmbridge.errors import LeaseReleased, NoColumn, RecordUnreadable, no_column, shown
from shmbridge.record.attributes import RecordColumns
from shmbridge.record.columns import RaggedLists as RaggedLists
from shmbridge.record.named_columns import NamedColumns
from shmbridge.record.shown import columns_as_html
from shmbridge.schema import JSON_COLUMNS, Column, Columns, Kind, Tag
from shmbridge.segments import OneProcess

if TYPE_CHECKING:
    import pyarrow as pa


@dataclass(frozen=True, slots=True)
class Lane:
    """The facts that every record of one lane shares."""

    producer_id: str
    env_name: str
    columns: Columns
    name: str  # of the segment
    origin_node: str = ""  # of a lane that a relay writes: where its records come from
    origin_producer_id: str = ""

    @property
    def source(self) -> str:
        """Id of the producer that put its records, on whatever node; several lanes in turn may bring them."""
        return self.origin_producer_id or self.producer_id

    @classmethod
    def of(cls, header: dict[str, Any], columns: Columns, name: str) -> "Lane":
        """Returns the facts of a lane's header, as `_ext.header.read_lane` returns it."""
        origin = header["origin_node"], header["origin_producer_id"]
        return cls(header["producer_id"], header["env_name"], columns, name, *origin)

    def describe_to(self, reader: LaneReader, table: bytes) -> None:
        """Registers this lane with its reader, so that its records refer to it.

        Raises LaneCorrupt if `table`, from which the columns were decoded, has changed.
        """
        reader.describe(
            self, table, tuple(self.columns), tuple(column.dtype for column in self.columns.order)
        )


class Record(RecordColumns, NamedColumns, OneProcess, LeasedRecord):
    """One record, leased: its memory does not change until release() was called and the last view of it is
    gone.

    `len(record)` counts rows; `record[name]` is a column; `name in record` and `record.columns` say which are
    present. A standard column is also an attribute, `record.tokens`, None where it is absent. As in a data
    frame, iteration gives the names of the columns. Use it as a context manager, which releases it unless it
    is left by an exception, or call release(). A record dropped without release stays un-released: it is
    handed out again if its meta and columns were never read, else the next consumer gets it. One thread at a
    time; views may go anywhere.
    """

    __slots__ = ()
    _instead = "pass copies of its columns: to_arrow(), to_scored_data(), or numpy arrays"

    @property
    def _lane(self) -> Lane:
        lane: Lane = self._lane_reader.about
        return lane

    @property
    def _lane_columns(self) -> Columns:
        """All columns its lane may carry, by name."""
        return self._lane.columns

    def __enter__(self) -> "Record":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.release()

    def __repr__(self) -> str:
        meta = self.meta
        return (
            f"<Record {meta.producer_id}#{meta.sequence} group {meta.group_id} "
            f"{self.rows}/{meta.group_size} rows {self.token_count} tokens "
            f"v{meta.min_policy_version}{' redelivered' if meta.redelivered else ''}"
            f"{' released' if self.is_released else ''}>"
        )

    def _repr_html_(self) -> str:
        columns = {} if self.is_released else self._lane.columns
        return columns_as_html(
            repr(self), [(name, columns[name].type_name) for name in self.columns if name in columns]
        )

    def tag(self, name: str) -> Tag | None:
        """Returns whether a column holds values, null, [] or {}; None if it is absent."""
        tag = self._tag(name)
        return None if tag < 0 else Tag(tag)

    def to_arrow(self) -> "pa.RecordBatch":
        """Returns the record as a pyarrow.RecordBatch over the lane's own buffers; it holds the lease until
        it is dropped.

        Columns with one value per record repeat it. Raises ValueError for uneven records, which have no
        rectangular form, and RecordUnreadable for text that is not UTF-8.
        """
        from shmbridge.record.arrow import record_batch

        return record_batch(self)

    def to_scored_data(self) -> dict[str, Any]:
        """Returns the Atropos ScoredDataGroup this came from, a new dict; per-token floats are float32."""
        from shmbridge.record.scored_data import scored_data

        return scored_data(self)

    def json(self, name: str) -> Any:
        """Returns a column of JSON text, decoded: one value, or a list with one per row.

        KeyError if absent, RecordUnreadable if the text is not JSON.
        """
        if name not in JSON_COLUMNS:
            raise NoColumn(f"column {shown(name)} is not JSON text", hint=f"record[{shown(name)}]")
        try:
            values = [None if text is None else msgspec.json.decode(text) for text in self[name]]
            return values[0] if self._lane.columns[name].per_record else values
        except (msgspec.MsgspecError, RecursionError, IndexError) as wrong:
            raise self._unreadable(name, f"is no JSON: {wrong}") from None

    def _unreadable(self, name: str, why: object) -> RecordUnreadable:
        return RecordUnreadable(
            f"column {name!r} of record {self._sequence} of producer {self._lane.producer_id} {why}",
            hint="end that producer: it is broken, or something overwrites shared memory",
        )

    def _absent(self, name: str) -> NoColumn:
        return no_column(name, "record", self._lane.columns, self.columns)

    def _too_late(self, name: str) -> LeaseReleased:
        return LeaseReleased(
            f"column {name!r} was read after release()", hint="take the views you need before release()"
        )

    def _compound(self, name: str) -> Any:
        """Returns a column that is neither numbers nor lists of numbers."""
        column = self._lane.columns[name]
        if column.kind is Kind.LIST_LIST:
            return RaggedLists(
                self._values(name), self._lengths(name), self._inner_lengths(name), self.valid(name)
            )
        return self._maps(name) if column.kind is Kind.MAP else self._texts(column)

    def _texts(self, column: Column) -> list[Any]:
        raw, valid = self._values(column.name).tobytes(), self.valid(column.name)
        rows: list[Any] = _cut(raw, self._lengths(column.name))
        if column.text:
            rows = self._decoded(column.name, rows)
        return (
            rows
            if valid is None
            else [row if there else None for row, there in zip(rows, valid, strict=True)]
        )

    def _decoded(self, name: str, raw: list[bytes]) -> list[str]:
        try:
            return [each.decode() for each in raw]
        except UnicodeDecodeError as wrong:
            raise self._unreadable(name, f"is no text: {wrong}") from None

    def _maps(self, name: str) -> list[dict[str, float]]:
        keys = self._decoded(name, _cut(self._keys(name), self._inner_lengths(name)))
        pairs = iter(zip(keys, self._values(name).tolist(), strict=True))
        return [dict(next(pairs) for _ in range(count)) for count in self._lengths(name).tolist()]


def _moved(name: str) -> property:
    def moved(record: Record) -> Any:
        warnings.warn(
            f"record.{name} is record.meta.{name}: the short name goes with the next release",
            FutureWarning,
            stacklevel=2,
        )
        return getattr(record.meta, name)

    return property(moved, doc=f"`record.meta.{name}`, under the name that it had on the record itself.")


# Properties and not __getattr__, which would make each look at any attribute a slow one.
for _name in {field.name for field in fields(RecordMeta)}.difference(dir(Record)):
    setattr(Record, _name, _moved(_name))


def _cut(raw: bytes, lengths: np.ndarray[Any, Any]) -> list[bytes]:
    ends = np.cumsum(lengths, dtype=np.int64).tolist()
    return [raw[start:end] for start, end in zip([0, *ends], ends, strict=False)]
