"""The common forms of what is handed to `put`, understood in C: rows that are lists, arrays or CPU tensors, one number a row, nothing missing.

Whatever else there is, it declines by returning None and says nothing: shmbridge.put.convert then takes its time, and finds the error if there is one.
What it accepts is measured exactly as there. Knows forms of columns; knows nothing of names' meanings beyond tokens and Atropos' masks.
"""

cimport numpy as cnp
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.float cimport PyFloat_CheckExact
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.tuple cimport PyTuple_CheckExact
from libc.stdint cimport int32_t, int64_t, uint32_t, uint64_t
from libc.stdio cimport snprintf
from libc.string cimport memcmp, memcpy

from shmbridge._ext.column cimport Column, Form
from shmbridge._ext.layout cimport KIND_LIST, KIND_SCALAR, TAG_EMPTY_LIST, TAG_EMPTY_MAP, TAG_NULL, TAG_VALUES
from shmbridge._ext.plan cimport SAID_NOTHING, SAID_OLDEST, Plan, RowSampler, Stamp
from shmbridge._ext.lane_writer cimport LaneWriter

from shmbridge._ext.pack import BadValue, LossyMasks
from shmbridge._ext.lane_writer import ClaimLost

cnp.import_array()

cdef object Tensor = None  # torch.Tensor, once whoever calls has imported torch


def know_tensors(tensor):
    """From now on `tensor` (torch.Tensor) is a form of rows, too."""
    global Tensor
    Tensor = tensor


cdef class Forms:
    """The columns of a lane's table by the keys a group may have them under."""

    cdef dict _by_key
    cdef Form _tokens
    cdef Form _masks
    cdef Form _loss_mask
    cdef RowSampler _sampler
    cdef Form _score
    cdef bint _foreign

    def __init__(self, dict by_key not None, RowSampler sampler=None, bint foreign=False):
        self._by_key, self._sampler, self._foreign, self._score = by_key, sampler, foreign, by_key["score"]
        self._tokens, self._masks, self._loss_mask = by_key["tokens"], by_key["masks"], by_key["loss_mask"]

    def plan(self, group, Stamp stamp not None, source):
        """The plan of a group's record, or None."""
        return self.make_plan(group, stamp, source)

    cdef Plan make_plan(self, group, Stamp stamp, source):
        cdef Column tokens, column
        cdef Form form
        cdef Plan made
        cdef list columns
        cdef int64_t env_id = -1
        if type(group) is not dict or "tokens" not in <dict>group:
            return None
        tokens = measure(self._tokens, (<dict>group)["tokens"])
        if tokens is None or tokens.entries == 0 or stamp.group_size and stamp.group_size < tokens.entries:
            return None
        columns = [tokens]
        for key, value in (<dict>group).items():
            if type(key) is not str:
                return None
            form = <Form>(self._by_key.get(key))
            if form is self._tokens:
                continue
            if form is None:
                if key != "env_id" or not small_number(value, &env_id):
                    return None
                continue
            if form.name is not key and form.name != key and form.name in <dict>group:
                return None
            if form is self._masks and PyList_CheckExact(value) and PyList_GET_SIZE(value):
                column = fold(self._loss_mask, tokens, <list>value) if "loss_mask" not in <dict>group else None
            else:
                column = measure(form, value)
            if column is None or form is self._masks and column.tag == TAG_VALUES and column.folds is None or not belongs(column, tokens):
                return None
            if form is self._score and not self._foreign and column.tag == TAG_VALUES and has_empty_row(tokens):
                return None
            columns.append(column)
        made = Plan.__new__(Plan)
        try:
            made.lay_out(columns, stamp, tokens.entries, tokens.count, False, <int32_t>env_id, source, self._sampler)
        except OverflowError:
            return None
        return made


cdef class Door:
    """The whole of a `put` where nothing is uncommon: understood, claimed, written, published. For the producer's thread; never blocks."""

    cdef Forms _forms
    cdef LaneWriter _writer
    cdef bytes _own_groups           # what ids of groups without one begin with
    cdef uint64_t _most_bytes
    cdef public uint64_t ahead       # groups stamped with a version that the bridge has not published

    def __init__(self, Forms forms not None, LaneWriter writer not None, str producer_id not None, uint64_t most_bytes):
        """`most_bytes` is the largest record the lane takes."""
        self._forms, self._writer, self._most_bytes = forms, writer, most_bytes
        self._own_groups = producer_id.encode() + b":"

    def put(self, group, group_id, uint64_t number, version):
        """The record's sequence; or None, and nothing has happened: something is uncommon or wrong, or there is no room.

        `number` is the group's among the producer's, for its id if it was given none.
        """
        cdef Plan plan
        cdef Stamp given
        if self._writer.is_hindered():
            return None
        given = self.make_stamp(group_id, number, version)
        if given is None:
            return None
        plan = self._forms.make_plan(group, given, None)
        if plan is None or plan.extent_bytes > self._most_bytes:
            return None
        try:
            return plan.sequence if plan.claim_and_write(self._writer) else None
        except (BadValue, LossyMasks, ClaimLost):
            return None

    def stamp(self, group_id, uint64_t number, version):
        """The stamp of a whole train group in its usual form, or None."""
        return self.make_stamp(group_id, number, version)

    cdef Stamp make_stamp(self, group_id, uint64_t number, version):
        cdef int64_t began
        cdef bytes raw
        cdef Stamp given
        if group_id is None:
            raw = numbered(self._own_groups, number)
        elif type(group_id) is str and len(<str>group_id) <= 1000:
            try:
                raw = (<str>group_id).encode()
            except UnicodeEncodeError:
                return None
        else:
            return None
        if version is None:
            began = self._writer.policy_version()
        elif not small_number(version, &began) or began < 0:
            return None
        elif began > self._writer.policy_version():
            if self.ahead == 0:  # the first is said in words
                return None
            self.ahead += 1
        given = Stamp.__new__(Stamp)
        given.group_id, given.oldest, given.newest = raw, began, began
        given.said = SAID_NOTHING if version is None else SAID_OLDEST
        return given


cdef bytes numbered(bytes prefix, uint64_t number):
    """`prefix` with a decimal number behind it."""
    cdef char digits[24]
    cdef int count = snprintf(digits, sizeof(digits), "%llu", <unsigned long long>number)
    cdef Py_ssize_t before = PyBytes_GET_SIZE(prefix)
    cdef bytes made = PyBytes_FromStringAndSize(NULL, before + count)
    memcpy(PyBytes_AS_STRING(made), PyBytes_AS_STRING(prefix), before)
    memcpy(PyBytes_AS_STRING(made) + before, digits, count)
    return made


cdef bint small_number(value, int64_t* to) noexcept:
    """Whether it is None (-1) or an exact int from 0 to 2**31 - 1."""
    cdef int overflow = 0
    to[0] = -1
    if value is None:
        return True
    if not PyLong_CheckExact(value):
        return False
    to[0] = PyLong_AsLongAndOverflow(value, &overflow)
    return not overflow and 0 <= to[0] <= 0x7FFFFFFF


cdef bint belongs(Column column, Column tokens) noexcept:
    """Whether the column's rows are the tokens' rows."""
    if column.tag != TAG_VALUES:
        return True
    if column.form.per_record:
        return column.entries == 1
    if column.entries != tokens.entries:
        return False
    return not column.form.per_token or column.row_lengths is tokens.row_lengths or memcmp(
        PyBytes_AS_STRING(column.row_lengths), PyBytes_AS_STRING(tokens.row_lengths), 4 * <size_t>tokens.entries) == 0


cdef bint has_empty_row(Column column) noexcept:
    """Whether a row of a list column has no values."""
    cdef const uint32_t* lengths = <const uint32_t*>PyBytes_AS_STRING(column.row_lengths)
    cdef uint32_t row
    for row in range(column.entries):
        if not lengths[row]:
            return True
    return False


cdef Column measure(Form form, value):
    """A column in a common form, or None."""
    if value is None:
        return empty(form, TAG_NULL)
    if PyList_CheckExact(value) and PyList_GET_SIZE(value) == 0:
        return empty(form, TAG_EMPTY_LIST)
    if type(value) is dict and not value:
        return empty(form, TAG_EMPTY_MAP)
    if form.kind == KIND_LIST:
        if PyList_CheckExact(value):
            return rows(form, <list>value)
        if PyTuple_CheckExact(value) and len(<tuple>value) == 2:
            return flat(form, (<tuple>value)[0], (<tuple>value)[1])
        return matrix(form, value)
    return scalars(form, value) if form.kind == KIND_SCALAR else None


cdef Column begun(Form form, int tag, uint32_t entries, uint64_t count, list rows):
    cdef Column column = Column.__new__(Column)
    column.form, column.tag, column.entries, column.count, column.rows = form, tag, entries, count, rows
    return column


cdef Column empty(Form form, int tag):
    return begun(form, tag, 0, 0, None)


cdef object as_array(value):
    """An exact ndarray, C contiguous, aligned, in native byte order; or None."""
    if type(value) is Tensor:
        try:
            value = value.numpy()
        except (RuntimeError, TypeError):  # it needs a gradient, is on a device, or of a type that NumPy has not
            return None
    if cnp.PyArray_CheckExact(value) and cnp.PyArray_ISCARRAY_RO(value):
        return value
    return None


cdef Column rows(Form form, list values):
    """A list of rows, each a list or a 1-D array."""
    cdef list held = list(values)  # the caller's own list may change, also while the record waits for room
    cdef Py_ssize_t row, length, count = PyList_GET_SIZE(held)
    cdef uint64_t total = 0
    cdef bytes raw
    cdef uint32_t* lengths
    if count > 1 << 24:
        return None
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    lengths = <uint32_t*>PyBytes_AS_STRING(raw)
    for row in range(count):
        each = <object>PyList_GET_ITEM(held, row)
        if PyList_CheckExact(each):
            length = PyList_GET_SIZE(each)
        else:
            array = as_array(each)
            if array is None or cnp.PyArray_NDIM(array) != 1:
                return None
            if array is not each:
                held[row] = array
            length = cnp.PyArray_DIM(array, 0)
        if length > 0xFFFFFFFF:
            return None
        lengths[row] = <uint32_t>length
        total += length
    column = begun(form, TAG_VALUES, count, total, held)
    column.row_lengths = raw
    return column


cdef Column flat(Form form, values, given):
    """(flat array, lengths)."""
    cdef Py_ssize_t row, count
    cdef int64_t length, total = 0
    cdef int kind
    array = as_array(values)
    if array is None or cnp.PyArray_NDIM(array) != 1:
        return None
    if PyList_CheckExact(given):
        if not all_exact_ints(<list>given):
            return None
        given = cnp.PyArray_FROM_O(given)
    given = as_array(given)
    if given is None or cnp.PyArray_NDIM(given) != 1:
        return None
    kind, count = cnp.PyArray_TYPE(given), cnp.PyArray_DIM(given, 0)
    if kind != cnp.NPY_INT64 and kind != cnp.NPY_INT32 and kind != cnp.NPY_UINT32:
        return None
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    for row in range(count):
        if kind == cnp.NPY_INT64:
            length = (<int64_t*>cnp.PyArray_DATA(given))[row]
        elif kind == cnp.NPY_INT32:
            length = (<int32_t*>cnp.PyArray_DATA(given))[row]
        else:
            length = (<uint32_t*>cnp.PyArray_DATA(given))[row]
        if not 0 <= length <= 0xFFFFFFFF:
            return None
        (<uint32_t*>PyBytes_AS_STRING(raw))[row] = <uint32_t>length
        total += length
    if total != cnp.PyArray_DIM(array, 0):
        return None
    column = begun(form, TAG_VALUES, count, total, [array])
    column.row_lengths = raw
    return column


cdef bint all_exact_ints(list values) noexcept:
    for each in values:
        if not PyLong_CheckExact(each):
            return False
    return True


cdef Column matrix(Form form, value):
    """A 2-D array: rows of one length."""
    cdef Py_ssize_t row, count
    array = as_array(value)
    if array is None or cnp.PyArray_NDIM(array) != 2 or cnp.PyArray_DIM(array, 0) == 0 or cnp.PyArray_DIM(array, 1) > 0xFFFFFFFF:
        return None
    count = cnp.PyArray_DIM(array, 0)
    raw = PyBytes_FromStringAndSize(NULL, 4 * count)
    for row in range(count):
        (<uint32_t*>PyBytes_AS_STRING(raw))[row] = <uint32_t>cnp.PyArray_DIM(array, 1)
    column = begun(form, TAG_VALUES, count, cnp.PyArray_SIZE(array), [array])
    column.row_lengths = raw
    return column


cdef Column scalars(Form form, value):
    """One number a row: a list of floats or ints, or a 1-D array."""
    if PyList_CheckExact(value):
        for each in <list>value:
            if not (PyFloat_CheckExact(each) or PyLong_CheckExact(each)):
                return None
        value = list(<list>value)
        return begun(form, TAG_VALUES, len(value), len(value), [value])
    array = as_array(value)
    if array is None or cnp.PyArray_NDIM(array) != 1 or cnp.PyArray_DIM(array, 0) == 0:
        return None
    return begun(form, TAG_VALUES, cnp.PyArray_DIM(array, 0), cnp.PyArray_DIM(array, 0), [array])


cdef Column fold(Form form, Column tokens, list value):
    """Atropos' masks as a loss_mask to fold while the values are packed, or None."""
    for each in value:
        if not PyList_CheckExact(each):
            return None
    column = rows(form, value)
    if column is not None:
        column.folds = tokens
    return column
