"""Reused memory for large arrays: touching a fresh page costs many times what copying into it does."""

cdef extern from "stdlib.h" nogil:
    void* aligned_alloc(size_t alignment, size_t size)

cdef extern from "sys/mman.h" nogil:
    int madvise(void* base, size_t size, int advice)
    int MADV_HUGEPAGE

cdef enum:
    PAGE = 4096
    MOST_SPARE = 64     # blocks
    SMALLEST = 1 << 15  # bytes; below that malloc has pages at hand
    HUGE = 1 << 22

cdef struct spare_block:
    void* base
    size_t size


cdef class Block


cdef class Pool:
    """Blocks without a reference, oldest first. Any thread that holds the GIL."""

    cdef spare_block _spare[MOST_SPARE]
    cdef Py_ssize_t _count
    cdef readonly size_t spare_bytes
    cdef size_t _keep_bytes

    def __dealloc__(self):
        self._forget(0)

    @property
    def keep_bytes(self) -> int:
        """Most bytes that are kept without use; the oldest blocks go first."""
        return self._keep_bytes

    @keep_bytes.setter
    def keep_bytes(self, size_t size):
        self._keep_bytes = size
        self._forget(size)

    def empty(self, shape, dtype):
        """An array with undefined values; its memory comes back with the last reference to it or a view."""
        cdef Block block
        cdef size_t size
        need = dtype.itemsize
        for length in shape:
            need *= length
        if need < SMALLEST or need >> 62:
            return np.empty(shape, dtype)
        size = need
        block = Block.__new__(Block, self)
        if not self._take(block, size):
            block.size = (size + size // 8 + PAGE - 1) // PAGE * PAGE  # batches differ a little
            block.base = aligned_alloc(PAGE, block.size)
            if block.base == NULL:
                raise MemoryError(f"no memory for an array of {size} bytes")
            if block.size >= HUGE:
                madvise(block.base, block.size, MADV_HUGEPAGE)
        return np.ndarray(shape, dtype, block)

    cdef bint _take(self, Block block, size_t size) noexcept:
        """The smallest spare block that is large enough, and not far too large."""
        cdef Py_ssize_t i, best = -1
        cdef bint fits
        for i in range(self._count):
            fits = size <= self._spare[i].size <= 2 * size
            if fits and (best < 0 or self._spare[i].size < self._spare[best].size):
                best = i
        if best < 0:
            return False
        block.base, block.size = self._spare[best].base, self._spare[best].size
        self._remove(best)
        return True

    cdef void _give(self, void* base, size_t size) noexcept:
        if self._count == MOST_SPARE:
            free(self._spare[0].base)
            self._remove(0)
        self._spare[self._count].base, self._spare[self._count].size = base, size
        self._count += 1
        self.spare_bytes += size
        self._forget(self._keep_bytes)

    cdef void _forget(self, size_t keep) noexcept:
        while self.spare_bytes > keep:
            free(self._spare[0].base)
            self._remove(0)

    cdef void _remove(self, Py_ssize_t i) noexcept:
        self.spare_bytes -= self._spare[i].size
        self._count -= 1
        memmove(&self._spare[i], &self._spare[i + 1], (self._count - i) * sizeof(spare_block))


@cython.no_gc  # in no cycle: it refers to its pool, which refers to nothing
cdef class Block:
    """Memory of one array, spare again once the array and all its views are gone."""

    cdef Pool pool
    cdef void* base
    cdef size_t size

    def __cinit__(self, Pool pool not None):
        self.pool = pool

    def __dealloc__(self):
        if self.base != NULL:
            self.pool._give(self.base, self.size)

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        PyBuffer_FillInfo(buffer, self, self.base, self.size, False, flags)
