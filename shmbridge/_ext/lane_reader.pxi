"""Leases of a lane's records as Python objects, over the C core in lane_read.h: who may read, and how long.

A LaneReader is for the holder of the hub lock, one thread at a time; a Lease may end on any thread.
"""

cdef enum:
    NEVER = -1
    REPORTED = -2


cdef class Drops:
    """Counts the leases that ended without release, over all lanes of a hub or a rank, and keeps the calls
    that handed the first ones out.

    `note` runs while an object is destroyed, where no Python code may run: the next call that takes a record
    reports them.
    """

    def __cinit__(self):
        self._first_returned = self._first_dropped = NEVER

    cdef void note(self, uint8_t by, bint looked_at) noexcept:
        self.returned += not looked_at
        self.dropped += looked_at
        if looked_at and self._first_dropped == NEVER:
            self._first_dropped, self.unsaid = by, True
        elif not looked_at and self._first_returned == NEVER:
            self._first_returned, self.unsaid = by, True

    def take_unsaid(self):
        """The first leases that are not reported yet: (number of their Call, whether they were looked at)."""
        self.unsaid = False
        unsaid = []
        if self._first_returned >= 0:
            unsaid.append((self._first_returned, False))
            self._first_returned = REPORTED
        if self._first_dropped >= 0:
            unsaid.append((self._first_dropped, True))
            self._first_dropped = REPORTED
        return unsaid


@cython.no_gc_clear  # leases that end while a cycle is collected need the lane
cdef class LaneReader:
    """The hub's side of one lane. The holder of the hub lock only; one thread at a time; never blocks."""

    def __cinit__(self, Mapping lane not None, object keep):
        cdef complaint why
        self.lane, self._keep, self._put_off = lane, keep, []
        self.numbers, self.names, self.dtypes = {}, (), ()
        if lane_reader_open(&self._reader, lane.base, lane.size, &why):
            raise LaneCorrupt(why.text.decode()) if why.text[0] else MemoryError()

    def __init__(self, Mapping lane not None, object keep):
        cdef complaint why
        if lane_adopt(&self._reader, &why):
            raise LaneCorrupt(why.text.decode()) if why.text[0] else MemoryError()

    def __dealloc__(self):
        lane_reader_close(&self._reader)

    def describe(self, object about, bytes table not None, tuple names not None, tuple dtypes not None):
        """What all records of the lane share, for LeasedRecord: `about` has producer_id and env_name; the
        columns' names and NumPy types, by number.

        `table` is the column table that these were read from. LaneCorrupt
        if the lane had another when this reader opened it.
        """
        cdef uint32_t count = self._reader.geometry.column_count
        if (len(table) != count * sizeof(column_def) or
                memcmp(PyBytes_AS_STRING(table), self._reader.columns, len(table))):
            raise LaneCorrupt("its column table has changed")
        if len(names) != count or len(dtypes) != count:
            raise ValueError(f"{len(names)} names and {len(dtypes)} types for {count} columns")
        self.about, self.dtypes, self.names = about, dtypes, tuple([intern(name) for name in names])
        self.numbers = {name: number for number, name in enumerate(names)}

    @property
    def slot_count(self) -> int:
        return self._reader.geometry.slot_count

    @property
    def data_bytes(self) -> int:
        return self._reader.geometry.data_bytes

    @property
    def data_at(self) -> int:
        """Where the data area begins: all that a reader writes lies before it."""
        return self._reader.geometry.data_at

    @property
    def waiting(self) -> int:
        """Records that can be taken now."""
        return lane_waiting(&self._reader) if self.lane.alive() else 0

    @property
    def undelivered(self) -> int:
        """Committed, un-released records, at most slot_count, whatever the lane's header says by now."""
        return lane_undelivered(&self._reader) if self.lane.alive() else 0

    @property
    def wanted_bytes(self) -> int:
        """What the producer's last claim asked for in vain; 0 if it succeeded. A hint."""
        return load_relaxed64(&self._reader.header.wanted_bytes) if self.lane.alive() else 0

    @property
    def quarantined(self) -> int:
        """0, or how many records this hub or an earlier one gave up when it quarantined the lane."""
        return load_relaxed64(&self._reader.header.quarantined) if self.lane.alive() else 0

    def has_room_for(self, uint64_t size):
        """Whether there is a free slot, and a gap of `size` bytes beside the un-released records."""
        cdef uint64_t at = 0, generation, start, taken, data = self._reader.geometry.data_bytes
        cdef uint32_t i
        extents = []
        if size > data or not self.lane.alive():
            return False
        for i in range(self._reader.geometry.slot_count):
            generation = load_acquire64(&self._reader.slots[i].generation)  # SYNC(slot-body)
            if generation != load_relaxed64(&self._reader.released[i]):
                start, taken = self._reader.slots[i].extent_at, self._reader.slots[i].extent_bytes
                if start > data or taken > data - start:  # it is being written again, or was scribbled over
                    return False
                extents.append((start, taken))
        for start, taken in sorted(extents):
            if start >= at + size:
                return len(extents) < self._reader.geometry.slot_count
            at = start + taken
        return len(extents) < self._reader.geometry.slot_count and at + size <= data

    def take(self, type cls):
        """The next record as an instance of `cls` (a Lease type), or None. Stores head before it returns.

        Raises LaneCorrupt when what the lane says cannot be; the record is then left un-released.
        """
        return self.next_lease(cls)

    cdef object next_lease(self, type cls):
        cdef lane_found found
        cdef Lease lease
        cdef complaint why
        cdef int there = lane_next(&self._reader, &found, &why)
        if there < 0:
            raise LaneCorrupt(why.text.decode())
        if there == 0:
            return None
        lease = self.lease(cls, &found)
        lease.is_new = lease._sequence >= load_relaxed64(&self._reader.header.head)
        lease._redelivered = lane_hand_out(&self._reader, &found)
        return lease

    cdef Lease lease(self, type cls, const lane_found* found):
        """A lease of a found record, once its index was copied and checked."""
        cdef complaint why
        cdef Lease lease
        cdef const slot* body = &found.body
        cdef const uint8_t* extent = self._reader.data + body.extent_at
        index = PyBytes_FromStringAndSize(<const char*>extent, body.index_bytes)
        if index_check(<const uint8_t*>PyBytes_AS_STRING(index), body, self._reader.columns,
                       self._reader.geometry.column_count, self._reader.tokens, &why):
            raise LaneCorrupt(why.text.decode())
        lease = <Lease>cls.__new__(cls)
        lease._lane_reader, lease._index = self, index
        lease._sequence, lease._generation, lease._slot = body.sequence, found.generation, found.index
        lease._min_policy_version = body.min_policy_version
        lease._max_policy_version = body.max_policy_version
        lease._t_created_ns, lease._t_publish_ns = body.t_created_ns, body.t_publish_ns
        lease._token_count, lease._extent_bytes = body.tokens, body.extent_bytes
        lease._rows, lease._column_entries = body.rows, body.columns
        lease._group_size, lease._env_id, lease._flags = body.group_size, body.env_id, body.flags
        lease._origin_sequence, lease._origin_waited_ns = body.origin_sequence, body.origin_waited_ns
        lease._origin_transfer_ns = body.origin_transfer_ns
        lease._group_id_bytes, lease._extent = body.group_id_bytes, extent
        lease._ended = False
        self.held += 1
        return lease

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1
        if self.abandoned or not self.lane.alive():
            return 0
        if self.ranks_before and lease._redelivered:
            self._put_off.append((lease._slot, lease._generation, lease._discard_of))
            if not self.ranks_before:  # another thread has just done all that was put off
                self.release_put_off()
        else:
            self.end_use(lease._slot, lease._generation, lease._discard_of)
        return 0

    cdef void end_use(self, uint32_t index, uint64_t generation, uint32_t discard_of) noexcept:
        """Releases, then counts the discard: a hub killed before its release has discarded nothing."""
        cdef shm_u64* discards = self._reader.header.discarded_total
        lane_release(&self._reader, index, generation)
        if discard_of:  # Lease.discard has checked it
            store_relaxed64(&discards[discard_of - 1], load_relaxed64(&discards[discard_of - 1]) + 1)

    cdef void lose_lease(self, Lease lease) noexcept:
        """The lease's object is destroyed without release. A record that was looked at stays un-released, as
        in a quarantined lane; any other is handed out next.
        """
        cdef bint stays = lease._looked_at or self.untrusted
        self.held -= 1
        if self.abandoned or not self.lane.alive():
            return
        if self.drops is not None:
            self.drops.note(lease._handed_out_by, stays)
        if stays:
            lane_drop(&self._reader, lease._sequence, lease._slot)
            return
        lane_put_back(&self._reader, lease._sequence, lease._slot, lease._redelivered)
        if isinstance(self._keep, Mapping):  # another thread may have lost it, and the hub sleep
            ring_bell(&(<control_header*>(<Mapping>self._keep).base).doorbell)

    @property
    def dropped(self) -> int:
        """Records that were looked at and are un-released and not leased."""
        return self._reader.dropped_count

    def take_back_dropped(self):
        """Hands out those records again, before all others and in their order; how many there are."""
        return lane_readmit(&self._reader)

    @property
    def put_off(self) -> int:
        """Releases that wait until no rank of an earlier hub is left."""
        return len(self._put_off)

    @property
    def discards_put_off(self) -> list:
        """How many of those are discards, by reason; the lane's words count them once they are done."""
        counts = [0] * DISCARD_REASONS
        for _, _, discard_of in tuple(self._put_off):
            if discard_of:
                counts[discard_of - 1] += 1
        return counts

    def release_put_off(self):
        """No rank of an earlier hub is left: does the deferred releases."""
        self.ranks_before = False
        while self._put_off:
            index, generation, discard_of = self._put_off.pop()
            if not self.abandoned and self.lane.alive():
                self.end_use(index, generation, discard_of)

    def ring(self):
        """Wakes a producer that waits for space."""
        if self.lane.alive():
            ring_bell(&self._reader.header.space_bell)

    def quarantine(self, uint64_t count):
        """Trusts nothing of the lane from now on; `count` records, or as many as an earlier hub gave up, are
        never released. Done once, by one store: no thread, handler or later hub sees half of it.
        """
        if self.untrusted or not self.lane.alive():
            return
        self.untrusted = True
        fault_hit("hub.quarantining")
        store_relaxed64(&self._reader.header.quarantined, max(count, self.quarantined, 1))
        fault_hit("hub.quarantined")


@cython.no_gc_clear  # the end of a lease needs its reader, also when a reference cycle is collected
cdef class Lease:
    """One record held in place: its memory does not change until the lease ends.

    It ends once release() was called and the last view of its buffer is gone; any thread may do either.
    Ending is one idempotent store. The loss of the object releases nothing: see LaneReader.lose_lease.
    """

    def __cinit__(self):
        self._ended = True

    @property
    def rows(self) -> int:
        """Trajectories in the record."""
        return self._rows

    @property
    def token_count(self) -> int:
        """Tokens of all its rows."""
        return self._token_count

    @property
    def _group_id(self) -> str:
        cdef const char* at = PyBytes_AS_STRING(self._index) + self._column_entries * sizeof(directory_entry)
        return PyUnicode_DecodeUTF8(at, self._group_id_bytes, "replace")

    @property
    def _slot_words(self) -> tuple:
        """rows, columns, index_bytes, group_id_bytes, flags, tokens, group_size: of its slot."""
        return (self._rows, self._column_entries, len(self._index), self._group_id_bytes, self._flags,
                self._token_count, self._group_size)

    @property
    def is_released(self) -> bool:
        """Whether release() was called."""
        return self._released

    def release(self):
        """Ends the lease as soon as no view of it is left. Idempotent."""
        self._released = True
        if self._exports == 0:
            self._end()

    def _discard(self, uint32_t reason):
        """Releases a record unread; counted once under `reason`, when the lease ends."""
        if reason >= DISCARD_REASONS:
            raise ValueError(f"discard reason {reason}, there are {DISCARD_REASONS}")
        if not self._released:
            self._discard_of = reason + 1
        self.release()

    cdef void _end(self) noexcept:
        if not self._ended:
            self._ended = True
            self._lane_reader.end_lease(self)

    def _abandon(self):
        """Forgets the lease without release: the next hub gets the record again."""
        if not self._ended:
            self._ended = True
            self._lane_reader.held -= 1

    cdef int begin_view(self) except -1:
        """One more looks at the record's memory, until end_view. BufferError if the lease has ended."""
        if self._ended or not self._lane_reader.lane.alive():
            raise BufferError("the lease has ended")
        self._exports += 1
        self._looked_at = True
        return 0

    cdef void end_view(self) noexcept:
        self._exports -= 1
        if self._exports == 0 and self._released:
            self._end()

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self.begin_view()
        try:
            PyBuffer_FillInfo(buffer, self, <void*>self._extent, self._extent_bytes, True, flags)
        except BaseException:
            self.end_view()
            raise

    def __releasebuffer__(self, Py_buffer* buffer):
        self.end_view()

    def __dealloc__(self):
        if not self._ended and not self._released:
            self._ended = True
            self._lane_reader.lose_lease(self)
        self._end()
