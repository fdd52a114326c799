"""Copies bytes of tensors into a mapped segment, without the GIL, and looks whether they are finite."""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t

from shmbridge._ext.mapping cimport Mapping

cdef extern from "cache.h" nogil:
    uint64_t cache_bytes(int level, uint64_t otherwise)

cdef extern from "lane_copy.h" nogil:
    void lane_copy(void* to, const void* source, uint64_t size, int is_cold)
    void lane_copies_done(int is_cold)

cdef extern from "finite.h" nogil:
    int numbers_are_finite(const uint8_t* at, uint64_t count, uint64_t width, uint64_t mask, uint64_t value)

cdef uint64_t PIECE = 32 << 10  # bytes that are copied, then looked at while the cache has them
cdef uint64_t FAR_OFF = cache_bytes(3, 32 << 20) // 2


cdef int _inside(Mapping mapping, uint64_t at, uint64_t size) except -1:
    if not mapping.alive():
        raise BufferError("the segment was mapped before fork: attach again in this process")
    if at > mapping.size or size > mapping.size - at:
        raise ValueError(f"bytes {at} to {at + size} of a segment of {mapping.size}")
    return 0


cdef tuple _ANY = (0, 0, 0)


def copy_in(Mapping mapping not None, uint64_t at, source not None, uint64_t going_round, tuple number=None,
            uint64_t first=0):
    """Copies the contiguous buffer `source` to byte `at` of the segment; returns whether its numbers are finite.

    Blocks, with the GIL released. Past the cache if this place is written again only after `going_round` bytes,
    and those are more than the cache keeps.

    Args:
        number: (bytes, mask, value) of the type of the numbers, as finite.h has them; None: all are finite.
        first: byte of the source at which the first whole number begins.
    """
    cdef Py_buffer view
    cdef bint is_cold = going_round > FAR_OFF, finite = True
    cdef uint64_t width, mask, value, size, piece, count, done = 0, looked = first
    width, mask, value = _ANY if number is None else number
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        _inside(mapping, at, size)
        with nogil:
            while done < size:
                piece = size - done if size - done < PIECE else PIECE
                lane_copy(mapping.base + at + done, <uint8_t*>view.buf + done, piece, is_cold)
                done += piece
                if width and finite and done > looked:
                    count = (done - looked) // width
                    finite = numbers_are_finite(<uint8_t*>view.buf + looked, count, width, mask, value)
                    looked += count * width
            lane_copies_done(is_cold)
    finally:
        PyBuffer_Release(&view)
    return finite


def are_finite(source not None, tuple number=None):
    """Returns whether the numbers of a contiguous buffer are finite, as `copy_in`. Blocks, with the GIL
    released.
    """
    cdef Py_buffer view
    cdef bint finite = True
    cdef uint64_t width, mask, value
    width, mask, value = _ANY if number is None else number
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            if width:
                finite = numbers_are_finite(<uint8_t*>view.buf, view.len // width, width, mask, value)
    finally:
        PyBuffer_Release(&view)
    return finite
