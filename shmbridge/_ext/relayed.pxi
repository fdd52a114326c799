"""The plan of a record that lay in a lane of another node: its index is checked, its extent copied as it is.

Knows layout.h and the column table of the lane that the record goes to; that of the lane it came from may have
other numbers for the same columns.
"""

class ColumnMissing(Exception):
    """The record has a column that the lane cannot carry: its number among those it came with."""


cdef class RelayedPlan(Plan):
    """The plan of one relayed record. Keeps `extent` until the record is committed or dropped.

    Args:
        extent: all bytes of the record, as a lane held them; read once to check, once to copy.
        numbers: int32[], for each column of the lane it came from its number in `table`, below 0 for none.
        table: the column table of the lane that it goes to.
        words: rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of the record's slot.
        versions: oldest and newest policy version; -1: not stamped.
        origin: the record's sequence at its origin, and its origin_waited_ns.
        requested_ns: CLOCK_MONOTONIC of this node, when the record was requested.

    Raises LaneCorrupt if the extent is not what its words say, ColumnMissing, OverflowError for a word that no
    slot can hold, BufferError for what is no flat memory.
    """

    cdef bytes _index                # a checked copy: directory with new numbers, group id, lengths
    cdef object _extent              # a memoryview: what it shows keeps its size
    cdef int64_t _requested_ns

    def __init__(self, extent, cnp.ndarray numbers not None, bytes table not None, words, versions, origin,
                 int64_t requested_ns):
        cdef Py_buffer view
        cdef int64_t sequence, oldest, newest
        self._extent, self._requested_ns, self.columns = memoryview(extent), requested_ns, []
        (self._slot.rows, self._slot.columns, self._slot.index_bytes, self._slot.group_id_bytes,
         self._slot.flags, self._slot.tokens, self._slot.group_size) = words
        PyObject_GetBuffer(self._extent, &view, PyBUF_SIMPLE)
        try:
            self.copy_index(<const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
        self.check_index(numbers, <const column_def*>PyBytes_AS_STRING(table), len(table) // sizeof(column_def))
        sequence, self._slot.origin_waited_ns = origin
        oldest, newest = versions
        if sequence < 0 or not -1 <= oldest <= newest:
            raise LaneCorrupt(f"sequence {sequence}, policy versions {oldest} to {newest}")
        self._slot.origin_sequence = <uint64_t>sequence + 1
        self._slot.min_policy_version, self._slot.max_policy_version = oldest, newest
        self._slot.env_id = -1  # such numbers are of the hub of one node
        self._slot.t_created_ns = monotonic_ns()
        self.stamp = self.stamp_of_index()

    cdef int copy_index(self, const uint8_t* base, uint64_t size) except -1:
        cdef uint64_t index = self._slot.index_bytes
        if index > size or index % ALIGNMENT or size % ALIGNMENT:
            raise LaneCorrupt(f"an index of {index} bytes in an extent of {size}")
        if self._slot.columns * sizeof(directory_entry) > index:
            raise LaneCorrupt(f"{self._slot.columns} columns in an index of {index} bytes")
        if self._slot.flags & ~(SLOT_EVAL | SLOT_UNEVEN) or self._slot.group_size < 1:
            raise LaneCorrupt(f"flags {self._slot.flags:#x}, group_size {self._slot.group_size}")
        self._slot.extent_bytes = self.extent_bytes = size
        self._index = PyBytes_FromStringAndSize(<const char*>base, index)
        return 0

    cdef int check_index(self, cnp.ndarray numbers, const column_def* columns, uint32_t count) except -1:
        """Numbers the columns as the new lane does, then checks all as its readers will."""
        cdef directory_entry* entry = <directory_entry*>PyBytes_AS_STRING(self._index)
        cdef uint32_t tokens = index_tokens(columns, count), i
        cdef uint64_t length
        cdef complaint why
        cdef const int32_t* number = <const int32_t*>cnp.PyArray_DATA(numbers)
        cdef Py_ssize_t numbered = cnp.PyArray_SIZE(numbers)
        if cnp.PyArray_TYPE(numbers) != cnp.NPY_INT32 or not cnp.PyArray_ISCARRAY_RO(numbers):
            raise ValueError("numbers of columns are an int32 array without gaps")
        for i in range(self._slot.columns):
            if entry[i].column >= numbered:
                raise LaneCorrupt(f"entry {i}: column {entry[i].column} of {numbered}")
            if number[entry[i].column] < 0:
                raise ColumnMissing(entry[i].column)
            entry[i].column = <uint16_t>number[entry[i].column]
        if index_check(<const uint8_t*>entry, &self._slot, columns, count, tokens, &why):
            raise LaneCorrupt(why.text.decode())
        for i in range(self._slot.columns):
            if entry[i].column == tokens and entry[i].tag == TAG_VALUES:
                length = index_sum(
                    <const uint32_t*>(<const uint8_t*>entry + entry[i].lengths_at * <uint64_t>ALIGNMENT),
                    entry[i].entries)
                if length != self._slot.tokens:
                    raise LaneCorrupt(f"{length} tokens, its slot says {self._slot.tokens}")
        return 0

    cdef Stamp stamp_of_index(self):
        cdef const char* at = PyBytes_AS_STRING(self._index) + self._slot.columns * sizeof(directory_entry)
        group_id = PyBytes_FromStringAndSize(at, self._slot.group_id_bytes)
        return Stamp(group_id, self._slot.group_size, self._slot.min_policy_version,
                     self._slot.max_policy_version, self._slot.flags & SLOT_EVAL != 0, SAID_BOTH)

    cdef int write_all(self, LaneWriter writer, uint64_t number) except -1:
        cdef uint8_t* base = writer.claimed(number)
        cdef bint is_cold = writer._writer.claim_is_cold
        cdef uint64_t index = PyBytes_GET_SIZE(self._index), rest = self.extent_bytes - index
        cdef Py_buffer view
        PyObject_GetBuffer(self._extent, &view, PyBUF_SIMPLE)
        try:
            with nogil:
                lane_copy(base + index, <const uint8_t*>view.buf + index, rest, is_cold)
        finally:
            PyBuffer_Release(&view)
        writer.claimed(number)  # another thread may have ended it meanwhile
        memcpy(base, PyBytes_AS_STRING(self._index), index)
        lane_copies_done(is_cold)
        self._slot.origin_transfer_ns = monotonic_ns() - self._requested_ns
        self.sequence = writer.publish(number, &self._slot)
        self.done = True
        self._extent = None
        return 0
