"""Copies bytes of tensors into a mapped segment, without the GIL."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint64_t

from shmbridge._ext.mapping cimport Mapping

cdef extern from "cache.h" nogil:
    uint64_t cache_bytes(int level, uint64_t otherwise)

cdef extern from "lane_copy.h" nogil:
    void lane_copy(void* to, const void* source, uint64_t size, int is_cold)
    void lane_copies_done(int is_cold)

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
