from libc.stdint cimport uint8_t

cdef class Mapping:
    cdef object __weakref__
    cdef uint8_t* base
    cdef readonly size_t size
    cdef int _fd
    cdef unsigned _born
    cdef bint _readonly
    cdef bint _protected
    cdef bint alive(self) noexcept nogil
