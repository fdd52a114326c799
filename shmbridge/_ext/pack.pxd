from libc.stdint cimport int32_t, int64_t, uint8_t

from shmbridge._ext.column cimport PackedColumn

cdef int64_t write_values(PackedColumn column, uint8_t* to, bint is_cold) except -1
cdef int fold_values(PackedColumn column, uint8_t* to, const int32_t* tokens) except -1
cdef int64_t check_column(PackedColumn column, uint8_t* values) except -1
