"""Packs lists and arrays into the claimed memory, each value checked against its column.

Raises BadValue, with the place, for what does not fit.
"""

cdef extern from "pylist.h":
    Py_ssize_t pack_int32(object row, Py_ssize_t count, int32_t* to, int64_t least)
    Py_ssize_t pack_uint8(object row, Py_ssize_t count, uint8_t* to)
    Py_ssize_t pack_float32(object row, Py_ssize_t count, float* to, bint none_is_nan)
    Py_ssize_t pack_float64(object row, Py_ssize_t count, double* to)
    Py_ssize_t fold_masks(object masks, PyObject* tokens, const int32_t* packed, Py_ssize_t count,
                          uint8_t* to)

cdef extern from "convert.h" nogil:
    ctypedef enum badness:
        NEGATIVE_IS_BAD
        NON_FINITE_IS_BAD
        UNUSUAL_LOGPROB
    const float LOWEST "LOWEST_LOGPROB"
    const float HIGHEST "HIGHEST_LOGPROB"
    int64_t mark_logprobs(float* values, int64_t count)
    int64_t first_bad32(const void* values, int64_t count, badness bad)
    int64_t first_non_finite64(const double* values, int64_t count)
    int64_t copy_checked32(void* to, const void* source, int64_t count, badness bad, bint is_cold)
    int64_t int64_to_int32(int32_t* to, const int64_t* source, int64_t count, int64_t least)
    int64_t int64_to_uint8(uint8_t* to, const int64_t* source, int64_t count)
    void float64_to_float32(float* to, const double* source, int64_t count)



class BadValue(ValueError):
    """A value, row or column that cannot be put, and the `limit` that it broke.

    `fault` is one of those in shmbridge.put.convert; `row` and `position` are -1 where they say nothing.
    """

    def __init__(self, column, row, position, value, fault, limit=None):
        super().__init__(column, row, position, value, fault, limit)
        self.column, self.row, self.position, self.value = column, row, position, value
        self.fault, self.limit = fault, limit


class LossyMasks(Exception):
    """Atropos masks that are neither -100 nor the token: loss_mask alone cannot carry them."""


cdef int64_t write_values(PackedColumn column, uint8_t* to, bint is_cold) except -1:
    """All values of a column, row after row; `is_cold`: the extent has left the cache. Raises BadValue.

    Returns how many log-probabilities are not recorded.
    """
    cdef uint64_t item = column.form.item_bytes
    cdef uint8_t* first = to
    cdef uint8_t* end = to + column.count * item
    cdef const uint32_t* planned
    cdef Py_ssize_t count, row = 0
    cdef int64_t none = 0
    if cnp.PyArray_CheckExact(column.rows):  # all values
        count = array_size(column.rows)
        if <uint64_t>count > column.count:
            raise_resized(column, 0, count, column.count)
        if <uint64_t>count < column.count:
            raise_resized(column, 0, count, column.count)
        return write_array(column, 0, <cnp.ndarray><PyObject*>column.rows, first, to, count, is_cold)
    if column.form.kind == KIND_BYTES:
        lane_copy(to, PyBytes_AS_STRING(column.rows), column.count, is_cold)
        return 0
    planned = planned_lengths(column)
    for source in <list>column.rows:
        count = array_size(source) if cnp.PyArray_CheckExact(source) else PySequence_Fast_GET_SIZE(source)
        if planned != NULL and count != planned[row] or <uint64_t>count > <uint64_t>(end - to) // item:
            raise_resized(column, row, count, column.count if planned == NULL else planned[row])
        if count:
            if cnp.PyArray_CheckExact(source):
                none += write_array(column, row, <cnp.ndarray>source, first, to, count, is_cold)
            else:
                none += write_list(column, row, source, first, to, count)
        to += count * item
        row += 1
    if to != end:
        raise_resized(column, max(row - 1, 0), (to - first) // item, column.count)
    return none


cdef inline const uint32_t* planned_lengths(PackedColumn column) noexcept:
    """The length of each of `column.rows` when the group was handed over; NULL if they lie in one array."""
    cdef bytes lengths = column.inner_lengths if column.form.kind == KIND_LIST_LIST else column.row_lengths
    if column.form.kind != KIND_LIST and column.form.kind != KIND_LIST_LIST:
        return NULL
    if lengths is None or PyList_GET_SIZE(column.rows) * 4 != PyBytes_GET_SIZE(lengths):
        return NULL
    return <const uint32_t*>PyBytes_AS_STRING(lengths)


cdef int raise_resized(PackedColumn column, Py_ssize_t row, Py_ssize_t count, uint64_t planned) except -1:
    """Raises for a row, or a whole column, whose length has changed since the group was handed over."""
    return raise_bad(column, row, 0, count, "resized", planned)


cdef inline Py_ssize_t array_size(object array) noexcept:
    return cnp.PyArray_DIM(array, 0) if cnp.PyArray_NDIM(array) == 1 else cnp.PyArray_SIZE(array)


cdef int64_t write_list(PackedColumn column, Py_ssize_t row, source, uint8_t* first, uint8_t* to,
                        Py_ssize_t count) except -1:
    cdef int code = column.form.code
    cdef Py_ssize_t bad
    if code == c"i":
        bad = pack_int32(source, count, <int32_t*>to, least_of(column))
    elif code == c"f":
        bad = pack_float32(source, count, <float*>to, column.form.role == IS_LOGPROBS)
    elif code == c"B":
        bad = pack_uint8(source, count, to)
    elif code == c"d":
        bad = pack_float64(source, count, <double*>to)
    else:
        bad = pack_any(source, temporary_view(column, to, count))
    if bad >= 0:
        if PyErr_Occurred() != NULL:
            return -1
        value = source[bad] if bad < len(source) else None
        raise_unfit(column, row, bad, value)
    return settle(column, first, to, count)


cdef inline int64_t least_of(PackedColumn column) noexcept:
    """The least value of an int32 column."""
    return 0 if column.form.role == IS_TOKENS else -(<int64_t>1 << 31)


cdef int64_t write_array(PackedColumn column, Py_ssize_t row, cnp.ndarray source, uint8_t* first, uint8_t* to,
                         Py_ssize_t count, bint is_cold) except -1:
    """A contiguous array: copied if its dtype is the column's, common conversions in C, others in NumPy."""
    cdef int have = cnp.PyArray_TYPE(source), want = column.form.array_type
    cdef void* values = cnp.PyArray_DATA(source)
    cdef int64_t bad = -1
    if not cnp.PyArray_ISCARRAY_RO(source):  # its strides or its byte order were set since it was planned
        copy_array(column, row, source.reshape(-1), temporary_view(column, to, count))
        check_negative(column, first, to, count)
    elif have == want and column.form.role == IS_TOKENS:
        bad = copy_checked32(to, values, count, NEGATIVE_IS_BAD, is_cold)
        if bad >= 0:
            raise_unfit(column, row, bad, (<int32_t*>to)[bad])
        return 0
    elif have == want and column.form.role == IS_LOGPROBS:
        return copy_checked32(to, values, count, UNUSUAL_LOGPROB, is_cold)
    elif have == want and want == cnp.NPY_FLOAT32 and column.form.finite:
        bad = copy_checked32(to, values, count, NON_FINITE_IS_BAD, is_cold)
        if bad >= 0:
            raise_non_finite(column, (to - first) // 4 + bad, (<float*>to)[bad])
        return 0
    elif have == want:
        lane_copy(to, values, count * column.form.item_bytes, is_cold)
    elif have == cnp.NPY_INT64 and want == cnp.NPY_INT32:
        bad = int64_to_int32(<int32_t*>to, <const int64_t*>values, count, least_of(column))
    elif have == cnp.NPY_INT64 and want == cnp.NPY_UINT8:
        bad = int64_to_uint8(to, <const int64_t*>values, count)
    elif have == cnp.NPY_BOOL and want == cnp.NPY_UINT8:
        lane_copy(to, values, count, is_cold)
    elif have == cnp.NPY_FLOAT64 and want == cnp.NPY_FLOAT32:
        float64_to_float32(<float*>to, <const double*>values, count)
    else:
        copy_array(column, row, source.reshape(-1), temporary_view(column, to, count))
        check_negative(column, first, to, count)
    if bad >= 0:
        raise_unfit(column, row, bad, (<int64_t*>values)[bad])
    return settle(column, first, to, count)


cdef int fold_values(PackedColumn column, uint8_t* to, const int32_t* tokens) except -1:
    """Atropos masks, all lists, into a loss_mask; `tokens` are the record's, packed just before.

    Raises LossyMasks where that loses something.
    """
    cdef PackedColumn folded = column.folds
    cdef const uint32_t* planned = <const uint32_t*>PyBytes_AS_STRING(column.row_lengths)
    cdef Py_ssize_t count, row = 0
    cdef uint8_t* end = to + column.count
    cdef PyObject* same
    cdef list token_rows = <list>folded.rows if PyList_CheckExact(folded.rows) else []
    cdef bint by_row = len(token_rows) == folded.entries
    for masks in <list>column.rows:
        count = PySequence_Fast_GET_SIZE(masks)
        if count > end - to or count != planned[row]:  # changed since it was handed over
            raise LossyMasks
        same = NULL
        if by_row and row < len(token_rows) and isinstance(token_rows[row], (list, tuple)):
            if PySequence_Fast_GET_SIZE(token_rows[row]) == count:
                same = <PyObject*>token_rows[row]
        if fold_masks(masks, same, tokens, count, to) >= 0:
            if PyErr_Occurred() != NULL:
                return -1
            raise LossyMasks
        to += count
        tokens += count
        row += 1
    if to != end:
        raise LossyMasks
    return 0


cdef object temporary_view(PackedColumn column, uint8_t* to, Py_ssize_t count):
    """The claimed memory as an array, for as long as one call of ours."""
    cdef cnp.npy_intp size = count
    return cnp.PyArray_SimpleNewFromData(1, &size, column.form.array_type, to)


def int32_of(row):
    """A new int32 array of the whole numbers of a list or tuple; None if one is something else, or does not fit."""
    made = np.empty(len(row), np.int32)
    if pack_int32(row, cnp.PyArray_SIZE(made), <int32_t*>cnp.PyArray_DATA(made), INT_MIN) < 0:
        return made
    raise_what_is_set()
    return None


cdef int raise_what_is_set() except -1:
    return -1 if PyErr_Occurred() != NULL else 0


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
        except (TypeError, ValueError, OverflowError, IndexError):
            return i
    return -1


def copy_array(PackedColumn column not None, Py_ssize_t row, source, to):
    """One array into one row of another dtype, values checked: integers must fit, floats may round."""
    kind = source.dtype.kind
    if source.dtype == to.dtype:
        to[:] = source
    elif to.dtype.kind in "iu" and kind in "iub":
        limits = np.iinfo(to.dtype)
        outside = (source < limits.min) | (source > limits.max) if kind != "b" else np.zeros(0, bool)
        if outside.any():
            position = int(outside.argmax())
            raise_bad(column, row, position, int(source[position]), "range")
        to[:] = source
    elif (to.dtype.kind == "f" and kind in "fiub") or (to.dtype.kind == "b" and kind == "b"):
        with np.errstate(over="ignore"):
            to[:] = source
    else:
        raise_bad(column, row, 0, source.dtype, "dtype")


cdef int64_t check_column(PackedColumn column, uint8_t* values) except -1:
    """All values of a column that were written in place: as write_values."""
    check_negative(column, values, values, column.count)
    return settle(column, values, values, column.count)


cdef int64_t settle(PackedColumn column, uint8_t* first, uint8_t* values, Py_ssize_t count) except -1:
    """Marks log-probabilities that are none, and returns how many; checks other floats, and returns 0."""
    if column.form.role == IS_LOGPROBS:
        return mark_logprobs(<float*>values, count)
    return check_finite(column, first, values, count)


LOWEST_LOGPROB, HIGHEST_LOGPROB = LOWEST, HIGHEST


def recorded_logprobs(values, none=None):
    """A float32 copy of log-probabilities as `put` stores them: NaN where none was recorded, or `none`; else 0 or
    less.
    """
    made = np.array(values, np.float32, order="C")
    if mark_logprobs(<float*>cnp.PyArray_DATA(made), cnp.PyArray_SIZE(made)) and none is not None:
        made[np.isnan(made)] = none
    return made


cdef int check_negative(PackedColumn column, uint8_t* first, uint8_t* values, Py_ssize_t count) except -1:
    """`count` values of a column that begins at `first`. Raises BadValue for a negative token."""
    cdef int64_t bad = -1
    if column.form.role == IS_TOKENS:
        bad = first_bad32(values, count, NEGATIVE_IS_BAD)
    if bad >= 0:
        row, position = row_of(column.lengths, (values - first) // 4 + bad)
        raise BadValue(column.form.name, row, position, (<int32_t*>values)[bad], "negative")
    return 0


cdef int check_finite(PackedColumn column, uint8_t* first, uint8_t* values, Py_ssize_t count) except -1:
    """`count` values of a column that begins at `first`. Raises BadValue if one must be finite and is not."""
    cdef int64_t bad = -1
    if not column.form.finite:
        return 0
    if column.form.code == c"f":
        bad = first_bad32(values, count, NON_FINITE_IS_BAD)
    elif column.form.code == c"d":
        bad = first_non_finite64(<double*>values, count)
    if bad >= 0:
        place = (values - first) // column.form.item_bytes + bad
        raise_non_finite(column, place, temporary_view(column, values, count)[bad])
    return 0


cdef int raise_unfit(PackedColumn column, Py_ssize_t row, Py_ssize_t position, value) except -1:
    """Of a value that its column's type does not hold, or a negative token."""
    fault = "none" if value is None else "type"
    if isinstance(value, (int, np.integer)):
        fault = "negative" if column.form.role == IS_TOKENS and -(1 << 31) <= value < 0 else "range"
    return raise_bad(column, row, position, value, fault)


cdef int raise_bad(PackedColumn column, Py_ssize_t row, Py_ssize_t position, value, str fault,
                   limit=None) except -1:
    """A scalar column is packed as if it were one row: its positions are rows."""
    if column.form.kind == KIND_SCALAR:
        row, position = position, 0
    elif column.form.kind == KIND_MAP:
        row, position = row_of(column.lengths, position)
    elif column.form.kind == KIND_LIST_LIST:
        row = row_of(column.lengths, row)[0]
    elif type(column.rows) is not list or len(column.rows) != column.entries:
        row, position = row_of(column.lengths, position)
    raise BadValue(column.form.name, row, position, value, fault, limit)


cdef int raise_non_finite(PackedColumn column, Py_ssize_t position, value) except -1:
    """`position` counts over the whole column."""
    row = position
    if column.form.kind == KIND_LIST_LIST:
        row, position = row_of(column.inner, position)
        row = row_of(column.lengths, row)[0]
    elif column.form.kind != KIND_SCALAR:
        row, position = row_of(column.lengths, position)
    else:
        position = 0
    raise BadValue(column.form.name, row, position, float(value), "finite")


def row_of(lengths, position):
    """Which row a place among all rows' values belongs to, and where in it."""
    ends = np.cumsum(lengths)
    row = int(np.searchsorted(ends, position, side="right"))
    return row, int(position - (ends[row] - lengths[row]))
