from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t

from shmbridge._ext.column cimport PackedColumn
from shmbridge._ext.layout cimport slot
from shmbridge._ext.lane_writer cimport Claim, LaneWriter


cdef enum:
    SAID_NOTHING                     # the tokens' versions count, else the current version
    SAID_OLDEST                      # no token is older; the newest is the tokens'
    SAID_BOTH                        # every token is within


cdef int check_columns(list columns) except -1


cdef class Stamp:
    cdef readonly bytes group_id
    cdef readonly uint32_t group_size  # 0: as many rows as are given
    cdef readonly bint is_eval
    cdef int said                    # how much of the versions: SAID_NOTHING, SAID_OLDEST or SAID_BOTH
    cdef int64_t oldest
    cdef int64_t newest
    cdef int64_t created_ns          # when `put` or `claim` began


cdef class RowSampler:
    cdef readonly uint32_t every     # 0: no row is checked
    cdef uint64_t _next

    cdef uint64_t take(self, uint64_t rows) noexcept


cdef class Plan:
    cdef readonly list columns
    cdef readonly Stamp stamp
    cdef readonly uint64_t extent_bytes
    cdef readonly object sequence    # of the committed record; None before
    cdef public bint done            # committed, or counted as dropped
    cdef public object source        # the group, to make the plan again
    cdef bint has_nulls              # some row of some column is None
    cdef bint worth_a_look           # a caller may have to be told something of the group: put/untrainable_notices.py
    cdef slot _slot
    cdef PackedColumn _versions            # token_versions, or None
    cdef uint64_t _first_row         # its number among the producer's rows
    cdef uint32_t _check_every       # which of them carry checks; 0: none of this record
    cdef PackedColumn _tokens
    cdef PackedColumn _ends                # step_ends, or None
    cdef PackedColumn _rewards             # step_rewards, or None
    cdef PackedColumn _prompts             # prompt_length, or None

    cdef int lay_out(self, list columns, Stamp stamp, uint32_t rows, uint64_t tokens, bint uneven,
                     int32_t env_id, object source, RowSampler sampler) except -1
    cdef int write_checks(self, uint8_t* base) except -1
    cdef int claim_and_write(self, LaneWriter writer) except -1
    cdef int write_all(self, LaneWriter writer, uint64_t number) except -1
    cdef bint is_per_row(self, PackedColumn column) noexcept
    cdef int publish(self, LaneWriter writer, uint64_t number, const uint8_t* base, uint64_t unrecorded) except -1
    cdef int check_steps(self, const uint8_t* base) except -1
    cdef int check_prompts(self, const uint8_t* base) except -1
    cdef int stamp_by_tokens(self, const uint8_t* base) except -1
    cdef object contradicted(self, const int32_t* values, int64_t version, str reason)
    cdef int write_index(self, uint8_t* base) except -1
