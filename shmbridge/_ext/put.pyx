"""All of `put` that is compiled: the grammar of a group, the plan of its record, and its values as bytes of a lane; and
a record that another node's lane had.
"""

from operator import index

cimport cython
cimport numpy as cnp
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.list cimport PyList_CheckExact, PyList_GET_ITEM, PyList_GET_SIZE
from cpython.long cimport PyLong_AsLongAndOverflow, PyLong_CheckExact
from cpython.object cimport PyObject
from cpython.tuple cimport PyTuple_CheckExact, PyTuple_GET_ITEM, PyTuple_GET_SIZE
from libc.limits cimport INT_MIN
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset

import numpy as np

from shmbridge._ext.core cimport (
    ALIGNMENT, KIND_BYTES, KIND_LIST, KIND_LIST_LIST, KIND_MAP, KIND_SCALAR, SLOT_EVAL, SLOT_UNEVEN,
    TAG_EMPTY_LIST, TAG_EMPTY_MAP, TAG_NULL, TAG_VALUES, column_def, complaint, directory_entry, index_check,
    index_sum, index_tokens, lane_copies_done, lane_copy, monotonic_ns, row_check_seed, slot,
)
from shmbridge._ext.lane cimport Claim, LaneWriter

from shmbridge._ext.header import LaneCorrupt
from shmbridge._ext.lane import ClaimLost

cdef extern from "Python.h":
    Py_ssize_t PySequence_Fast_GET_SIZE(object row)
    PyObject* PyErr_Occurred()

cnp.import_array()

include "column.pxi"
include "pack.pxi"
include "plan.pxi"
include "forms.pxi"
include "relayed.pxi"
