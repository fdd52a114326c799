"""Checksums of bytes: of one row's values in a lane, and of what files and parcels hold."""

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t

cdef extern from "row_check.h" nogil:
    ctypedef struct checksum_pieces:
        pass
    void checksum_begin(checksum_pieces* all)
    void checksum_add(checksum_pieces* all, const uint8_t* data, uint64_t size)
    uint64_t checksum_end(checksum_pieces* all, uint64_t seed)
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


def checksum(pieces, uint64_t seed=0):
    """The checksum of bytes that lie in several contiguous pieces, one behind the other; never 0.

    However they are cut, it is the same. Another seed gives another one. Never blocks; lets other threads run.
    """
    cdef checksum_pieces all
    cdef Py_buffer view
    checksum_begin(&all)
    for piece in pieces:
        PyObject_GetBuffer(piece, &view, PyBUF_ANY_CONTIGUOUS)
        try:
            if view.len < 1 << 14:
                checksum_add(&all, <const uint8_t*>view.buf, view.len)
            else:
                with nogil:
                    checksum_add(&all, <const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
    return checksum_end(&all, seed)
