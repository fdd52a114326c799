"""A batch as a pyarrow.RecordBatch: one row per trajectory, lists over the batch's own arrays."""

from collections.abc import Mapping

import numpy as np
import pyarrow as pa

from shmbridge._ext.record import Ragged
from shmbridge.errors import SchemaMismatch
from shmbridge.record.batch_numbers import ReadableBatch, batch_columns
from shmbridge.record.columns import RaggedLists
from shmbridge.record.meta_types import META_TYPES
from shmbridge.schema import Column, Kind, arrow_type

# Arrow types of what `meta=True` adds, in this order.
_OF_ROWS = {"group_index": pa.int32(), **META_TYPES, "uneven": pa.bool_()}


def batch_rows(batch: ReadableBatch, columns: Mapping[str, Column], meta: bool) -> pa.RecordBatch:
    """Returns the batch's rows; the types of its columns are those of `columns`."""
    arrays = {name: _array(batch, columns[name]) for name in batch_columns(batch)}
    if meta:
        for name in _OF_ROWS.keys() & arrays.keys():
            raise SchemaMismatch(
                f"column {name!r} has the name of what says where a row came from",
                hint=f"to_arrow(meta=False), or rename the column: 'my_{name}'",
            )
        arrays |= _of_rows(batch)
    return pa.RecordBatch.from_arrays(list(arrays.values()), list(arrays))


def _array(batch: ReadableBatch, column: Column) -> pa.Array:
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
