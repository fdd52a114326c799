from libc.stdint cimport uint32_t, uint64_t

cdef extern from "atomics.h" nogil:
    ctypedef struct shm_u64:
        pass
    ctypedef struct shm_u32:
        pass

    uint64_t load_relaxed64(const shm_u64* word)
    uint64_t load_acquire64(const shm_u64* word)
    uint64_t load_seq64(const shm_u64* word)
    void store_relaxed64(shm_u64* word, uint64_t value)
    void store_release64(shm_u64* word, uint64_t value)
    void store_seq64(shm_u64* word, uint64_t value)
    void add_seq64(shm_u64* word, uint64_t count)
    uint32_t load_seq32(const shm_u32* word)
    void store_seq32(shm_u32* word, uint32_t value)
    void add_seq32(shm_u32* word)
    void store_release_words(shm_u64* to, const void* source, uint64_t count)
    void load_acquire_words(void* to, const shm_u64* source, uint64_t count)
    void cpu_relax()
