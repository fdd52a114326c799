"""Readers of a lane beside its hub, without the hub lock, for one thread at a time: a learner rank's leases of the
records that the hub's manifests name, and an observer's copies.

A rank's Lease may end on any thread. An observer writes nothing and holds nothing back.
"""

cdef extern from "lane_observe.h" nogil:
    bint lane_is_unreleased(const lane_reader* reader, const lane_found* found)
    bint lane_observe_next(lane_reader* reader, uint64_t* sequence, uint32_t* index, uint64_t* missed)
    uint32_t lane_observe_held(const lane_reader* reader, uint64_t tail, lane_entry* entries)


@cython.no_gc_clear
cdef class RankReader(LaneReader):
    """A learner rank's reader of one lane; writes nothing, so that leases end in this process only."""

    cdef set _looks                  # numbers of the leases that live; one record may be looked at twice
    cdef uint64_t _next_look
    # number of a look whose lease is gone without release -> whether it was looked at
    cdef dict _lost

    def __init__(self, Mapping lane not None, object keep):
        self._looks, self._lost = set(), {}  # nothing is adopted: that is for the hub

    def holds(self, uint64_t look):
        """Whether the lease of that number was not released yet, or a view of its record lives."""
        return look in self._looks

    def lost(self, uint64_t look):
        """None while the lease lives or once it was released; else whether its record was looked at."""
        return self._lost.get(look)

    def excuse(self, uint64_t look):
        """Makes a lost lease count as unread."""
        if look in self._lost:
            self._lost[look] = False

    def forget(self, uint64_t look):
        """Forgets a lost lease: its record is leased again, or left to the successor."""
        self._looks.discard(look)
        self._lost.pop(look, None)

    def look(self, type cls, uint32_t index, uint64_t sequence, uint64_t generation, bint redelivered):
        """The record that a manifest places in slot `index`, as a `cls`. LaneCorrupt if another is there."""
        cdef lane_found found
        cdef complaint why
        cdef Lease lease
        if lane_look(&self._reader, index, sequence, &found, &why):
            raise LaneCorrupt(why.text.decode())
        if found.generation != generation:
            raise LaneCorrupt(
                f"slot {index} is in generation {found.generation}, the manifest says {generation}")
        lease = self.lease(cls, &found)
        lease._redelivered, lease._look = redelivered, self._next_look
        self._looks.add(self._next_look)
        self._next_look += 1
        return lease

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1
        self._looks.discard(lease._look)
        return 0

    cdef void lose_lease(self, Lease lease) noexcept:
        self.held -= 1
        if self.drops is not None:
            self.drops.note(lease._handed_out_by, lease._looked_at)
        try:
            self._lost[lease._look] = lease._looked_at
        except MemoryError:
            pass  # it stays held, for the successor


@cython.no_gc_clear
cdef class LaneObserver(LaneReader):
    """Reads one lane beside its hub."""

    cdef lane_entry* _backlog        # un-released when the observer came, and not copied yet; newest first
    cdef uint32_t _backlog_count
    cdef readonly uint64_t missed    # committed since then, or in the backlog, and released before a copy was whole

    def __init__(self, Mapping lane not None, object keep):
        self._reader.next = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
        self._backlog = <lane_entry*>malloc(self._reader.geometry.slot_count * sizeof(lane_entry))
        if self._backlog == NULL:
            raise MemoryError()
        self._backlog_count = lane_observe_held(&self._reader, self._reader.next, self._backlog)

    def __dealloc__(self):
        free(self._backlog)

    @property
    def waiting(self) -> int:
        """Records that were not looked at yet."""
        if not self.lane.alive():
            return 0
        tail = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
        behind = tail - self._reader.next if tail > self._reader.next else 0
        return self._backlog_count + behind

    def miss_earlier(self):
        """Counts what was released before this observer came: it should have been there. Before any copy."""
        self.missed += self._reader.next - self._backlog_count

    def skip_backlog(self):
        """Begins with the next record that is committed."""
        self._backlog_count = 0

    def end_with_backlog(self):
        """Ends with the last record that was un-released when this observer came."""
        self._reader.next = UINT64_MAX

    def copy(self, type cls):
        """A copy of the next record that is still un-released, as a `cls`; None if there is none yet."""
        cdef uint64_t sequence = 0
        cdef uint32_t index = 0
        while self.lane.alive():
            if self._backlog_count > 0:
                self._backlog_count -= 1
                sequence = self._backlog[self._backlog_count].sequence
                index = self._backlog[self._backlog_count].index
            elif not lane_observe_next(&self._reader, &sequence, &index, &self.missed):
                return None
            record = self.copy_of(cls, index, sequence)
            if record is not None:
                return record
            self.missed += 1
        return None

    def newest(self, type cls):
        """A copy of the newest un-released record, as a `cls`, also one that was copied before; or None.
        Counts nothing as missed.
        """
        cdef lane_entry* entries
        cdef uint32_t count, i
        if not self.lane.alive():
            return None
        entries = <lane_entry*>malloc(self._reader.geometry.slot_count * sizeof(lane_entry))
        if entries == NULL:
            raise MemoryError()
        try:
            tail = load_acquire64(&self._reader.header.tail)  # SYNC(commit)
            count = lane_observe_held(&self._reader, tail, entries)
            for i in range(count):
                record = self.copy_of(cls, entries[i].index, entries[i].sequence)
                if record is not None:
                    return record
        finally:
            free(entries)
        return None

    cdef object copy_of(self, type cls, uint32_t index, uint64_t sequence):
        """A whole copy; None if the record is released by now, or is not what its lane says."""
        cdef lane_found found
        cdef complaint why
        cdef Lease lease
        cdef char* to
        if lane_look(&self._reader, index, sequence, &found, &why):
            return None
        try:
            lease = self.lease(cls, &found)
        except LaneCorrupt:
            return None
        lease._copy = PyBytes_FromStringAndSize(NULL, lease._extent_bytes + ALIGNMENT)
        to = PyBytes_AS_STRING(lease._copy)
        to += -<uintptr_t>to % ALIGNMENT
        with nogil:
            memcpy(to, lease._extent, lease._extent_bytes)
        lease._extent = <const uint8_t*>to
        return lease if lane_is_unreleased(&self._reader, &found) else None

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1

    cdef void lose_lease(self, Lease lease) noexcept:
        self.held -= 1
