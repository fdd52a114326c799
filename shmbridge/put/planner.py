"""Turns the group given to `put` into a plan, before any memory is claimed.

ColumnForms (_ext/forms.pxi) makes the forms of columns, and asks convert.Converter for uncommon values.
"""

import operator
import sys
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import numpy as np

from shmbridge import sizing
from shmbridge._ext import put as fast_put
from shmbridge._ext.put import BadValue, BeyondLayout, PackedColumn, Plan, Stamp
from shmbridge.config import format_size, whole_number
from shmbridge.errors import InvalidRecord, RecordTooBig
from shmbridge.other_names import did_you_mean, nearest
from shmbridge.put.convert import Converter, checked_lengths, with_reason_codes
from shmbridge.put.group_errors import as_invalid as as_invalid
from shmbridge.put.group_errors import as_written
from shmbridge.put.group_errors import groups_of as groups_of
from shmbridge.put.recorded import RecordedGroup
from shmbridge.put.relayed import RelayedRecord
from shmbridge.put.untrainable_notices import PutNotices
from shmbridge.record.row_checks import new_sampler
from shmbridge.schema import ALIASES, Columns, Kind
from shmbridge.shown import counted, kind_of, shown

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
        raise InvalidRecord(f'split={shown(split)} is not "train" or "eval"', hint=_split_hint(split))
    try:
        name = str(group_id)
    except Exception:  # of an object of the caller's, or an int of thousands of digits
        name = "\ud800"
    raw_id = name.encode(errors="replace")
    if len(raw_id) > _LONGEST_GROUP_ID or raw_id.decode() != name:
        raise InvalidRecord(
            f"group_id {shown(group_id)} is not text of at most {_LONGEST_GROUP_ID} bytes of UTF-8",
            hint='a short id, group_id="question-1", and the rest in extra={...}',
        )
    if group_size is not None and not (_is_int(group_size) and 1 <= group_size < 1 << 31):
        raise InvalidRecord(
            f"group_size={shown(group_size)} is not a number of rows",
            hint="group_size=8: rows of the whole group; leave it out for a group put whole",
        )
    bounds = version if isinstance(version, tuple) else (version, version)
    given = [current if bound is None else whole_number(bound) for bound in bounds]
    oldest, newest = given if len(given) == 2 else (None, None)
    if oldest is None or newest is None or not -1 <= oldest <= newest < 1 << 62:
        raise InvalidRecord(
            f"policy_version={shown(version)} is not a version, or (oldest, newest)",
            hint=_version_hint(version),
        )
    said = 0 if version is None else 2 if isinstance(version, tuple) else 1
    return Stamp(raw_id, group_size or 0, oldest, newest, split == "eval", said)


def _is_int(value: object) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool)


def _split_hint(split: object) -> str:
    if isinstance(split, str) and split:
        return 'split="train"' if split.lower().startswith("tr") else 'split="eval"'
    return 'leave it out for "train"'


def _version_hint(version: object) -> str:
    if isinstance(version, str) and version.isdigit():
        return f"policy_version={version}, without quotes"
    if isinstance(version, float) and version.is_integer() and version >= 0:
        return f"policy_version={int(version)}, a whole number"
    if isinstance(version, (tuple, list)) and len(version) == 2 and all(map(_is_int, version)):
        oldest, newest = sorted(map(int, version))
        return f"a tuple, oldest first: policy_version=({oldest}, {newest})"
    return (
        "policy_version=3: the version when generation began, from 0; leave it out for "
        "producer.policy_version"
    )


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
            self.notices.look(group, nulls=nulls)

    def with_masks_as_they_are(self, plan: Plan) -> Plan:
        """Returns a plan of the same group with its Atropos masks not folded."""
        group, foreign = plan.source
        return self._planned(group, plan.stamp, foreign, fold_masks=False)

    def claimed(self, rows: int, lengths: Mapping[str, Any], stamp: Stamp) -> Plan:
        """Returns the plan of a record whose values the caller will write in place.

        Raises InvalidRecord, RecordTooBig.
        """
        rows = _checked_claim(rows, lengths)
        try:
            columns = {
                name: _claimed_column(self.table, name, rows, wanted) for name, wanted in lengths.items()
            }
            plan = self.forms.claimed(list(columns.values()), columns["tokens"], columns.get("score"), stamp)
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
            raise as_invalid(bad, self.table, group) from None
        except InvalidRecord as wrong:
            raise as_written(wrong, group) from wrong.__cause__
        except BeyondLayout as wrong:
            raise _beyond_the_layout(wrong) from None
        return self._fitting(plan)

    def _fitting(self, plan: Plan, *, checked: bool = False) -> Plan:
        """Returns the plan. Raises RecordTooBig; InvalidRecord for a fragment that contradicts its group."""
        size, of_group = plan.extent_bytes, plan.stamp.group_size
        if of_group and of_group < plan.rows:
            raise InvalidRecord(
                f"group_size={of_group} is less than the {counted(plan.rows, 'row')} given",
                hint=f"group_size={plan.rows} or more, of all fragments; leave it out for a whole group",
            )
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
            raise InvalidRecord(
                f"group {name!r} has group_size={stamp.group_size}, and an earlier fragment said {size}",
                hint="one group_size= for all fragments of a group, and a group_id of its own for each group",
            )
        if rows + plan.rows > size:
            raise InvalidRecord(
                f"group {name!r} has {rows} rows of group_size={size} already, and {plan.rows} more are put",
                hint="group_size= is the number of rows of all fragments together",
            )

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
    """Returns the rows of a claim. Raises InvalidRecord."""
    if not _is_int(rows) or rows < 1:  # type: ignore[operator]
        raise InvalidRecord(f"rows={shown(rows)} is no number of rows from 1", hint="rows=8")
    if not isinstance(lengths, Mapping):
        raise InvalidRecord(
            f"a claim's lengths are {kind_of(lengths)}, not a mapping from column to lengths",
            hint='claim(2, {"tokens": [3, 5], "score": None})',
        )
    if "tokens" not in lengths:
        has = ", ".join(map(shown, lengths)) or "nothing"
        meant = next((name for name in lengths if nearest(name, ("tokens",))), None)
        hint = f"rename {meant!r} to 'tokens'" if meant else 'add the length of each row: {"tokens": [3, 5]}'
        raise InvalidRecord(f"a claim needs 'tokens', and has {has}", hint=hint, column="tokens")
    return operator.index(rows)  # type: ignore[arg-type]


def _claimed_column(table: Columns, name: str, rows: int, wanted: Any) -> PackedColumn:
    column = table.get(name)
    if column is None:
        if name in ALIASES:
            hint = f"claims have the columns' own names: {ALIASES[name]!r}"
        else:
            hint = did_you_mean(name, table) or "declare it: Producer(schema=pyarrow.schema([...]))"
        raise InvalidRecord(f"unknown column {shown(name)} in a claim", hint=hint, column=str(name))
    if column.kind not in (Kind.LIST, Kind.SCALAR):
        raise InvalidRecord(
            f"column {name!r} is {column.type_name}, and only numbers and lists of numbers can be claimed",
            hint=f"put the group with {name!r}, or leave it out",
            column=name,
        )
    form, rows = table.forms[name], 1 if column.per_record else rows
    if column.kind is Kind.SCALAR:
        return PackedColumn(form, entries=rows, count=rows)
    lengths = checked_lengths(name, wanted, rows)
    if lengths.shape != (rows,):
        raise InvalidRecord(
            f"column {name!r}: {counted(len(lengths), 'length')} for {counted(rows, 'row')}",
            hint=f"one length for each row: claim({len(lengths) or 1}, ...), or {counted(rows, 'length')}",
            column=name,
        )
    return PackedColumn(form, entries=rows, count=int(lengths.sum()), lengths=lengths)
