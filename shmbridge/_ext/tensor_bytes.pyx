"""Bytes of tensors into and out of a mapped segment, without the GIL, and their checksum.

Knows places, not what lies there.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t
from libc.string cimport memcpy

from shmbridge._ext.mapping cimport Mapping

cdef extern from "cache.h" nogil:
    uint64_t cache_bytes(int level, uint64_t otherwise)

cdef extern from "lane_copy.h" nogil:
    void lane_copy(void* to, const void* source, uint64_t size, int is_cold)
    void lane_copies_done(int is_cold)

cdef extern from "checksum.h" nogil:
    uint64_t checksum_of(const uint8_t* data, uint64_t size)

cdef uint64_t FAR_OFF = cache_bytes(3, 32 << 20) // 2


cdef int _inside(Mapping mapping, uint64_t at, uint64_t size) except -1:
    if not mapping.alive():
        raise BufferError("the segment was mapped before fork: attach again in this process")
    if at > mapping.size or size > mapping.size - at:
        raise ValueError(f"bytes {at} to {at + size} of a segment of {mapping.size}")
    return 0


def copy_in(Mapping mapping not None, uint64_t at, source not None, uint64_t going_round):
    """Copies the contiguous buffer `source` to byte `at` of the segment. Blocks, with the GIL released.

    Past the cache if this place is written again only after `going_round` bytes,
    and those are more than the cache keeps.
    """
    cdef Py_buffer view
    cdef bint is_cold = going_round > FAR_OFF
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        _inside(mapping, at, view.len)
        with nogil:
            lane_copy(mapping.base + at, view.buf, view.len, is_cold)
            lane_copies_done(is_cold)
    finally:
        PyBuffer_Release(&view)


def copy_out(Mapping mapping not None, uint64_t at, to not None):
    """Fills the contiguous, writable buffer `to` from byte `at` of the segment on, which others may be
    writing. Blocks, with the GIL released.
    """
    cdef Py_buffer view
    PyObject_GetBuffer(to, &view, PyBUF_SIMPLE | PyBUF_WRITABLE)
    try:
        _inside(mapping, at, view.len)
        with nogil:
            memcpy(view.buf, mapping.base + at, view.len)
    finally:
        PyBuffer_Release(&view)


def checksum(Mapping mapping not None, uint64_t at, uint64_t size):
    """Checksum of `size` bytes from byte `at` of the segment on, never 0. Blocks, with the GIL released."""
    cdef uint64_t found
    _inside(mapping, at, size)
    with nogil:
        found = checksum_of(mapping.base + at, size)
    return found
