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
from shmbridge.errors import RecordTooBig, counted
from shmbridge.put.convert import Converter, checked_lengths, with_reason_codes
from shmbridge.put.errors import PutNotices, as_invalid, refused
from shmbridge.put.recorded import RecordedGroup
from shmbridge.put.relayed import RelayedRecord
from shmbridge.record.row_checks import new_sampler
from shmbridge.schema import ALIASES, Columns, Kind

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
