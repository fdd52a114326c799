"""How the hub waits for records of any lane: hub_wait.h over the lanes of LaneReader objects. Knows words, not records.

A producer's wait for space is LaneWriter.wait_space.
"""

from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc

from shmbridge._ext.atomics cimport shm_u64
from shmbridge._ext.futex cimport monotonic_ns
from shmbridge._ext.layout cimport control_header
from shmbridge._ext.mapping cimport Mapping
from shmbridge._ext.ring cimport LaneReader

cdef extern from "hub_wait.h" nogil:
    enum:
        LONGEST_SPIN_NS
    ctypedef struct hub_watch:
        shm_u64** tails
        uint64_t* next
        uint32_t count
        uint32_t arrivals
    int hub_has_work(const hub_watch* watch, control_header* control)
    int hub_spin(const hub_watch* watch, control_header* control, int64_t timeout_ns, int64_t* spin_ns)
    int hub_sleep(const hub_watch* watch, control_header* control, int64_t timeout_ns, int* late)


cdef class HubWait:
    """Waits until a watched lane has a record, a lane arrives, or the doorbell rings. One thread at a time."""

    cdef Mapping _control
    cdef control_header* _words
    cdef hub_watch _watch
    cdef uint32_t _capacity
    cdef int64_t _spin_ns
    cdef readonly uint64_t late_wakes  # ticks that found work: 0 in a healthy run
    cdef readonly uint64_t sleeps

    def __cinit__(self, Mapping control not None):
        self._control = control
        self._words = <control_header*>control.base
        self._spin_ns = LONGEST_SPIN_NS

    def __dealloc__(self):
        free(self._watch.tails)
        free(self._watch.next)

    cdef int _look_at(self, list readers) except -1:
        cdef uint32_t count = len(readers), i
        cdef LaneReader reader
        self._watch.count = 0
        if count > self._capacity:
            free(self._watch.tails)
            free(self._watch.next)
            self._capacity = 0
            self._watch.tails = <shm_u64**>malloc(2 * count * sizeof(shm_u64*))
            self._watch.next = <uint64_t*>malloc(2 * count * sizeof(uint64_t))
            if self._watch.tails == NULL or self._watch.next == NULL:
                raise MemoryError
            self._capacity = 2 * count
        for i in range(count):
            reader = <LaneReader?>readers[i]
            self._watch.tails[i] = &reader._reader.header.tail
            self._watch.next[i] = reader._reader.next
        self._watch.count = count
        return 0

    def wait(self, list readers not None, int64_t timeout_ns, uint32_t arrivals, bint spin=True):
        """Returns True when there may be work: a record, an arrival since `arrivals`, or a ring of the bell; False on timeout.

        Blocks at most `timeout_ns` and at most one tick of a second, with the GIL released; also returns True on a signal.
        """
        cdef int64_t began = monotonic_ns()
        cdef int work, late = 0
        if not self._control.alive():
            raise BufferError("the bridge was attached before fork")
        self._look_at(readers)
        self._watch.arrivals = arrivals
        with nogil:
            if spin:
                work = hub_spin(&self._watch, self._words, timeout_ns, &self._spin_ns)
            else:
                work = hub_has_work(&self._watch, self._words)
            timeout_ns -= monotonic_ns() - began
            if not work and timeout_ns > 0:
                self.sleeps += 1
                work = hub_sleep(&self._watch, self._words, timeout_ns, &late)
        self.late_wakes += late
        return bool(work)
