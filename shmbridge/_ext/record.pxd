from cpython.object cimport PyObject

from shmbridge._ext.layout cimport directory_entry
from shmbridge._ext.lane_reader cimport Lease


cdef class LeasedRecord(Lease):
    cdef object _meta                # made when it is asked for
    cdef PyObject* _views            # the first of the Views of its columns; they take themselves out

    cdef const directory_entry* find(self, object name) except? NULL
    cdef const directory_entry* there(self, object name) except NULL
    cdef object values(self, const directory_entry* entry)
    cdef object lengths(self, const directory_entry* entry)
    cdef object validity(self, const directory_entry* entry)
