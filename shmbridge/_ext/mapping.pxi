"""One mapped segment and its descriptor, and in what pages it lies.

The descriptor carries the segment's locks: a lock lasts as long as its Mapping. The kernel counts a mapping
as a descriptor. So a process whose program closes all descriptors, as daemons do, keeps its locks; and
close() frees none while the Mapping lives.
"""

cdef extern from "fork.h" nogil:
    int fork_watch(int fd)
    void fork_unwatch(int fd)
    unsigned fork_generation()
    const unsigned* fork_generation_at()
    unsigned fork_count()

cdef extern from "<sys/mman.h>" nogil:
    enum: MADV_DONTFORK
    enum: MADV_DONTDUMP
    enum: MADV_HUGEPAGE
    int madvise(void* addr, size_t length, int advice)
    int mprotect(void* addr, size_t length, int protection)

cdef extern from "<fcntl.h>" nogil:
    int posix_fallocate(int fd, off_t offset, off_t length)

cdef extern from "placement.h" nogil:
    enum: HUGE_PAGE
    enum: MADV_COLLAPSE
    enum: MADV_POPULATE_WRITE
    int64_t worked_ns()


def forks():
    """Forks of this process so far; see open_segment in shmbridge.segments.segment."""
    return fork_count()


cdef class Descriptor:
    """An open file that is closed once: by the first close(), or with the last reference.

    A second close of a plain number may hit what another thread has opened meanwhile, and an interrupt makes
    clean-ups run twice. Owns `fd` also if it raises. `kept_from_children`: every child of fork closes it
    before it runs any Python, so that no child keeps its locks; OSError when 4096 are.
    """

    def __cinit__(self, int fd, bint kept_from_children=True):
        self._fd, self._born = fd, fork_generation()
        if kept_from_children:
            if fork_watch(fd) != 0:
                raise OSError(EMFILE, "too many segments are open in this process (4096)")
            self._kept = True

    @property
    def fd(self) -> int:
        """Its number; -1 once it is closed, also by fork."""
        return self.number()

    cdef int number(self) noexcept:
        return -1 if self._kept and self._born != fork_generation() else self._fd

    def close(self):
        """Closes it. Idempotent."""
        self.end()

    cdef void end(self) noexcept:
        cdef int fd = self.number()  # no property: at the interpreter's end the module's names may be gone
        self._fd = -1
        if fd >= 0:
            if self._kept:
                fork_unwatch(fd)
            close(fd)

    def __dealloc__(self):
        self.end()


cdef void* map_aligned(int fd, size_t size, int protection, off_t at) noexcept nogil:
    """mmap at an address fit for huge pages, if it is large enough; anywhere if address space is short."""
    cdef uint8_t* room
    cdef uint8_t* base
    cdef void* there
    if size >= HUGE_PAGE:
        room = <uint8_t*>mmap(
            NULL, size + HUGE_PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)
        if room != MAP_FAILED:
            base = <uint8_t*>((<size_t>room + HUGE_PAGE - 1) & ~(<size_t>HUGE_PAGE - 1))
            there = mmap(base, size, protection, MAP_SHARED | MAP_FIXED, fd, at)
            if there == MAP_FAILED:
                munmap(room, size + HUGE_PAGE)
                return MAP_FAILED
            size = (size + 4095) & ~(<size_t>4095)
            if base != room:
                munmap(room, base - room)
            munmap(base + size, room + HUGE_PAGE - base)
            return there
    return mmap(NULL, size, protection, MAP_SHARED, fd, at)


def fill_with_huge_pages(int fd, size_t at, size_t size, int64_t most_ns):
    """Has bytes `at` to `at + size` of a segment lie in huge pages, as far as whole ones go, and returns how
    many bytes do; both are multiples of a huge page from the segment's start, but for the last bytes of a
    segment.

    Best effort: ends at the first that the kernel refuses (before Linux 6.1 all), or that took more than
    `most_ns` of processor time to be found. It also reserves memory that was not reserved. Blocks;
    releases the GIL.
    """
    cdef size_t whole = size & ~(<size_t>HUGE_PAGE - 1), done = 0
    cdef int64_t began
    cdef uint8_t* base
    if whole == 0:
        return 0
    with nogil:
        base = <uint8_t*>map_aligned(fd, whole, PROT_READ | PROT_WRITE, at)
        if base != MAP_FAILED:
            madvise(base, whole, MADV_DONTFORK)
            while done < whole:
                began = worked_ns()
                # A huge page grows out of small ones. First the first: the segment is not to end behind a
                # page that is not reserved.
                if (posix_fallocate(fd, at + done, 4096) or
                        posix_fallocate(fd, at + done + HUGE_PAGE - 4096, 4096)):
                    break
                if madvise(base + done, HUGE_PAGE, MADV_COLLAPSE):
                    break
                done += HUGE_PAGE
                if worked_ns() - began > most_ns:
                    break
            munmap(base, whole)
    return done


@cython.final
@cython.no_gc  # a descriptor refers to nothing
cdef class Mapping:
    """A shared mapping of a whole segment, closed with the last reference.

    Never blocks. Keeps `file` open. In a child of fork the mapping
    is gone and `alive()` is false: nothing may be touched.
    """

    def __cinit__(self, Descriptor file not None, size_t size, bint readonly=False):
        cdef void* base
        self.base = NULL
        self._born, self._generation = fork_generation(), fork_generation_at()
        base = map_aligned(file.number(), size, PROT_READ if readonly else PROT_READ | PROT_WRITE, 0)
        if base == MAP_FAILED:
            raise OSError(errno, f"mmap of {size} bytes failed")
        self.base = <uint8_t*>base
        self.size = size
        self._readonly, self._protected = readonly, readonly
        madvise(base, size, MADV_DONTFORK)
        madvise(base, size, MADV_DONTDUMP)
        if size >= HUGE_PAGE:
            madvise(base, size, MADV_HUGEPAGE)
        self.file = file

    cdef size_t segment_size(self) noexcept nogil:
        """The segment's size now, which is more than `size` if it has grown since; 0 if it cannot be told."""
        cdef struct_stat about
        return about.st_size if self.alive() and fstat(self.file._fd, &about) == 0 else 0

    @property
    def fd(self) -> int:
        return self.file.number() if self.alive() else -1

    @property
    def address(self) -> int:
        """Where it begins; 0 in a child of fork."""
        return <size_t>self.base if self.alive() else 0

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that mapped the segment."""
        return self._born != fork_generation()

    def protect(self, size_t at):
        """Makes the bytes from `at`, rounded up to a page, read-only here, and all buffers. Raises OSError.

        Locks, forks and huge pages are as before.
        """
        cdef size_t page = sysconf(_SC_PAGESIZE)
        at = (at + page - 1) // page * page
        if self.alive() and at < self.size:
            if mprotect(self.base + at, self.size - at, PROT_READ):
                raise OSError(errno, f"{self.size - at} bytes cannot be made read-only")
            self._readonly, self._protected = True, True

    def make_writable(self):
        """Makes all of it writable here, for a device; buffers stay as they are. OSError if refused."""
        if self.alive() and mprotect(self.base, self.size, PROT_READ | PROT_WRITE):
            raise OSError(errno, f"{self.size} bytes cannot be made writable")
        self._protected = False

    @property
    def data_writable(self) -> bool:
        """Whether a store to its last page is no fault."""
        return not self._protected

    def populate(self):
        """Maps every page now, so that no first write is a fault. Blocks; no-op before Linux 5.14."""
        if self.alive():
            with nogil:
                madvise(self.base, self.size, MADV_POPULATE_WRITE)

    def lock(self):
        """Locks the pages in memory if RLIMIT_MEMLOCK allows; returns whether it did. Blocks; maps all."""
        cdef bint locked = False
        if self.alive():
            with nogil:
                locked = mlock(self.base, self.size) == 0
        return locked

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if not self.alive():
            raise BufferError("the segment was mapped before fork: attach again in this process")
        PyBuffer_FillInfo(buffer, self, self.base, self.size, self._readonly, flags)

    def __dealloc__(self):
        if not self.alive():
            return
        munmap(self.base, self.size)
