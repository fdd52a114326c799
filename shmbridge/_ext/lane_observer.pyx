"""An observer's copies of a lane's records, over lane_observe.h. Writes nothing and holds nothing back.

For one thread at a time, without any lock.
"""

cimport cython
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport UINT64_MAX, uint8_t, uint32_t, uint64_t, uintptr_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from shmbridge._ext.atomics cimport load_acquire64
from shmbridge._ext.geometry cimport complaint
from shmbridge._ext.layout cimport ALIGNMENT
from shmbridge._ext.lane_reader cimport (
    LaneReader, Lease, lane_entry, lane_found, lane_look, lane_reader,
)
from shmbridge._ext.mapping cimport Mapping

from shmbridge._ext.header import LaneCorrupt

cdef extern from "lane_observe.h" nogil:
    bint lane_is_unreleased(const lane_reader* reader, const lane_found* found)
    bint lane_observe_next(lane_reader* reader, uint64_t* sequence, uint32_t* index, uint64_t* missed)
    uint32_t lane_observe_held(const lane_reader* reader, uint64_t tail, lane_entry* entries)


@cython.no_gc_clear
cdef class LaneObserver(LaneReader):
    """Reads one lane beside its hub."""

    def __init__(self, Mapping lane not None, object keep):
        self._reader.next = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
        self._backlog = <lane_entry*>malloc(self._reader.geometry.slot_count * sizeof(lane_entry))
        if self._backlog == NULL:
            raise MemoryError()
        self._backlog_count = lane_observe_held(&self._reader, self._reader.next, self._backlog)

    def __dealloc__(self):
        free(self._backlog)

    @property
    def waiting(self) -> int:
        """Records that were not looked at yet."""
        if not self.lane.alive():
            return 0
        tail = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
        behind = tail - self._reader.next if tail > self._reader.next else 0
        return self._backlog_count + behind

    def miss_earlier(self):
        """Counts what was released before this observer came: it should have been there. Before any copy."""
        self.missed += self._reader.next - self._backlog_count

    def skip_backlog(self):
        """Begins with the next record that is committed."""
        self._backlog_count = 0

    def end_with_backlog(self):
        """Ends with the last record that was un-released when this observer came."""
        self._reader.next = UINT64_MAX

    def copy(self, type cls):
        """A copy of the next record that is still un-released, as a `cls`; None if there is none yet."""
        cdef uint64_t sequence = 0
        cdef uint32_t index = 0
        while self.lane.alive():
            if self._backlog_count > 0:
                self._backlog_count -= 1
                sequence = self._backlog[self._backlog_count].sequence
                index = self._backlog[self._backlog_count].index
            elif not lane_observe_next(&self._reader, &sequence, &index, &self.missed):
                return None
            record = self.copy_of(cls, index, sequence)
            if record is not None:
                return record
            self.missed += 1
        return None

    def newest(self, type cls):
        """A copy of the newest un-released record, as a `cls`, also one that was copied before; or None.
        Counts nothing as missed.
        """
        cdef lane_entry* entries
        cdef uint32_t count, i
        if not self.lane.alive():
            return None
        entries = <lane_entry*>malloc(self._reader.geometry.slot_count * sizeof(lane_entry))
        if entries == NULL:
            raise MemoryError()
        try:
            tail = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
            count = lane_observe_held(&self._reader, tail, entries)
            for i in range(count):
                record = self.copy_of(cls, entries[i].index, entries[i].sequence)
                if record is not None:
                    return record
        finally:
            free(entries)
        return None

    cdef object copy_of(self, type cls, uint32_t index, uint64_t sequence):
        """A whole copy; None if the record is released by now, or is not what its lane says."""
        cdef lane_found found
        cdef complaint why
        cdef Lease lease
        cdef char* to
        if lane_look(&self._reader, index, sequence, &found, &why):
            return None
        try:
            lease = self.lease(cls, &found)
        except LaneCorrupt:
            return None
        lease._copy = PyBytes_FromStringAndSize(NULL, lease._extent_bytes + ALIGNMENT)
        to = PyBytes_AS_STRING(lease._copy)
        to += -<uintptr_t>to % ALIGNMENT
        with nogil:
            memcpy(to, lease._extent, lease._extent_bytes)
        lease._extent = <const uint8_t*>to
        return lease if lane_is_unreleased(&self._reader, &found) else None

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1

    cdef void lose_lease(self, Lease lease) noexcept:
        self.held -= 1
