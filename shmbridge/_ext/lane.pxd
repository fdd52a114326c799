from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from shmbridge._ext.core cimport column_def, complaint, control_header, lane_geometry, lane_header, shm_u64, slot
from shmbridge._ext.header cimport Mapping

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

cdef extern from "lane_read.h" nogil:
    ctypedef struct lane_reader:
        lane_header* header
        const slot* slots
        shm_u64* released
        const uint8_t* data
        lane_geometry geometry
        column_def* columns
        uint32_t tokens
        uint64_t next
        uint64_t first_head
        uint32_t dropped_count
    ctypedef struct lane_entry:
        uint64_t sequence
        uint32_t index
    ctypedef struct lane_found:
        slot body
        uint64_t generation
        uint32_t index
    int lane_reader_open(lane_reader* reader, uint8_t* base, uint64_t size, complaint* why)
    void lane_reader_close(lane_reader* reader)
    int lane_adopt(lane_reader* reader, complaint* why)
    int lane_look(const lane_reader* reader, uint32_t index, uint64_t sequence, lane_found* found,
                  complaint* why)
    int lane_next(const lane_reader* reader, lane_found* found, complaint* why)
    int lane_hand_out(lane_reader* reader, const lane_found* found)
    void lane_put_back(lane_reader* reader, uint64_t sequence, uint32_t index, int again)
    void lane_drop(lane_reader* reader, uint64_t sequence, uint32_t index)
    uint32_t lane_readmit(lane_reader* reader)
    void lane_release(lane_reader* reader, uint32_t index, uint64_t generation)
    uint64_t lane_waiting(const lane_reader* reader)
    uint32_t lane_undelivered(const lane_reader* reader)


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


cdef class Drops:
    cdef readonly uint64_t returned  # leases lost unread: their records are handed out again
    cdef readonly uint64_t dropped   # leases lost after a look: their records stay un-released
    cdef bint unsaid                 # a first one is not reported yet
    cdef int _first_returned         # the Call that handed it out, or NEVER, or REPORTED
    cdef int _first_dropped

    cdef void note(self, uint8_t by, bint looked_at) noexcept


cdef class LaneReader:
    cdef readonly Mapping lane
    cdef public Drops drops          # None: drops are not counted
    # what views hold on to through their lane: the control mapping with the hub lock
    cdef object _keep
    cdef lane_reader _reader
    cdef public bint abandoned       # leases end without release: the next hub gets these records again
    # a rank of an earlier hub may still read a redelivered record: its release is deferred
    cdef public bint ranks_before
    cdef list _put_off               # (slot, generation, _discard_of of the lease)
    cdef readonly uint64_t held
    cdef readonly bint untrusted     # the lane is quarantined: nothing more is taken from it
    cdef readonly object about       # what all records of the lane share
    cdef dict numbers                # of its columns, by name
    cdef tuple names                 # of its columns, by number
    cdef tuple dtypes

    cdef int end_lease(self, Lease lease) except -1
    cdef void end_use(self, uint32_t index, uint64_t generation, uint32_t discard_of) noexcept
    cdef void lose_lease(self, Lease lease) noexcept
    cdef object next_lease(self, type cls)
    cdef Lease lease(self, type cls, const lane_found* found)


cdef class Lease:
    cdef readonly LaneReader _lane_reader
    cdef bytes _index
    cdef readonly uint64_t _sequence
    cdef readonly uint64_t _generation
    cdef readonly uint32_t _slot
    cdef readonly uint64_t _look     # number of a rank's lease in its RankReader
    cdef readonly int64_t _min_policy_version
    cdef readonly int64_t _max_policy_version
    cdef readonly int64_t _t_created_ns
    cdef readonly int64_t _t_publish_ns
    cdef uint64_t _token_count
    cdef readonly uint64_t _extent_bytes
    cdef uint32_t _rows
    cdef uint32_t _column_entries
    cdef readonly int32_t _group_size
    cdef readonly int32_t _env_id
    cdef readonly uint32_t _flags
    cdef readonly uint64_t _origin_sequence  # + 1; 0: the record came from no other node
    cdef readonly int64_t _origin_waited_ns
    cdef readonly int64_t _origin_transfer_ns
    cdef readonly bint _redelivered
    cdef bint is_new                 # no hub has handed it out before
    cdef uint32_t _group_id_bytes
    cdef const uint8_t* _extent
    cdef bytes _copy                 # the memory of an observer's copy; None: _extent is in the lane
    cdef uint32_t _exports
    cdef public bint _looked_at      # by its user: if it is lost without release, it stays un-released
    cdef public uint8_t _handed_out_by  # a Call
    cdef bint _released              # asked for; the lease ends with the last export
    cdef uint32_t _discard_of        # 1 + the reason for which it is discarded, 0: it is not
    cdef bint _ended

    cdef int begin_view(self) except -1
    cdef void end_view(self) noexcept
    cdef void _end(self) noexcept
