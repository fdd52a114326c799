"""One column, measured: how many rows of what length, and where the values are, be they lists, arrays,
tensors or text.

Knows shapes; values are checked while they are packed (`_ext/pack.pyx`). Knows nothing of groups or lanes.
Called by shmbridge.put.convert.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shmbridge._ext.column import Column, row_lengths
from shmbridge._ext.pack import BadValue, row_of
from shmbridge.errors import InvalidRecord
from shmbridge.put import hints
from shmbridge.schema import Column as ColumnType
from shmbridge.schema import Columns, Kind

Array = np.ndarray[Any, Any]


def _array(value: Any) -> Array:
    """An array of a tensor or anything array-like; bfloat16, which numpy lacks, widens to float32."""
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    return array if array.flags.c_contiguous else array.copy()


def first_masked(value: Any) -> int | None:
    """The place of the first value that a NumPy masked array leaves out; None where there is none."""
    if not (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        return None
    return int(np.ma.getmaskarray(value).reshape(-1).argmax())


def _masked(column: ColumnType, row: int, position: int) -> BadValue:
    return BadValue(column.name, row, position, np.ma.masked, "is no value: the array is masked there")


def checked_lengths(name: str, lengths: Any) -> Array:
    """Row lengths a caller gives, as uint32; InvalidRecord if they are no lengths."""
    found = np.asarray(lengths)
    no_lengths = first_masked(lengths) is not None or found.ndim != 1 or found.dtype.kind not in "iu"
    if no_lengths or (found.size and (found.min() < 0 or found.max() > np.iinfo(np.uint32).max)):
        raise InvalidRecord(
            f"column {name!r}: lengths are whole numbers from 0, one a row, not {lengths!r:.80}", column=name
        )
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
    if (place := first_masked(row)) is not None:
        raise _masked(column, number, place)
    return array


def as_invalid(bad: BadValue, table: Columns, written: str = "") -> InvalidRecord:
    """The public error of a value the packer refused; `written` is the key that its column was given
    under.
    """
    column, written = table.get(bad.column), written or bad.column
    return InvalidRecord(
        f"column {written!r} row {bad.row} position {bad.position}: {bad.value!r:.80} {bad.reason}",
        hint=hints.for_value(
            bad.column, written, "" if column is None else column.type_name, bad.value, bad.reason
        ),
        column=written,
        row=bad.row,
        position=bad.position,
    )


def _scalars(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    if hasattr(value, "dtype"):
        flat = _array(value)
        if flat.ndim != 1:
            raise BadValue(column.name, 0, 0, flat.shape, "is not one value a row")
        if (place := first_masked(value)) is not None:
            raise _masked(column, place, 0)
        rows: Any = [flat]  # checked and converted like a row of a list
        entries = len(flat)
    else:
        values = list(value)
        entries = len(values)
        if any(each is None for each in values):
            validity = np.array([each is not None for each in values], np.uint8)
            values = [column.dtype.type(0) if each is None else each for each in values]
        rows = [values]
    return Column(table.forms[column.name], entries=entries, count=entries, rows=rows, validity=validity)


def _lists(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    if is_flat(value):
        flat, lengths = _array(value[0]), checked_lengths(column.name, value[1])
        if int(lengths.sum()) != len(flat):
            raise InvalidRecord(
                f"column {column.name!r}: {len(flat)} values, lengths add up to {int(lengths.sum())}",
                hint="a tuple of an array and whole numbers is (flat array, lengths): give two rows as a "
                "list, [first, second]",
                column=column.name,
            )
        if (place := first_masked(value[0])) is not None:
            raise _masked(column, *row_of(lengths, place))
        rows: Any = [flat]
    else:
        rows = list(value)
        if any(row is None for row in rows):
            validity = np.array([row is not None for row in rows], np.uint8)
            rows = [() if row is None else row for row in rows]
        rows = [row if type(row) is list else _row(column, number, row) for number, row in enumerate(rows)]
        lengths = row_lengths(rows)
    return Column(
        table.forms[column.name],
        entries=len(lengths),
        count=int(lengths.sum()),
        lengths=lengths,
        validity=validity,
        rows=rows,
    )


def _list_lists(table: Columns, column: ColumnType, value: Any) -> Column:
    validity = None
    outer = list(value)
    if any(row is None for row in outer):
        validity = np.array([row is not None for row in outer], np.uint8)
        outer = [() if row is None else row for row in outer]
    inner_rows = [_row(column, number, inner) for number, row in enumerate(outer) for inner in row]
    lengths, inner = row_lengths(outer), row_lengths(inner_rows)
    return Column(
        table.forms[column.name],
        entries=len(outer),
        count=int(inner.sum()),
        lengths=lengths,
        inner=inner,
        validity=validity,
        rows=inner_rows,
    )


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
        table.forms[column.name],
        entries=len(rows),
        count=len(values),
        lengths=np.array(counts, np.uint32),
        inner=row_lengths(keys),
        keys=b"".join(keys),
        validity=validity,
        rows=[values],
    )


def texts(table: Columns, column: ColumnType, value: Sequence[Any]) -> Column:
    """A column of text or bytes, one a row; None is null. Raises BadValue."""
    rows, validity = list(value), None
    if any(row is None for row in rows):
        validity = np.array([row is not None for row in rows], np.uint8)
    raw = [b"" if row is None else _utf8(column, number, row) for number, row in enumerate(rows)]
    whole = b"".join(raw)
    return Column(
        table.forms[column.name],
        entries=len(raw),
        count=len(whole),
        lengths=row_lengths(raw),
        validity=validity,
        rows=whole,
    )


def _utf8(column: ColumnType, row: int, value: Any) -> bytes:
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise BadValue(column.name, row, 0, value, f"is not {column.type_name}")
    try:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        if column.text and not isinstance(value, str):
            raw.decode()
        return raw
    except UnicodeError as wrong:
        at = wrong.start if isinstance(wrong, UnicodeEncodeError | UnicodeDecodeError) else 0
        raise BadValue(column.name, row, at, value, "is not Unicode text") from None


def is_nested(value: Any) -> bool:
    """Whether it is a nested tensor of torch, which has no shape to look at."""
    return getattr(value, "is_nested", False) is True


def is_flat(value: Any) -> bool:
    """The (flat array, lengths) form: a pair of a 1-D array and whole numbers.

    Two float arrays are two rows.
    """
    if not (
        isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "dtype") and np.ndim(value[0]) == 1
    ):
        return False
    return not hasattr(value[1], "dtype") or "int" in str(value[1].dtype)


_BUILDERS = {
    Kind.SCALAR: _scalars,
    Kind.LIST: _lists,
    Kind.LIST_LIST: _list_lists,
    Kind.MAP: _maps,
    Kind.BYTES: texts,
}


def build(table: Columns, column: ColumnType, value: Any) -> Column:
    """Measures a column's value in any accepted form.

    Raises InvalidRecord for its shape, BadValue for a value that shows at once.
    """
    if is_nested(value) or (
        column.kind is not Kind.SCALAR and type(value).__module__.split(".")[0] == "pyarrow"
    ):
        what, rows = (
            ("nested tensor", "unbind()")
            if is_nested(value)
            else (f"pyarrow.{type(value).__name__}", "to_pylist()")
        )
        raise InvalidRecord(
            f"column {column.name!r} takes rows of {column.type_name}, not a {what}",
            hint=f"pass {column.name}.{rows}",
            column=column.name,
        )
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise InvalidRecord(
            f"column {column.name!r} takes rows of {column.type_name}, not a {type(value).__name__}",
            hint=hints.for_whole(column.name, column.type_name, value),
            column=column.name,
        )
    try:
        return _BUILDERS[column.kind](table, column, value)
    except BadValue:
        raise
    except (TypeError, ValueError, OverflowError, AttributeError, RuntimeError) as wrong:
        # torch says what it cannot do with RuntimeError
        if isinstance(wrong, InvalidRecord):
            raise
        raise InvalidRecord(
            f"column {column.name!r} is {column.type_name}: {wrong}", column=column.name
        ) from wrong
