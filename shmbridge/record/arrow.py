"""Records and batches as pyarrow.RecordBatches over their own buffers, and checks of bytes from outside."""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

import numpy as np
import pyarrow as pa

from shmbridge._ext.record import Ragged, flat_array
from shmbridge.errors import InvalidRecord, RecordUnreadable, SchemaMismatch, shown
from shmbridge.record.columns import RaggedLists, ReadableBatch, ReadableRecord, batch_columns
from shmbridge.schema import Column, Kind, arrow_field, arrow_type

META_TYPES: dict[str, pa.DataType] = {
    "producer_id": pa.utf8(),
    "sequence": pa.uint64(),
    "env_name": pa.utf8(),
    "env_id": pa.int32(),
    "group_id": pa.utf8(),
    "group_size": pa.int32(),
    "min_policy_version": pa.int64(),
    "max_policy_version": pa.int64(),
    "t_created_ns": pa.int64(),
    "t_publish_ns": pa.int64(),
    "split": pa.utf8(),
    "redelivered": pa.bool_(),
}


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
    array = _record_array(record, column)
    if column.per_record and len(array) == 1:
        array = array.take(pa.array(np.zeros(len(record), np.int32)))
    if len(array) != len(record):
        raise RecordUnreadable(
            f"column {column.name!r} of {record!r} has {len(array)} rows",
            hint="end that producer: it is broken",
        )
    return array


def _record_array(record: ReadableRecord, column: Column) -> pa.Array:
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


# Arrow types of what `meta=True` adds, in this order.
_OF_ROWS = {"group_index": pa.int32(), **META_TYPES, "uneven": pa.bool_()}


def batch_rows(batch: ReadableBatch, columns: Mapping[str, Column], meta: bool) -> pa.RecordBatch:
    """Returns the batch's rows; the types of its columns are those of `columns`."""
    arrays = {name: _batch_array(batch, columns[name]) for name in batch_columns(batch)}
    if meta:
        for name in _OF_ROWS.keys() & arrays.keys():
            raise SchemaMismatch(
                f"column {name!r} has the name of what says where a row came from",
                hint=f"to_arrow(meta=False), or rename the column: 'my_{name}'",
            )
        arrays |= _of_rows(batch)
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def _batch_array(batch: ReadableBatch, column: Column) -> pa.Array:
    value = batch[column.name]
    has = batch.has(column.name)
    valid = None if column.name == "loss_mask" or has.all() else has
    if isinstance(value, RaggedLists):
        return RaggedLists(value.values, value.lengths, value.inner_lengths, valid).to_arrow()
    if isinstance(value, Ragged):
        return Ragged(value.values, value.lengths, valid).to_arrow()
    if column.kind is Kind.LIST:
        if batch.layout == "padded":
            value = value[np.arange(value.shape[1]) < batch.lengths[:, None]]
        return Ragged(value, batch.lengths, valid).to_arrow()
    if column.kind is Kind.SCALAR:
        return pa.array(value, mask=None if valid is None else ~valid)
    if column.kind is Kind.MAP:
        value = [list(row.items()) if there else None for row, there in zip(value, has, strict=True)]
    return pa.array(value, arrow_type(column))


def _of_rows(batch: ReadableBatch) -> dict[str, pa.Array]:
    rows = batch.meta
    return {
        name: pa.array(batch.group_index, kind)
        if name == "group_index"
        else pa.array([getattr(row, name) for row in rows], kind)
        for name, kind in _OF_ROWS.items()
    }


MOST_ROWS = (1 << 31) - 1


def checked_batch(
    batch: pa.RecordBatch, types: Mapping[str, pa.DataType], nullable: Collection[str] = ()
) -> pa.RecordBatch:
    """Returns the columns of `types` out of a batch, in that order, once all of them are true. Never blocks.

    Args:
        batch: as Arrow has read it; not trusted. Columns that are not in `types` are left out.
        types: each column that must be there, once, and its type.
        nullable: those of them whose rows may be null. What a row holds inside never is.

    Raises InvalidRecord, which names the column, and the row where one is to blame.
    """
    with _arrow_errors():
        if batch.num_rows > MOST_ROWS:
            raise InvalidRecord(f"{batch.num_rows} rows in one batch, allowed are {MOST_ROWS}")
        numbers = []
        for name, declared in types.items():
            found = batch.schema.get_all_field_indices(name)
            if len(found) != 1:
                has = f"{len(found)} columns" if found else "no column"
                raise InvalidRecord(f"it has {has} {shown(name)}", column=name)
            with _arrow_errors(name):
                _check_column(name, batch.column(found[0]), declared, name in nullable)
            numbers += found
        return batch.select(numbers)


def only_batch(
    raw: "pa.Buffer | memoryview | bytes", types: Mapping[str, pa.DataType], nullable: Collection[str] = ()
) -> pa.RecordBatch:
    """Returns the one batch of an Arrow stream that lies in memory, over that memory, checked like any other.

    Its columns are some of `types`. Never blocks. Raises InvalidRecord for anything else: a stream that is
    cut, that has several batches or none, or other columns.
    """
    with _arrow_errors():
        with pa.ipc.open_stream(pa.py_buffer(raw)) as stream:
            batches = [*stream]
        if len(batches) != 1:
            raise InvalidRecord(f"a stream of {len(batches)} batches, not of one")
        (batch,) = batches
        if other := next((name for name in batch.schema.names if name not in types), None):
            raise InvalidRecord(f"column {shown(other)} does not belong there", column=other)
        return checked_batch(batch, {name: types[name] for name in batch.schema.names}, nullable)


@contextmanager
def _arrow_errors(column: str = "") -> Iterator[None]:
    """Turns whatever Arrow makes of bytes that are not its own, or of names that are not text."""
    try:
        yield
    except InvalidRecord:
        raise
    except (pa.ArrowException, OSError, ValueError, TypeError, LookupError) as wrong:
        said = first_line(wrong)
        raise InvalidRecord(f"column {shown(column)}: {said}" if column else said, column=column) from None


def first_line(wrong: BaseException) -> str:
    """Returns the reason that an error of Arrow gives, in one line."""
    return (str(wrong).strip() or type(wrong).__name__).splitlines()[0]


def _check_column(name: str, array: pa.Array, declared: pa.DataType, nullable: bool) -> None:
    """Raises InvalidRecord unless an array is what its column is declared to be."""
    if array.type != declared:
        raise InvalidRecord(f"column {shown(name)} is {array.type}, and declared as {declared}", column=name)
    array.validate(full=True)
    if array.null_count and not nullable:
        row = array.is_null().index(True).as_py()
        raise InvalidRecord(f"column {shown(name)}, row {row}: null", column=name, row=row)
    if pa.types.is_struct(declared):
        holed = any(field.null_count != array.null_count for field in array.flatten())
    else:
        holed = _has_null_inside(array)
    if holed:
        raise InvalidRecord(f"column {shown(name)}: null inside of a row", column=name)


def _has_null_inside(array: pa.Array) -> bool:
    """Returns whether a list holds a null at any depth; rows of the array itself may be null."""
    if pa.types.is_list(array.type):
        inside = [array.values]
    elif pa.types.is_struct(array.type):
        inside = [array.field(number) for number in range(array.type.num_fields)]
    else:
        return False
    return any(each.null_count or _has_null_inside(each) for each in inside)
