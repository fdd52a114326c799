from libc.stdint cimport uint64_t

from shmbridge._ext.layout cimport lane_header

cdef int check_geometry(lane_header* header, uint64_t size) except -1
