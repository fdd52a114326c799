"""Turns the group given to `put` into a plan, before any memory is claimed; also a recorded group, and a
record that a relay brings as it was in another node's lane (shmbridge/record/record.py is the other end).

ColumnForms (_ext/forms.pxi) makes the forms of columns, and asks convert.Converter for uncommon values.
"""

import operator
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from typing import Any

import numpy as np

from shmbridge import sizing
from shmbridge._ext import put as fast_put
from shmbridge._ext.header import LaneCorrupt
from shmbridge._ext.put import (
    BadValue,
    BeyondLayout,
    ColumnMissing,
    Form,
    PackedColumn,
    Plan,
    RelayedPlan,
    RowSampler,
    Stamp,
    WrongLengths,
)
from shmbridge.config import format_size, whole_number
from shmbridge.errors import BadArgument, InvalidRecord, RecordTooBig, SchemaMismatch, counted, kind_of, shown
from shmbridge.put.convert import (
    Converter,
    PutNotices,
    as_invalid,
    checked_lengths,
    refused,
    with_reason_codes,
)
from shmbridge.record import new_sampler
from shmbridge.schema import ALIASES, COLUMN_BYTES, Column, Columns, Kind, Tag

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


Version = int | tuple[int, int] | None
_LONGEST_GROUP_ID = 4096
_MOST_PARTIAL = 1024


def checked_stamp(
    group_id: str | int, group_size: int | None, version: Version, current: int, split: str
) -> Stamp:
    """Returns the stamp of a group: its metadata beside the columns; `current` is the default policy version.

    Raises InvalidRecord.
    """
    if not isinstance(split, str) or split not in ("train", "eval"):
        raise refused("split", split)
    try:
        raw_id = str(group_id).encode()
    except Exception:  # not UTF-8, an int of thousands of digits, or of an object of the caller's
        raw_id = None
    if raw_id is None or len(raw_id) > _LONGEST_GROUP_ID:
        raise refused("group_id", group_id, _LONGEST_GROUP_ID)
    if group_size is not None and not (_is_int(group_size) and 1 <= group_size < 1 << 31):
        raise refused("group_size", group_size)
    bounds = version if isinstance(version, tuple) else (version, version)
    given = [current if bound is None else whole_number(bound) for bound in bounds]
    oldest, newest = given if len(given) == 2 else (None, None)
    if oldest is None or newest is None or not -1 <= oldest <= newest < 1 << 62:
        raise refused("policy_version", version)
    said = 0 if version is None else 2 if isinstance(version, tuple) else 1
    return Stamp(raw_id, group_size or 0, oldest, newest, split == "eval", said)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


class RecordPlanner:
    """Makes the plans of one producer's records."""

    def __init__(self, table: Columns, lane_bytes: int, env_name: str | None = None) -> None:
        self.table, self.lane_bytes, self.sampler = table, lane_bytes, new_sampler()
        # None: a caller that only measures logs no notices.
        self.notices = None if env_name is None else PutNotices(env_name)
        self.forms = self._forms_of(table, foreign=False)
        # Atropos cannot carry NaN or infinity in any column: nothing of a batch with such a value would
        # arrive. Of log-probabilities they are the mark of "not recorded", which leaves as Atropos' own.
        self._foreign_forms = self._forms_of(
            Columns(replace(column, finite=True) for column in table.order), foreign=True
        )
        self._knows_tensors = False
        self.fragments = Fragments()

    @cached_property
    def _encoded(self) -> bytes:
        return self.table.encode()

    def _forms_of(self, table: Columns, *, foreign: bool) -> fast_put.ColumnForms:
        by_key = {**table.forms, **{alias: table.forms[name] for alias, name in ALIASES.items()}}
        return fast_put.ColumnForms(by_key, Converter(table, foreign, self.notices), self.sampler, foreign)

    @property
    def most_bytes(self) -> int:
        """Size of the largest record: a larger one could never be written while another is read."""
        return self.lane_bytes // 2

    def plan(self, group: Any, stamp: Stamp, foreign: bool) -> Plan:
        """Returns a group's plan. Raises InvalidRecord, RecordTooBig."""
        if isinstance(group, RecordedGroup):
            try:
                return self._fitting(group.plan(self.table, stamp, self.sampler))
            except BeyondLayout as wrong:
                raise _beyond_the_layout(wrong) from None
        if (
            not self._knows_tensors
            and (tensor := getattr(sys.modules.get("torch"), "Tensor", None)) is not None
        ):
            fast_put.know_tensors(tensor)
            self._knows_tensors = True
        plan = self._planned(group, stamp, foreign)
        self.look(group)
        return plan

    def relayed(self, record: RelayedRecord, newest: int | None) -> Plan:
        """Returns the plan of a record of another node, in a lane whose last one there is `newest`.

        Its producer has checked the fragments of its group, of which this lane may have some.

        Raises InvalidRecord, SchemaMismatch, RecordTooBig.
        """
        return self._fitting(record.plan(self._encoded, newest), checked=True)

    def look(self, group: Any, *, nulls: bool = True) -> None:
        """Logs what learners will not train of a group; `nulls=False`: no row of it is None."""
        if self.notices is not None:
            self.notices.warn_untrainable(group, nulls=nulls)

    def with_masks_as_they_are(self, plan: Plan) -> Plan:
        """Returns a plan of the same group with its Atropos masks not folded."""
        group, foreign = plan.source
        return self._planned(group, plan.stamp, foreign, fold_masks=False)

    def claimed(self, rows: int, lengths: Mapping[str, Any], stamp: Stamp) -> Plan:
        """Returns the plan of a record whose values the caller will write in place.

        Raises InvalidRecord, RecordTooBig.
        """
        try:
            rows = _checked_claim(rows, lengths)
            columns = {
                name: _claimed_column(self.table, name, rows, wanted) for name, wanted in lengths.items()
            }
            plan = self.forms.claimed(list(columns.values()), columns["tokens"], columns.get("score"), stamp)
        except BadValue as bad:
            raise as_invalid(bad, self.table) from None
        except BeyondLayout as wrong:
            raise _beyond_the_layout(wrong) from None
        self.look(dict.fromkeys(lengths, True))
        return self._fitting(plan)

    def _planned(self, group: Any, stamp: Stamp, foreign: bool, *, fold_masks: bool = True) -> Plan:
        forms = self._foreign_forms if foreign else self.forms
        if type(group) is dict and "finish_reason" in group:
            group = with_reason_codes(group)
        try:
            plan = forms.plan(group, stamp, (group, foreign), fold_masks)
        except BadValue as bad:
            raise as_invalid(bad, self.table, group) from bad.__cause__
        except BeyondLayout as wrong:
            raise _beyond_the_layout(wrong) from None
        return self._fitting(plan)

    def _fitting(self, plan: Plan, *, checked: bool = False) -> Plan:
        """Returns the plan. Raises RecordTooBig; InvalidRecord for a fragment that contradicts its group."""
        size, of_group = plan.extent_bytes, plan.stamp.group_size
        if of_group and of_group < plan.rows:
            raise refused("small group", of_group, plan.rows)
        if not checked:
            self.fragments.check(plan)
        if size <= self.most_bytes:
            return plan
        least, eight = (sizing.as_option(sizing.lane_bytes_holding(held, size)) for held in (1, 8))
        held = f"{counted(plan.rows, 'row')}, {counted(plan.tokens, 'token')}"
        lane = format_size(self.lane_bytes)
        raise RecordTooBig(
            f"a record of {format_size(size)} ({held}); half of the lane's {lane} is the limit",
            hint=f'Producer(lane_bytes="{least}") holds one, "{eight}" eight of them; or put the group in '
            "fragments with group_size=",
        )


class Fragments:
    """The partly put groups of one producer, to refuse fragments that contradict each other."""

    def __init__(self) -> None:
        self._partial: dict[bytes, tuple[int, int]] = {}  # id -> group_size, rows committed

    def check(self, plan: Plan) -> None:
        """Raises InvalidRecord for a fragment that contradicts the committed fragments of its group."""
        stamp = plan.stamp
        known = self._partial.get(stamp.group_id) if stamp.group_size else None
        if known is None:
            return
        size, rows = known
        name = stamp.group_id.decode()
        if stamp.group_size != size:
            raise refused("other size", stamp.group_size, (name, size))
        if rows + plan.rows > size:
            raise refused("full group", size, (name, rows + plan.rows))

    def note(self, plan: Plan) -> None:
        """Notes a committed fragment."""
        stamp = plan.stamp
        if stamp.group_size <= plan.rows:
            return
        rows = self._partial.pop(stamp.group_id, (0, 0))[1] + plan.rows
        if rows < stamp.group_size:
            self._partial[stamp.group_id] = stamp.group_size, rows
            if len(self._partial) > _MOST_PARTIAL:  # forget the oldest: the consumer checks too
                del self._partial[next(iter(self._partial))]


def _beyond_the_layout(wrong: BeyondLayout) -> RecordTooBig:
    return RecordTooBig(str(wrong), hint="put the group in fragments with group_size=")


def _checked_claim(rows: object, lengths: object) -> int:
    """Returns the rows of a claim. Raises BadValue."""
    if not _is_int(rows) or rows < 1:  # type: ignore[operator]
        raise BadValue("", -1, -1, rows, "claim rows")
    if not isinstance(lengths, Mapping):
        raise BadValue("", -1, -1, lengths, "claim")
    if "tokens" not in lengths:
        raise BadValue("tokens", -1, -1, list(lengths), "no tokens")
    return operator.index(rows)  # type: ignore[arg-type]


def _claimed_column(table: Columns, name: str, rows: int, wanted: Any) -> PackedColumn:
    column = table.get(name)
    if column is None:
        raise BadValue(name, -1, -1, None, "unknown")
    if column.kind not in (Kind.LIST, Kind.SCALAR):
        raise BadValue(name, -1, -1, None, "claim type")
    form, rows = table.forms[name], 1 if column.per_record else rows
    if column.kind is Kind.SCALAR:
        return PackedColumn(form, entries=rows, count=rows)
    lengths = checked_lengths(name, wanted, "claim lengths")
    if lengths.shape != (rows,):
        raise BadValue(name, -1, -1, len(lengths), "claim count", rows)
    return PackedColumn(form, entries=rows, count=int(lengths.sum()), lengths=lengths)
