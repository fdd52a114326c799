"""A record of another node, as its lane held it, which `put` copies into a lane here; and the lane's origin.

The record's index is checked as a consumer checks it; no value is looked at.
"""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from shmbridge._ext.header import LaneCorrupt
from shmbridge._ext.put import ColumnMissing, Plan, RelayedPlan
from shmbridge.errors import BadArgument, InvalidRecord, SchemaMismatch, kind_of, shown
from shmbridge.schema import COLUMN_BYTES, Columns

Array = np.ndarray[Any, Any]

LONGEST_NODE, _LONGEST_ID = 63, 95  # bytes that a lane's header has for each, less the NUL


@dataclass(frozen=True, slots=True)
class LaneOrigin:
    """The producer on another node whose records a lane takes, in their order.

    Args:
        node: the node's name, at most 63 bytes.
        producer_id: of its producer there, at most 95 bytes.
        newest: sequence there of the last record that earlier lanes of this bridge have; None: none has any.
    """

    node: str
    producer_id: str
    newest: int | None = None

    def words(self) -> tuple[bytes, bytes, int]:
        """Returns what stands in a lane's header. Raises BadArgument if it has no room there."""
        for what, text, most in (
            ("node", self.node, LONGEST_NODE),
            ("producer_id", self.producer_id, _LONGEST_ID),
        ):
            raw = text.encode(errors="replace")
            if not 1 <= len(raw) <= most or raw.decode() != text or "\0" in text:
                raise BadArgument(
                    f"origin {what} {shown(text)} is not text of 1 to {most} bytes", hint=f"a shorter {what}"
                )
        if self.newest is not None and not 0 <= self.newest < 1 << 62:
            raise BadArgument(f"origin newest {shown(self.newest)} is no sequence", hint="newest=None")
        newest = 0 if self.newest is None else self.newest + 1
        return self.node.encode(), self.producer_id.encode(), newest


@dataclass(frozen=True, slots=True, eq=False)
class RelayedRecord:
    """What `Producer.put` takes for a record of another node; all that put says of a group, it brings itself.

    Args:
        extent: its bytes as a lane held them, in flat memory; not changed until put has returned.
        table: the column table of that lane.
        words: rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of its slot there.
        min_policy_version, max_policy_version: -1 where none was stamped.
        sequence: its own at its origin.
        waited_ns: from its commit there until it was sent, by the clock there.
        requested_ns: CLOCK_MONOTONIC of this node, when it was requested.
    """

    extent: "bytes | memoryview | Array"
    table: bytes
    words: tuple[int, int, int, int, int, int, int]
    min_policy_version: int
    max_policy_version: int
    sequence: int
    waited_ns: int
    requested_ns: int

    def plan(self, table: bytes, newest: int | None) -> Plan:
        """Returns the plan of its record in a lane with that column table, whose last record is `newest`.

        Raises:
            InvalidRecord: its bytes are not what its words say, or the lane has it.
            SchemaMismatch: the lane lacks one of its columns, or has it with another type.
        """
        if newest is not None and self.sequence <= newest:
            raise InvalidRecord(
                f"record {self.sequence} of another node comes after {newest}, which the lane has",
                hint="put the records of an origin in their order, each once",
            )
        numbers = self._numbers(table)
        try:
            plan = RelayedPlan(
                self.extent,
                numbers,
                table,
                self.words,
                (self.min_policy_version, self.max_policy_version),
                (self.sequence, self.waited_ns),
                self.requested_ns,
            )
            plan.stamp.group_id.decode()
        except ColumnMissing as missing:
            raise _cannot_carry(self.table, table, missing.args[0]) from None
        except (LaneCorrupt, OverflowError, TypeError, ValueError, BufferError) as wrong:
            raise self._untrue(wrong) from None
        return plan

    def _numbers(self, table: bytes) -> Array:
        """Returns the number in `table` of each of its lane's columns, -1 for none.

        Raises InvalidRecord for what is no column table, SchemaMismatch for one of types that no lane has.
        """
        if type(self.table) is not bytes or len(self.table) % COLUMN_BYTES:
            raise self._untrue(
                f"a column table of {kind_of(self.table)}, not of entries of {COLUMN_BYTES} bytes"
            )
        return _numbers(self.table, table)

    def _untrue(self, why: object) -> InvalidRecord:
        return InvalidRecord(
            f"record {self.sequence} of another node is not what it says: {why}",
            hint="something overwrites shared memory there, or the relays are of two versions",
        )


@lru_cache(maxsize=256)
def _numbers(theirs: bytes, ours: bytes) -> Array:
    """Returns the number here of each column there, -1 for one that cannot come. Raises SchemaMismatch."""
    there, here = Columns.decode(theirs), Columns.decode(ours)
    numbers = [
        here.number[column.name] if column.name in here and here[column.name].same_type(column) else -1
        for column in there.order
    ]
    return np.array(numbers, np.int32)


def _cannot_carry(theirs: bytes, ours: bytes, number: int) -> SchemaMismatch:
    column, here = Columns.decode(theirs).order[number], Columns.decode(ours)
    has = f"has {here[column.name].type_name}" if column.name in here else "has none"
    return SchemaMismatch(
        f"column {column.name!r} is {column.type_name} on the other node, and the lane here {has}",
        hint="open the producer with schema= of that node's environment",
    )
