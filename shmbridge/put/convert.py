"""From what a caller hands to `put` to measured columns: Atropos groups, mappings, Arrow batches.

Knows which columns there are, their names and that rows must agree; one column by itself is
column_forms.py's. Called by shmbridge.put.planner and shmbridge.producer only.
"""

import difflib
import json
import math
import operator
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext.column import Column, row_lengths
from shmbridge._ext.pack import BadValue
from shmbridge.errors import InvalidRecord
from shmbridge.put import hints
from shmbridge.put.column_forms import Array, as_invalid, build, is_flat, is_nested, texts
from shmbridge.schema import ALIASES, JSON_COLUMNS, Columns, Tag
from shmbridge.schema import Column as ColumnType

_ATROPOS_MARKS = ("masks", "scores")


@dataclass(slots=True)
class Intake:
    """A group, measured: columns ready for a pack plan and what the record's slot says of it."""

    columns: list[Column]
    rows: int
    tokens: int
    uneven: bool
    env_id: int
    why_uneven: dict[str, str] = field(default_factory=dict)  # column -> row and numbers


def take_in(group: Any, table: Columns, *, foreign: bool = False, fold_masks: bool = True) -> Intake:
    """Measures a group in any accepted form. Raises InvalidRecord naming column, row and numbers.

    `foreign` carries what upstream delivers: rows of unequal length (flagged), unknown keys (in `extra`), no
    NaN. With `fold_masks` Atropos' masks are to be stored as loss_mask; the packer raises LossyMasks when
    that loses something.
    """
    from_arrow = type(group).__name__ == "RecordBatch" and type(group).__module__.startswith("pyarrow")
    if not (from_arrow or isinstance(group, Mapping)):
        raise InvalidRecord(
            f"a group is a mapping of columns or a pyarrow.RecordBatch, not {type(group).__name__}",
            hint='put({"tokens": [[1, 2], [3]]})',
        )
    is_atropos = not from_arrow and any(mark in group for mark in _ATROPOS_MARKS)
    columns = _from_arrow(group, table) if from_arrow else group
    try:
        return _Mapping(columns, table, foreign, fold_masks, is_atropos).take()
    except BadValue as bad:
        raise as_invalid(bad, table, written_as(bad.column, columns)) from None
    except InvalidRecord as wrong:
        raise _as_written(wrong, columns) from wrong.__cause__


def written_as(column: str, group: Any) -> str:
    """The key under which a group has a column: its name, or an alias of it."""
    names = group if isinstance(group, Mapping) else getattr(getattr(group, "schema", None), "names", ())
    if column in names:
        return column
    return next((alias for alias, name in ALIASES.items() if name == column and alias in names), column)


def _as_written(wrong: InvalidRecord, group: Mapping[str, Any]) -> InvalidRecord:
    """The error, in the name that the caller used for the column."""
    written = written_as(wrong.column, group)
    if written == wrong.column:
        return wrong
    message, hint = (text.replace(wrong.column, written) for text in (wrong.message, wrong.hint))
    return InvalidRecord(message, hint=hint, column=written, row=wrong.row, position=wrong.position)


class _Mapping:
    """One mapping under way."""

    def __init__(
        self, group: Mapping[str, Any], table: Columns, foreign: bool, fold_masks: bool, is_atropos: bool
    ) -> None:
        self.group, self.table = group, table
        self.foreign, self.fold, self.is_atropos = foreign, fold_masks, foreign or is_atropos
        self.columns: list[Column] = []
        self.lengths: dict[str, Array] = {}
        self.unknown: dict[str, Any] = {}
        self.why_uneven: dict[str, str] = {}

    def take(self) -> Intake:
        self.take_tokens()
        for key, value in self.group.items():
            name = ALIASES.get(key, key)
            if name in ("tokens", "env_id", "extra"):
                continue
            if name != key and name in self.group:
                raise InvalidRecord(
                    f"column {name!r} is given twice: as {name!r} and as {key!r}", column=name
                )
            if name == "masks":
                self.add_masks(value)
            elif name not in self.table:
                self.add_unknown(key, value)
            elif name in JSON_COLUMNS:
                self.add_json(name, value)
            else:
                self.add(name, value)
        self.add_extra()
        self.check_empty_rows()
        return Intake(
            columns=self.columns,
            rows=self.rows,
            tokens=int(self.lengths["tokens"].sum()),
            uneven=self.check_lengths(),
            env_id=self.env_id(),
            why_uneven=self.why_uneven,
        )

    def take_tokens(self) -> None:
        if "tokens" not in self.group and self.group:
            raise self.without_tokens()
        tokens = self.group.get("tokens")
        rows: Any = tokens[1] if tokens is not None and is_flat(tokens) else tokens
        if _empty_tag(rows) is not None or (
            not is_nested(rows) and hasattr(rows, "shape") and tuple(rows.shape)[:1] == (0,)
        ):
            raise InvalidRecord(
                "the group is empty: `tokens` has no rows", hint="skip the group before put", column="tokens"
            )
        self.add("tokens", tokens)
        column = self.columns[0]
        self.rows = column.entries
        if column.valid is not None:
            row = int(column.valid.argmin())
            raise InvalidRecord(f"column 'tokens' row {row} is None", column="tokens", row=row)

    def without_tokens(self) -> InvalidRecord:
        meant = next(
            (key for key in self.group if isinstance(key, str) and hints.column_meant(key) == "tokens"), None
        )
        has = ", ".join(map(repr, list(self.group)[:8]))
        hint = (
            f"rename {meant!r} to 'tokens'"
            if meant
            else 'put({"tokens": [[1, 2], [3]], ...}): each row is a prompt and its response'
        )
        return InvalidRecord(f"the group has no column 'tokens'; it has {has}", hint=hint, column="tokens")

    def check_empty_rows(self) -> None:
        """A score of nothing would count in its group's mean.

        Upstream takes such rows, so a foreign group may have them.
        """
        scored = next(
            (column for column in self.columns if column.name == "score" and column.tag == Tag.VALUES), None
        )
        if scored is None or self.foreign or scored.entries != self.rows:
            return
        empty = self.lengths["tokens"] == 0
        if scored.valid is not None:
            empty &= scored.valid
        if not empty.any():
            return
        row = int(empty.argmax())
        raise InvalidRecord(
            f"column 'tokens' row {row} has no tokens, and there is a score for it",
            hint="leave the row out of every column, or the group out if nothing was generated",
            column="tokens",
            row=row,
        )

    def env_id(self) -> int:
        value = self.group.get("env_id")
        if value is None:
            return -1
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 31:
            raise InvalidRecord(f"env_id {value!r} is not an environment's number", column="env_id")
        return number

    def add(self, name: str, value: Any) -> None:
        """A column as it is given; null, [] and {} become tags."""
        column = self.table[name]
        empty = _empty_tag(value)
        if empty is not None:
            self.columns.append(_tagged(self.table, column, empty))
            return
        built = build(self.table, column, value)
        if built.lengths is not None:
            self.lengths[name] = built.lengths
        self.columns.append(built)

    def add_masks(self, value: Any) -> None:
        """Atropos masks: folded into loss_mask while that loses nothing, else carried as they are beside
        it.
        """
        if _empty_tag(value) is not None or "loss_mask" in self.group:
            self.add("masks", value)
            return
        if not self.foreign and isinstance(value, (list, tuple)) and any(row is None for row in value):
            row = next(number for number, each in enumerate(value) if each is None)
            raise InvalidRecord(f"column 'masks' row {row} is None", column="masks", row=row)
        if (
            self.fold
            and _all_lists(value)
            and np.array_equal(row_lengths(list(value)), self.lengths["tokens"])
        ):
            lengths = self.lengths["loss_mask"] = self.lengths["tokens"]
            folded = Column(
                self.table.forms["loss_mask"],
                entries=len(lengths),
                count=int(lengths.sum()),
                lengths=lengths,
                rows=list(value),
                folds=self.columns[0],
            )
            self.columns.append(folded)
        else:
            self.add("masks", value)
            rows = [value[0]] if is_flat(value) else value
            try:
                trained = [None if row is None else np.not_equal(row, -100) for row in rows]
            except (TypeError, ValueError, RuntimeError) as wrong:
                raise InvalidRecord(
                    f"column 'masks' is list<int32>: {wrong}", hint="-100, or the token", column="masks"
                ) from wrong
            self.add("loss_mask", (trained[0], value[1]) if is_flat(value) else trained)

    def add_json(self, name: str, value: Any) -> None:
        column = self.table[name]
        empty = _empty_tag(value)
        if empty is not None:
            self.columns.append(_tagged(self.table, column, empty))
        elif column.per_record:
            self.columns.append(texts(self.table, column, [self.as_text(name, 0, value)]))
        elif isinstance(value, (list, tuple)) and len(value) == self.rows:
            rows = [
                None if row is None else self.as_text(name, number, row) for number, row in enumerate(value)
            ]
            self.columns.append(texts(self.table, column, rows))
        else:
            self.add_unknown(name, value)

    def as_text(self, name: str, row: int, value: Any) -> bytes | str:
        """Atropos' values become JSON, also plain strings, as its client writes them; in our own form a
        string is JSON already.
        """
        if isinstance(value, (str, bytes)) and not self.is_atropos:
            return _checked_json(name, row, value)
        try:
            if self.foreign:
                return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            text = msgspec.json.encode(value)
            if b"null" in text and not _is_finite(value):  # NaN has no JSON: msgspec writes null
                raise ValueError("NaN and infinity have no JSON")
            return text
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise InvalidRecord(
                f"column {name!r} row {row} cannot become JSON: {wrong}",
                hint="pass str, finite numbers, lists and dicts",
                column=name,
                row=row,
            ) from None

    def add_unknown(self, key: str, value: Any) -> None:
        """A column nobody knows, or side data that is not one value per row: `extra` for foreign groups, an
        error for others.
        """
        if self.foreign and isinstance(key, str):
            self.unknown[key] = value
        elif key in self.table:
            count = len(value) if hasattr(value, "__len__") else "no"
            raise InvalidRecord(f"column {key!r} has {count} rows, tokens have {self.rows}", column=key)
        else:
            meant = hints.column_meant(str(key))
            near = [meant] if meant else difflib.get_close_matches(str(key), self.table, n=3)
            hint = (
                f"did you mean {' or '.join(map(repr, near))}?"
                if near
                else "declare it: Producer(schema=pyarrow.schema([...]))"
            )
            if meant == "score":
                hint += " (one number a row; one per token is 'token_rewards')"
            raise InvalidRecord(f"unknown column {key!r}", hint=hint, column=str(key))

    def add_extra(self) -> None:
        extra = self.group.get("extra")
        if self.unknown:
            extra = {
                **(extra if isinstance(extra, Mapping) else {} if extra is None else {"extra": extra}),
                **self.unknown,
            }
        if extra is not None or "extra" in self.group:
            self.add_json("extra", extra)

    def check_lengths(self) -> bool:
        """Whether rows disagree; raises for them unless the group is foreign."""
        uneven = False
        for column in self.columns:
            kind = self.table[column.name]
            if column.tag != Tag.VALUES:
                continue
            if kind.per_record:
                check_one_value(column)
                continue
            row = (
                _first_difference(column, self.lengths["tokens"])
                if column.entries == self.rows and kind.per_token
                else -1
            )
            if column.entries == self.rows and row < 0:
                continue
            uneven = True
            wrong = self.unequal(column, row)
            if not self.foreign:
                raise wrong
            self.why_uneven[column.name] = wrong.message
        return uneven

    def unequal(self, column: Column, row: int) -> InvalidRecord:
        if row < 0 or column.lengths is None:
            return InvalidRecord(
                f"column {column.name!r} has {column.entries} rows, tokens have {self.rows}",
                column=column.name,
            )
        return InvalidRecord(
            f"column {column.name!r} row {row} has {column.lengths[row]} values, tokens have "
            f"{self.lengths['tokens'][row]}",
            hint="every per-token column has one value per token, prompt included",
            column=column.name,
            row=row,
        )


def check_one_value(column: Column) -> None:
    """Raises unless a column with one value per record has one."""
    if column.entries != 1:
        raise InvalidRecord(
            f"column {column.name!r} has {column.entries} values, and has one per record",
            hint="pass a list of one",
            column=column.name,
        )


def _first_difference(column: Column, tokens: Array) -> int:
    """The first row that is there and has not one value per token; -1 if none."""
    if column.lengths is None or np.array_equal(column.lengths, tokens):
        return -1
    valid = np.ones(len(tokens), bool) if column.valid is None else column.valid
    differing = np.flatnonzero((column.lengths != tokens) & valid)
    return int(differing[0]) if differing.size else -1


def _empty_tag(value: Any) -> Tag | None:
    if value is None:
        return Tag.NULL
    if isinstance(value, (list, tuple)) and len(value) == 0:
        return Tag.EMPTY_LIST
    return Tag.EMPTY_MAP if isinstance(value, Mapping) and len(value) == 0 else None


def _checked_json(name: str, row: int, text: bytes | str) -> bytes | str:
    """JSON as its reader will read it."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise BadValue(name, row, 0, text, f"is no JSON: {wrong}") from None
    return text


def _is_finite(value: Any) -> bool:
    """Whether no number in it, at any depth, is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _tagged(table: Columns, column: ColumnType, tag: Tag) -> Column:
    return Column(table.forms[column.name], tag=tag)


def _all_lists(rows: Any) -> bool:
    return isinstance(rows, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in rows)


def _from_arrow(batch: Any, table: Columns) -> dict[str, Any]:
    """The mapping a RecordBatch stands for: numbers by their value buffers, everything else by its Python
    values.
    """
    import pyarrow as pa

    group: dict[str, Any] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.null_count == len(array) and len(array):
            group[name] = None
        elif len(array) and name in table and table[name].per_record:  # repeated in every row
            value = next(value for value in array.to_pylist() if value is not None)
            group[name] = (
                value if name in JSON_COLUMNS else [dict(value) if pa.types.is_map(array.type) else value]
            )
        elif pa.types.is_map(array.type):
            group[name] = [None if row is None else dict(row) for row in array.to_pylist()]
        elif isinstance(array, pa.ListArray) and not (
            pa.types.is_nested(array.type.value_type) or array.null_count or _inner_nulls(array)
        ):
            group[name] = (array.flatten().to_numpy(zero_copy_only=False), np.diff(array.offsets.to_numpy()))
        elif pa.types.is_primitive(array.type) and array.null_count == 0:
            group[name] = array.to_numpy(zero_copy_only=False)
        else:
            group[name] = array.to_pylist()
    return group


def _inner_nulls(lists: Any) -> int:
    """Of values within rows, which to_numpy would make NaN."""
    return int(lists.flatten().null_count)
