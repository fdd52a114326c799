"""The check of one row's values in one column, as a producer stores it beside them."""

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t

cdef extern from "row_check.h" nogil:
    uint64_t checksum_seeded(const uint8_t* data, uint64_t size, uint64_t seed)
    uint64_t row_check_seed(const char* column)


def check_of(str column not None, values not None):
    """The check of one row's contiguous values, which have the column's dtype; never 0. Never blocks."""
    cdef Py_buffer view
    cdef bytes name = column.encode()
    PyObject_GetBuffer(values, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        return checksum_seeded(<const uint8_t*>view.buf, view.len, row_check_seed(name))
    finally:
        PyBuffer_Release(&view)
