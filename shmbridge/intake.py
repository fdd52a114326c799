"""From what a caller hands to `put` to measured columns: Atropos groups, mappings, Arrow batches; lists, arrays, tensors.

Checks shapes and names; values are checked while they are packed. Knows nothing of lanes. Called by shmbridge.outgoing only.
"""

import difflib
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext.pack import BadValue, Column, row_lengths
from shmbridge.errors import InvalidRecord
from shmbridge.schema import JSON_COLUMNS, Columns, Kind, Tag
from shmbridge.schema import Column as ColumnType

_ALIASES = {"scores": "score", "rewards": "token_rewards"}
_ATROPOS_MARKS = ("masks", "scores")

Array = np.ndarray[Any, Any]


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

    `foreign` carries what upstream accepts: rows of unequal length (flagged), unknown keys (in `extra`). With `fold_masks` Atropos' masks
    are to be stored as loss_mask; the packer raises LossyMasks when that loses something.
    """
    from_arrow = type(group).__name__ == "RecordBatch" and type(group).__module__.startswith("pyarrow")
    if not (from_arrow or isinstance(group, Mapping)):
        raise InvalidRecord(
            f"a group is a mapping of columns or a pyarrow.RecordBatch, not {type(group).__name__}", hint='put({"tokens": [[1, 2], [3]]})'
        )
    is_atropos = not from_arrow and any(mark in group for mark in _ATROPOS_MARKS)
    columns = _from_arrow(group, table) if from_arrow else group
    try:
        return _Mapping(columns, table, foreign, fold_masks, is_atropos).take()
    except BadValue as bad:
        raise as_invalid(bad) from None


class _Mapping:
    """One mapping under way."""

    def __init__(self, group: Mapping[str, Any], table: Columns, foreign: bool, fold_masks: bool, is_atropos: bool) -> None:
        self.group, self.table = group, table
        self.foreign, self.fold, self.is_atropos = foreign, fold_masks, is_atropos
        self.columns: list[Column] = []
        self.lengths: dict[str, Array] = {}
        self.unknown: dict[str, Any] = {}

    def take(self) -> Intake:
        self.take_tokens()
        for key, value in self.group.items():
            name = _ALIASES.get(key, key)
            if name in ("tokens", "env_id", "extra"):
                continue
            if name != key and name in self.group:
                raise InvalidRecord(f"column {name!r} is given twice: as {name!r} and as {key!r}", column=name)
            if name == "masks":
                self.add_masks(value)
            elif name not in self.table:
                self.add_unknown(key, value)
            elif name in JSON_COLUMNS:
                self.add_json(name, value)
            else:
                self.add(name, value)
        self.add_extra()
        return Intake(
            columns=self.columns,
            rows=self.rows,
            tokens=int(self.lengths["tokens"].sum()),
            uneven=self.check_lengths(),
            group_size=self.rows,
            env_id=self.env_id(),
        )

    def take_tokens(self) -> None:
        tokens = self.group.get("tokens")
        rows: Any = tokens[1] if tokens is not None and _is_flat(tokens) else tokens
        if _empty_tag(rows) is not None or (hasattr(rows, "shape") and tuple(rows.shape)[:1] == (0,)):
            raise InvalidRecord("the group is empty: `tokens` has no rows", hint="skip the group before put", column="tokens")
        self.add("tokens", tokens)
        column = self.columns[0]
        self.rows = column.entries
        if column.validity is not None:
            row = int(column.validity.argmin())
            raise InvalidRecord(f"column 'tokens' row {row} is None", column="tokens", row=row)

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
        built = _build(self.table, column, value)
        if built.lengths is not None:
            self.lengths[name] = built.lengths
        self.columns.append(built)

    def add_masks(self, value: Any) -> None:
        """Atropos masks: folded into loss_mask while that loses nothing, else carried as they are beside it."""
        if _empty_tag(value) is not None or "loss_mask" in self.group:
            self.add("masks", value)
            return
        if not self.foreign and isinstance(value, (list, tuple)) and any(row is None for row in value):
            row = next(number for number, each in enumerate(value) if each is None)
            raise InvalidRecord(f"column 'masks' row {row} is None", column="masks", row=row)
        tokens = self.group["tokens"]
        if self.fold and _all_lists(value) and _all_lists(tokens) and np.array_equal(row_lengths(list(value)), self.lengths["tokens"]):
            column = self.table["loss_mask"]
            lengths = self.lengths["loss_mask"] = self.lengths["tokens"]
            folded = Column(
                "loss_mask", self.table.number["loss_mask"], column.kind, column.dtype,
                entries=len(lengths), count=int(lengths.sum()), lengths=lengths, rows=list(value), tokens=tokens,
            )  # fmt: skip
            self.columns.append(folded)
        else:
            self.add("masks", value)
            rows = [value[0]] if _is_flat(value) else value
            trained = [None if row is None else np.not_equal(row, -100) for row in rows]
            self.add("loss_mask", (trained[0], value[1]) if _is_flat(value) else trained)

    def add_json(self, name: str, value: Any) -> None:
        column = self.table[name]
        empty = _empty_tag(value)
        if empty is not None:
            self.columns.append(_tagged(self.table, column, empty))
        elif column.per_record:
            self.columns.append(_texts(self.table, column, [self.as_text(name, value)]))
        elif isinstance(value, (list, tuple)) and len(value) == self.rows:
            self.columns.append(_texts(self.table, column, [None if row is None else self.as_text(name, row) for row in value]))
        else:
            self.add_unknown(name, value)

    def as_text(self, name: str, value: Any) -> bytes | str:
        """Atropos' values become JSON, also plain strings; in our own form a string is JSON already."""
        if isinstance(value, (str, bytes)) and not self.is_atropos:
            return value
        try:
            return msgspec.json.encode(value)
        except (TypeError, ValueError, OverflowError) as wrong:
            raise InvalidRecord(
                f"column {name!r} cannot become JSON: {wrong}", hint="pass str, numbers, lists and dicts", column=name
            ) from None

    def add_unknown(self, key: str, value: Any) -> None:
        """A column nobody knows, or side data that is not one value per row: `extra` for foreign groups, an error for others."""
        if self.foreign and isinstance(key, str):
            self.unknown[key] = value
        elif key in self.table:
            count = len(value) if hasattr(value, "__len__") else "no"
            raise InvalidRecord(f"column {key!r} has {count} rows, tokens have {self.rows}", column=key)
        else:
            near = difflib.get_close_matches(str(key), self.table, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "declare it: Producer(schema=pyarrow.schema([...]))"
            raise InvalidRecord(f"unknown column {key!r}", hint=hint, column=str(key))

    def add_extra(self) -> None:
        extra = self.group.get("extra")
        if self.unknown:
            extra = {**(extra if isinstance(extra, Mapping) else {} if extra is None else {"extra": extra}), **self.unknown}
        if extra is not None or "extra" in self.group:
            self.add_json("extra", extra)

    def check_lengths(self) -> bool:
        """Whether rows disagree; raises for them unless the group is foreign."""
        uneven = False
        for column in self.columns:
            kind = self.table[column.name]
            if column.tag != Tag.VALUES or kind.per_record:
                continue
            row = _first_difference(column, self.lengths["tokens"]) if column.entries == self.rows and kind.per_token else -1
            if column.entries == self.rows and row < 0:
                continue
            uneven = True
            if not self.foreign:
                raise self.unequal(column, row)
        return uneven

    def unequal(self, column: Column, row: int) -> InvalidRecord:
        if row < 0 or column.lengths is None:
            return InvalidRecord(f"column {column.name!r} has {column.entries} rows, tokens have {self.rows}", column=column.name)
        return InvalidRecord(
            f"column {column.name!r} row {row} has {column.lengths[row]} values, tokens have {self.lengths['tokens'][row]}",
            hint="every per-token column has one value per token, prompt included",
            column=column.name,
            row=row,
        )


def _first_difference(column: Column, tokens: Array) -> int:
    """The first row that is there and has not one value per token; -1 if none."""
    if column.lengths is None or np.array_equal(column.lengths, tokens):
        return -1
    valid = np.ones(len(tokens), bool) if column.validity is None else column.validity.astype(bool)
    differing = np.flatnonzero((column.lengths != tokens) & valid)
    return int(differing[0]) if differing.size else -1


def _empty_tag(value: Any) -> Tag | None:
    if value is None:
        return Tag.NULL
    if isinstance(value, (list, tuple)) and len(value) == 0:
        return Tag.EMPTY_LIST
    return Tag.EMPTY_MAP if isinstance(value, Mapping) and len(value) == 0 else None


def _tagged(table: Columns, column: ColumnType, tag: Tag) -> Column:
    return Column(column.name, table.number[column.name], column.kind, column.dtype, tag=tag)


def _is_flat(value: Any) -> bool:
    """The (flat array, lengths) form: a pair of a 1-D array and whole numbers. Two float arrays are two rows."""
    if not (isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "dtype") and np.ndim(value[0]) == 1):
        return False
    return not hasattr(value[1], "dtype") or "int" in str(value[1].dtype)


def _all_lists(rows: Any) -> bool:
    return isinstance(rows, (list, tuple)) and all(isinstance(row, (list, tuple)) for row in rows)


def _array(value: Any) -> Array:
    """An array of a tensor or anything array-like; bfloat16, which numpy lacks, widens to float32."""
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    return array if array.flags.c_contiguous else array.copy()


def checked_lengths(name: str, lengths: Any) -> Array:
    """Row lengths a caller gives, as uint32; InvalidRecord if they are no lengths."""
    found = np.asarray(lengths)
    if found.ndim != 1 or found.dtype.kind not in "iu" or (found.size and (found.min() < 0 or found.max() > np.iinfo(np.uint32).max)):
        raise InvalidRecord(f"column {name!r}: lengths are whole numbers from 0, one a row, not {lengths!r:.80}", column=name)
    return found.astype(np.uint32)


def _row(column: ColumnType, number: int, row: Any) -> Any:
    """One row of a list column: a list, or a 1-D array."""
    if isinstance(row, (list, tuple)):
        return row
    if isinstance(row, (str, bytes, Mapping)) or not (hasattr(row, "__array__") or hasattr(row, "__len__")):
        raise BadValue(column.name, number, 0, row, "is not a row of numbers")
    array = _array(row)
    if array.ndim != 1:
        raise BadValue(column.name, number, 0, row, "is not one-dimensional")
    return array


def _build(table: Columns, column: ColumnType, value: Any) -> Column:
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise InvalidRecord(f"column {column.name!r} takes rows of {column.type_name}, not a {type(value).__name__}", column=column.name)
    try:
        return _BUILDERS[column.kind](table, column, value)
    except BadValue:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError) as wrong:
        if isinstance(wrong, InvalidRecord):
            raise
        raise InvalidRecord(f"column {column.name!r} is {column.type_name}: {wrong}", column=column.name) from wrong


def as_invalid(bad: BadValue) -> InvalidRecord:
    """The public error of a value the packer refused."""
    return InvalidRecord(
        f"column {bad.column!r} row {bad.row} position {bad.position}: {bad.value!r:.80} {bad.reason}",
        hint="mend the value in the environment",
        column=bad.column,
        row=bad.row,
        position=bad.position,
    )


def _scalars(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    if hasattr(value, "dtype"):
        flat = _array(value)
        if flat.ndim != 1:
            raise BadValue(column.name, 0, 0, flat.shape, "is not one value a row")
        rows: Any = [flat]  # checked and converted like a row of a list
        entries = len(flat)
    else:
        values = list(value)
        entries = len(values)
        if any(each is None for each in values):
            validity = np.array([each is not None for each in values], np.uint8)
            values = [0 if each is None else each for each in values]
        rows = [values]
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=entries, count=entries, rows=rows, validity=validity, finite=column.finite,
    )  # fmt: skip


def _lists(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    if _is_flat(value):
        flat, lengths = _array(value[0]), checked_lengths(column.name, value[1])
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
        rows = [row if type(row) is list else _row(column, number, row) for number, row in enumerate(rows)]
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
    inner_rows = [_row(column, number, inner) for number, row in enumerate(outer) for inner in row]
    lengths, inner = row_lengths(outer), row_lengths(inner_rows)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(outer), count=int(inner.sum()), lengths=lengths, inner=inner, validity=validity, rows=inner_rows, finite=column.finite,
    )  # fmt: skip


def _maps(table: Columns, column: ColumnType, value: Any) -> Column:
    validity, keys, values, counts = None, [], [], []
    rows = list(value)
    if any(row is None for row in rows):
        validity = np.array([row is not None for row in rows], np.uint8)
    for number, row in enumerate(rows):
        pairs = {} if row is None else dict(row)
        for key, each in pairs.items():
            if not isinstance(key, str):
                raise BadValue(column.name, number, 0, key, "is not a name")
            keys.append(_utf8(column, number, key))
            values.append(each)
        counts.append(len(pairs))
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(rows), count=len(values), lengths=np.array(counts, np.uint32), inner=row_lengths(keys), keys=b"".join(keys),
        validity=validity, rows=[values], finite=column.finite,
    )  # fmt: skip


def _texts(table: Columns, column: ColumnType, value: Sequence[Any]) -> Column:
    rows, validity = list(value), None
    if any(row is None for row in rows):
        validity = np.array([row is not None for row in rows], np.uint8)
    raw = [b"" if row is None else _utf8(column, number, row) for number, row in enumerate(rows)]
    whole = b"".join(raw)
    return Column(
        column.name, table.number[column.name], column.kind, column.dtype,
        entries=len(raw), count=len(whole), lengths=row_lengths(raw), validity=validity, rows=whole,
    )  # fmt: skip


def _utf8(column: ColumnType, row: int, value: Any) -> bytes:
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise BadValue(column.name, row, 0, value, f"is not {column.type_name}")
    try:
        return value.encode() if isinstance(value, str) else bytes(value)
    except UnicodeEncodeError as wrong:
        raise BadValue(column.name, row, wrong.start, value, "is not Unicode text") from None


_BUILDERS = {Kind.SCALAR: _scalars, Kind.LIST: _lists, Kind.LIST_LIST: _list_lists, Kind.MAP: _maps, Kind.BYTES: _texts}


def _from_arrow(batch: Any, table: Columns) -> dict[str, Any]:
    """The mapping a RecordBatch stands for: numbers by their value buffers, everything else by its Python values."""
    import pyarrow as pa

    group: dict[str, Any] = {}
    for name, array in zip(batch.schema.names, batch.columns, strict=True):
        if array.null_count == len(array) and len(array):
            group[name] = None
        elif pa.types.is_map(array.type):
            group[name] = [None if row is None else dict(row) for row in array.to_pylist()]
        elif isinstance(array, pa.ListArray) and not pa.types.is_nested(array.type.value_type) and array.null_count == 0:
            group[name] = (array.flatten().to_numpy(zero_copy_only=False), np.diff(array.offsets.to_numpy()))
        elif pa.types.is_primitive(array.type) and array.null_count == 0:
            group[name] = array.to_numpy(zero_copy_only=False)
        elif name in table and table[name].per_record:
            group[name] = next(value for value in array.to_pylist() if value is not None)
        else:
            group[name] = array.to_pylist()
    return group
