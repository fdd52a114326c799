from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from shmbridge._ext.atomics cimport shm_u64
from shmbridge._ext.layout cimport column_def, control_header, lane_header, slot
from shmbridge._ext.mapping cimport Mapping

cdef extern from "extents.h" nogil:
    ctypedef struct interval:
        uint64_t at
        uint64_t bytes
    uint64_t extent_take(interval* free_list, uint32_t* count, uint64_t bytes)
    void extent_give(interval* free_list, uint32_t* count, uint64_t at, uint64_t bytes)


cdef class LaneWriter:
    cdef Mapping _lane
    cdef Mapping _control
    cdef lane_header* _header
    cdef control_header* _hub
    cdef uint32_t* _ring
    cdef slot* _slots
    cdef shm_u64* _released
    cdef uint8_t* _data
    cdef readonly uint32_t slot_count
    cdef readonly uint64_t data_bytes
    cdef uint64_t _tail
    cdef uint32_t* _free_slots
    cdef uint32_t _free_slot_count
    cdef uint32_t* _outstanding      # slots of committed records, in order of commit
    cdef uint32_t _outstanding_at
    cdef uint32_t _outstanding_count
    cdef interval* _free_extents
    cdef uint32_t _free_extent_count
    cdef int64_t _claimed            # slot of the open claim, -1: none
    cdef uint64_t _claim_at
    cdef uint64_t _claim_bytes

    cdef bint _is_released(self, uint32_t index) noexcept nogil
    cdef void _reclaim(self, bint all_of_them) noexcept nogil
    cdef void _give_back(self, uint32_t index) noexcept nogil
    cdef bint _anything_released(self) noexcept nogil
    cdef uint8_t* claimed(self) except NULL


cdef class LaneReader:
    cdef readonly Mapping lane
    cdef object _keep                # the control mapping with the hub lock: views hold it through their lane
    cdef lane_header* _header
    cdef uint32_t* _ring
    cdef slot* _slots
    cdef shm_u64* _released
    cdef uint8_t* _data
    cdef column_def* _columns        # private copy
    cdef readonly uint32_t column_count
    cdef readonly uint32_t slot_count
    cdef readonly uint64_t data_bytes
    cdef readonly uint64_t next      # sequence to take from the ring
    cdef readonly uint64_t first_head
    cdef list _backlog               # (sequence, slot) committed and un-released before this hub came, newest first
    cdef public bint abandoned       # leases end without release: the next hub gets these records again
    cdef readonly uint64_t held

    cdef shm_u64* tail_word(self) noexcept nogil
    cdef void end_lease(self, uint32_t index, uint64_t generation) noexcept nogil
    cdef object _lease(self, type cls, uint32_t index, uint64_t sequence, bint redelivered)


cdef class Lease:
    cdef readonly LaneReader reader
    cdef readonly bytes index
    cdef readonly uint64_t sequence
    cdef readonly int64_t min_policy_version
    cdef readonly int64_t max_policy_version
    cdef readonly int64_t t_created_ns
    cdef readonly int64_t t_publish_ns
    cdef readonly uint64_t token_count
    cdef readonly uint64_t extent_bytes
    cdef readonly uint32_t rows
    cdef readonly uint32_t column_entries
    cdef readonly int32_t group_size
    cdef readonly int32_t env_id
    cdef readonly uint32_t flags
    cdef readonly bint redelivered
    cdef uint32_t _slot
    cdef uint32_t _group_id_bytes
    cdef uint64_t _generation
    cdef uint8_t* _extent
    cdef uint32_t _exports
    cdef bint _released              # asked for; the lease ends with the last export
    cdef bint _ended

    cdef void _end(self) noexcept
