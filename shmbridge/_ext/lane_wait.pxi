"""How the hub waits for records of any lane: hub_wait.h over the lanes of LaneReader objects. And which waits of
a consumer or rank are under way.

A producer's wait for space is LaneWriter.wait_space.
"""

cdef extern from "pythread.h" nogil:
    int PyThread_acquire_lock_timed(PyThread_type_lock lock, long long microseconds, int interruptible)

cdef extern from "<sys/eventfd.h>" nogil:
    int eventfd_write(int fd, uint64_t value)

cdef extern from "spin.h" nogil:
    enum:
        LONGEST_SPIN_NS

cdef extern from "hub_wait.h" nogil:
    ctypedef struct hub_watch:
        shm_u64** tails
        uint64_t* next
        uint32_t count
        uint32_t arrivals
        uint32_t heard
    int hub_has_work(const hub_watch* watch, control_header* control)
    int hub_spin(const hub_watch* watch, control_header* control, int64_t timeout_ns, int64_t* spin_ns)
    int hub_sleep(const hub_watch* watch, control_header* control, int64_t timeout_ns, int* late)
    int hub_arm(const hub_watch* watch, control_header* control, uint32_t* seen)
    void hub_disarm(control_header* control)
    void hub_relay(control_header* control, uint32_t seen, shm_u64* stop, int event)


cdef enum:
    RING_AGAIN_US = 1000


cdef class HubWait:
    """Waits until a watched lane has a record, a lane arrives, or the doorbell rings.

    `wait` sleeps, one thread at a time. Between `arm` and `disarm`, `relay` wakes an event loop instead. Both
    may run at once.
    """

    cdef Mapping _control
    cdef control_header* _words
    cdef hub_watch _watch
    cdef list _readers               # whose words _watch reads; None while no thread waits
    cdef uint32_t _capacity
    cdef int64_t _spin_ns
    cdef PyThread_type_lock _one_sleeper  # hub_sleeping and _watch have one owner at a time
    cdef uint32_t _armed, _seen, _relay_from
    cdef int64_t _armed_at
    cdef shm_u64 _stop
    cdef int _event  # what relay writes to, -1: there is none
    cdef readonly uint64_t late_wakes  # ticks that found work: 0 in a healthy run
    cdef readonly uint64_t sleeps
    cdef readonly uint64_t wait_ns

    def __cinit__(self, Mapping control not None):
        self._control = control
        self._words = <control_header*>control.base
        self._spin_ns = LONGEST_SPIN_NS
        self._event = -1
        self._watch.heard = load_seq32(&self._words.doorbell)  # SYNC(bell)
        self._one_sleeper = PyThread_allocate_lock()
        if self._one_sleeper == NULL:
            raise MemoryError

    def __dealloc__(self):
        free(self._watch.tails)
        free(self._watch.next)
        if self._one_sleeper != NULL:
            PyThread_free_lock(self._one_sleeper)

    cdef int _look_at(self, list readers, uint32_t arrivals) except -1:
        cdef uint32_t count = len(readers), i
        cdef LaneReader reader
        self._watch.count, self._watch.arrivals = 0, arrivals
        self._readers = readers  # the caller's own list, made for this
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

    cdef void _look_away(self) noexcept:
        """Drops the lanes, so that the memory of a dead one is not kept."""
        if not self._armed:
            self._watch.count = 0
            self._readers = None

    cdef int _own(self) except -1:
        """Becomes the one sleeper, after waking the present one."""
        if not self._control.alive():
            raise BufferError("the bridge was attached before fork")
        cdef int owned = PyThread_acquire_lock(self._one_sleeper, NOWAIT_LOCK)
        if owned:
            return 0
        with nogil:
            # ring repeatedly: a thread about to sleep may not have read the bell yet
            while not owned:
                ring_bell(&self._words.doorbell)
                owned = PyThread_acquire_lock_timed(self._one_sleeper, RING_AGAIN_US, 0) == PY_LOCK_ACQUIRED
        return 0

    def wait(self, list readers not None, int64_t timeout_ns, uint32_t arrivals):
        """Returns True when there may be work: a record, an arrival since `arrivals`, or a ring of the bell
        since the last wait; False on timeout.

        Blocks at most `timeout_ns` and at most one tick of a second, with the GIL released;
        also returns True on a signal.
        """
        cdef int64_t began = monotonic_ns()
        cdef int work, late = 0
        self._own()
        try:
            self._look_at(readers, arrivals)
            with nogil:
                work = hub_spin(&self._watch, self._words, timeout_ns, &self._spin_ns)
                timeout_ns -= monotonic_ns() - began
                if not work and timeout_ns > 0:
                    self.sleeps += 1
                    work = hub_sleep(&self._watch, self._words, timeout_ns, &late)
                self._watch.heard = load_seq32(&self._words.doorbell)  # SYNC(bell)
            if self._armed:  # hub_sleep has cleared the flag: set it again, and wake the loop to look again
                hub_arm(&self._watch, self._words, &self._seen)
                eventfd_write(self._event, 1)
            self._look_away()
        finally:
            PyThread_release_lock(self._one_sleeper)
        self.late_wakes += late
        self.wait_ns += monotonic_ns() - began
        return bool(work)

    def arm(self, list readers not None, uint32_t arrivals):
        """Has the relay ring for what `wait` waits for; True if it is there already, or the relay has ended.

        Never sleeps. Each call needs one `disarm`.
        """
        cdef int work
        self._own()
        try:
            if load_relaxed64(&self._stop):
                return True
            self._look_at(readers, arrivals)
            work = hub_arm(&self._watch, self._words, &self._seen)
            self._armed += 1
            if self._armed == 1:
                self._armed_at = monotonic_ns()
                self.sleeps += not work
        finally:
            PyThread_release_lock(self._one_sleeper)
        return bool(work)

    def disarm(self, bint tick_over=False):
        """Undoes one `arm`. `tick_over`: the bell was silent for a whole tick, so present work came late."""
        if not self._control.alive():
            return
        self._own()
        try:
            if not self._armed:  # stop_relay has ended all
                return
            self._armed -= 1
            if self._armed == 0:
                hub_disarm(self._words)
                self.wait_ns += monotonic_ns() - self._armed_at
            if tick_over and hub_has_work(&self._watch, self._words):
                self.late_wakes += load_seq32(&self._words.doorbell) == self._seen  # SYNC(bell)
            self._look_away()
        finally:
            PyThread_release_lock(self._one_sleeper)

    def relay(self, int event):
        """Writes to the eventfd at each ring, until `stop_relay`. Blocks without the GIL: for a thread."""
        with nogil:
            hub_relay(self._words, self._relay_from, &self._stop, event)

    def start_relay(self, int event):
        """Prepares `relay(event)` for every ring from now on, whenever its thread begins. No other runs."""
        store_relaxed64(&self._stop, 0)
        self._event, self._relay_from = event, load_seq32(&self._words.doorbell)  # SYNC(bell)

    def stop_relay(self):
        """Ends `relay`, and whatever is armed. Does not wait for the thread."""
        if self._control.alive():
            if self._armed:
                self._armed = 0
                hub_disarm(self._words)
            store_relaxed64(&self._stop, 1)
            ring_bell(&self._words.doorbell)


cdef class Waits:
    """The waits of one consumer or rank that are under way: those inside another one are part of it.

    Any thread. Compiled, since it runs between a wake and the return of what came: Python code that has not
    run for some milliseconds takes several microseconds a call.

    Attributes:
        words: those of the control segment, in which observers see a wait; None: observers see none.
        since_s: when the oldest of them began, or another one got its record, by time.monotonic(); None:
            nobody waits.
    """

    cdef public object words
    cdef readonly object since_s
    cdef double _got_s
    cdef dict _open  # Wait -> when it began

    def __cinit__(self, words=None):
        self.words, self._open = words, {}

    def open(self, *, bint for_record=False):
        """A wait, for as long as the `with` block takes. Never blocks by itself.

        Args:
            for_record: a block that raises nothing got the next record, which others wait for, too.
        """
        cdef Wait wait = Wait.__new__(Wait)
        wait._all, wait._for_record = self, for_record
        return wait

    cdef int _look(self) except -1:
        since = max(min(self._open.values()), self._got_s) if self._open else None
        if since == self.since_s:
            return 0
        words = self.words
        if words is not None and not words.mapping.forked:
            if self.since_s is not None:
                words.note_asking(False)
            if since is not None:
                words.note_asking(True)
        self.since_s = since
        return 0


@cython.internal
cdef class Wait:
    cdef Waits _all
    cdef bint _for_record

    def __enter__(self):
        self._all._open[self] = 1e-9 * monotonic_ns()
        self._all._look()

    def __exit__(self, kind, error, traceback):
        if self._for_record and kind is None:
            self._all._got_s = 1e-9 * monotonic_ns()
        self._all._open.pop(self, None)
        self._all._look()
