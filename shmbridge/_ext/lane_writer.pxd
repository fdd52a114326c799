from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

from shmbridge._ext.geometry cimport lane_geometry
from shmbridge._ext.layout cimport control_header, lane_header, slot
from shmbridge._ext.mapping cimport Mapping

cdef extern from "lane_write.h" nogil:
    ctypedef struct lane_writer:
        lane_header* header
        uint8_t* data
        uint32_t slot_count
        uint64_t data_bytes
        int64_t claimed
        uint64_t claim_at
        uint64_t claim_bytes
        uint64_t claim_number
        bint claim_is_cold
        uint64_t origin_newest
    int lane_writer_open(lane_writer* writer, uint8_t* base, const lane_geometry* geometry,
                         control_header* hub)
    void lane_writer_close(lane_writer* writer)
    void lane_keep_pace(lane_writer* writer, uint64_t bytes)
    int lane_claim(lane_writer* writer, uint64_t bytes)
    void lane_reclaim(lane_writer* writer, int thoroughly)
    void lane_abort(lane_writer* writer)
    uint64_t lane_commit(lane_writer* writer, const slot* stamp)
    void lane_note_outstanding(lane_writer* writer)
    int64_t lane_wait_space(lane_writer* writer, int64_t timeout_ns)
    uint64_t lane_free_bytes(const lane_writer* writer)
    uint32_t lane_unreleased(const lane_writer* writer)


cdef class LaneWriter:
    cdef Mapping _lane
    cdef Mapping _control
    cdef lane_writer _writer
    cdef int64_t _look_at_ns

    cdef lane_writer* alive(self) except NULL
    cdef int begin(self, uint64_t size) except -1
    cdef void give_back(self, uint64_t number) noexcept
    cdef uint8_t* claimed(self, uint64_t number) except NULL
    cdef object publish(self, uint64_t number, const slot* stamp)
    cdef void count_unrecorded(self, uint64_t values) noexcept
    cdef void keep_pace(self, uint64_t size) noexcept
    cdef bint is_blocked(self, int64_t now) noexcept
    cdef int64_t policy_version(self) noexcept


cdef class Claim:
    cdef LaneWriter _writer
    cdef uint64_t _number            # 0: none yet
    cdef bint _left

    cdef uint8_t* memory_here(self) except NULL
