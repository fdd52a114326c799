"""From what a caller hands to `put` to measured columns: Atropos groups, mappings, Arrow batches; lists, arrays, tensors.

Checks shapes and names; values are checked while they are packed. Knows nothing of lanes. Called by shmbridge.producer only.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext.pack import BadValue, Column, copy_array, row_lengths
from shmbridge.errors import InvalidRecord
from shmbridge.schema import JSON_COLUMNS, Columns, Kind, Tag
from shmbridge.schema import Column as ColumnType

_ALIASES = {"scores": "score", "rewards": "token_rewards"}
_ATROPOS_MARKS = ("masks", "scores")


@dataclass(slots=True)
class Intake:
    """A group, measured: columns ready for a pack plan and what the record's slot says of it."""

    columns: list[Column]
    rows: int
    tokens: int
    uneven: bool
    group_size: int
    env_id: int


def take_in(group: Any, table: Columns, *, foreign: bool = False, fold_masks: bool = True) -> Intake:
    """Measures a group in any accepted form. Raises InvalidRecord naming column, row and numbers.

    `foreign` carries what upstream accepts: rows of unequal length (flagged), unknown keys (in `extra`). With `fold_masks`
    Atropos' masks are to be stored as loss_mask; the packer raises LossyMasks when that loses something.
    """
    if type(group).__name__ == "RecordBatch" and type(group).__module__.startswith("pyarrow"):
        return _from_arrow(group, table)
    if not isinstance(group, Mapping):
        raise InvalidRecord(
            f"a group is a mapping of columns or a pyarrow.RecordBatch, not {type(group).__name__}", hint='put({"tokens": [[1, 2], [3]]})'
        )
    return _Mapping(group, table, foreign, fold_masks).take()


class _Mapping:
    """One mapping under way."""

    def __init__(self, group: Mapping[str, Any], table: Columns, foreign: bool, fold_masks: bool) -> None:
        self.table, self.foreign, self.fold = table, foreign, fold_masks
        self.is_atropos = any(mark in group for mark in _ATROPOS_MARKS)
        self.group = group
        self.columns: list[Column] = []
        self.lengths: dict[str, np.ndarray[Any, Any]] = {}
        self.unknown: dict[str, Any] = {}

    def take(self) -> Intake:
        tokens = self.group.get("tokens")
        if tokens is None or len(tokens) == 0:
            raise InvalidRecord("the group is empty: `tokens` has no rows", hint="skip the group before put", column="tokens")
        self.rows = len(tokens[1]) if _is_flat(tokens) else len(tokens)
        self.add("tokens", tokens)
        for key, value in self.group.items():
            name = _ALIASES.get(key, key)
            if name in ("tokens", "env_id", "extra"):
                continue
            if name == "masks":
                self.add_masks(value)
            elif name not in self.table:
                self.add_unknown(key, value)
            elif name in JSON_COLUMNS:
                self.add_json(name, value)
            else:
                self.add(name, value)
        self.add_extra()
        uneven = self.check_lengths()
        env_id = self.group.get("env_id")
        return Intake(
            columns=self.columns,
            rows=self.rows,
            tokens=int(self.lengths["tokens"].sum()),
            uneven=uneven,
            group_size=self.rows,
            env_id=-1 if env_id is None else int(env_id),
        )

    def add(self, name: str, value: Any) -> None:
        column = self.table[name]
        empty = _empty_tag(value)
        if empty is not None:
            self.columns.append(_tagged(self.table, column, empty))
            return
        built = _build(self.table, column, value)
        if built.lengths is not None:
            self.lengths[name] = built.lengths
        self.columns.append(built)

    def add_masks(self, value: Any) -> None:
        """Atropos masks: folded into loss_mask while that loses nothing, else carried as they are beside it."""
        if _empty_tag(value) is not None or "loss_mask" in self.group:
            self.add("masks", value)
            return
        rows, tokens = list(value), self.group["tokens"]
        foldable = self.fold and _all_lists(rows) and _all_lists(tokens) and len(rows) == len(tokens)
        lengths = row_lengths(rows)
        if foldable and np.array_equal(lengths, self.lengths["tokens"]):
            column = self.table["loss_mask"]
            folded = Column(
                "loss_mask", self.table.number["loss_mask"], column.kind, column.dtype,
                entries=len(rows), count=int(lengths.sum()), lengths=lengths, rows=rows, tokens=tokens,
            )  # fmt: skip
            self.lengths["loss_mask"] = lengths
            self.columns.append(folded)
        else:
            self.add("masks", rows)
            self.add("loss_mask", [np.not_equal(row, -100) for row in rows])

    def add_json(self, name: str, value: Any) -> None:
        column = self.table[name]
        empty = _empty_tag(value)
        if empty is not None:
            self.columns.append(_tagged(self.table, column, empty))
        elif column.per_record:
            self.columns.append(_texts(self.table, column, [self.as_text(value)]))
        elif isinstance(value, (list, tuple)) and len(value) == self.rows:
            self.columns.append(_texts(self.table, column, [None if row is None else self.as_text(row) for row in value]))
        else:
            self.add_unknown(name, value)

    def as_text(self, value: Any) -> bytes | str:
        """Atropos' values become JSON, also plain strings; in our own form a string is JSON already."""
        return value if isinstance(value, (str, bytes)) and not self.is_atropos else _json(value)

    def add_unknown(self, key: str, value: Any) -> None:
        if not self.foreign:
            near = difflib.get_close_matches(key, self.table, n=1)
            if key in self.table:
                raise InvalidRecord(f"column {key!r} has {_count(value)} rows, tokens have {self.rows}", column=key)
            raise InvalidRecord(
                f"unknown column {key!r}",
                hint=f"did you mean {near[0]!r}?" if near else "declare it: Producer(schema=pyarrow.schema([...]))",
                column=key,
            )
        self.unknown[key] = value

    def add_extra(self) -> None:
        extra = self.group.get("extra")
        if self.unknown:
            extra = {**(extra if isinstance(extra, Mapping) else {} if extra is None else {"extra": extra}), **self.unknown}
        if extra is not None or "extra" in self.group:
            self.add_json("extra", extra)

    def check_lengths(self) -> bool:
        """Whether rows disagree; raises for them unless the group is foreign."""
        uneven = False
        tokens = self.lengths["tokens"]
        for column in self.columns:
            if column.tag != Tag.VALUES or self.table[column.name].per_record:
                continue
            if column.entries != self.rows:
                uneven = True
                if not self.foreign:
                    raise InvalidRecord(f"column {column.name!r} has {column.entries} rows, tokens have {self.rows}", column=column.name)
            elif self.table[column.name].per_token and column.lengths is not None:
                valid = np.ones(self.rows, bool) if column.validity is None else column.validity.astype(bool)
                differing = np.flatnonzero((column.lengths != tokens) & valid)
                if differing.size == 0:
                    continue
                uneven = True
                if not self.foreign:
                    row = int(differing[0])
                    raise InvalidRecord(
                        f"column {column.name!r} row {row} has {column.lengths[row]} values, tokens have {tokens[row]}",
                        hint="every per-token column has one value per token, prompt included",
                        column=column.name,
                        row=row,
                    )
        return uneven


def _json(value: Any) -> bytes:
    try:
        return msgspec.json.encode(value)
    except (TypeError, ValueError, OverflowError) as wrong:
        raise InvalidRecord(f"side data cannot become JSON: {wrong}", hint="pass str, numbers, lists and dicts") from wrong


def _count(value: Any) -> int | str:
    return len(value) if hasattr(value, "__len__") else "no"


def _empty_tag(value: Any) -> Tag | None:
    if value is None:
        return Tag.NULL
    if isinstance(value, (list, tuple)) and len(value) == 0:
        return Tag.EMPTY_LIST
    return Tag.EMPTY_MAP if isinstance(value, Mapping) and len(value) == 0 else None


def _tagged(table: Columns, column: ColumnType, tag: Tag) -> Column:
    return Column(column.name, table.number[column.name], column.kind, column.dtype, tag=tag)


def _is_flat(value: Any) -> bool:
    """The (flat array, lengths) form."""
    return isinstance(value, tuple) and len(value) == 2 and not isinstance(value[0], (list, tuple)) and np.ndim(value[0]) == 1 and (
        hasattr(value[0], "dtype")
    )


def _all_lists(rows: Any) -> bool:
    return isinstance(rows, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in rows)


def _array(value: Any) -> np.ndarray[Any, Any]:
    """An array of a tensor or anything array-like; bfloat16, which numpy lacks, widens to float32."""
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    return np.ascontiguousarray(value)


def _build(table: Columns, column: ColumnType, value: Any) -> Column:
    try:
        return _BUILDERS[column.kind](table, column, value)
    except BadValue as bad:
        raise as_invalid(bad) from None
    except (TypeError, ValueError) as wrong:
        if isinstance(wrong, InvalidRecord):
            raise
        raise InvalidRecord(f"column {column.name!r} is {column.type_name}: {wrong}", column=column.name) from wrong


def as_invalid(bad: BadValue) -> InvalidRecord:
    """The public error of a value the packer refused."""
    return InvalidRecord(
        f"column {bad.column!r} row {bad.row} position {bad.position}: {bad.value!r} {bad.reason}",
        hint="mend the value in the environment",
        column=bad.column,
        row=bad.row,
        position=bad.position,
    )


def _scalars(table: Columns, column: ColumnType, value: Any) -> Column:
    source = _array(value) if hasattr(value, "dtype") else _scalar_list(column, value)
    validity = None
    if isinstance(source, tuple):
        source, validity = source
    flat = np.empty(len(source), column.dtype)
    target = Column(column.name, table.number[column.name], column.kind, column.dtype)
    try:
        copy_array(target, 0, source, flat)
    except BadValue as bad:
        bad.row, bad.position = bad.position, 0
        raise
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(flat), count=len(flat), rows=flat, validity=validity, finite=column.finite,
    )  # fmt: skip


def _scalar_list(column: ColumnType, value: Any) -> Any:
    """An array of Python scalars, with validity where some are None."""
    rows = list(value)
    if any(row is None for row in rows):
        validity = np.array([row is not None for row in rows], np.uint8)
        return np.array([0 if row is None else row for row in rows]), validity
    source = np.array(rows)
    if source.ndim != 1 or source.dtype.kind not in "iufb":
        row = next((i for i, each in enumerate(rows) if not isinstance(each, (int, float, np.number))), 0)
        raise BadValue(column.name, row, 0, rows[row], f"is not a {column.dtype}")
    return source


def _lists(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    if _is_flat(value):
        flat, lengths = _array(value[0]), np.ascontiguousarray(value[1], np.uint32)
        if int(lengths.sum()) != len(flat):
            raise InvalidRecord(
                f"column {column.name!r}: {len(flat)} values, lengths add up to {int(lengths.sum())}",
                hint="(flat array, lengths) must agree",
                column=column.name,
            )
        rows: Any = [flat]
    else:
        rows = list(value)
        if any(row is None for row in rows):
            validity = np.array([row is not None for row in rows], np.uint8)
            rows = [() if row is None else row for row in rows]
        rows = [row if isinstance(row, (list, tuple)) else _array(row) for row in rows]
        lengths = row_lengths(rows)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(lengths), count=int(lengths.sum()), lengths=lengths, validity=validity, rows=rows, finite=column.finite,
    )  # fmt: skip


def _list_lists(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    outer = list(value)
    if any(row is None for row in outer):
        validity = np.array([row is not None for row in outer], np.uint8)
        outer = [() if row is None else row for row in outer]
    lengths = row_lengths(outer)
    inner_rows = [inner if isinstance(inner, (list, tuple)) else _array(inner) for row in outer for inner in row]
    inner = row_lengths(inner_rows)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(outer), count=int(inner.sum()), lengths=lengths, inner=inner, validity=validity, rows=inner_rows, finite=column.finite,
    )  # fmt: skip


def _maps(table: Columns, column: ColumnType, value: Any) -> Column:
    rows = [dict(row) for row in value]
    keys = [key.encode() for row in rows for key in row]
    values = np.array([each for row in rows for each in row.values()], column.dtype)
    lengths = row_lengths(rows)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(rows), count=len(values), lengths=lengths, inner=row_lengths(keys), keys=b"".join(keys),
        rows=values, finite=column.finite,
    )  # fmt: skip


def _byte_rows(table: Columns, column: ColumnType, value: Any) -> Column:
    if isinstance(value, (str, bytes)):
        raise InvalidRecord(f"column {column.name!r} is one {column.type_name} a row, not a single one", column=column.name)
    return _texts(table, column, value)


def _texts(table: Columns, column: ColumnType, value: Sequence[Any]) -> Column:
    validity = None
    if any(row is None for row in value):
        validity = np.array([row is not None for row in value], np.uint8)
    raw = []
    for row, each in enumerate(value):
        if each is not None and not isinstance(each, (str, bytes, bytearray, memoryview)):
            raise BadValue(column.name, row, 0, each, f"is not {column.type_name}")
        raw.append(b"" if each is None else each.encode() if isinstance(each, str) else bytes(each))
    whole = b"".join(raw)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(raw), count=len(whole), lengths=row_lengths(raw), validity=validity, rows=whole,
    )  # fmt: skip


_BUILDERS = {Kind.SCALAR: _scalars, Kind.LIST: _lists, Kind.LIST_LIST: _list_lists, Kind.MAP: _maps, Kind.BYTES: _byte_rows}


def _from_arrow(batch: Any, table: Columns) -> Intake:
    """A RecordBatch: list columns by their value buffers, everything else by its Python values."""
    import pyarrow as pa

    group: dict[str, Any] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if isinstance(array, pa.ListArray) and not pa.types.is_nested(array.type.value_type) and array.null_count == 0:
            offsets = array.offsets.to_numpy()
            group[name] = (array.flatten().to_numpy(zero_copy_only=False), np.diff(offsets).astype(np.uint32))
        elif pa.types.is_map(array.type):
            group[name] = [dict(row or {}) for row in array.to_pylist()]
        elif pa.types.is_primitive(array.type) and array.null_count == 0:
            group[name] = array.to_numpy(zero_copy_only=False)
        elif name in table and table[name].per_record:
            values = [value for value in array.to_pylist() if value is not None]
            group[name] = values[0] if values else None
        elif array.null_count == len(array):
            group[name] = None
        else:
            group[name] = array.to_pylist()
    return _Mapping(group, table, foreign=False, fold_masks=True).take()
