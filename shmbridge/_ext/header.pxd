cimport cython
from libc.stdint cimport uint8_t


cdef class Descriptor:
    cdef int _fd
    cdef unsigned _born
    cdef bint _kept
    cdef int number(self) noexcept
    cdef void end(self) noexcept


@cython.final
cdef class Mapping:
    cdef object __weakref__
    cdef uint8_t* base
    cdef readonly size_t size
    cdef readonly Descriptor file
    cdef unsigned _born
    cdef const unsigned* _generation  # of this process; of another number in a child of fork
    cdef bint _readonly
    cdef bint _protected
    cdef size_t segment_size(self) noexcept nogil

    cdef inline bint alive(self) noexcept nogil:
        return self.base != NULL and self._born == self._generation[0]
