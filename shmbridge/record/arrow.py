"""A record as a pyarrow.RecordBatch over the lane's own buffers."""

from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from shmbridge._ext.record import Ragged, flat_array
from shmbridge.errors import RecordUnreadable
from shmbridge.record.columns import RaggedLists, ReadableRecord
from shmbridge.schema import Column, Kind, arrow_field, arrow_type


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
    columns = record._lane_columns
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
    if isinstance(value, (Ragged, RaggedLists)):
        return value.to_arrow()
    if column.kind is Kind.MAP:
        valid = record.valid(column.name)
        value = [
            list(row.items()) if valid is None or valid[number] else None for number, row in enumerate(value)
        ]
    return pa.array(value, arrow_type(column))


def _with_nulls(array: pa.Array, valid: np.ndarray[Any, Any] | None, column: Column) -> pa.Array:
    return (
        array
        if valid is None
        else pa.compute.if_else(pa.array(valid), array, pa.scalar(None, arrow_type(column)))
    )
