"""A recorded group: columns flat, as a lane held them, which `put` copies back bit by bit.

A group that went through a lane once was checked then; the checks across columns are made again, and
log-probabilities follow the rule of today.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from shmbridge._ext.put import Form, PackedColumn, Plan, RowSampler, Stamp, WrongLengths
from shmbridge.errors import InvalidRecord, SchemaMismatch
from shmbridge.schema import Column, Columns, Kind, Tag

Array = np.ndarray[Any, Any]
_DAMAGED = "take another copy of the file that it was read from"


@dataclass(slots=True)  # frozen, each costs a recorder four times as much
class FlatColumn:
    """One column of one record. Not changed once it is made.

    Args:
        entries: rows that it has; 1 where it has one value per record.
        values: all values, flat, of the column's dtype; text and bytes as uint8.
        lengths: uint32 (entries,), values of each row; None for scalars.
        inner: uint32, values of each inner list, or bytes of each key; None otherwise.
        keys: the bytes of all keys of a map.
        valid: bool (entries,), False where a row is null; None where none is.
    """

    entries: int
    values: Array
    lengths: Array | None = None
    inner: Array | None = None
    keys: bytes = b""
    valid: Array | None = None

    def packed(self, form: Form, kind: Kind) -> PackedColumn:
        """Returns it in the form that is written into a lane. Raises WrongLengths."""
        if self.values.dtype != form.dtype or self.values.ndim != 1:
            raise WrongLengths(f"its values are {self.values.dtype}, the lane's {form.dtype}")
        return PackedColumn(
            form,
            entries=self.entries,
            count=len(self.values),
            lengths=self.lengths,
            inner=self.inner,
            keys=self.keys if kind is Kind.MAP else None,
            validity=None if self.valid is None else self.valid.astype(np.uint8),
            rows=self.values.tobytes() if kind is Kind.BYTES else [self.values],
        )


@dataclass(frozen=True, slots=True)
class RecordedGroup:
    """What `Producer.put` takes for a group that was recorded; its columns in the order of the record.

    Args:
        columns: the column table of the lane it came from.
        values: the columns that were put, by name: a FlatColumn, or the Tag of one without values.
        env_id: the number under which its environment had registered; None if it had none.
        uneven: whether it was put as `foreign`, with rows that do not fit its tokens.
    """

    columns: Columns
    values: Mapping[str, FlatColumn | Tag]
    env_id: int | None = None
    uneven: bool = False

    def plan(self, table: Columns, stamp: Stamp, sampler: RowSampler) -> Plan:
        """Returns the plan of its record in a lane with the columns of `table`.

        Raises InvalidRecord without tokens, or for lengths that do not fit; SchemaMismatch for a column that
        the lane has not.
        """
        tokens = self.values.get("tokens")
        if not isinstance(tokens, FlatColumn) or not tokens.entries:
            raise InvalidRecord("a recorded group has no tokens", column="tokens")
        packed = [self._packed(table, name, value) for name, value in self.values.items()]
        if not self.uneven:
            for name, value in self.values.items():
                if isinstance(value, FlatColumn) and table[name].per_token and not _fit(value, tokens):
                    raise _unfit(name, "its rows are not as long as their tokens")
        env_id = -1 if self.env_id is None else self.env_id
        try:
            return Plan(packed, stamp, tokens.entries, len(tokens.values), self.uneven, env_id, None, sampler)
        except WrongLengths as wrong:
            raise InvalidRecord(f"a recorded group is not what it says: {wrong}", hint=_DAMAGED) from None

    def _packed(self, table: Columns, name: str, value: FlatColumn | Tag) -> PackedColumn:
        column: Column | None = table.get(name)
        if column is None or not column.same_type(self.columns[name]):
            has = "has none" if column is None else f"has {column.type_name}"
            raise SchemaMismatch(
                f"recorded column {name!r} is {self.columns[name].type_name}, and the lane {has}",
                hint="open the producer with the schema of the archive",
            )
        form = table.forms[name]
        try:
            return (
                PackedColumn(form, tag=value) if isinstance(value, Tag) else value.packed(form, column.kind)
            )
        except WrongLengths as wrong:
            raise _unfit(name, wrong) from None


def _fit(column: FlatColumn, tokens: FlatColumn) -> bool:
    """Returns whether each row of a column that is not null has as many values as tokens."""
    if column.entries != tokens.entries:
        return False
    fits = column.lengths == tokens.lengths
    return bool(np.all(fits if column.valid is None else fits | ~column.valid))


def _unfit(name: str, why: object) -> InvalidRecord:
    return InvalidRecord(f"recorded column {name!r} is not what it says: {why}", hint=_DAMAGED, column=name)
