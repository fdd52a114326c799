"""A record as a pyarrow.RecordBatch over the lane's own buffers."""

from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from shmbridge._ext.record import Ragged
from shmbridge.errors import RecordUnreadable
from shmbridge.record.columns import RaggedLists, ReadableRecord
from shmbridge.schema import Column, Kind, arrow_field, arrow_type

MOST_VALUES = 2**31 - 1


def record_batch(record: ReadableRecord) -> pa.RecordBatch:
    """Returns the record's RecordBatch: zero-copy for numbers; text, bytes and maps are copied.

    Record metadata goes into the schema's metadata.
    """
    if record.meta.uneven:
        raise ValueError(
            f"{record!r} has rows of unequal length and no rectangular form: use record[name] or "
            "to_scored_data()"
        )
    names = record.columns
    columns = record.lane_columns
    arrays = [_rows_of(record, columns[name]) for name in names]
    meta = {field.name: str(getattr(record.meta, field.name)) for field in fields(record.meta)}
    return pa.record_batch(
        arrays, schema=pa.schema([arrow_field(columns[name]) for name in names], metadata=meta)
    )


def _rows_of(record: ReadableRecord, column: Column) -> pa.Array:
    """Returns one value a row; checks the count, since a lane may claim rows it does not hold."""
    array = _array(record, column)
    if column.per_record and len(array) == 1:
        array = array.take(pa.array(np.zeros(len(record), np.int32)))
    if len(array) != len(record):
        raise RecordUnreadable(
            f"column {column.name!r} of {record!r} has {len(array)} rows",
            hint="end that producer: it is broken",
        )
    return array


def _array(record: ReadableRecord, column: Column) -> pa.Array:
    value = record[column.name]
    if column.kind is Kind.SCALAR:
        return _with_nulls(flat_array(value), record.valid(column.name), column)
    if isinstance(value, Ragged):
        return list_array(value.lengths, flat_array(value.values), value.valid)
    if isinstance(value, RaggedLists):
        return list_array(
            value.lengths, list_array(value.inner_lengths, flat_array(value.values), None), value.valid
        )
    if column.kind is Kind.MAP:
        valid = record.valid(column.name)
        value = [
            list(row.items()) if valid is None or valid[number] else None for number, row in enumerate(value)
        ]
    return pa.array(value, arrow_type(column))


def flat_array(values: np.ndarray[Any, Any]) -> pa.Array:
    """Returns the values of a one-dimensional array, in place; bools, which Arrow packs, are copied."""
    return (
        pa.array(values)
        if values.dtype == np.bool_ or len(values) == 0
        else pa.Array.from_buffers(
            pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)]
        )
    )


def list_array(
    lengths: np.ndarray[Any, Any], values: pa.Array, valid: np.ndarray[Any, Any] | None
) -> pa.Array:
    """Returns lists of `values`, null where not `valid`. ValueError for more values than Arrow counts."""
    if len(values) > MOST_VALUES:
        raise ValueError(
            f"{len(values)} values, and the int32 offsets of an Arrow list count {MOST_VALUES} "
            "-> ask for fewer groups"
        )
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    mask = None if valid is None else pa.array(~valid)
    return pa.ListArray.from_arrays(pa.array(offsets), values, mask=mask)


def _with_nulls(array: pa.Array, valid: np.ndarray[Any, Any] | None, column: Column) -> pa.Array:
    return (
        array
        if valid is None
        else pa.compute.if_else(pa.array(valid), array, pa.scalar(None, arrow_type(column)))
    )
