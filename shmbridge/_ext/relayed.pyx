"""The plan of a record that lay in a lane of another node: its extent is checked, then copied as it is.

Knows layout.h and the column table of the lane that the record came from; that of the lane it goes to may have
other numbers for the same columns.
"""

from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcpy

from shmbridge._ext.futex cimport monotonic_ns
from shmbridge._ext.geometry cimport complaint
from shmbridge._ext.lane_writer cimport LaneWriter
from shmbridge._ext.layout cimport column_def, directory_entry, slot
from shmbridge._ext.plan cimport Plan

from shmbridge._ext.header import LaneCorrupt

cdef extern from "index.h" nogil:
    uint32_t index_tokens(const column_def* columns, uint32_t column_count)
    int index_check(const uint8_t* index, const slot* body, const column_def* columns, uint32_t column_count,
                    uint32_t tokens, complaint* why)

cdef extern from "lane_copy.h" nogil:
    void lane_copy(void* to, const void* source, uint64_t count, bint is_cold)
    void lane_copies_done(bint is_cold)


cdef class RelayedPlan(Plan):
    """The plan of one relayed record. Whoever makes it keeps `extent` until it is committed or dropped.

    Args:
        extent: all bytes of the record, as a lane held them.
        table: the column table of the lane it came from, as its header had it.
        numbers: the number in the new lane of each column of that table; -1 for one that it has not.
        stamp: of the record.
        words: rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of the record's slot.
        origin: sequence at the origin, and its origin_waited_ns.
        requested_ns: CLOCK_MONOTONIC of this node, when the record was requested.

    Raises LaneCorrupt if the extent is not what its words say, or has a column without a new number.
    """

    cdef bytes _index                # a checked copy: directory with new numbers, group id, lengths
    cdef object _extent
    cdef int64_t _requested_ns

    def __init__(self, extent, bytes table not None, numbers, stamp, words, origin, int64_t requested_ns):
        cdef Py_buffer view
        PyObject_GetBuffer(extent, &view, PyBUF_SIMPLE)
        try:
            self.check(<const uint8_t*>view.buf, view.len, table, numbers, words)
        finally:
            PyBuffer_Release(&view)
        self.columns, self.stamp, self._extent, self._requested_ns = [], stamp, extent, requested_ns
        self._slot.min_policy_version, self._slot.max_policy_version = self.stamp.oldest, self.stamp.newest
        self._slot.env_id = -1  # a number that the hub of the other node gave
        self._slot.t_created_ns = monotonic_ns()
        self._slot.origin_sequence = <uint64_t>origin[0] + 1
        self._slot.origin_waited_ns = origin[1]

    cdef int check(self, const uint8_t* base, uint64_t size, bytes table, numbers, words) except -1:
        cdef complaint why
        cdef uint32_t count = len(table) // sizeof(column_def), i
        cdef const column_def* columns = <const column_def*>PyBytes_AS_STRING(table)
        cdef directory_entry* entry
        cdef slot body = self._slot
        (body.rows, body.columns, body.index_bytes, body.group_id_bytes, body.flags, body.tokens,
         body.group_size) = words
        body.extent_bytes = self.extent_bytes = size
        if body.index_bytes > size:
            raise LaneCorrupt(f"an index of {body.index_bytes} bytes in an extent of {size}")
        self._index = PyBytes_FromStringAndSize(<const char*>base, body.index_bytes)
        if index_check(<const uint8_t*>PyBytes_AS_STRING(self._index), &body, columns, count,
                       index_tokens(columns, count), &why):
            raise LaneCorrupt(why.text.decode())
        self._slot = body
        entry = <directory_entry*>PyBytes_AS_STRING(self._index)
        for i in range(body.columns):
            if numbers[entry[i].column] < 0:
                name = columns[entry[i].column].name.decode("utf-8", "replace")
                raise LaneCorrupt(f"column {name!r} is not among those of the new lane")
            entry[i].column = <uint16_t>numbers[entry[i].column]
        return 0

    cdef int write_all(self, LaneWriter writer, uint64_t number) except -1:
        cdef uint8_t* base = writer.claimed(number)
        cdef bint is_cold = writer._writer.claim_is_cold
        cdef uint64_t index = self._slot.index_bytes, rest
        cdef const uint8_t* source
        cdef Py_buffer view
        PyObject_GetBuffer(self._extent, &view, PyBUF_SIMPLE)
        try:
            source, rest = <const uint8_t*>view.buf, self.extent_bytes - index
            with nogil:
                lane_copy(base + index, source + index, rest, is_cold)
        finally:
            PyBuffer_Release(&view)
        memcpy(writer.claimed(number), PyBytes_AS_STRING(self._index), index)
        lane_copies_done(is_cold)
        self._slot.origin_transfer_ns = monotonic_ns() - self._requested_ns
        self.sequence = writer.publish(number, &self._slot)
        self.done = True
        self._extent = None
        return 0
