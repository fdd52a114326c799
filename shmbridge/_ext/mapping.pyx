"""One mapped segment and its descriptor. Knows neither names nor what the bytes mean; shmbridge.segment makes them.

The descriptor carries the segment's locks, so it lives exactly as long as this object; whoever must keep a lock keeps the Mapping.
"""

from cpython.buffer cimport PyBuffer_FillInfo
from libc.errno cimport EMFILE, errno
from libc.stdint cimport uint8_t
from posix.mman cimport MAP_FAILED, MAP_SHARED, PROT_READ, PROT_WRITE, mmap, munmap
from posix.unistd cimport close

cdef extern from "fork.h" nogil:
    int fork_watch(int fd)
    void fork_unwatch(int fd)
    unsigned fork_generation()
    unsigned fork_count()

cdef extern from "<sys/mman.h>" nogil:
    enum: MADV_DONTFORK
    enum: MADV_DONTDUMP
    int madvise(void* addr, size_t length, int advice)


def forks():
    """Forks of this process so far; see open_watched in shmbridge.segment."""
    return fork_count()


def watch(int fd):
    """Has every child of fork close the descriptor before it runs any Python. OSError when 4096 are watched."""
    if fork_watch(fd) != 0:
        raise OSError(EMFILE, "too many segments are open in this process (4096)")


def close_watched(int fd):
    """Closes a watched descriptor."""
    fork_unwatch(fd)
    close(fd)


cdef class Mapping:
    """A shared mapping of a whole segment, closed with the last reference.

    Never blocks. Owns `fd` from here on. In a child of fork the mapping is gone and `alive()` is false: nothing may be touched.
    """

    def __cinit__(self, int fd, size_t size, bint readonly=False):
        cdef void* base
        self.base = NULL
        self._fd = -1
        self._born = fork_generation()
        base = mmap(NULL, size, PROT_READ if readonly else PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"mmap of {size} bytes failed")
        self.base = <uint8_t*>base
        self.size = size
        self._readonly = readonly
        madvise(base, size, MADV_DONTFORK)
        madvise(base, size, MADV_DONTDUMP)
        watch(fd)
        self._fd = fd

    cdef bint alive(self) noexcept nogil:
        return self.base != NULL and self._born == fork_generation()

    @property
    def fd(self) -> int:
        return self._fd if self.alive() else -1

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that mapped the segment."""
        return self._born != fork_generation()

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if not self.alive():
            raise BufferError("the segment was mapped before fork: attach again in this process")
        PyBuffer_FillInfo(buffer, self, self.base, self.size, self._readonly, flags)

    def __dealloc__(self):
        if not self.alive():
            return
        munmap(self.base, self.size)
        if self._fd >= 0:  # not close_watched: at the end of the interpreter the module's names may be gone
            fork_unwatch(self._fd)
            close(self._fd)
