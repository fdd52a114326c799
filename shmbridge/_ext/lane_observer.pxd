from libc.stdint cimport uint32_t, uint64_t

from shmbridge._ext.lane_reader cimport LaneReader, lane_entry


cdef class LaneObserver(LaneReader):
    cdef lane_entry* _backlog        # un-released when the observer came, and not copied yet; newest first
    cdef uint32_t _backlog_count
    cdef readonly uint64_t missed    # committed since then, or in the backlog, and released before a copy was whole

    cdef object copy_of(self, type cls, uint32_t index, uint64_t sequence)
