"""The limit that measurements are held against, and the read of every byte that all contenders share.

Knows nothing of the ring.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBUF_WRITABLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport uint8_t, uint64_t
cimport numpy as cnp

cdef extern from "memcpy_baseline.h" nogil:
    const uint64_t BASELINE_LINE
    ctypedef struct baseline_flag:
        pass
    ctypedef struct baseline:
        baseline_flag* flags
        uint8_t* data
        uint64_t slots, record, position
        bint past_cache
    uint64_t sum_of_words(const uint8_t* bytes, uint64_t count)
    uint64_t baseline_write(baseline* it, const uint8_t* source, uint64_t sources, uint64_t count, double patience_s)
    uint64_t baseline_read(baseline* it, uint64_t count, double patience_s, uint64_t* sum)


cnp.import_array()


def touch(object buffer) -> int:
    """Reads every byte of a contiguous buffer: the sum of its 8-byte words and of the bytes after them,
    modulo 2**64. Holds the GIL.
    """
    cdef Py_buffer view
    cdef uint64_t total
    # half the time of the buffer protocol
    if cnp.PyArray_Check(buffer) and cnp.PyArray_IS_C_CONTIGUOUS(<cnp.ndarray>buffer):
        return sum_of_words(<const uint8_t*>cnp.PyArray_BYTES(<cnp.ndarray>buffer),
                            cnp.PyArray_NBYTES(<cnp.ndarray>buffer))
    PyObject_GetBuffer(buffer, &view, PyBUF_SIMPLE)
    total = sum_of_words(<const uint8_t*>view.buf, view.len)
    PyBuffer_Release(&view)
    return total


def slots_in(uint64_t lane_bytes, uint64_t record_bytes) -> int:
    """How many records of this size a lane has room for."""
    return lane_bytes // record_bytes


def segment_bytes(uint64_t lane_bytes, uint64_t record_bytes) -> int:
    """Bytes of the segment for that lane: its slots, and a line for the flag of each."""
    return lane_bytes // record_bytes * (record_bytes + BASELINE_LINE)


cdef class MemcpyBaseline:
    """One side of the limit over a shared, writable, zeroed segment.

    For one thread; write and read spin with the GIL released.
    """

    cdef Py_buffer _segment
    cdef baseline _it
    cdef bint _open

    def __init__(self, object segment, uint64_t lane_bytes, uint64_t record_bytes, bint past_cache=False):
        if record_bytes < 8 or record_bytes % 8 or lane_bytes // record_bytes < 2:
            raise ValueError(f"records of {record_bytes} bytes in a lane of {lane_bytes}: "
                             "whole 8-byte words, and room for two, are needed")
        PyObject_GetBuffer(segment, &self._segment, PyBUF_WRITABLE)
        self._open = True
        if <uint64_t>self._segment.len < segment_bytes(lane_bytes, record_bytes):
            raise ValueError(f"the segment has {self._segment.len} bytes, "
                             f"{segment_bytes(lane_bytes, record_bytes)} are needed")
        self._it.slots, self._it.record, self._it.position = lane_bytes // record_bytes, record_bytes, 0
        self._it.past_cache = past_cache
        self._it.flags = <baseline_flag*>self._segment.buf
        self._it.data = <uint8_t*>self._segment.buf + self._it.slots * BASELINE_LINE

    def __dealloc__(self):
        self.close()

    def write(self, object source, uint64_t count, double patience_s=30.0) -> None:
        """Copies `count` records in, from those in `source` in turn.

        Spins; TimeoutError if the reader stands still for patience_s.
        """
        cdef Py_buffer view
        cdef uint64_t done
        PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
        try:
            if not self._open or view.len == 0 or view.len % self._it.record:
                raise ValueError(f"{view.len} bytes are no whole records of {self._it.record}")
            with nogil:
                done = baseline_write(&self._it, <const uint8_t*>view.buf, view.len // self._it.record, count,
                                  patience_s)
        finally:
            PyBuffer_Release(&view)
        if done < count:
            raise TimeoutError(
                f"the reader took no record for {patience_s} s; {done} of {count} were written")

    def read(self, uint64_t count, double patience_s=30.0) -> int:
        """Reads every byte of `count` records: the sum of their words.

        Spins; TimeoutError if the writer stands still for patience_s.
        """
        cdef uint64_t done, total = 0
        if not self._open:
            raise ValueError("this side is closed")
        with nogil:
            done = baseline_read(&self._it, count, patience_s, &total)
        if done < count:
            raise TimeoutError(f"the writer gave no record for {patience_s} s; {done} of {count} were read")
        return total

    def close(self) -> None:
        """Lets go of the segment; write and read are errors from here on."""
        if self._open:
            self._open = False
            PyBuffer_Release(&self._segment)
