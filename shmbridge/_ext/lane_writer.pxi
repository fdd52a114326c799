"""A producer's claims on its lane as Python objects, over the C core in lane_write.h: who may write, and how
long. For one thread at a time.
"""

cdef extern from "<time.h>" nogil:
    enum: CLOCK_MONOTONIC_COARSE


cdef inline int64_t coarse_ns() noexcept nogil:
    """Monotonic, to some milliseconds: cheap enough for each put."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now)
    return now.tv_sec * <int64_t>1000000000 + now.tv_nsec


class ClaimLost(RuntimeError):
    """The claim to be written to is over, or another one is open."""


cdef class LaneWriter:
    """The producer's side of one lane. One thread at a time; never blocks except in wait_space."""

    def __cinit__(self, Mapping lane not None, Mapping control not None):
        cdef complaint why
        cdef lane_geometry geometry
        self._lane, self._control = lane, control
        self._writer.claimed = -1
        self.looked(1.0)  # they were made just now
        if geometry_read(<lane_header*>lane.base, lane.size, &geometry, &why):
            raise LaneCorrupt(why.text.decode())
        if lane_writer_open(&self._writer, lane.base, &geometry, <control_header*>control.base):
            raise MemoryError

    def __dealloc__(self):
        lane_writer_close(&self._writer)

    cdef lane_writer* alive(self) except NULL:
        if not self._lane.alive():
            raise BufferError("lane was opened before fork")
        return &self._writer

    @property
    def slot_count(self) -> int:
        return self._writer.slot_count

    @property
    def data_bytes(self) -> int:
        return self._writer.data_bytes

    def claim(self, uint64_t size):
        """Reserves a slot and `size` bytes; False if the lane has no room now. One open claim at a time."""
        return bool(self.begin(size))

    cdef int begin(self, uint64_t size) except -1:
        """`claim`, of which `_writer.claim_number` is then the number."""
        cdef lane_writer* writer = self.alive()
        if writer.claimed >= 0:
            raise ClaimLost("a claim is open already")
        return lane_claim(writer, size)

    def reclaim(self):
        """Takes back whatever has been released."""
        if self._lane.alive():
            lane_reclaim(&self._writer, True)

    @property
    def quarantined(self) -> bool:
        """Whether a hub has found that this lane's words cannot be true, and reads it no more."""
        return self._lane.alive() and load_relaxed64(&self._writer.header.quarantined) != 0

    @property
    def look_due(self) -> bool:
        """Whether it is time to look whether the names of lane and bridge are there."""
        return coarse_ns() >= self._look_at_ns

    def looked(self, double again_s):
        """Notes a check; the next one is due in so many seconds."""
        self._look_at_ns = coarse_ns() + <int64_t>(again_s * 1e9)

    @property
    def blocked(self) -> bool:
        """Whether a claim needs the full checks first: they are due, another claim is open, the lane is
        quarantined, or the bridge is draining or paused.
        """
        return self.is_blocked(coarse_ns())

    cdef bint is_blocked(self, int64_t now) noexcept:
        cdef control_header* hub
        if self._writer.claimed >= 0 or not self._lane.alive() or now >= self._look_at_ns:
            return True
        hub = <control_header*>self._control.base
        if load_relaxed64(&self._writer.header.quarantined):
            return True
        return load_acquire64(&hub.draining) or load_acquire64(&hub.paused)  # SYNC(flags)

    cdef void keep_pace(self, uint64_t size) noexcept:
        """Before a claim by who may wait a moment: see lane_keep_pace."""
        if self._lane.alive():
            lane_keep_pace(&self._writer, size)

    cdef int64_t policy_version(self) noexcept:
        """The newest the hub has announced, -1 before the first; the lane must be alive."""
        # SYNC(flags)
        return <int64_t>load_acquire64(&(<control_header*>self._control.base).policy_version) - 1

    @property
    def claiming(self) -> bool:
        """Whether a claim is open."""
        return self._writer.claimed >= 0

    cdef uint8_t* claimed(self, uint64_t number) except NULL:
        """Memory of the open claim, if it has that number."""
        if self._writer.claimed < 0 or self._writer.claim_number != number or not self._lane.alive():
            raise ClaimLost("no open claim")
        return self._writer.data + self._writer.claim_at

    cdef void give_back(self, uint64_t number) noexcept:
        """Aborts the claim of that number if it is open; no other."""
        if self._writer.claimed >= 0 and self._writer.claim_number == number and self._lane.alive():
            lane_abort(&self._writer)

    def claimed_memory(self):
        """Writable memory of the open claim, valid until commit or abort."""
        cdef uint64_t at = self.claimed(self._writer.claim_number) - self._lane.base
        return memoryview(self._lane)[at:at + self._writer.claim_bytes]

    def abort(self):
        """Gives back the open claim, if any; no shared word has been touched."""
        self.give_back(self._writer.claim_number)

    def commit(self, *, uint32_t rows, uint32_t columns, uint32_t index_bytes, uint16_t group_id_bytes,
               uint16_t flags, uint64_t tokens, int64_t min_policy_version, int64_t max_policy_version,
               int64_t t_created_ns, int32_t group_size, int32_t env_id):
        """Publishes the open claim and returns its sequence."""
        cdef slot stamp
        stamp.min_policy_version, stamp.max_policy_version = min_policy_version, max_policy_version
        stamp.t_created_ns, stamp.tokens, stamp.rows, stamp.columns = t_created_ns, tokens, rows, columns
        stamp.group_size, stamp.env_id = group_size, env_id
        stamp.group_id_bytes, stamp.flags, stamp.index_bytes = group_id_bytes, flags, index_bytes
        stamp.origin_sequence = stamp.origin_waited_ns = stamp.origin_transfer_ns = 0
        return self.publish(self._writer.claim_number, &stamp)

    cdef object publish(self, uint64_t number, const slot* stamp):
        """Publishes the open claim, if it has that number, under what `stamp` says of it; its sequence."""
        self.claimed(number)
        return lane_commit(&self._writer, stamp)

    def wait_space(self, int64_t timeout_ns):
        """Sleeps until a release since the last claim, a ring since the last wait, or the timeout.

        Returns nanoseconds slept. Releases the GIL. A tick that finds work counts in `late_wakes`.
        """
        cdef int64_t slept
        if not self._lane.alive() or timeout_ns <= 0:
            return 0
        # the GIL is the lock: another thread may put while this one sleeps
        lane_note_outstanding(&self._writer)
        with nogil:
            slept = lane_wait_space(&self._writer, timeout_ns)
        return slept

    def ring(self):
        """Wakes a thread of this process that sleeps in `wait_space`."""
        cdef lane_header* header = self.alive().header
        ring_bell(&header.space_bell)

    def count_wait(self, uint64_t wait_ns):
        cdef lane_header* header = self.alive().header
        store_relaxed64(&header.wait_ns_total, load_relaxed64(&header.wait_ns_total) + wait_ns)

    def note_blocked(self, bint waits):
        """Notes that a put begins to wait for room, or no longer does. For observers."""
        cdef lane_header* header = self._writer.header
        if self._lane.alive():
            store_relaxed64(&header.blocked_ns, monotonic_ns() if waits else 0)

    def close_origin(self):
        """The lane's origin will send nothing again: no receipt is needed when the lane is removed."""
        cdef lane_header* header = self.alive().header
        store_relaxed64(&header.origin_open, 0)

    def leave_receipt(self):
        """Whoever removes the lane once this producer has ended leaves a receipt for its last record."""
        cdef lane_header* header = self.alive().header
        store_relaxed64(&header.origin_open, 1)

    @property
    def newest_origin(self):
        """The sequence at its origin of the last record that this lane, or one before it, has; None if none has."""
        return self._writer.origin_newest - 1 if self._writer.origin_newest else None

    def count_drop(self, uint32_t reason):
        cdef lane_header* header = self._writer.header
        if reason < DROP_REASONS and self._lane.alive():
            store_relaxed64(&header.dropped_total[reason], load_relaxed64(&header.dropped_total[reason]) + 1)

    def count_lost(self, uint32_t reason, uint64_t episodes):
        """Counts episodes that are in no record."""
        cdef lane_header* header = self._writer.header
        if reason < LOST_REASONS and self._lane.alive():
            store_relaxed64(&header.episodes_lost_total[reason],
                            load_relaxed64(&header.episodes_lost_total[reason]) + episodes)

    cdef void count_unrecorded(self, uint64_t values) noexcept:
        """Counts log-probabilities that are not recorded, of a record published just now."""
        cdef lane_header* header = self._writer.header
        if self._lane.alive():
            store_relaxed64(&header.logprobs_unrecorded_total,
                            load_relaxed64(&header.logprobs_unrecorded_total) + values)

    @property
    def outstanding(self) -> int:
        """Committed and un-released records. Only looks: any thread."""
        return lane_unreleased(self.alive())

    @property
    def leases_dropped(self) -> int:
        """Records that the hub has dropped without release; a hint."""
        cdef lane_header* header = self.alive().header
        return load_relaxed64(&header.leases_dropped)

    @property
    def free_bytes(self) -> int:
        """Bytes of the data area that no committed, un-released record has. Only looks: any thread."""
        return lane_free_bytes(self.alive())


@cython.no_gc_clear  # a claim that ends while a cycle is collected needs the lane
cdef class Claim:
    """One claim of a lane, from `begin` to the end of its `with` block; it is published once or given back,
    whatever interrupts either.

    All in C: no interrupt comes between the entry of `__exit__` and its `try`,
    and the loss of the object ends its claim, and no other.
    """

    def __cinit__(self, LaneWriter writer not None, *_):
        self._writer = writer

    def begin(self, uint64_t size):
        """Reserves a slot and `size` bytes; False if there is no room. ClaimLost if another claim is open."""
        if not self._writer.begin(size):
            return False
        self._number = self._writer._writer.claim_number
        return True

    @property
    def is_open(self) -> bool:
        """Whether it has begun, and was neither published nor given back."""
        return (self._number and self._writer._writer.claimed >= 0 and
                self._writer._writer.claim_number == self._number)

    cdef uint8_t* memory_here(self) except NULL:
        return self._writer.claimed(self._number)

    def memory(self):
        """Writable memory of the claim. ClaimLost if it is not open."""
        cdef uint64_t at = self.memory_here() - self._writer._lane.base
        return memoryview(self._writer._lane)[at:at + self._writer._writer.claim_bytes]

    def abort(self):
        """Gives it back if it is open."""
        self._writer.give_back(self._number)

    def publish_whole(self):
        """Publishes it; for a subclass."""
        raise NotImplementedError

    def __enter__(self):
        return self

    def __exit__(self, kind, *_):
        if self._left:
            return
        self._left = True
        try:
            if kind is None:
                self.publish_whole()
        finally:
            self.abort()

    def __dealloc__(self):
        if self._writer is not None:  # __cinit__ refused its arguments
            self._writer.give_back(self._number)
