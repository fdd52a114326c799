"""Columns into a lane: measures them, lays them out, and writes Python lists and arrays straight into the claimed memory.

Knows bytes, dtypes and the record layout of layout.h; knows nothing of what a column means. A Plan is for one record and one thread.
"""

from cpython.bytes cimport PyBytes_AS_STRING
from cpython.object cimport PyObject
from libc.stdint cimport int32_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy, memset

from operator import index

import numpy as np

from shmbridge._ext.layout cimport ALIGNMENT, KIND_LIST_LIST, KIND_MAP, KIND_SCALAR, TAG_VALUES, directory_entry
from shmbridge._ext.ring cimport LaneWriter

cdef extern from "Python.h":
    PyObject** PySequence_Fast_ITEMS(object)
    Py_ssize_t PySequence_Fast_GET_SIZE(object)

cdef extern from "pylist.h":
    Py_ssize_t pack_int32(PyObject** items, Py_ssize_t count, int32_t* to)
    Py_ssize_t pack_uint8(PyObject** items, Py_ssize_t count, uint8_t* to)
    Py_ssize_t pack_float32(PyObject** items, Py_ssize_t count, float* to)
    Py_ssize_t fold_masks(PyObject** masks, PyObject** tokens, Py_ssize_t count, uint8_t* to)
    Py_ssize_t first_non_finite32(const float* values, Py_ssize_t count) nogil


class BadValue(ValueError):
    """A value that its column cannot hold."""

    def __init__(self, column, row, position, value, reason):
        super().__init__(column, row, position, value, reason)
        self.column, self.row, self.position, self.value, self.reason = column, row, position, value, reason


class LossyMasks(Exception):
    """Atropos masks that are neither -100 nor the token: loss_mask alone cannot carry them."""


def row_lengths(list rows not None):
    """Lengths of the rows of a list of sequences, uint32[len(rows)]."""
    cdef Py_ssize_t i, count = len(rows)
    lengths = np.empty(count, np.uint32)
    cdef uint32_t[::1] view = lengths
    cdef Py_ssize_t length
    for i in range(count):
        length = len(rows[i])
        if length > 0xFFFFFFFF:
            raise OverflowError(f"row {i} has {length} values, allowed are 2**32 - 1")
        view[i] = <uint32_t>length
    return lengths


cdef inline uint64_t lines(uint64_t size) noexcept:
    return (size + ALIGNMENT - 1) // ALIGNMENT


cdef class Column:
    """One present column of a record under way: its directory entry and where its values come from."""

    cdef readonly str name
    cdef readonly object dtype
    cdef readonly uint32_t index
    cdef readonly uint8_t kind
    cdef readonly uint8_t tag
    cdef readonly uint32_t entries
    cdef readonly object lengths     # uint32[entries], or None
    cdef readonly object inner       # uint32[], or None
    cdef readonly object keys        # bytes, or None
    cdef readonly object validity    # uint8[entries], or None
    cdef readonly uint64_t values_bytes
    cdef readonly object rows        # list of lists, list of arrays, one flat array, bytes, or None: filled in by the caller
    cdef readonly object tokens      # rows of tokens: `rows` are Atropos masks to fold
    cdef readonly bint finite
    cdef readonly uint64_t values_at
    cdef uint64_t _lengths_at, _inner_at, _keys_at, _validity_at

    def __init__(self, str name not None, int index, int kind, dtype, *, int tag=TAG_VALUES, uint64_t entries=0, uint64_t count=0,
                 lengths=None, inner=None, keys=None, validity=None, rows=None, tokens=None, bint finite=False):
        if entries > 0xFFFFFFFF:
            raise OverflowError(f"{entries} rows, allowed are 2**32 - 1")
        self.name, self.index, self.kind, self.dtype, self.tag = name, index, kind, dtype, tag
        self.entries, self.lengths, self.inner, self.keys, self.validity = entries, lengths, inner, keys, validity
        self.values_bytes = count * dtype.itemsize
        self.rows, self.tokens, self.finite = rows, tokens, finite


cdef class Plan:
    """The layout of one record: columns, group id, and after `layout()` every place in its extent."""

    cdef readonly list columns
    cdef readonly bytes group_id
    cdef readonly uint64_t index_bytes
    cdef readonly uint64_t extent_bytes

    def __init__(self, list columns not None, bytes group_id not None):
        self.columns, self.group_id = columns, group_id
        cdef uint64_t at
        cdef Column column
        at = lines(len(columns) * sizeof(directory_entry) + len(group_id))
        for column in columns:
            if column.lengths is not None:
                column._lengths_at = at
                at += lines(4 * <uint64_t>column.entries)
            if column.inner is not None:
                column._inner_at = at
                at += lines(4 * <uint64_t>len(column.inner))
        self.index_bytes = at * ALIGNMENT
        for column in columns:
            if column.values_bytes:
                column.values_at = at
                at += lines(column.values_bytes)
            if column.keys:
                column._keys_at = at
                at += lines(len(column.keys))
            if column.validity is not None:
                column._validity_at = at
                at += lines(column.entries)
        self.extent_bytes = at * ALIGNMENT
        if at >= 1 << 32:
            raise OverflowError(f"a record of {self.extent_bytes} bytes; the layout ends at 256 GiB")

    def write(self, LaneWriter writer not None):
        """Writes everything into the writer's open claim. Raises BadValue or LossyMasks; the caller aborts the claim then."""
        cdef uint8_t* base = writer.claimed()
        cdef directory_entry* entry
        cdef Column column
        cdef Py_ssize_t i
        memset(base, 0, len(self.columns) * sizeof(directory_entry))
        for i, column in enumerate(self.columns):
            entry = <directory_entry*>base + i
            entry.column, entry.kind, entry.tag, entry.entries = <uint16_t>column.index, column.kind, column.tag, column.entries
            entry.values_at, entry.values_bytes = <uint32_t>column.values_at, column.values_bytes
            entry.lengths_at, entry.inner_at = <uint32_t>column._lengths_at, <uint32_t>column._inner_at
            entry.keys_at, entry.validity_at = <uint32_t>column._keys_at, <uint32_t>column._validity_at
            if column.lengths is not None:
                copy_bytes(base + column._lengths_at * ALIGNMENT, column.lengths)
            if column.inner is not None:
                entry.inner_count = len(column.inner)
                copy_bytes(base + column._inner_at * ALIGNMENT, column.inner)
            if column.keys:
                entry.keys_bytes = len(column.keys)
                copy_bytes(base + column._keys_at * ALIGNMENT, column.keys)
            if column.validity is not None:
                copy_bytes(base + column._validity_at * ALIGNMENT, column.validity)
        memcpy(base + len(self.columns) * sizeof(directory_entry), PyBytes_AS_STRING(self.group_id), len(self.group_id))
        memory = None
        for column in self.columns:
            if column.rows is None or not column.values_bytes:
                continue
            to = base + column.values_at * ALIGNMENT
            if isinstance(column.rows, list):
                if memory is None:
                    memory = writer.claimed_memory()
                write_rows(column, to, memory)
            else:
                copy_bytes(to, column.rows)
            if column.finite:
                check_finite(column, to)

    def check_values(self, memory):
        """Checks what a caller wrote into a claim: finite where the column says so. Raises BadValue."""
        cdef Column column
        for column in self.columns:
            if column.finite and column.values_bytes:
                check_array(column, self.view(memory, column))

    def view(self, memory, Column column not None):
        """The column's values inside `memory` of the claim, as a flat array of its dtype."""
        count = column.values_bytes // column.dtype.itemsize
        return np.frombuffer(memory, column.dtype, count, column.values_at * ALIGNMENT) if count else np.empty(0, column.dtype)


cdef int copy_bytes(uint8_t* to, object source) except -1:
    cdef const uint8_t[::1] view
    if isinstance(source, bytes):
        memcpy(to, PyBytes_AS_STRING(source), len(source))
    elif len(source):
        view = source.view(np.uint8)
        memcpy(to, &view[0], view.shape[0])
    return 0


cdef int write_rows(Column column, uint8_t* to, object memory) except -1:
    """Rows one after another: lists through the number paths, arrays through one copy each."""
    cdef Py_ssize_t row, count, bad
    cdef uint64_t at = column.values_at * ALIGNMENT
    cdef uint64_t item = column.dtype.itemsize
    cdef uint64_t end = at + column.values_bytes
    cdef int code = ord(column.dtype.char)
    cdef list rows = column.rows
    for row in range(len(rows)):
        source = rows[row]
        count = len(source)
        if count == 0:
            continue
        if <uint64_t>count > (end - at) // item:
            raise BadValue(column.name, row, 0, count, "is a length that was smaller when the group was handed over")
        if not isinstance(source, (list, tuple)):
            copy_array(column, row, source, np.frombuffer(memory, column.dtype, count, at))
        elif column.tokens is not None:
            fold_row(source, column.tokens[row], to)
        else:
            if code == c"i":
                bad = pack_int32(PySequence_Fast_ITEMS(source), count, <int32_t*>to)
            elif code == c"f":
                bad = pack_float32(PySequence_Fast_ITEMS(source), count, <float*>to)
            elif code == c"B":
                bad = pack_uint8(PySequence_Fast_ITEMS(source), count, to)
            else:
                bad = pack_any(source, np.frombuffer(memory, column.dtype, count, at))
            if bad >= 0:
                raise_bad(column, row, bad, source[bad], f"does not fit {column.dtype}")
        to += count * item
        at += count * item
    if at != end:
        raise BadValue(column.name, len(rows) - 1, 0, at, "bytes: the group became smaller after it was handed over")
    return 0


def pack_any(source, to):
    """Numbers one by one into an array of any dtype; the index of the first that does not fit, or -1."""
    kind = to.dtype.kind
    limits = np.iinfo(to.dtype) if kind in "iu" else None
    for i, value in enumerate(source):
        try:
            if kind in "iu":
                value = index(value)
                if not limits.min <= value <= limits.max:
                    return i
            elif kind == "b":
                if not isinstance(value, (bool, np.bool_)):
                    return i
            elif isinstance(value, (str, bytes)):
                return i
            else:
                value = float(value)
            to[i] = value
        except (TypeError, ValueError, OverflowError):
            return i
    return -1


cdef int raise_bad(Column column, Py_ssize_t row, Py_ssize_t position, value, reason) except -1:
    """A scalar column is packed as if it were one row: its positions are rows."""
    if column.kind == KIND_SCALAR:
        row, position = position, 0
    elif column.kind == KIND_MAP:
        row, position = row_of(column.lengths, position)
    elif column.kind == KIND_LIST_LIST:
        row = row_of(column.lengths, row)[0]
    elif len(column.rows) != column.entries:
        row, position = row_of(column.lengths, position)
    raise BadValue(column.name, row, position, value, reason)


def row_of(lengths, position):
    """Which row a place among all rows' values belongs to, and where in it."""
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, position, side="right"))
    return row, int(position - (ends[row] - lengths[row]))


cdef Py_ssize_t fold_row(object masks, object tokens, uint8_t* to) except -2:
    cdef Py_ssize_t bad
    if not isinstance(tokens, (list, tuple)):
        tokens = tokens.tolist()
    if len(tokens) != len(masks):
        raise LossyMasks
    bad = fold_masks(PySequence_Fast_ITEMS(masks), PySequence_Fast_ITEMS(tokens), len(masks), to)
    if bad >= 0:
        raise LossyMasks
    return -1


def copy_array(Column column not None, Py_ssize_t row, source, to):
    """One array into one row of another dtype, values checked: integers must fit, floats may round."""
    kind = source.dtype.kind
    if source.dtype == to.dtype:
        to[:] = source
    elif to.dtype.kind in "iu" and kind in "iub":
        limits = np.iinfo(to.dtype)
        outside = (source < limits.min) | (source > limits.max) if kind != "b" else np.zeros(0, bool)
        if outside.any():
            position = int(outside.argmax())
            raise_bad(column, row, position, int(source[position]), f"does not fit {to.dtype}")
        to[:] = source
    elif (to.dtype.kind == "f" and kind in "fiub") or (to.dtype.kind == "b" and kind == "b"):
        with np.errstate(over="ignore"):
            to[:] = source
    else:
        raise_bad(column, row, 0, source.dtype, f"cannot become {to.dtype}")


cdef int check_finite(Column column, uint8_t* values) except -1:
    cdef Py_ssize_t bad
    if column.dtype.char == "f":
        bad = first_non_finite32(<float*>values, column.values_bytes // 4)
        if bad >= 0:
            raise_non_finite(column, bad, (<float*>values)[bad])
    else:
        view = np.frombuffer(<uint8_t[:column.values_bytes]>values, column.dtype)
        check_array(column, view)
    return 0


def check_array(Column column not None, values):
    finite = np.isfinite(values)
    if not finite.all():
        bad = int((~finite).argmax())
        raise_non_finite(column, bad, values[bad])


def raise_non_finite(Column column not None, Py_ssize_t position, value):
    row = position
    if column.kind == KIND_LIST_LIST:
        row, position = row_of(column.inner, position)
        row = row_of(column.lengths, row)[0]
    elif column.kind != KIND_SCALAR:
        row, position = row_of(column.lengths, position)
    else:
        position = 0
    raise BadValue(column.name, row, position, float(value), "is not finite")
