"""A lane from both ends: claims of its writer; leases of its readers; how they sleep and are woken. Python objects
over the C core, which has the protocol: lane_write.h, lane_read.h, lane_observe.h, hub_wait.h.

Whoever writes or reads lanes may crash; what it then leaves said in a file is here, too.
"""

from sys import intern

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.pythread cimport (
    NOWAIT_LOCK, PY_LOCK_ACQUIRED, PyThread_acquire_lock, PyThread_allocate_lock, PyThread_free_lock,
    PyThread_release_lock, PyThread_type_lock,
)
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport UINT64_MAX, int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcmp, memcpy
from posix.time cimport clock_gettime, timespec
from posix.unistd cimport getpid

from shmbridge._ext.core cimport (
    ALIGNMENT, DISCARD_REASONS, DROP_REASONS, LOST_REASONS, column_def, complaint, control_header,
    directory_entry, fault_hit, geometry_read, index_check, lane_geometry, lane_header, load_acquire64,
    load_relaxed64, load_seq32, monotonic_ns, ring_bell, shm_u64, slot, store_relaxed64,
)
from shmbridge._ext.header cimport Mapping

from shmbridge._ext.header import LaneCorrupt

include "lane_writer.pxi"
include "lane_reader.pxi"
include "lane_beside.pxi"
include "lane_poller.pxi"
include "lane_wait.pxi"


cdef extern from "crash_mark.h" nogil:
    int crash_note_begin(const char *path)
    int crash_note_set(int note, const char *text)
    void crash_note_end(int note)


cdef class CrashNote:
    """A note for a file, empty at first; for the process that made it. Never blocks.

    Several notes of one process may have one file: each appends a line. A process has at most 16.
    """

    cdef int note, process

    def __cinit__(self, path: bytes):
        self.note, self.process = crash_note_begin(path), getpid()

    def __dealloc__(self):
        self.end()

    def set(self, text: bytes):
        """A crash from now on appends the signal's number, a blank and this text to the file; b"": none."""
        if self.note >= 0 and self.process == getpid():
            crash_note_set(self.note, text)

    def end(self):
        """Forgets the note. Idempotent."""
        if self.note >= 0 and self.process == getpid():
            crash_note_end(self.note)
        self.note = -1
