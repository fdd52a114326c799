"""What a leased record says: its metadata, and its columns as arrays over the lane's own memory; and many records
as the arrays of one batch.

Reads the private copy of the index, which index_check has passed, and what LaneReader.describe was given.
Text, maps and errors are those of Record in shmbridge/record/record.py.
"""

import numpy as np

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_FillInfo, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.dict cimport PyDict_GetItemWithError
from cpython.object cimport PyObject
from cpython.ref cimport Py_INCREF
from cpython.tuple cimport PyTuple_GET_ITEM, PyTuple_GET_SIZE
from cython.dataclasses cimport dataclass
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.stdlib cimport calloc, free, realloc
from libc.string cimport memcmp, memmove, strncmp

from shmbridge._ext.core cimport (
    ALIGNMENT, COLUMN_NAME_BYTES, KIND_LIST, KIND_LIST_LIST, KIND_SCALAR, MAX_COLUMNS, SLOT_EVAL, SLOT_UNEVEN,
    TAG_VALUES, column_def, directory_entry,
)
from shmbridge._ext.lane cimport LaneReader, Lease

from shmbridge._ext.header import LaneCorrupt

cdef extern from "numpy/arrayobject.h":
    object PyArray_NewFromDescr(type subtype, cnp.dtype dtype, int dimensions, cnp.npy_intp* shape,
                                cnp.npy_intp* strides, void* data, int flags, PyObject* like)

cnp.import_array()
MOST_ARROW_VALUES = 2**31 - 1
cdef type NDARRAY = np.ndarray
cdef cnp.dtype UINT32 = cnp.PyArray_DescrFromType(cnp.NPY_UINT32)


@cython.final
@cython.no_gc  # it leads to a lease only, and nothing leads from there back
@cython.freelist(64)
cdef class View:
    """Kept by an array over a record's memory, so that the lease does not end before the array."""

    cdef Lease _lease
    cdef uint32_t _column
    cdef PyObject* _before           # in the list of its record's views; no references
    cdef PyObject* _after

    def __dealloc__(self):
        if self._lease is not None:
            if self._after != NULL:
                (<View>self._after)._before = self._before
            if self._before != NULL:
                (<View>self._before)._after = self._after
            else:
                (<LeasedRecord>self._lease)._views = self._after
            self._lease.end_view()


cdef View view_of(LeasedRecord record, uint32_t column):
    cdef View view = View.__new__(View)
    record.begin_view()
    view._lease, view._column = record, column
    view._before, view._after = NULL, record._views
    if record._views != NULL:
        (<View>record._views)._before = <PyObject*>view
    record._views = <PyObject*>view
    return view


class LaneArrayBody:
    """A read-only view of a lane.

    NumPy keeps it read-only; what NumPy cannot tell others, who may write then, is refused: take to_torch()
    or copy().
    """

    __slots__ = ()

    def to_torch(self):
        """A torch tensor of its own memory."""
        import torch

        return torch.from_numpy(np.array(self))

    def __dlpack__(self, *, copy=None, **how):
        if copy:
            return np.array(self).__dlpack__(**how)
        if not self.flags.writeable:
            raise BufferError("a view of a lane is read-only, and who takes it by DLPack could write: "
                              "use its to_torch() or copy(), which copy")
        return self.view(np.ndarray).__dlpack__(copy=copy, **how)

    def __array_wrap__(self, array, context=None, return_scalar=False):
        return array[()] if return_scalar else array  # a computed result is no view

    def __reduce_ex__(self, protocol):
        return self.view(np.ndarray).__reduce_ex__(protocol)


cdef extern from *:
    """
    /* LaneArray has ndarray's own layout and frees nothing: an array becomes one by its type word alone, and ends as
     * any array does. A class made by Python would cost each view a quarter more. */
    static PyTypeObject lane_array_type = {
        PyVarObject_HEAD_INIT(NULL, 0)
        .tp_name = "shmbridge._ext.record.LaneArray",
        .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    };
    static PyObject *lane_array_made(PyTypeObject *base, PyObject *body, reprfunc repr) {
        lane_array_type.tp_base = base, lane_array_type.tp_dict = body, lane_array_type.tp_repr = repr;
        Py_INCREF(body);
        return PyType_Ready(&lane_array_type) ? NULL : Py_NewRef(&lane_array_type);
    }
    #define become_lane_array(array) Py_SET_TYPE(array, &lane_array_type)
    """
    object lane_array_made(type base, dict body, object (*repr)(object))
    void become_lane_array(object array)


cdef object repr_of(object self):
    return repr(self.view(np.ndarray))


LaneArray = lane_array_made(NDARRAY, dict(vars(LaneArrayBody)), &repr_of)


cdef object array_over(object keeper, cnp.dtype dtype, const void* at, uint64_t count):
    """A read-only array of `count` values at `at`, which are there as long as `keeper` is."""
    cdef cnp.npy_intp shape = count
    Py_INCREF(dtype)  # the call keeps one
    cdef object made = PyArray_NewFromDescr(
        NDARRAY, dtype, 1, &shape, NULL, <void*>at, cnp.NPY_ARRAY_CARRAY_RO, NULL)
    cnp.set_array_base(made, keeper)
    become_lane_array(made)
    return made


cdef object nothing(cnp.dtype dtype):
    """An empty array, read-only as all others; it keeps nothing."""
    cdef cnp.npy_intp shape = 0
    cdef cnp.ndarray made = cnp.PyArray_EMPTY(1, &shape, dtype.num, 0)
    cnp.PyArray_CLEARFLAGS(made, cnp.NPY_ARRAY_WRITEABLE)
    return made


def flat_array(values):
    """The values of a one-dimensional array as a pyarrow.Array, in place; bools, which Arrow packs, are
    copied.
    """
    import pyarrow as pa

    if values.dtype == np.bool_ or len(values) == 0:
        return pa.array(values)
    return pa.Array.from_buffers(pa.from_numpy_dtype(values.dtype), len(values), [None, pa.py_buffer(values)])


def list_array(lengths, values, valid):
    """Lists of `values`, a pyarrow.Array; null where not `valid`. ValueError for more values than Arrow
    counts.
    """
    import pyarrow as pa

    if len(values) > MOST_ARROW_VALUES:
        raise ValueError(f"{len(values)} values, and the int32 offsets of an Arrow list count "
                         f"{MOST_ARROW_VALUES} -> ask for fewer groups")
    offsets = np.zeros(len(lengths) + 1, np.int32)
    np.cumsum(lengths, out=offsets[1:])
    return pa.ListArray.from_arrays(
        pa.array(offsets), values, mask=None if valid is None else pa.array(~valid))


@cython.no_gc  # arrays of numbers lead nowhere
@cython.freelist(64)
cdef class Ragged:
    """A list column of one record: flat values in place, and the length of each row."""

    cdef object _values
    cdef object _valid
    cdef object _lengths
    cdef bytes _index                # of the record, if it came from one: its lengths are here
    cdef uint64_t _lengths_at
    cdef Py_ssize_t _rows
    cdef object _offsets

    def __init__(self, values, lengths, valid):
        self._values, self._lengths, self._valid = values, lengths, valid
        self._rows = len(lengths)

    @property
    def valid(self):
        """bool[rows] where some rows are null, None where none is."""
        return self._valid

    @property
    def lengths(self):
        """Values in each row, uint32[rows]."""
        if self._lengths is None:
            self._lengths = array_over(
                self._index, UINT32, PyBytes_AS_STRING(self._index) + self._lengths_at, self._rows)
        return self._lengths

    @property
    def offsets(self):
        """Start of each row and the end of the last, int64[rows + 1]."""
        return self.row_offsets().copy()

    cdef cnp.ndarray row_offsets(self):
        cdef cnp.npy_intp shape = self._rows + 1
        cdef cnp.ndarray made
        cdef int64_t* offset
        cdef const uint32_t* length
        cdef Py_ssize_t row
        if self._offsets is None and self._index is None:
            self._offsets = np.concatenate(([0], np.cumsum(self._lengths, dtype=np.int64)))
        elif self._offsets is None:
            made = cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_INT64)
            offset = <int64_t*>cnp.PyArray_DATA(made)
            length = <const uint32_t*>(PyBytes_AS_STRING(self._index) + self._lengths_at)
            offset[0] = 0
            for row in range(self._rows):
                offset[row + 1] = offset[row] + length[row]
            self._offsets = made
        return self._offsets

    def __len__(self):
        return self._rows

    def __getitem__(self, Py_ssize_t row):
        """Row `row` as a read-only view of the values."""
        cdef cnp.ndarray values
        cdef const char* first
        cdef int64_t* offsets
        if not -self._rows <= row < self._rows:
            raise IndexError(f"row {row} of {self._rows}")
        if row < 0:
            row += self._rows
        offsets = <int64_t*>cnp.PyArray_DATA(self.row_offsets())
        if self._index is None:
            return self._values[offsets[row]:offsets[row + 1]]
        values = self._values
        first = cnp.PyArray_BYTES(values) + offsets[row] * cnp.PyArray_ITEMSIZE(values)
        return array_over(values, values.descr, first, offsets[row + 1] - offsets[row])

    def __iter__(self):
        return (self[row] for row in range(self._rows))

    def to_torch(self):
        """All values, flat, as a torch tensor of its own memory: a copy."""
        import torch

        return torch.from_numpy(np.array(self._values))

    def tolist(self):
        """The rows as lists of Python numbers, a copy; None for a null row."""
        cdef list flat = self._values.tolist(), ends = self.row_offsets().tolist()
        rows = [flat[start:end] for start, end in zip(ends, ends[1:])]
        if self._valid is None:
            return rows
        return [row if there else None for row, there in zip(rows, self._valid)]

    def to_padded(self, fill=0):
        """The rows as one array (rows, longest), `fill` behind the end of each: a copy, of the same dtype.

        A null row is `fill` all over.
        """
        lengths = self.lengths if self._valid is None else self.lengths * self._valid
        padded = np.full((self._rows, lengths.max(initial=0)), fill, self._values.dtype)
        values = self._values if self._valid is None else self._values[np.repeat(self._valid, self.lengths)]
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = values
        return padded

    def to_arrow(self):
        """A pyarrow.ListArray over the same values, null where a row is null.

        It keeps the lease until it is dropped. ValueError for more values than Arrow counts.
        """
        return list_array(self.lengths, flat_array(self._values), self._valid)

    def __arrow_c_array__(self, requested_schema=None):
        """to_arrow() as capsules of Arrow's C interface: `pa.array(record.tokens)`."""
        return self.to_arrow().__arrow_c_array__(requested_schema)

    def __reduce__(self):
        return type(self), (self._values, self.lengths, self._valid)

    def __repr__(self):
        shown = ", ".join(map(str, list(self)[:8]))
        return f"<Ragged {self._values.dtype}: {shown}{', …' if len(self) > 8 else ''}>"


cdef extern from *:
    """
    #include <structmember.h>
    /* `values` as a member: Python reads one in place, while a property is a lookup and a call each time. */
    static PyMemberDef ragged_values = {"values", T_OBJECT_EX, 0, READONLY,
        "The values of all rows, flat: a read-only view of the lane, valid as long as it is referenced, also\\n"
        "after the record's release()."};
    static int ragged_add_values(PyTypeObject *type, Py_ssize_t offset) {
        PyObject *member;
        int status;
        ragged_values.offset = offset;
        if (!(member = PyDescr_NewMember(type, &ragged_values))) return -1;
        status = PyDict_SetItemString(type->tp_dict, "values", member);
        Py_DECREF(member);
        PyType_Modified(type);
        return status;
    }
    #define RAGGED_VALUES_AT offsetof(struct __pyx_obj_9shmbridge_4_ext_6record_Ragged, _values)
    """
    Py_ssize_t RAGGED_VALUES_AT
    int ragged_add_values(type ragged, Py_ssize_t offset) except -1


ragged_add_values(Ragged, RAGGED_VALUES_AT)


@cython.final
@cython.auto_pickle(True)
@dataclass(frozen=True)
cdef class Origin:
    """Where a record lay before a relay brought it to this node; `(producer_id, sequence)` is its key for ever.

    `waited_ns` from its commit there until it was sent, by the clock there; `transfer_ns` from the request for
    it until its commit here, by the clock here. Times of the two nodes' clocks are never compared.
    """

    cdef readonly str node
    cdef readonly str producer_id
    cdef readonly uint64_t sequence
    cdef readonly int64_t waited_ns
    cdef readonly int64_t transfer_ns


@cython.final
@cython.auto_pickle(True)
@dataclass(frozen=True)
cdef class RecordMeta:
    """Where a record came from and when.

    Times are CLOCK_MONOTONIC nanoseconds; versions are -1 where none was stamped.

    Attributes:
        producer_id: the producer's id, unique to its incarnation.
        env_name: name of the environment.
        sequence: the record's number in its producer's lane, from 0; with `producer_id` unique for ever.
        group_id: id of the group.
        group_size: rows of the whole group; a fragment has fewer.
        env_id: the number under which the environment has registered; None if it has none.
        min_policy_version, max_policy_version: the oldest and newest version that sampled it.
        t_created_ns, t_publish_ns: when `put` or `claim` began, and when it was committed.
        split: "train" or "eval".
        redelivered: whether an earlier consumer may have had it.
        uneven: whether some column has rows of another length than the tokens.
        origin: where it lay before a relay brought it to this node; None if it was put here.
    """

    cdef readonly str producer_id
    cdef readonly str env_name
    cdef readonly uint64_t sequence
    cdef readonly str group_id
    cdef readonly int32_t group_size
    cdef readonly object env_id
    cdef readonly int64_t min_policy_version
    cdef readonly int64_t max_policy_version
    cdef readonly int64_t t_created_ns
    cdef readonly int64_t t_publish_ns
    cdef readonly str split
    cdef readonly bint redelivered
    cdef readonly bint uneven
    cdef readonly Origin origin


cdef RecordMeta meta_of(Lease lease):
    cdef RecordMeta meta = RecordMeta.__new__(RecordMeta)
    about = lease._lane_reader.about
    meta.producer_id, meta.env_name = about.producer_id, about.env_name
    meta.sequence, meta.group_id, meta.group_size = lease._sequence, lease._group_id, lease._group_size
    meta.env_id = None if lease._env_id < 0 else lease._env_id
    meta.min_policy_version = lease._min_policy_version
    meta.max_policy_version = lease._max_policy_version
    meta.t_created_ns, meta.t_publish_ns = lease._t_created_ns, lease._t_publish_ns
    meta.split = "eval" if lease._flags & SLOT_EVAL else "train"
    meta.redelivered, meta.uneven = lease._redelivered, lease._flags & SLOT_UNEVEN != 0
    meta.origin = None
    if lease._origin_sequence:
        meta.origin = Origin(about.origin_node, about.origin_producer_id, lease._origin_sequence - 1,
                             lease._origin_waited_ns, lease._origin_transfer_ns)
    return meta


@cython.no_gc_clear  # as Lease
cdef class LeasedRecord(Lease):
    """Metadata and columns of one record. The names that begin with _ are for Record."""

    cdef object _meta                # made when it is asked for
    cdef PyObject* _views            # the first of the Views of its columns; they take themselves out

    @property
    def meta(self):
        """Who, when, which group, which policy version. Valid also after release()."""
        self._looked_at = True
        if self._meta is None:
            self._meta = meta_of(self)
        return self._meta

    @property
    def _split(self):
        """`meta.split`, without a look at the record."""
        return "eval" if self._flags & SLOT_EVAL else "train"

    cdef const directory_entry* find(self, object name) except? NULL:
        """The entry of a column; NULL if it has none.

        One that has values comes last (index_check), so the last one counts.
        """
        cdef const directory_entry* entries = <const directory_entry*>PyBytes_AS_STRING(self._index)
        cdef tuple names = self._lane_reader.names
        cdef PyObject* number
        cdef uint32_t column, i = self._column_entries
        if PyTuple_GET_SIZE(names):  # the lane was described
            while i > 0:
                i -= 1
                # a name in a program's text is the very string of the lane's table
                if PyTuple_GET_ITEM(names, entries[i].column) == <PyObject*>name:
                    return &entries[i]
        number, i = PyDict_GetItemWithError(self._lane_reader.numbers, name), self._column_entries
        if number != NULL:
            column = <object>number
            while i > 0:
                i -= 1
                if entries[i].column == column:
                    return &entries[i]
        return NULL

    cdef const directory_entry* there(self, object name) except NULL:
        cdef const directory_entry* entry = self.find(name)
        if entry == NULL:
            raise KeyError(name)
        self._looked_at = True
        return entry

    cdef object values(self, const directory_entry* entry):
        cdef cnp.dtype dtype = <cnp.dtype>self._lane_reader.dtypes[entry.column]
        cdef uint64_t count = entry.values_bytes // self._lane_reader._reader.columns[entry.column].item_bytes
        if count == 0:
            return nothing(dtype)
        return array_over(
            view_of(self, entry.column), dtype, self._extent + entry.values_at * <uint64_t>ALIGNMENT, count)

    cdef object lengths(self, const directory_entry* entry):
        cdef const char* at = PyBytes_AS_STRING(self._index) + entry.lengths_at * <uint64_t>ALIGNMENT
        return array_over(self._index, UINT32, at, entry.entries)

    cdef object validity(self, const directory_entry* entry):
        """bool[entries], a copy; None where nothing is null."""
        cdef cnp.npy_intp shape = entry.entries
        cdef const uint8_t* said = self._extent + entry.validity_at * <uint64_t>ALIGNMENT
        cdef uint8_t* valid
        cdef cnp.npy_intp i
        if entry.validity_at == 0:
            return None
        view = view_of(self, entry.column)
        copy = cnp.PyArray_SimpleNew(1, &shape, cnp.NPY_BOOL)
        valid = <uint8_t*>cnp.PyArray_DATA(<cnp.ndarray>copy)
        for i in range(shape):
            valid[i] = said[i] != 0
        return copy

    def __len__(self):
        return self._rows

    def __contains__(self, name):
        cdef const directory_entry* entry = self.find(name)
        return entry != NULL and entry.tag == TAG_VALUES

    @property
    @cython.boundscheck(True)  # the lane may not have been described
    def columns(self):
        """Names of the columns that have values in this record."""
        cdef const directory_entry* entries = <const directory_entry*>PyBytes_AS_STRING(self._index)
        cdef uint32_t i
        return [self._lane_reader.names[entries[i].column] for i in range(self._column_entries)
                if entries[i].tag == TAG_VALUES]

    def __getitem__(self, name):
        """A column: Ragged (lists), RaggedLists, ndarray (rows,) of scalars, or a list of dict, str or bytes.

        Raises KeyError if it is absent, RecordUnreadable for text that is none. Numbers are read-only views
        of the lane; dicts, str and bytes are copies.
        """
        cdef const directory_entry* entry = self.find(name)
        cdef Ragged ragged
        if entry == NULL or entry.tag != TAG_VALUES:
            raise self._absent(name)
        if self._released:
            raise self._too_late(name)
        self._looked_at = True
        if entry.kind == KIND_SCALAR:
            return self.values(entry)
        if entry.kind != KIND_LIST:
            return self._compound(name)
        ragged = Ragged.__new__(Ragged)
        ragged._values, ragged._valid = self.values(entry), self.validity(entry)
        ragged._index, ragged._rows = self._index, entry.entries
        ragged._lengths_at = entry.lengths_at * <uint64_t>ALIGNMENT
        return ragged

    def valid(self, name):
        """bool[rows] where some rows of the column are null, None where none is."""
        return self.validity(self.there(name))

    def row_checks(self, name):
        """uint64[rows], a copy: each row's check (shmbridge.record.record), 0 for none; or None.

        A row of other than one value per token gives 0: no reader trains with its values.
        """
        cdef const directory_entry* entry = self.find(name)
        cdef const directory_entry* tokens = self.find("tokens")
        cdef cnp.npy_intp shape = self._rows
        cdef const uint64_t* said
        cdef const uint32_t* lengths
        cdef const uint32_t* wanted
        cdef uint64_t* to
        cdef uint32_t row
        if self._released:
            raise self._too_late(name)
        if entry == NULL or entry.kind != KIND_LIST or entry.checks_at == 0 or tokens == NULL:
            return None
        view = view_of(self, entry.column)
        said = <const uint64_t*>(self._extent + entry.checks_at * <uint64_t>ALIGNMENT)
        lengths = <const uint32_t*>(PyBytes_AS_STRING(self._index) + entry.lengths_at * <uint64_t>ALIGNMENT)
        wanted = <const uint32_t*>(PyBytes_AS_STRING(self._index) + tokens.lengths_at * <uint64_t>ALIGNMENT)
        copy = cnp.PyArray_ZEROS(1, &shape, cnp.NPY_UINT64, 0)
        to = <uint64_t*>cnp.PyArray_DATA(<cnp.ndarray>copy)
        # else no row has the column: which of its rows belongs to which trajectory is unknown
        if entry.entries == self._rows:
            for row in range(self._rows):
                if lengths[row] == wanted[row]:
                    to[row] = said[row]
        return copy

    def _viewed(self):
        """Names of the columns of which views live, one per view, and "all" for one of all its memory; None if
        the lease has ended.
        """
        cdef PyObject* view = self._views
        names = []
        if self._ended:
            return None
        while view != NULL:
            names.append(self._lane_reader.names[(<View>view)._column])
            view = (<View>view)._after
        return names + ["all"] * (self._exports - len(names))

    def _tag(self, name):
        """The TAG_ of a column's entry, -1 if it has none."""
        cdef const directory_entry* entry = self.find(name)
        return -1 if entry == NULL else entry.tag

    def _values(self, name):
        """All values of a column, flat."""
        return self.values(self.there(name))

    def _lengths(self, name):
        """uint32[entries]."""
        return self.lengths(self.there(name))

    def _inner_lengths(self, name):
        """uint32: values per inner list, or bytes per key."""
        cdef const directory_entry* entry = self.there(name)
        cdef const char* at = PyBytes_AS_STRING(self._index) + entry.inner_at * <uint64_t>ALIGNMENT
        return array_over(self._index, UINT32, at, entry.inner_count)

    def _keys(self, name):
        """The bytes of all keys of a map column, a copy."""
        cdef const directory_entry* entry = self.there(name)
        cdef const uint8_t* at = self._extent + entry.keys_at * <uint64_t>ALIGNMENT
        if entry.keys_bytes == 0:
            return b""
        view = view_of(self, entry.column)
        return at[:entry.keys_bytes]


include "blocks.pxi"
include "gather.pxi"
