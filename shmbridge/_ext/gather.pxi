"""Leased records as the arrays of one batch: sizes first, then all columns in one pass without the GIL.

Over the C core in gather.h. Text and maps are batch.py's. A Gather is for one thread.
"""

cdef extern from "gather.h" nogil:
    ctypedef struct gather_record:
        const uint8_t* extent
        const uint8_t* index
        uint64_t tokens
        uint32_t entries
        uint32_t rows
        uint32_t table
        const uint32_t* lengths
    ctypedef struct gather_column:
        const int32_t* numbers
        uint32_t item
        uint8_t kind
        uint8_t per_record
        uint8_t per_token
        uint64_t width
        uint8_t* present
        uint8_t* uneven
        uint8_t* values
        uint32_t* lengths
        uint32_t* inner
    const directory_entry* gather_find(const gather_record* record, int32_t number)
    const uint32_t* gather_lengths(const gather_record* record, uint32_t line)
    int gather_total(const gather_record* records, uint64_t count, const gather_column* column,
                     uint64_t* lists, uint64_t* values)
    void gather_copy(const gather_record* records, uint64_t count, const gather_column* column)
    void gather_positions(const int32_t* lengths, uint64_t rows, uint64_t width, int32_t* to)
    enum:
        COLUMN_PER_RECORD

BOOL, INT32 = np.dtype(np.bool_), np.dtype(np.int32)
MOST_TOKENS = 0x7FFFFFFF  # cu_seqlens is int32


class TooManyTokens(ValueError):
    """More tokens than cu_seqlens can count; the number of them is `args[0]`."""


cdef inline void* data_of(object array) noexcept:
    return cnp.PyArray_DATA(<cnp.ndarray>array)


cdef class Gather:
    """The rows of many records: `add` allocates a column's arrays, `copy` fills all of them at once.

    Holds the records' leases, also released ones, until close() or the end of a `with` block.
    """

    cdef readonly object lengths      # int32[rows]: tokens of each row
    cdef readonly object cu_seqlens   # int32[rows + 1]
    cdef readonly object group_index  # int32[rows]
    cdef readonly Py_ssize_t rows
    cdef readonly Py_ssize_t tokens
    cdef readonly Py_ssize_t longest  # tokens of the longest row
    cdef readonly tuple shape         # of what has a value per token: (tokens,), or (rows, longest)
    # of each added column, in order: bool[rows], filled by `copy`; its rows are more, fewer or of another
    # length
    cdef readonly list uneven
    cdef object _pool                 # a blocks.Pool, where large arrays come from
    cdef size_t _bytes                # of the arrays that were added
    cdef list _leases
    cdef list _tables                 # a LaneReader for each distinct column table
    cdef list _arrays                 # what `copy` writes to, and the numbers it reads
    cdef Py_buffer* _views
    cdef Py_ssize_t _open             # views held
    cdef gather_record* _records
    cdef gather_column* _columns
    cdef Py_ssize_t _added

    def __cinit__(self, list groups not None, bint padded, pool not None):
        """`groups` is a list of lists of leases.

        BufferError for a lease that has ended, TooManyTokens beyond MOST_TOKENS.
        """
        cdef Py_ssize_t i, group
        cdef Lease lease
        self._pool = pool
        self._leases, self._tables, self._arrays = [lease for leases in groups for lease in leases], [], []
        self.uneven = []
        self._views = <Py_buffer*>calloc(len(self._leases) or 1, sizeof(Py_buffer))
        self._records = <gather_record*>calloc(len(self._leases) or 1, sizeof(gather_record))
        if self._views == NULL or self._records == NULL:
            raise MemoryError
        for i, lease in enumerate(self._leases):
            PyObject_GetBuffer(lease, &self._views[i], PyBUF_SIMPLE)
            self._open = i + 1
            self._look(lease, &self._records[i], <const uint8_t*>self._views[i].buf)
        if self.tokens > MOST_TOKENS:
            raise TooManyTokens(self.tokens)
        self.shape = (self.tokens,)
        if padded:
            self.shape = (self.rows, self.longest)
        self.lengths, self.cu_seqlens = np.empty(self.rows, INT32), np.empty(self.rows + 1, INT32)
        self.group_index = np.empty(self.rows, INT32)
        self._measure([len(leases) for leases in groups])

    def __dealloc__(self):
        self.close()
        free(self._views)
        free(self._records)
        free(self._columns)

    def close(self):
        """Lets the leases go. Idempotent."""
        while self._open:
            self._open -= 1
            PyBuffer_Release(&self._views[self._open])

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    cdef int _look(self, Lease lease, gather_record* record, const uint8_t* extent) except -1:
        """Where one record's things are, and what its tokens add up to: all from its private index."""
        cdef LaneReader reader = lease._lane_reader
        cdef const directory_entry* entry
        cdef uint32_t row
        record.extent, record.index = extent, <const uint8_t*>PyBytes_AS_STRING(lease._index)
        record.entries, record.rows, record.table = lease._column_entries, lease._rows, self._table_of(reader)
        entry = gather_find(record, <int32_t>reader._reader.tokens)
        if entry == NULL:
            raise LaneCorrupt(f"record {lease._sequence} has no tokens")
        record.lengths = gather_lengths(record, entry.lengths_at)
        for row in range(record.rows):
            record.tokens += record.lengths[row]
            self.longest = max(self.longest, <Py_ssize_t>record.lengths[row])
        self.rows += record.rows
        self.tokens += record.tokens
        return 0

    cdef uint32_t _table_of(self, LaneReader reader) except? 0xFFFFFFFF:
        """Number of the reader's column table; lanes of one schema share one."""
        cdef LaneReader other
        cdef uint32_t table, count
        count = reader._reader.geometry.column_count
        for table, other in enumerate(self._tables):
            if reader is other or (
                    count == other._reader.geometry.column_count and
                    memcmp(reader._reader.columns, other._reader.columns, count * sizeof(column_def)) == 0):
                return table
        self._tables.append(reader)
        return len(self._tables) - 1

    cdef void _measure(self, list records_of_groups):
        cdef int32_t* lengths = <int32_t*>data_of(self.lengths)
        cdef int32_t* ends = <int32_t*>data_of(self.cu_seqlens)
        cdef int32_t* groups = <int32_t*>data_of(self.group_index)
        cdef Py_ssize_t i = 0, at = 0, group, left
        cdef uint32_t row
        cdef const gather_record* record
        ends[0] = 0
        for group in range(len(records_of_groups)):
            for left in range(<Py_ssize_t>records_of_groups[group]):
                record = &self._records[i]
                for row in range(record.rows):
                    lengths[at], groups[at] = record.lengths[row], <int32_t>group
                    ends[at + 1] = ends[at] + lengths[at]
                    at += 1
                i += 1

    def columns(self):
        """(record, number in its lane's column table) of each column with values, once per table."""
        cdef Py_ssize_t i
        cdef uint32_t at
        cdef const directory_entry* directory
        cdef bytearray seen = bytearray(MAX_COLUMNS * len(self._tables))
        cdef uint8_t* places
        cdef list found = []
        for i in range(len(self._leases)):
            directory = <const directory_entry*>self._records[i].index
            places = <uint8_t*>PyByteArray_AS_STRING(seen) + MAX_COLUMNS * self._records[i].table
            for at in range(self._records[i].entries):
                if directory[at].tag == TAG_VALUES and not places[directory[at].column]:
                    places[directory[at].column] = True
                    found.append((self._leases[i], <int>directory[at].column))
        return found

    def add(self, bytes name not None, int kind, dtype, *, bint per_record=False, bint per_token=False):
        """Allocates a column's arrays, which `copy` fills: (present bool[rows], values, lengths,
        inner lengths); the last three or None.

        With `per_token`, lists are values of `shape`, zero right of each row's end; a row of another length
        than its tokens is not present and zero. Scalars have values (rows,), lists and lists of lists all
        rows' values and uint32 lengths; of other kinds there is only `present`. LaneCorrupt where the lanes
        do not agree on the column; OverflowError if there are more values than any machine holds.
        """
        cdef gather_column* column
        cdef uint64_t lists = 0, count = 0
        cdef bint joined = not per_token and kind in (KIND_SCALAR, KIND_LIST, KIND_LIST_LIST)
        if per_token and kind != KIND_LIST:
            raise ValueError(f"column {name.decode()}: only lists have a value per token")
        column = <gather_column*>realloc(self._columns, (self._added + 1) * sizeof(gather_column))
        if column == NULL:
            raise MemoryError
        self._columns = column
        column = &self._columns[self._added]
        numbers = self._numbers(name, kind, dtype.itemsize, per_record)
        column.numbers, column.item, column.kind = <const int32_t*>data_of(numbers), dtype.itemsize, kind
        column.per_record, column.per_token = per_record, per_token
        column.width = self.shape[1] if len(self.shape) == 2 else 0
        column.values, column.lengths, column.inner = NULL, NULL, NULL
        present, values, lengths, inner = np.empty(self.rows, BOOL), None, None, None
        if joined:
            if gather_total(self._records, len(self._leases), column, &lists, &count):
                raise OverflowError(
                    f"column {name.decode()}: its rows repeat, or are, more values than there is memory for")
            values = self._pool.empty((count,), dtype)
        elif per_token:
            values = self._pool.empty(self.shape, dtype)
        if joined and kind != KIND_SCALAR:
            lengths = np.empty(self.rows, UINT32)
            column.lengths = <uint32_t*>data_of(lengths)
        if joined and kind == KIND_LIST_LIST:
            inner = self._pool.empty((lists,), UINT32)
            self._bytes += inner.nbytes
            column.inner = <uint32_t*>data_of(inner)
        uneven = np.empty(self.rows, BOOL)
        self.uneven.append(uneven)
        column.present, column.uneven = <uint8_t*>data_of(present), <uint8_t*>data_of(uneven)
        if values is not None:
            column.values = <uint8_t*>data_of(values)
            self._bytes += values.nbytes
        self._arrays.append((numbers, present, values, lengths, inner))
        self._added += 1
        return present, values, lengths, inner

    cdef object _numbers(self, bytes name, int kind, uint32_t item, bint per_record):
        """The column's number in each table, int32[tables], -1 where it is not; of one type in all."""
        numbers = np.empty(len(self._tables), INT32)
        cdef int32_t* to = <int32_t*>data_of(numbers)
        cdef LaneReader reader
        cdef const column_def* first = NULL
        cdef const column_def* each
        cdef uint32_t at, table
        for table, reader in enumerate(self._tables):
            to[table] = -1
            for at in range(reader._reader.geometry.column_count):
                each = &reader._reader.columns[at]
                if strncmp(each.name, PyBytes_AS_STRING(name), COLUMN_NAME_BYTES) != 0:
                    continue
                first = each if first == NULL else first
                if (each.kind != kind or each.item_bytes != item or each.dtype != first.dtype or
                        ((each.flags & COLUMN_PER_RECORD) != 0) != per_record):
                    raise LaneCorrupt(
                        f"column {name.decode()} is not of one type in {len(self._tables)} column tables")
                to[table] = <int32_t>at
                break
        return numbers

    def copy(self):
        """Fills every array that was added. Copies without the GIL; values that are null,
        absent or beyond a row's end are zero.

        The pool keeps as much spare memory as two such batches have from now on.
        """
        cdef Py_ssize_t i
        cdef uint64_t count = len(self._leases)
        if self._open < <Py_ssize_t>count:
            raise BufferError("the leases have been let go")
        self._pool.keep_bytes = 2 * self._bytes
        with nogil:
            for i in range(self._added):
                gather_copy(self._records, count, &self._columns[i])


def positions(lengths not None, bint padded, pool not None):
    """0, 1, 2, ... per row, int32: rows one after another, or (rows, longest) padded with zeros."""
    lengths = np.ascontiguousarray(lengths, np.int32)
    cdef uint64_t rows = len(lengths), longest = lengths.max(initial=0) if padded else 0
    to = pool.empty([rows, longest] if padded else [int(lengths.sum())], INT32)
    cdef const int32_t* source = <const int32_t*>data_of(lengths)
    cdef int32_t* values = <int32_t*>data_of(to)
    with nogil:
        gather_positions(source, rows, longest, values)
    return to
