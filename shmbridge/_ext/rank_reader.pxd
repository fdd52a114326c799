from libc.stdint cimport uint64_t

from shmbridge._ext.lane_reader cimport LaneReader


cdef class RankReader(LaneReader):
    cdef set _looks                  # numbers of the leases that live; one record may be looked at twice
    cdef uint64_t _next_look
    # number of a look whose lease is gone without release -> whether it was looked at
    cdef dict _lost
