"""Converts the uncommon values that `put` takes to the forms that C reads, column by column.

ColumnForms (_ext/forms.pxi) has the grammar of a group and calls a Converter.
"""

import json
import math
import operator
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec
import numpy as np

from shmbridge._ext.put import BadValue, Form, PackedColumn, int32_of, row_of
from shmbridge.errors import is_tensor
from shmbridge.put.errors import PutNotices, as_invalid
from shmbridge.schema import FINISH_REASONS, JSON_COLUMNS, Column, Columns, Kind, Tag

Array = np.ndarray[Any, Any]
_ATROPOS_MARKS = ("masks", "scores")
_CANNOT = (TypeError, ValueError, OverflowError, AttributeError, RuntimeError)  # RuntimeError is torch's


class Converter:
    """Converts uncommon values of a group to common ones. Keeps nothing of a group; for the producer's
    thread.

    Whatever cannot be converted is a BadValue.

    Args:
        table: the lane's columns.
        foreign: whether the groups come from Atropos, and may have what Atropos accepts.
        notices: logs rows that do not fit; None: nothing is logged.
    """

    def __init__(self, table: Columns, foreign: bool = False, notices: PutNotices | None = None) -> None:
        self.table, self._foreign, self._notices = table, foreign, notices

    def mapping(self, group: Any) -> dict[str, Any]:
        """Returns the columns of a group that is not a dict."""
        if type(group).__name__ == "RecordBatch" and type(group).__module__.startswith("pyarrow"):
            return with_reason_codes(_from_arrow(group, self.table))
        if isinstance(group, Mapping):
            return with_reason_codes(dict(group.items()))
        raise BadValue("", -1, -1, group, "group")

    def convert(self, form: Form, value: Any, group: Any, rows: int) -> Any:
        """Returns a value in a form that C reads, or its column; None for side data not one value a row."""
        column = self.table[form.name]
        if _is_empty(value):
            return PackedColumn(form, tag=Tag.EMPTY_MAP if isinstance(value, Mapping) else Tag.EMPTY_LIST)
        if column.name in JSON_COLUMNS:
            of_atropos = isinstance(group, Mapping) and any(mark in group for mark in _ATROPOS_MARKS)
            return self._json(form, column, value, rows, self._foreign or of_atropos)
        if is_nested(value):
            raise BadValue(form.name, -1, -1, value, "library", "unbind()")
        if column.kind is not Kind.SCALAR and type(value).__module__.split(".")[0] == "pyarrow":
            raise BadValue(form.name, -1, -1, value, "library", "to_pylist()")
        if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
            raise BadValue(form.name, -1, -1, value, "rows")
        _check_readable(column, value, -1)
        try:
            if column.kind is Kind.MAP:
                return _maps(form, column, value)
            if column.kind is Kind.BYTES:
                return _texts(form, column, value)
            return _COMMON[column.kind](column, value)
        except BadValue:
            raise
        except _CANNOT as wrong:
            raise BadValue(form.name, -1, -1, value, "converter", _first_line(wrong)) from wrong

    def loss_mask(self, masks: Any) -> Any:
        """Returns the loss_mask that Atropos' masks stand for."""
        rows = [masks[0]] if is_flat(masks) else masks
        try:
            trained = [None if row is None else np.not_equal(row, -100) for row in rows]
        except (TypeError, ValueError, RuntimeError) as wrong:
            raise BadValue("masks", -1, -1, masks, "converter", _first_line(wrong)) from wrong
        return (trained[0], masks[1]) if is_flat(masks) else trained

    def extra(self, extra: Any, unknown: Mapping[str, Any]) -> dict[str, Any]:
        """Returns `extra` with the unknown keys of a foreign group added."""
        if not isinstance(extra, Mapping):
            extra = {} if extra is None else {"extra": extra}
        return {**extra, **unknown}

    def env_id(self, value: Any) -> int:
        """Returns the environment's number."""
        try:
            number = operator.index(value)
        except TypeError:
            number = -1
        if not 0 <= number < 1 << 31:
            raise BadValue("env_id", -1, -1, value, "env_id")
        return number

    def uneven(self, column: PackedColumn, tokens: PackedColumn, row: int) -> None:
        """Refuses a column that does not fit the tokens, in `row` or, if negative, in its number of rows; one
        of a foreign group is logged.
        """
        fault, value, limit = "row count", column.entries, tokens.entries
        if column.form.per_record:
            fault = "per record"
        elif row >= 0 and column.lengths is not None and tokens.lengths is not None:
            fault, value, limit = "length", int(column.lengths[row]), int(tokens.lengths[row])
        bad = BadValue(column.name, max(row, -1), -1, value, fault, limit)
        if column.form.per_record or not self._foreign:
            raise bad
        if self._notices is not None:
            self._notices.warn_uneven(column.name, as_invalid(bad, self.table).message)

    def _json(
        self, form: Form, column: Column, value: Any, rows: int, of_atropos: bool
    ) -> PackedColumn | None:
        if column.per_record:
            return _texts(form, column, [self._as_text(column.name, 0, value, of_atropos)])
        values = list(value) if isinstance(value, (list, tuple)) else []
        if len(values) != rows and not self._foreign:
            if isinstance(value, (list, tuple)):
                raise BadValue(column.name, -1, -1, len(values), "row count", rows)
            raise BadValue(column.name, -1, -1, value, "side", rows)
        if len(values) != rows:
            return None
        texts: list[bytes | str | None] = [None] * rows
        for row, each in enumerate(values):
            if each is not None:
                texts[row] = self._as_text(column.name, row, each, of_atropos)
        return _texts(form, column, texts)

    def _as_text(self, name: str, row: int, value: Any, of_atropos: bool) -> bytes | str:
        """Returns a value as JSON. A string is JSON already, but a value in an Atropos column."""
        if isinstance(value, (str, bytes)) and not of_atropos:
            return _checked_json(name, row, value)
        try:
            if self._foreign:
                return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()
            text = msgspec.json.encode(value)
            if b"null" in text and not _is_finite(value):  # NaN has no JSON: msgspec writes null
                raise ValueError("NaN and infinity have no JSON")
            return text
        except (TypeError, ValueError, OverflowError, RecursionError) as wrong:
            raise BadValue(name, row, -1, value, "json", _first_line(wrong)) from None


def first_masked(value: Any) -> int | None:
    """Returns the position of the first masked value of a NumPy masked array; None if there is none."""
    if not (isinstance(value, np.ma.MaskedArray) and np.ma.is_masked(value)):
        return None
    return int(np.ma.getmaskarray(value).reshape(-1).argmax())


def _first_line(wrong: Exception) -> str:
    return (str(wrong).splitlines() or [type(wrong).__name__])[0][:160]


def checked_lengths(name: str, lengths: Any, fault: str = "lengths") -> Array:
    """Returns a caller's row lengths as uint32. Raises BadValue with that fault if they are not lengths."""
    try:
        found = np.asarray(lengths)
    except _CANNOT:
        raise BadValue(name, -1, -1, lengths, fault) from None
    no_lengths = first_masked(lengths) is not None or found.ndim != 1 or found.dtype.kind not in "iu"
    if no_lengths or (found.size and (found.min() < 0 or found.max() > np.iinfo(np.uint32).max)):
        raise BadValue(name, -1, -1, lengths, fault)
    return found.astype(np.uint32)


def with_reason_codes(group: dict[str, Any]) -> dict[str, Any]:
    """Returns a mapping with the names of its finish reasons, if it has such, as their codes."""
    reasons = group.get("finish_reason")
    if isinstance(reasons, (list, tuple)) and any(isinstance(reason, str) for reason in reasons):
        return {**group, "finish_reason": [_reason_code(reason) for reason in reasons]}
    return group


def _reason_code(reason: Any) -> Any:
    return FINISH_REASONS.index(reason) if isinstance(reason, str) and reason in FINISH_REASONS else reason


def is_nested(value: Any) -> bool:
    """Returns whether it is a nested torch tensor, which has no shape."""
    return getattr(value, "is_nested", False) is True


def is_flat(value: Any) -> bool:
    """Returns whether it is (flat array, lengths): a 1-D array and whole numbers, not two float arrays."""
    if not (
        isinstance(value, tuple) and len(value) == 2 and hasattr(value[0], "dtype") and np.ndim(value[0]) == 1
    ):
        return False
    return not hasattr(value[1], "dtype") or "int" in str(value[1].dtype)


def _is_empty(value: Any) -> bool:
    return isinstance(value, (list, tuple, Mapping)) and len(value) == 0


def _array(value: Any) -> Array:
    """Returns a tensor or array-like as an array that C reads; bfloat16 widens to float32."""
    if type(value).__module__.split(".")[0] == "torch":
        value = value.detach()
        value = (value.float() if str(value.dtype) == "torch.bfloat16" else value).numpy()
    array = np.asarray(value)
    if array.flags.c_contiguous and array.flags.aligned and array.dtype.isnative:
        return array
    return np.array(array, array.dtype.newbyteorder("="), order="C")


def _check_readable(column: Column, value: Any, row: int) -> None:
    """Raises BadValue for a tensor whose numbers are not in the CPU's memory, one after another."""
    if is_tensor(value):
        device, layout = str(value.device), str(value.layout).removeprefix("torch.")
        if (device, layout) != ("cpu", "strided"):
            raise BadValue(column.name, row, -1, device, "device", layout)


def _check_mask(column: Column, row: int, position: int | None) -> None:
    if position is not None:
        raise BadValue(column.name, row, position, np.ma.masked, "masked")


def _row(column: Column, number: int, row: Any) -> Any:
    """Returns one row of a list column: a list, or a 1-D array."""
    if isinstance(row, (list, tuple)):
        return row
    if isinstance(row, (str, bytes, Mapping)) or not (hasattr(row, "__array__") or hasattr(row, "__len__")):
        raise BadValue(column.name, number, 0, row, "row")
    _check_readable(column, row, number)
    array = _array(row)
    if array.ndim != 1:
        raise BadValue(column.name, number, 0, row, "row")
    _check_mask(column, number, first_masked(row))
    return array


def _scalars(column: Column, value: Any) -> Any:
    if not hasattr(value, "dtype"):
        return list(value)
    flat = _array(value)
    if flat.ndim != 1:
        raise BadValue(column.name, 0, 0, flat.shape, "shape")
    if (place := first_masked(value)) is not None:
        _check_mask(column, place, 0)
    return flat


def _lists(column: Column, value: Any) -> Any:
    if not is_flat(value):
        return [None if row is None else _row(column, number, row) for number, row in enumerate(list(value))]
    flat, lengths = _array(value[0]), checked_lengths(column.name, value[1])
    if int(lengths.sum()) != len(flat):
        raise BadValue(column.name, -1, -1, len(flat), "sum", int(lengths.sum()))
    if (place := first_masked(value[0])) is not None:
        _check_mask(column, *row_of(lengths, place))
    return flat, lengths


def _list_lists(column: Column, value: Any) -> Any:
    found: list[list[Any] | None] = []
    for number, row in enumerate(list(value)):
        found.append(None if row is None else [_row(column, number, each) for each in row])
        if row is not None and len(row) != len(found[-1] or ()):
            raise ValueError(f"row {number} has not as many lists as it says")
    return found


_COMMON = {Kind.SCALAR: _scalars, Kind.LIST: _lists, Kind.LIST_LIST: _list_lists}


def _maps(form: Form, column: Column, value: Any) -> PackedColumn:
    rows = list(value)
    pairs = [_pairs(column, number, row) for number, row in enumerate(rows)]
    keys, values = [], []
    for number, row in enumerate(pairs):
        for key, each in row.items():
            if not isinstance(key, str):
                raise BadValue(column.name, number, 0, key, "key")
            keys.append(_utf8(column, number, key))
            values.append(each)
    return PackedColumn(
        form,
        entries=len(rows),
        count=len(values),
        lengths=_lengths(pairs),
        inner=_lengths(keys),
        keys=b"".join(keys),
        validity=_validity(rows),
        rows=[values],
    )


def _pairs(column: Column, number: int, row: Any) -> dict[Any, Any]:
    try:
        return {} if row is None else dict(row)
    except (TypeError, ValueError):
        raise BadValue(column.name, number, -1, row, "dict") from None


def _texts(form: Form, column: Column, value: Iterable[Any]) -> PackedColumn:
    """Returns a column of text or bytes, one a row; None is null."""
    rows = list(value)
    raw = [b"" if row is None else _utf8(column, number, row) for number, row in enumerate(rows)]
    whole = b"".join(raw)
    return PackedColumn(
        form, entries=len(raw), count=len(whole), lengths=_lengths(raw), validity=_validity(rows), rows=whole
    )


def _lengths(rows: list[Any]) -> Array:
    return np.fromiter(map(len, rows), np.uint32, len(rows))


def _validity(rows: list[Any]) -> Array | None:
    valid = np.fromiter((row is not None for row in rows), np.uint8, len(rows))
    return None if valid.all() else valid


def _utf8(column: Column, row: int, value: Any) -> bytes:
    if not isinstance(value, (str, bytes, bytearray, memoryview)):
        raise BadValue(column.name, row, 0, value, "type")
    try:
        raw = value.encode() if isinstance(value, str) else bytes(value)
        if column.text and not isinstance(value, str):
            raw.decode()
        return raw
    except UnicodeError as wrong:
        at = wrong.start if isinstance(wrong, UnicodeEncodeError | UnicodeDecodeError) else 0
        raise BadValue(column.name, row, at, value, "unicode") from None


def _checked_json(name: str, row: int, text: bytes | str) -> bytes | str:
    """Returns JSON text after checking that a reader can decode it."""
    try:
        msgspec.json.decode(text)
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as wrong:
        raise BadValue(name, row, 0, text, "not json", wrong) from None
    return text


def _is_finite(value: Any) -> bool:
    """Returns whether no number in it, at any depth, is NaN or infinite."""
    if isinstance(value, Mapping):
        return all(map(_is_finite, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(_is_finite, value))
    return not isinstance(value, float) or math.isfinite(value)


def _from_arrow(batch: Any, table: Columns) -> dict[str, Any]:
    """Returns a RecordBatch as a mapping: numbers from its buffers, everything else as Python values."""
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
        elif isinstance(array, pa.ListArray) and _is_plain(array):
            group[name] = (array.flatten().to_numpy(zero_copy_only=False), np.diff(array.offsets.to_numpy()))
        elif pa.types.is_primitive(array.type) and array.null_count == 0:
            group[name] = array.to_numpy(zero_copy_only=False)
        else:
            group[name] = array.to_pylist()
    return group


def _is_plain(lists: Any) -> bool:
    """Returns whether its rows are numbers without nulls; to_numpy would turn nulls into NaN."""
    import pyarrow as pa

    return not (pa.types.is_nested(lists.type.value_type) or lists.null_count or lists.flatten().null_count)


def token_array(row: Any) -> np.ndarray[Any, np.dtype[np.int32]] | None:
    """int32 of token ids in any form; a list's are copied. None if they are no token ids."""
    if isinstance(row, (list, tuple)):
        return int32_of(row)
    try:
        array = np.asarray(row)
    except (TypeError, ValueError, RuntimeError):
        return None
    limits = np.iinfo(np.int32)
    if (
        array.ndim != 1
        or array.dtype.kind not in "iu"
        or (array.size and not limits.min <= array.min() <= array.max() <= limits.max)
    ):
        return None
    return array.astype(np.int32)
