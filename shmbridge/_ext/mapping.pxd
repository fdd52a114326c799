from libc.stdint cimport uint8_t

cdef class Descriptor:
    cdef int _fd
    cdef unsigned _born
    cdef bint _kept
    cdef int number(self) noexcept
    cdef void end(self) noexcept


cdef class Mapping:
    cdef object __weakref__
    cdef uint8_t* base
    cdef readonly size_t size
    cdef readonly Descriptor file
    cdef unsigned _born
    cdef bint _readonly
    cdef bint _protected
    cdef bint alive(self) noexcept nogil
    cdef size_t segment_size(self) noexcept nogil
