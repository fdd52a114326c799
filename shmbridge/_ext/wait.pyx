"""How the hub waits for records of any lane: a short adaptive spin, then the doorbell. Knows words, not records.

The store-load handshake is argued in docs/adr/0001-lanes.md; a producer's wait for space is LaneWriter.wait_space.
"""

from libc.errno cimport ETIMEDOUT
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shmbridge._ext.atomics cimport cpu_relax, load_seq32, load_seq64, shm_u64, store_seq32
from shmbridge._ext.faults cimport fault_hit
from shmbridge._ext.futex cimport futex_wait, monotonic_ns
from shmbridge._ext.layout cimport control_header
from shmbridge._ext.mapping cimport Mapping
from shmbridge._ext.ring cimport LaneReader

cdef int64_t LONGEST_SPIN_NS = 50_000
cdef int64_t SHORTEST_SPIN_NS = 500
cdef int64_t TICK_NS = 1_000_000_000


cdef class HubWait:
    """Waits until a watched lane has a record, a lane arrives, or the doorbell rings. One thread at a time."""

    cdef Mapping _control
    cdef control_header* _words
    cdef shm_u64** _tails
    cdef uint64_t* _next
    cdef uint32_t _count
    cdef uint32_t _capacity
    cdef int64_t _spin_ns
    cdef readonly uint64_t late_wakes  # ticks that found work: 0 in a healthy run
    cdef readonly uint64_t sleeps

    def __cinit__(self, Mapping control not None):
        self._control = control
        self._words = <control_header*>control.base
        self._spin_ns = LONGEST_SPIN_NS

    def __dealloc__(self):
        free(self._tails)
        free(self._next)

    cdef int _look_at(self, list readers) except -1:
        cdef uint32_t count = len(readers), i
        if count > self._capacity:
            free(self._tails)
            free(self._next)
            self._capacity = 0
            self._tails = <shm_u64**>malloc(2 * count * sizeof(shm_u64*))
            self._next = <uint64_t*>malloc(2 * count * sizeof(uint64_t))
            if self._tails == NULL or self._next == NULL:
                raise MemoryError
            self._capacity = 2 * count
        for i in range(count):
            self._tails[i] = (<LaneReader?>readers[i]).tail_word()
            self._next[i] = (<LaneReader>readers[i]).next
        self._count = count
        return 0

    cdef bint _work(self, uint32_t arrivals) noexcept nogil:
        cdef uint32_t i
        for i in range(self._count):
            if load_seq64(self._tails[i]) != self._next[i]:  # SYNC(commit), SYNC(hub-wake)
                return True
        return load_seq32(&self._words.arrivals) != arrivals  # SYNC(bell)

    def wait(self, list readers not None, int64_t timeout_ns, uint32_t arrivals, bint spin=True):
        """Returns True when there may be work: a record, an arrival since `arrivals`, or a ring of the bell; False on timeout.

        Blocks at most `timeout_ns` and at most one tick of a second, with the GIL released; also returns True on a signal.
        """
        cdef uint32_t seen
        cdef int64_t began = monotonic_ns(), until
        cdef int status = 0
        cdef bint work
        if not self._control.alive():
            raise BufferError("the bridge was attached before fork")
        self._look_at(readers)
        with nogil:
            until = began + (min(self._spin_ns, timeout_ns) if spin else 0)
            work = self._work(arrivals)
            while not work and monotonic_ns() < until:
                cpu_relax()
                work = self._work(arrivals)
            if work:
                self._spin_ns = min(2 * self._spin_ns, LONGEST_SPIN_NS)
            else:
                self._spin_ns = max(self._spin_ns // 2, SHORTEST_SPIN_NS)
        timeout_ns -= monotonic_ns() - began
        if work or timeout_ns <= 0:
            return work
        fault_hit(b"hub.before_sleep")
        with nogil:
            seen = load_seq32(&self._words.doorbell)  # SYNC(bell)
            store_seq32(&self._words.hub_sleeping, 1)  # SYNC(hub-wake)
            work = self._work(arrivals)
            if not work:
                self.sleeps += 1
                status = futex_wait(&self._words.doorbell, seen, min(timeout_ns, TICK_NS))
            store_seq32(&self._words.hub_sleeping, 0)
        if status == ETIMEDOUT:
            work = self._work(arrivals)
            if work and load_seq32(&self._words.doorbell) == seen:  # SYNC(bell)
                self.late_wakes += 1
            return work
        return True
