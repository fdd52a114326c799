"""A group on its way into a lane: measured, planned, and what its slot will say. Made by the producer, before any memory is claimed.

Knows columns, plans and stamps; knows nothing of lanes, waiting or who reads.
"""

import operator
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from shmbridge import intake, sizing
from shmbridge._ext.pack import Column, Plan
from shmbridge.config import format_size
from shmbridge.errors import InvalidRecord, RecordTooBig
from shmbridge.measure import checked_lengths
from shmbridge.schema import Columns, Kind

Version = int | tuple[int, int] | None
Split = Literal["train", "eval"]
_LONGEST_GROUP_ID = 4096


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a caller says of a group beside its columns."""

    group_id: str
    group_size: int | None
    versions: tuple[int, int]
    split: str

    @classmethod
    def of(cls, group_id: str | int, group_size: int | None, version: Version, current: int, split: str) -> "Stamp":
        """Checks and completes it; `current` is stamped where no policy version is given."""
        if split not in ("train", "eval"):
            raise InvalidRecord(f'split={split!r} is not "train" or "eval"')
        raw_id = str(group_id).encode(errors="replace")
        if len(raw_id) > _LONGEST_GROUP_ID or raw_id.decode() != str(group_id):
            raise InvalidRecord(f"group_id {str(group_id)[:40]!r} is not text of at most {_LONGEST_GROUP_ID} bytes")
        if group_size is not None and not 1 <= group_size < 1 << 31:
            raise InvalidRecord(f"group_size={group_size} is not a number of rows")
        bounds = version if isinstance(version, tuple) else (version, version)
        try:
            oldest, newest = (current if bound is None else operator.index(bound) for bound in bounds)
        except (TypeError, ValueError):
            oldest, newest = 0, -1
        if not -1 <= oldest <= newest < 1 << 62:
            raise InvalidRecord(f"policy_version={version} is not a version, or (oldest, newest)")
        return cls(str(group_id), group_size, (oldest, newest), split)


class Outgoing:
    """One measured record: its plan, its slot's fields, and whether it has been committed or counted."""

    __slots__ = ("done", "fields", "group", "plan", "sequence", "stamp")

    def __init__(self, measured: intake.Intake, stamp: Stamp, group: tuple[Any, bool] | None) -> None:
        if stamp.group_size is not None and stamp.group_size < measured.rows:
            raise InvalidRecord(f"group_size={stamp.group_size} is less than the {measured.rows} rows given")
        raw_id = stamp.group_id.encode()
        self.plan = Plan(measured.columns, raw_id)
        self.stamp = stamp
        self.group = group  # (what was handed over, foreign), to measure it again
        self.done = False
        self.sequence: int | None = None
        self.fields = {
            "rows": measured.rows,
            "columns": len(measured.columns),
            "index_bytes": self.plan.index_bytes,
            "group_id_bytes": len(raw_id),
            "flags": (stamp.split == "eval") | measured.uneven << 1,
            "tokens": measured.tokens,
            "min_policy_version": stamp.versions[0],
            "max_policy_version": stamp.versions[1],
            "t_created_ns": time.monotonic_ns(),
            "group_size": measured.rows if stamp.group_size is None else stamp.group_size,
            "env_id": measured.env_id,
        }

    def check_fits(self, lane_bytes: int) -> None:
        """Raises RecordTooBig for a record of more than half a lane, which could never be written while another is read."""
        size = self.plan.extent_bytes
        if size > lane_bytes // 2:
            least, eight = (sizing.as_option(sizing.lane_bytes_holding(held, size)) for held in (1, 8))
            raise RecordTooBig(
                f"a record of {format_size(size)} ({self.fields['rows']} rows, {self.fields['tokens']} tokens); half of the lane's "
                f"{format_size(lane_bytes)} is the limit",
                hint=f'Producer(lane_bytes="{least}") holds one, "{eight}" eight of them; or put the group in fragments with group_size=',
            )

    def with_masks_as_they_are(self, table: Columns) -> "Outgoing":
        """The same group measured again, its Atropos masks not folded."""
        assert self.group is not None
        group, foreign = self.group
        return Outgoing(intake.take_in(group, table, foreign=foreign, fold_masks=False), self.stamp, self.group)


def claimed(table: Columns, rows: int, lengths: Mapping[str, Any]) -> intake.Intake:
    """The measure of a record whose values the caller will write in place. Raises InvalidRecord."""
    columns = [_claimed_column(table, name, rows, wanted) for name, wanted in lengths.items()]
    tokens = next((column for column in columns if column.name == "tokens"), None)
    if rows < 1 or tokens is None or tokens.lengths is None:
        raise InvalidRecord(f"a claim needs `tokens` and at least one row, got {rows} rows of {', '.join(lengths) or 'nothing'}")
    for column in columns:
        if table[column.name].per_token and column.lengths is not None and not np.array_equal(column.lengths, tokens.lengths):
            raise InvalidRecord(
                f"column {column.name!r} has lengths {column.lengths.tolist()}, tokens have {tokens.lengths.tolist()}",
                column=column.name,
            )
    return intake.Intake(columns, rows, int(tokens.lengths.sum()), False, rows, -1)


def _claimed_column(table: Columns, name: str, rows: int, wanted: Any) -> Column:
    column = table.get(name)
    if column is None or column.kind not in (Kind.LIST, Kind.SCALAR):
        raise InvalidRecord(f"column {name!r} cannot be claimed: only number and list<number> columns can", column=name)
    number, rows = table.number[name], 1 if column.per_record else rows
    if column.kind is Kind.SCALAR:
        return Column(name, number, column.kind, column.dtype, entries=rows, count=rows, finite=column.finite)
    lengths = checked_lengths(name, wanted)
    if lengths.shape != (rows,):
        raise InvalidRecord(f"column {name!r}: lengths of shape {lengths.shape} for {rows} rows", column=name)
    count = int(lengths.sum())
    return Column(name, number, column.kind, column.dtype, entries=rows, count=count, lengths=lengths, finite=column.finite)
