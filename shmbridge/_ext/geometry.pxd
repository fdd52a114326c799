from libc.stdint cimport uint32_t, uint64_t

from shmbridge._ext.layout cimport lane_header

cdef extern from "geometry.h" nogil:
    ctypedef struct complaint:
        char text[200]
    ctypedef struct lane_geometry:
        uint32_t slot_count
        uint32_t column_count
        uint64_t data_bytes
        uint64_t ring_at
        uint64_t slots_at
        uint64_t released_at
        uint64_t data_at
        uint64_t segment_bytes
    lane_geometry geometry_of(uint64_t data_bytes, uint32_t slot_count)
    int geometry_read(const lane_header* header, uint64_t size, lane_geometry* geometry, complaint* why)
