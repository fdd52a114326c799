"""Claims and leases as Python objects, over the C core of the lane protocol (lane_write.h, lane_read.h).

Knows lifetimes: who may touch a lane's memory, and until when. Knows nothing of headers' identity
(header.pyx), names, locks, or Python values of columns. LaneWriter is for the lane's producer, LaneReader for
the holder of the hub lock, RankReader for a learner rank; each for one thread at a time, except that a Lease
may end on any thread.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.string cimport memcmp
from posix.time cimport clock_gettime, timespec

from shmbridge._ext.atomics cimport load_acquire64, load_relaxed64, load_seq32, shm_u64, store_relaxed64
from shmbridge._ext.faults cimport fault_hit
from shmbridge._ext.futex cimport monotonic_ns, ring_bell
from shmbridge._ext.layout cimport (
    DISCARD_REASONS, DROP_REASONS, column_def, control_header, directory_entry, lane_header, slot,
)
from shmbridge._ext.mapping cimport Mapping

from shmbridge._ext.header import LaneCorrupt

cdef extern from "<time.h>" nogil:
    enum: CLOCK_MONOTONIC_COARSE


cdef inline int64_t coarse_ns() noexcept nogil:
    """Monotonic, to some milliseconds: cheap enough for each put."""
    cdef timespec now
    clock_gettime(CLOCK_MONOTONIC_COARSE, &now)
    return now.tv_sec * <int64_t>1000000000 + now.tv_nsec


class ClaimLost(RuntimeError):
    """The claim that is to be written to is not open any more, or another one is."""


cdef class LaneWriter:
    """The producer's side of one lane. One thread at a time; never blocks except in wait_space."""

    def __cinit__(self, Mapping lane not None, Mapping control not None):
        cdef complaint why
        cdef lane_shape shape
        self._lane, self._control = lane, control
        self._writer.claimed = -1
        self.looked(1.0)  # they were made just now
        if shape_read(<lane_header*>lane.base, lane.size, &shape, &why):
            raise LaneCorrupt(why.text.decode())
        if lane_writer_open(&self._writer, lane.base, &shape, <control_header*>control.base):
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
        """They are; time to look again comes in so many seconds."""
        self._look_at_ns = coarse_ns() + <int64_t>(again_s * 1e9)

    @property
    def hindered(self) -> bool:
        """Whether to look closer before a claim: it is time to, another is open, the lane is quarantined,
        the bridge draining or paused.
        """
        return self.is_hindered()

    cdef bint is_hindered(self) noexcept:
        cdef control_header* hub
        if self._writer.claimed >= 0 or not self._lane.alive() or coarse_ns() >= self._look_at_ns:
            return True
        hub = <control_header*>self._control.base
        if load_relaxed64(&self._writer.header.quarantined):
            return True
        return load_acquire64(&hub.draining) or load_acquire64(&hub.paused)  # SYNC(flags)

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
        """Gives the open claim back, whosever it is; no shared word has been touched."""
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
        return self.publish(self._writer.claim_number, &stamp)

    cdef object publish(self, uint64_t number, const slot* stamp):
        """Publishes the open claim, if it has that number, under what `stamp` says of it; its sequence."""
        self.claimed(number)
        return lane_commit(&self._writer, stamp)

    def wait_space(self, int64_t timeout_ns):
        """Sleeps until something was released since the last claim, the
        bell has rung since the last wait, or the timeout is over.

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

    def count_drop(self, uint32_t reason):
        cdef lane_header* header = self._writer.header
        if reason < DROP_REASONS and self._lane.alive():
            store_relaxed64(&header.dropped_total[reason], load_relaxed64(&header.dropped_total[reason]) + 1)

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


cdef enum:
    NEVER = -1
    TOLD = -2


cdef class Drops:
    """Counts the leases that ended without a word, over all lanes of a hub or a rank,
    and keeps what is to be said of the first ones.

    Noted while an object is destroyed, so that nothing of Python may run:
    whoever takes the next record says it.
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
        """What nobody was told yet: a list of (number of the Call that handed the record out,
        whether it was looked at); it is told now.
        """
        self.unsaid = False
        unsaid = []
        if self._first_returned >= 0:
            unsaid.append((self._first_returned, False))
            self._first_returned = TOLD
        if self._first_dropped >= 0:
            unsaid.append((self._first_dropped, True))
            self._first_dropped = TOLD
        return unsaid


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
        """Reserves a slot and `size` bytes; False if the lane has no room now.

        ClaimLost if another claim is open.
        """
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
        self._writer.give_back(self._number)


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
        cdef uint32_t count = self._reader.shape.column_count
        if (len(table) != count * sizeof(column_def) or
                memcmp(PyBytes_AS_STRING(table), self._reader.columns, len(table))):
            raise LaneCorrupt("its column table has changed")
        if len(names) != count or len(dtypes) != count:
            raise ValueError(f"{len(names)} names and {len(dtypes)} types for {count} columns")
        self.about, self.names, self.dtypes = about, names, dtypes
        self.numbers = {name: number for number, name in enumerate(names)}

    @property
    def slot_count(self) -> int:
        return self._reader.shape.slot_count

    @property
    def data_bytes(self) -> int:
        return self._reader.shape.data_bytes

    @property
    def data_at(self) -> int:
        """Where the data area begins: all that a reader writes lies before it."""
        return self._reader.shape.data_at

    @property
    def waiting(self) -> int:
        """Records that can be taken now."""
        return lane_waiting(&self._reader) if self.lane.alive() else 0

    @property
    def undelivered(self) -> int:
        """Committed, un-released records, at most slot_count, whatever the lane's header says by now."""
        return lane_undelivered(&self._reader) if self.lane.alive() else 0

    @property
    def space_waiting(self) -> bool:
        """Whether the producer sleeps for want of room; a hint."""
        return self.lane.alive() and load_seq32(&self._reader.header.space_waiting) != 0  # SYNC(space-wake)

    @property
    def wanted_bytes(self) -> int:
        """What the producer's last claim asked for in vain; 0 if it succeeded. A hint."""
        return load_relaxed64(&self._reader.header.wanted_bytes) if self.lane.alive() else 0

    @property
    def quarantined(self) -> int:
        """0 unless this hub or an earlier one has quarantined the lane;
        else how many records were given up with it, 1 at least.
        """
        return load_relaxed64(&self._reader.header.quarantined) if self.lane.alive() else 0

    def has_room_for(self, uint64_t size):
        """Whether a record of `size` bytes fits beside the committed, un-released ones: a free slot,
        and a gap in the data area.
        """
        cdef uint64_t at = 0, generation, start, taken, data = self._reader.shape.data_bytes
        cdef uint32_t i
        extents = []
        if size > data or not self.lane.alive():
            return False
        for i in range(self._reader.shape.slot_count):
            generation = load_acquire64(&self._reader.slots[i].generation)  # SYNC(slot-body)
            if generation != load_relaxed64(&self._reader.released[i]):
                start, taken = self._reader.slots[i].extent_at, self._reader.slots[i].extent_bytes
                if start > data or taken > data - start:  # it is being written again, or was scribbled over
                    return False
                extents.append((start, taken))
        for start, taken in sorted(extents):
            if start >= at + size:
                return len(extents) < self._reader.shape.slot_count
            at = start + taken
        return len(extents) < self._reader.shape.slot_count and at + size <= data

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
        lease.redelivered = lane_hand_out(&self._reader, &found)
        return lease

    cdef Lease lease(self, type cls, const lane_found* found):
        """A lease of a found record, once its index was copied and checked."""
        cdef complaint why
        cdef Lease lease
        cdef const slot* body = &found.body
        cdef const uint8_t* extent = self._reader.data + body.extent_at
        index = PyBytes_FromStringAndSize(<const char*>extent, body.index_bytes)
        if index_check(<const uint8_t*>PyBytes_AS_STRING(index), body, self._reader.columns,
                       self._reader.shape.column_count, self._reader.tokens, &why):
            raise LaneCorrupt(why.text.decode())
        lease = <Lease>cls.__new__(cls)
        lease.reader, lease.index = self, index
        lease.sequence, lease.generation, lease.slot = body.sequence, found.generation, found.index
        lease.min_policy_version, lease.max_policy_version = body.min_policy_version, body.max_policy_version
        lease.t_created_ns, lease.t_publish_ns = body.t_created_ns, body.t_publish_ns
        lease.token_count, lease.extent_bytes = body.tokens, body.extent_bytes
        lease.rows, lease.column_entries = body.rows, body.columns
        lease.group_size, lease.env_id, lease.flags = body.group_size, body.env_id, body.flags
        lease._group_id_bytes, lease._extent = body.group_id_bytes, extent
        lease._ended = False
        self.held += 1
        return lease

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1
        if self.abandoned or not self.lane.alive():
            return 0
        if self.ranks_before and lease.redelivered:
            self._put_off.append((lease.slot, lease.generation, lease._discard_of))
            if not self.ranks_before:  # another thread has just done all that was put off
                self.release_put_off()
        else:
            self.end_use(lease.slot, lease.generation, lease._discard_of)
        return 0

    cdef void end_use(self, uint32_t index, uint64_t generation, uint32_t discard_of) noexcept:
        """Releases, then counts the discard: a hub that is
        killed before its release has discarded nothing.
        """
        lane_release(&self._reader, index, generation)
        if discard_of:
            self.count_in_lane(discard_of - 1, 1)

    cdef void lose_lease(self, Lease lease) noexcept:
        """The lease's object is gone, and nobody has released it. Looked at, the record stays un-released;
        else it is handed out next, unless its lane has been quarantined meanwhile.
        """
        cdef bint stays = lease.looked_at or self.untrusted
        self.held -= 1
        if self.abandoned or not self.lane.alive():
            return
        if self.drops is not None:
            self.drops.note(lease.handed_out_by, stays)
        if stays:
            lane_drop(&self._reader, lease.sequence, lease.slot)
            return
        lane_put_back(&self._reader, lease.sequence, lease.slot, lease.redelivered)
        if isinstance(self._keep, Mapping):  # another thread may have lost it, and the hub sleep
            ring_bell(&(<control_header*>(<Mapping>self._keep).base).doorbell)

    @property
    def dropped(self) -> int:
        """Records that were looked at and are un-released, though nobody holds a lease."""
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
        """No rank of an earlier hub is left: does what was put off."""
        self.ranks_before = False
        while self._put_off:
            index, generation, discard_of = self._put_off.pop()
            if not self.abandoned and self.lane.alive():
                self.end_use(index, generation, discard_of)

    def ring(self):
        """Wakes a producer that waits for space."""
        if self.lane.alive():
            ring_bell(&self._reader.header.space_bell)

    cdef void count_in_lane(self, uint32_t reason, uint64_t count) noexcept:
        cdef shm_u64* words = self._reader.header.discarded_total
        if reason < DISCARD_REASONS:
            store_relaxed64(&words[reason], load_relaxed64(&words[reason]) + count)

    def quarantine(self, uint64_t count):
        """Nothing of the lane is believed any more; `count` records, or as many as an earlier hub gave up,
        are never released. Done once: one word says both: no thread, no handler and no later hub sees the
        half of it.
        """
        if self.untrusted or not self.lane.alive():
            return
        self.untrusted = True
        fault_hit("hub.quarantining")
        store_relaxed64(&self._reader.header.quarantined, max(count, self.quarantined, 1))
        fault_hit("hub.quarantined")


@cython.no_gc_clear
cdef class RankReader(LaneReader):
    """A learner rank's look at one lane: reads what a manifest names, writes nothing.

    Its leases end in this process only.
    """

    def __init__(self, Mapping lane not None, object keep):
        self._looks, self._lost = set(), {}  # nothing is adopted: that is for the hub

    def holds(self, uint64_t look):
        """Whether the lease of that number was not released yet, or a view of its record lives."""
        return look in self._looks

    def lost(self, uint64_t look):
        """None while the lease of that number lives or once it was released; else,
        whether its record was looked at.
        """
        return self._lost.get(look)

    def excuse(self, uint64_t look):
        """A lost lease counts as if nobody had looked at its record."""
        if look in self._lost:
            self._lost[look] = False

    def forget(self, uint64_t look):
        """Nothing is known of a lost lease any more: its record is looked at again, or left to others."""
        self._looks.discard(look)
        self._lost.pop(look, None)

    def look(self, type cls, uint32_t index, uint64_t sequence, uint64_t generation, bint redelivered):
        """The record that the hub said is in slot `index`, as an instance of `cls`.

        LaneCorrupt if another is there.
        """
        cdef lane_found found
        cdef complaint why
        cdef Lease lease
        if lane_look(&self._reader, index, sequence, &found, &why):
            raise LaneCorrupt(why.text.decode())
        if found.generation != generation:
            raise LaneCorrupt(
                f"slot {index} is in generation {found.generation}, the manifest says {generation}")
        lease = self.lease(cls, &found)
        lease.redelivered, lease.look = redelivered, self._next_look
        self._looks.add(self._next_look)
        self._next_look += 1
        return lease

    cdef int end_lease(self, Lease lease) except -1:
        self.held -= 1
        self._looks.discard(lease.look)
        return 0

    cdef void lose_lease(self, Lease lease) noexcept:
        self.held -= 1
        if self.drops is not None:
            self.drops.note(lease.handed_out_by, lease.looked_at)
        try:
            self._lost[lease.look] = lease.looked_at
        except MemoryError:
            pass  # it stays held, for the successor


@cython.no_gc_clear  # the end of a lease needs its reader, also when a reference cycle is collected
cdef class Lease:
    """One record held in place: its memory does not change until the lease ends.

    It ends with the last of release() and the last view of its buffer; any thread may do either. Ending is
    one idempotent store. The loss of the object releases nothing: see LaneReader.lose_lease.
    shmbridge.record.record.Record derives from it.
    """

    def __cinit__(self):
        self._ended = True

    @property
    def group_id(self) -> str:
        cdef const char* at = PyBytes_AS_STRING(self.index) + self.column_entries * sizeof(directory_entry)
        return PyUnicode_DecodeUTF8(at, self._group_id_bytes, "replace")

    @property
    def is_released(self) -> bool:
        return self._released

    def release(self):
        """Ends the lease as soon as no view of it is left. Idempotent."""
        self._released = True
        if self._exports == 0:
            self._end()

    def discard(self, uint32_t reason):
        """release() of a record that nobody is to train with: counted under `reason` when the lease ends.

        Not twice.
        """
        if reason >= DISCARD_REASONS:
            raise ValueError(f"discard reason {reason}, there are {DISCARD_REASONS}")
        if not self._released:
            self._discard_of = reason + 1
        self.release()

    cdef void _end(self) noexcept:
        if not self._ended:
            self._ended = True
            self.reader.end_lease(self)

    def abandon(self):
        """Forgets the lease without release: the next hub gets the record again."""
        if not self._ended:
            self._ended = True
            self.reader.held -= 1

    cdef int begin_view(self) except -1:
        """One more looks at the record's memory, until end_view. BufferError if the lease has ended."""
        if self._ended or not self.reader.lane.alive():
            raise BufferError("the lease has ended")
        self._exports += 1
        self.looked_at = True
        return 0

    cdef void end_view(self) noexcept:
        self._exports -= 1
        if self._exports == 0 and self._released:
            self._end()

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        self.begin_view()
        try:
            PyBuffer_FillInfo(buffer, self, <void*>self._extent, self.extent_bytes, True, flags)
        except BaseException:
            self.end_view()
            raise

    def __releasebuffer__(self, Py_buffer* buffer):
        self.end_view()

    def __dealloc__(self):
        if not self._ended and not self._released:
            self._ended = True
            self.reader.lose_lease(self)
        self._end()
