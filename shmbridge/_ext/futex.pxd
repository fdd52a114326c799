from libc.stdint cimport int64_t, uint32_t

from shmbridge._ext.atomics cimport shm_u32

cdef extern from "futex.h" nogil:
    int EINTR
    int64_t monotonic_ns()
    int futex_wait(shm_u32* word, uint32_t seen, int64_t timeout_ns)
    void futex_wake_all(shm_u32* word)
    void ring_bell(shm_u32* bell)
