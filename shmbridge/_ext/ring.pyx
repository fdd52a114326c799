"""The lane protocol: claim, commit, abort; take, lease, release. docs/adr/0001-lanes.md says why it is right.

Knows shared words and bytes; knows nothing of headers' identity (header.pyx), names, locks, or Python values of columns. LaneWriter is for the lane's producer,
LaneReader for the holder of the hub lock; each for one thread at a time, except that a Lease may end on any thread.
"""

cimport cython
from cpython.buffer cimport PyBuffer_FillInfo
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.errno cimport ETIMEDOUT
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t
from libc.stdlib cimport free, malloc
from libc.string cimport memcpy

from shmbridge._ext.atomics cimport (
    load_acquire64, load_relaxed64, load_seq32, load_seq64, shm_u64, store_relaxed64, store_release64, store_seq32, store_seq64,
)
from shmbridge._ext.faults cimport fault_hit
from shmbridge._ext.futex cimport futex_wait, monotonic_ns, ring_bell
from shmbridge._ext.header cimport check_geometry
from shmbridge._ext.layout cimport (
    ALIGNMENT, DISCARD_REASONS, DROP_REASONS, KIND_LIST_LIST, KIND_MAP, KIND_SCALAR, LANE_MAGIC, PAGE, TAG_EMPTY_MAP, TAG_VALUES,
    column_def, control_header, directory_entry, lane_header, slot,
)
from shmbridge._ext.mapping cimport Mapping

from shmbridge._ext.header import LaneCorrupt, lane_geometry

cdef uint64_t NO_PLACE = 0xFFFFFFFFFFFFFFFF
cdef int64_t PRODUCER_TICK_NS = 50_000_000


cdef inline uint64_t up_to_line(uint64_t size) noexcept nogil:
    return (size + ALIGNMENT - 1) & ~<uint64_t>(ALIGNMENT - 1)


cdef class LaneWriter:
    """The producer's side of one lane. One thread at a time; never blocks except in wait_space."""

    def __cinit__(self, Mapping lane not None, Mapping control not None):
        cdef uint32_t i
        self._lane, self._control = lane, control
        self._header = <lane_header*>lane.base
        self._hub = <control_header*>control.base
        check_geometry(self._header, lane.size)
        self.slot_count = self._header.slot_count
        self.data_bytes = self._header.data_bytes
        self._ring = <uint32_t*>(lane.base + self._header.ring_at)
        self._slots = <slot*>(lane.base + self._header.slots_at)
        self._released = <shm_u64*>(lane.base + self._header.released_at)
        self._data = lane.base + self._header.data_at
        self._tail = 0
        self._claimed = -1
        self._free_slots = <uint32_t*>malloc(self.slot_count * sizeof(uint32_t))
        self._outstanding = <uint32_t*>malloc(self.slot_count * sizeof(uint32_t))
        self._free_extents = <interval*>malloc((self.slot_count + 2) * sizeof(interval))
        if self._free_slots == NULL or self._outstanding == NULL or self._free_extents == NULL:
            raise MemoryError
        for i in range(self.slot_count):
            self._free_slots[i] = self.slot_count - 1 - i
        self._free_slot_count = self.slot_count
        self._free_extents[0].at, self._free_extents[0].bytes = 0, self.data_bytes
        self._free_extent_count = 1

    def __dealloc__(self):
        free(self._free_slots)
        free(self._outstanding)
        free(self._free_extents)

    cdef bint _is_released(self, uint32_t index) noexcept nogil:
        # SYNC(release): after this the reader's loads of the extent are over, so it may be written again.
        return load_seq64(&self._released[index]) == load_relaxed64(&self._slots[index].generation)

    cdef void _reclaim(self, bint all_of_them) noexcept nogil:
        """Takes released slots back: the oldest ones while they are released, or by one pass over all."""
        cdef uint32_t mask = self.slot_count - 1, kept = 0, index, i
        while self._outstanding_count:
            index = self._outstanding[self._outstanding_at & mask]
            if not self._is_released(index):
                break
            self._outstanding_at += 1
            self._outstanding_count -= 1
            self._give_back(index)
        if not all_of_them:
            return
        for i in range(self._outstanding_count):
            index = self._outstanding[(self._outstanding_at + i) & mask]
            if self._is_released(index):
                self._give_back(index)
            else:
                self._outstanding[(self._outstanding_at + kept) & mask] = index
                kept += 1
        self._outstanding_count = kept

    cdef void _give_back(self, uint32_t index) noexcept nogil:
        extent_give(self._free_extents, &self._free_extent_count, self._slots[index].extent_at, self._slots[index].extent_bytes)
        self._free_slots[self._free_slot_count] = index
        self._free_slot_count += 1

    def claim(self, uint64_t size):
        """Reserves a slot and `size` bytes; False if the lane has no room now. One open claim at a time."""
        if not self._lane.alive():
            raise BufferError("lane was opened before fork")
        if self._claimed >= 0:
            raise RuntimeError("a claim is open already")
        size = up_to_line(size)
        cdef uint64_t at = NO_PLACE
        cdef bint full_pass = False
        with nogil:
            while True:
                self._reclaim(full_pass)
                if self._free_slot_count:
                    at = extent_take(self._free_extents, &self._free_extent_count, size)
                if at != NO_PLACE or full_pass:
                    break
                full_pass = True
        if at == NO_PLACE:
            store_relaxed64(&self._header.wanted_bytes, size)
            return False
        if load_relaxed64(&self._header.wanted_bytes):
            store_relaxed64(&self._header.wanted_bytes, 0)
        self._free_slot_count -= 1
        self._claimed = self._free_slots[self._free_slot_count]
        self._claim_at, self._claim_bytes = at, size
        fault_hit(b"producer.claimed")
        return True

    def reclaim(self):
        """Takes back whatever has been released."""
        if self._lane.alive():
            self._reclaim(True)

    @property
    def quarantined(self) -> bool:
        """Whether a hub has found that this lane's words cannot be true, and reads it no more."""
        return self._lane.alive() and load_relaxed64(&self._header.quarantined) != 0

    @property
    def claiming(self) -> bool:
        """Whether a claim is open."""
        return self._claimed >= 0

    cdef uint8_t* claimed(self) except NULL:
        if self._claimed < 0 or not self._lane.alive():
            raise RuntimeError("no open claim")
        return self._data + self._claim_at

    def claimed_memory(self):
        """Writable memory of the open claim, valid until commit or abort."""
        return memoryview(self._lane)[self._header.data_at + self._claim_at:][:self._claim_bytes]

    def abort(self):
        """Gives the open claim back; no shared word has been touched."""
        if self._claimed < 0 or not self._lane.alive():
            return
        extent_give(self._free_extents, &self._free_extent_count, self._claim_at, self._claim_bytes)
        self._free_slots[self._free_slot_count] = <uint32_t>self._claimed
        self._free_slot_count += 1
        self._claimed = -1

    def commit(self, *, uint32_t rows, uint32_t columns, uint32_t index_bytes, uint16_t group_id_bytes, uint16_t flags, uint64_t tokens,
               int64_t min_policy_version, int64_t max_policy_version, int64_t t_created_ns, int32_t group_size, int32_t env_id):
        """Publishes the open claim and returns its sequence."""
        self.claimed()
        cdef uint32_t index = <uint32_t>self._claimed, mask = self.slot_count - 1
        cdef slot* body = &self._slots[index]
        cdef uint64_t sequence = self._tail
        fault_hit(b"producer.payload_written")
        body.sequence = sequence
        body.extent_at, body.extent_bytes = self._claim_at, self._claim_bytes
        body.min_policy_version, body.max_policy_version = min_policy_version, max_policy_version
        body.t_created_ns, body.t_publish_ns = t_created_ns, monotonic_ns()
        body.tokens, body.rows, body.columns = tokens, rows, columns
        body.group_size, body.env_id = group_size, env_id
        body.group_id_bytes, body.flags, body.index_bytes = group_id_bytes, flags, index_bytes
        fault_hit(b"producer.body_written")
        store_release64(&body.generation, load_relaxed64(&body.generation) + 1)  # SYNC(slot-body)
        fault_hit(b"producer.generation_stored")
        self._ring[sequence & mask] = index
        fault_hit(b"producer.ring_written")
        self._outstanding[(self._outstanding_at + self._outstanding_count) & mask] = index
        self._outstanding_count += 1
        self._claimed = -1
        self._tail = sequence + 1
        store_relaxed64(&self._header.bytes_total, load_relaxed64(&self._header.bytes_total) + self._claim_bytes)
        store_relaxed64(&self._header.tokens_total, load_relaxed64(&self._header.tokens_total) + tokens)
        fault_hit(b"producer.before_tail")
        store_seq64(&self._header.tail, sequence + 1)  # SYNC(commit), SYNC(hub-wake)
        fault_hit(b"producer.committed")
        if load_seq32(&self._hub.hub_sleeping):  # SYNC(hub-wake)
            ring_bell(&self._hub.doorbell)
        fault_hit(b"producer.woken_hub")
        return sequence

    def wait_space(self, int64_t timeout_ns):
        """Sleeps until something was released since the last claim, the bell rang, or the tick (50 ms) or the timeout is over.

        Returns nanoseconds slept. Releases the GIL. A tick that finds work counts in `late_wakes`.
        """
        cdef uint32_t seen
        cdef int64_t began = monotonic_ns(), pause = min(timeout_ns, PRODUCER_TICK_NS)
        cdef int status = 0
        if not self._lane.alive() or pause <= 0:
            return 0
        seen = load_seq32(&self._header.space_bell)  # SYNC(bell)
        store_seq32(&self._header.space_waiting, 1)  # SYNC(space-wake)
        fault_hit(b"producer.waiting")
        with nogil:
            if not self._anything_released():
                status = futex_wait(&self._header.space_bell, seen, pause)
        store_seq32(&self._header.space_waiting, 0)
        if status == ETIMEDOUT and load_seq32(&self._header.space_bell) == seen and self._anything_released():
            store_relaxed64(&self._header.late_wakes_total, load_relaxed64(&self._header.late_wakes_total) + 1)
        return monotonic_ns() - began

    cdef bint _anything_released(self) noexcept nogil:
        cdef uint32_t i, mask = self.slot_count - 1
        for i in range(self._outstanding_count):
            if self._is_released(self._outstanding[(self._outstanding_at + i) & mask]):  # SYNC(space-wake)
                return True
        return False

    def count_wait(self, uint64_t wait_ns):
        store_relaxed64(&self._header.wait_ns_total, load_relaxed64(&self._header.wait_ns_total) + wait_ns)

    def count_drop(self, uint32_t reason):
        if reason < DROP_REASONS and self._lane.alive():
            store_relaxed64(&self._header.dropped_total[reason], load_relaxed64(&self._header.dropped_total[reason]) + 1)

    @property
    def outstanding(self) -> int:
        """Committed and un-released records. Only looks: any thread."""
        if not self._lane.alive():
            raise BufferError("lane was opened before fork")
        return sum(not self._is_released(self._outstanding[(self._outstanding_at + i) & (self.slot_count - 1)])
                   for i in range(self._outstanding_count))

    @property
    def free_bytes(self) -> int:
        """Bytes of the data area that no committed, un-released record has. Only looks: any thread."""
        cdef uint64_t used = 0
        cdef uint32_t i, index
        if not self._lane.alive():
            raise BufferError("lane was opened before fork")
        for i in range(self._outstanding_count):
            index = self._outstanding[(self._outstanding_at + i) & (self.slot_count - 1)]
            if not self._is_released(index):
                used += self._slots[index].extent_bytes
        return self.data_bytes - used


@cython.no_gc_clear  # leases that end while a cycle is collected need the lane
cdef class LaneReader:
    """The hub's side of one lane. The holder of the hub lock only; one thread at a time; never blocks."""

    def __cinit__(self, Mapping lane not None, object keep):
        cdef uint64_t size
        self.lane, self._keep = lane, keep
        self._header = <lane_header*>lane.base
        self._columns = NULL
        if load_acquire64(&self._header.magic) != LANE_MAGIC:  # SYNC(lane-ready)
            raise LaneCorrupt("no lane")
        check_geometry(self._header, lane.size)
        self.slot_count = self._header.slot_count
        self.data_bytes = self._header.data_bytes
        self.column_count = self._header.column_count
        ring_at, slots_at, released_at, data_at, _ = lane_geometry(self.data_bytes, self.slot_count)
        self._ring = <uint32_t*>(lane.base + <uint64_t>ring_at)
        self._slots = <slot*>(lane.base + <uint64_t>slots_at)
        self._released = <shm_u64*>(lane.base + <uint64_t>released_at)
        self._data = lane.base + <uint64_t>data_at
        size = self.column_count * sizeof(column_def)
        self._columns = <column_def*>malloc(size + 1)
        if self._columns == NULL:
            raise MemoryError
        memcpy(self._columns, lane.base + PAGE, size)
        self._adopt()

    def __dealloc__(self):
        free(self._columns)

    def _adopt(self):
        """Finds what is committed and un-released: tail first, then the slots."""
        cdef uint64_t tail = load_seq64(&self._header.tail)  # SYNC(commit)
        cdef uint64_t generation
        cdef uint32_t i
        backlog = []
        fault_hit(b"hub.adopting")
        for i in range(self.slot_count):
            generation = load_acquire64(&self._slots[i].generation)  # SYNC(slot-body)
            if generation != load_relaxed64(&self._released[i]) and self._slots[i].sequence < tail:
                backlog.append((self._slots[i].sequence, i))
        backlog.sort(reverse=True)
        self._backlog = backlog
        self.next = tail
        self.first_head = load_relaxed64(&self._header.head)  # SYNC(hand-out): ordered by the hub lock that changed hands

    cdef shm_u64* tail_word(self) noexcept nogil:
        return &self._header.tail

    @property
    def waiting(self) -> int:
        """Records that can be taken now."""
        return len(self._backlog) + load_acquire64(&self._header.tail) - self.next  # SYNC(commit)

    @property
    def space_waiting(self) -> bool:
        """Whether the producer sleeps for want of room; a hint."""
        return load_seq32(&self._header.space_waiting) != 0  # SYNC(space-wake)

    @property
    def wanted_bytes(self) -> int:
        """What the producer's last claim asked for in vain; 0 if it succeeded. A hint."""
        return load_relaxed64(&self._header.wanted_bytes)

    @property
    def quarantined(self) -> bool:
        """Whether this hub or an earlier one has quarantined the lane."""
        return load_relaxed64(&self._header.quarantined) != 0

    def has_room_for(self, uint64_t size):
        """Whether a record of `size` bytes fits beside the committed, un-released ones: a free slot, and a gap in the data area."""
        cdef uint64_t at = 0, generation
        cdef uint32_t i
        extents = []
        for i in range(self.slot_count):
            generation = load_acquire64(&self._slots[i].generation)  # SYNC(slot-body)
            if generation != load_relaxed64(&self._released[i]):
                extents.append((self._slots[i].extent_at, self._slots[i].extent_bytes))
        for start, taken in sorted(extents):
            if start >= at + size:
                return len(extents) < self.slot_count
            at = start + taken
        return len(extents) < self.slot_count and at + size <= self.data_bytes

    def take(self, type cls):
        """The next record as an instance of `cls` (a Lease type), or None. Stores head before it returns.

        Raises LaneCorrupt when what the lane says cannot be; the record is then left un-released.
        """
        cdef uint64_t sequence, tail
        cdef uint32_t index
        if self._backlog:
            sequence, index = self._backlog[-1]
            lease = self._lease(cls, index, sequence, sequence < self.first_head)
            self._backlog.pop()
        else:
            tail = load_acquire64(&self._header.tail)  # SYNC(commit)
            if tail == self.next:
                return None
            if tail - self.next > self.slot_count:
                raise LaneCorrupt(f"tail {tail} is {tail - self.next} past {self.next}, more than {self.slot_count} slots")
            sequence = self.next
            index = self._ring[sequence & (self.slot_count - 1)]
            if index >= self.slot_count:
                raise LaneCorrupt(f"ring entry {sequence} names slot {index} of {self.slot_count}")
            lease = self._lease(cls, index, sequence, False)
            self.next = sequence + 1
        fault_hit(b"hub.read")
        if sequence >= load_relaxed64(&self._header.head):
            store_release64(&self._header.head, sequence + 1)  # SYNC(hand-out)
        fault_hit(b"hub.marked")
        return lease

    cdef object _lease(self, type cls, uint32_t index, uint64_t sequence, bint redelivered):
        cdef slot body
        cdef uint64_t generation = load_acquire64(&self._slots[index].generation)  # SYNC(slot-body)
        cdef Lease lease
        memcpy(&body, &self._slots[index], sizeof(slot))
        if body.sequence != sequence or generation == load_relaxed64(&self._released[index]):
            raise LaneCorrupt(f"slot {index} holds sequence {body.sequence}, ring says {sequence}")
        if (body.extent_at % ALIGNMENT or body.extent_bytes % ALIGNMENT or body.extent_at > self.data_bytes
                or body.extent_bytes > self.data_bytes - body.extent_at or body.index_bytes > body.extent_bytes):
            raise LaneCorrupt(f"slot {index}: extent {body.extent_at}+{body.extent_bytes} (index {body.index_bytes}) "
                              f"is not inside {self.data_bytes} data bytes")
        index_copy = PyBytes_FromStringAndSize(<char*>self._data + body.extent_at, body.index_bytes)
        _check_index(index_copy, &body, self._columns, self.column_count)
        lease = <Lease>cls.__new__(cls)
        lease.reader, lease.index = self, index_copy
        lease.sequence, lease.redelivered = sequence, redelivered
        lease.min_policy_version, lease.max_policy_version = body.min_policy_version, body.max_policy_version
        lease.t_created_ns, lease.t_publish_ns = body.t_created_ns, body.t_publish_ns
        lease.token_count, lease.extent_bytes = body.tokens, body.extent_bytes
        lease.rows, lease.column_entries = body.rows, body.columns
        lease.group_size, lease.env_id, lease.flags = body.group_size, body.env_id, body.flags
        lease._slot, lease._generation, lease._group_id_bytes = index, generation, body.group_id_bytes
        lease._extent = self._data + body.extent_at
        lease._ended = False
        self.held += 1
        return lease

    cdef void end_lease(self, uint32_t index, uint64_t generation) noexcept nogil:
        self.held -= 1
        if self.abandoned or not self.lane.alive():
            return
        fault_hit(b"hub.releasing")
        store_seq64(&self._released[index], generation)  # SYNC(release), SYNC(space-wake)
        fault_hit(b"hub.released")
        if load_seq32(&self._header.space_waiting):  # SYNC(space-wake)
            ring_bell(&self._header.space_bell)

    def ring(self):
        """Wakes a producer that waits for space."""
        ring_bell(&self._header.space_bell)

    def count_discard(self, uint32_t reason, uint64_t count=1):
        if reason < DISCARD_REASONS:
            store_relaxed64(&self._header.discarded_total[reason], load_relaxed64(&self._header.discarded_total[reason]) + count)

    def quarantine(self):
        store_relaxed64(&self._header.quarantined, 1)


cdef int _check_span(uint64_t at, uint64_t size, uint64_t begin, uint64_t end, str what, uint32_t column) except -1:
    at *= ALIGNMENT
    if at < begin or at > end or size > end - at:
        raise LaneCorrupt(f"column {column}: {what} {at}+{size} is outside {begin}..{end}")
    return 0


cdef uint64_t _sum(const uint32_t* lengths, uint64_t count) noexcept nogil:
    cdef uint64_t total = 0, i
    for i in range(count):
        total += lengths[i]
    return total


cdef int _check_index(bytes index, slot* body, column_def* columns, uint32_t column_count) except -1:
    """Validates a private copy of the index region: after this, its offsets and lengths may be used as indices."""
    cdef const char* base = PyBytes_AS_STRING(index)
    cdef uint64_t index_bytes = body.index_bytes, extent = body.extent_bytes, head, values, innermost
    cdef const directory_entry* entry
    cdef const uint32_t* lengths
    cdef uint32_t i
    head = <uint64_t>body.columns * sizeof(directory_entry) + body.group_id_bytes
    if body.columns > column_count or head > index_bytes or body.rows > 1 << 30:
        raise LaneCorrupt(f"{body.columns} columns, {body.rows} rows, group id of {body.group_id_bytes} in an index of {index_bytes} bytes")
    for i in range(body.columns):
        entry = <const directory_entry*>(base + i * sizeof(directory_entry))
        if entry.column >= column_count or entry.kind != columns[entry.column].kind or entry.tag > TAG_EMPTY_MAP:
            raise LaneCorrupt(f"entry {i}: column {entry.column} kind {entry.kind} tag {entry.tag}")
        if entry.tag != TAG_VALUES:
            if entry.entries or entry.values_bytes or entry.inner_count or entry.keys_bytes or entry.validity_at:
                raise LaneCorrupt(f"entry {i}: an empty column with values")
            continue
        values = entry.entries
        if entry.kind != KIND_SCALAR:
            _check_span(entry.lengths_at, <uint64_t>entry.entries * 4, head, index_bytes, "lengths", entry.column)
            lengths = <const uint32_t*>(base + <uint64_t>entry.lengths_at * ALIGNMENT)
            values = _sum(lengths, entry.entries)
        if entry.kind == KIND_LIST_LIST or entry.kind == KIND_MAP:
            if entry.inner_count != values:
                raise LaneCorrupt(f"column {entry.column}: {entry.inner_count} inner lengths for {values} entries")
            if entry.inner_count > index_bytes:
                raise LaneCorrupt(f"column {entry.column}: {entry.inner_count} inner lengths in an index of {index_bytes} bytes")
            _check_span(entry.inner_at, entry.inner_count * 4, head, index_bytes, "inner lengths", entry.column)
            lengths = <const uint32_t*>(base + <uint64_t>entry.inner_at * ALIGNMENT)
            innermost = _sum(lengths, entry.inner_count)
            if entry.kind == KIND_MAP:
                if entry.keys_bytes != innermost:
                    raise LaneCorrupt(f"column {entry.column}: keys of {entry.keys_bytes} bytes, lengths say {innermost}")
                if entry.keys_bytes:
                    _check_span(entry.keys_at, entry.keys_bytes, index_bytes, extent, "keys", entry.column)
            else:
                values = innermost
        if entry.values_bytes != values * columns[entry.column].item_bytes:
            raise LaneCorrupt(f"column {entry.column}: {entry.values_bytes} bytes for {values} values")
        if entry.values_bytes:
            _check_span(entry.values_at, entry.values_bytes, index_bytes, extent, "values", entry.column)
        if entry.validity_at:
            _check_span(entry.validity_at, entry.entries, index_bytes, extent, "validity", entry.column)
    return 0


@cython.no_gc_clear  # the end of a lease needs its reader, also when a reference cycle is collected
cdef class Lease:
    """One record held in place: its memory does not change until the lease ends.

    It ends with the last of release() (or the loss of the object) and the last view of its buffer; any thread may do either. Ending is one
    idempotent store. shmbridge.record.Record derives from it.
    """

    def __cinit__(self):
        self._ended = True

    @property
    def group_id(self) -> str:
        start = self.column_entries * sizeof(directory_entry)
        return self.index[start:start + self._group_id_bytes].decode("utf-8", "replace")

    @property
    def is_released(self) -> bool:
        return self._released

    def release(self):
        """Ends the lease as soon as no view of it is left. Idempotent."""
        self._released = True
        if self._exports == 0:
            self._end()

    cdef void _end(self) noexcept:
        if not self._ended:
            self._ended = True
            self.reader.end_lease(self._slot, self._generation)

    def abandon(self):
        """Forgets the lease without release: the next hub gets the record again."""
        if not self._ended:
            self._ended = True
            self.reader.held -= 1

    def __getbuffer__(self, Py_buffer* buffer, int flags):
        if self._ended or not self.reader.lane.alive():
            raise BufferError("the lease has ended")
        PyBuffer_FillInfo(buffer, self, self._extent, self.extent_bytes, True, flags)
        self._exports += 1

    def __releasebuffer__(self, Py_buffer* buffer):
        self._exports -= 1
        if self._exports == 0 and self._released:
            self._end()

    def __dealloc__(self):
        self._end()
