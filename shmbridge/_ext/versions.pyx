"""The shared words of a weights segment: its newest complete version, and the progress of a filling."""

from libc.stdint cimport int64_t, uint32_t, uint64_t
cimport numpy as cnp

import numpy as np

from shmbridge._ext.atomics cimport (
    add_seq64, load_acquire64, load_acquire_words, load_seq32, load_seq64, shm_u64, store_release64,
    store_release_words, store_seq64,
)
from shmbridge._ext.faults cimport fault_hit
from shmbridge._ext.futex cimport futex_wait, ring_bell
from shmbridge._ext.layout cimport (
    ALIGNMENT, LAYOUT_VERSION, PAGE, WEIGHTS_MAGIC, WEIGHTS_SLOTS, WEIGHTS_WORDS, weights_header,
)
from shmbridge._ext.mapping cimport Mapping

cnp.import_array()

slots = WEIGHTS_SLOTS
header_bytes = PAGE
layout_version = LAYOUT_VERSION
end = 1 << 60  # no version is as high

cdef uint64_t END = 1 << 60


cdef uint64_t _pages(uint64_t count) noexcept:
    return (count + PAGE - 1) // PAGE * PAGE


cdef uint64_t _words_at(uint64_t table_bytes) noexcept:
    return PAGE + (table_bytes + 7) // 8 * 8


def data_place(uint64_t table_bytes, uint64_t tensors):
    """Where the slots of a segment begin, bytes."""
    return _pages(_words_at(table_bytes) + tensors * WEIGHTS_WORDS * 8)


cdef class Versions:
    """Header and words of a mapped weights segment. Setters are for the holder of the writer's lock,
    `add_written` is its parts'.

    Nothing blocks but `wait_bell`.
    """

    cdef readonly Mapping mapping
    cdef weights_header* _header
    # our own copies: only checked values are used
    cdef uint64_t _table_bytes, _tensors, _data_at, _slot_bytes
    cdef shm_u64* _words

    def __cinit__(self, Mapping mapping not None):
        if mapping.size < sizeof(weights_header):
            raise ValueError("weights segment too small")
        self.mapping = mapping
        self._header = <weights_header*>mapping.base

    cdef void _keep(self, uint64_t table_bytes, uint64_t tensors, uint64_t data_at,
                    uint64_t slot_bytes) noexcept:
        self._table_bytes, self._tensors = table_bytes, tensors
        self._data_at, self._slot_bytes = data_at, slot_bytes
        self._words = <shm_u64*>(self.mapping.base + _words_at(table_bytes))

    def format(self, uint32_t pid, bytes table not None, uint64_t tensors, uint64_t slot_bytes,
               uint64_t segment_id):
        """Makes an empty segment a weights segment; magic last."""
        self._keep(len(table), tensors, data_place(len(table), tensors), slot_bytes)
        self._header.layout_version, self._header.writer_pid = LAYOUT_VERSION, pid
        self._header.table_bytes, self._header.data_at = self._table_bytes, self._data_at
        self._header.slot_bytes, self._header.tensors = slot_bytes, tensors
        self._header.words_at, self._header.segment_id = _words_at(self._table_bytes), segment_id
        memoryview(self.mapping)[PAGE:PAGE + len(table)] = table
        fault_hit(b"weights.before_magic")
        store_release64(&self._header.magic, WEIGHTS_MAGIC)  # SYNC(weights-ready)

    def enter(self, uint32_t pid):
        """Names the writer, for the error of a second one."""
        self._header.writer_pid = pid

    @property
    def writer_pid(self) -> int:
        """Pid of the last writer, alive or not; 0 if there was none."""
        return self._header.writer_pid

    @property
    def layout_version(self) -> int:
        """Of the segment, if it is whole; 0 if it is not."""
        # SYNC(weights-ready)
        return self._header.layout_version if load_acquire64(&self._header.magic) == WEIGHTS_MAGIC else 0

    @property
    def ready(self) -> bool:
        """Whether the segment is whole, of this layout, and its header possible. Check this first."""
        cdef uint64_t size = self.mapping.size, table_bytes, tensors, data_at, slot_bytes
        # SYNC(weights-ready)
        if (load_acquire64(&self._header.magic) != WEIGHTS_MAGIC or
                self._header.layout_version != LAYOUT_VERSION):
            return False
        table_bytes, tensors = self._header.table_bytes, self._header.tensors
        data_at, slot_bytes = self._header.data_at, self._header.slot_bytes
        if (table_bytes > size or tensors > size // (8 * WEIGHTS_WORDS) or
                self._header.words_at != _words_at(table_bytes)):
            return False
        if data_at != data_place(table_bytes, tensors) or data_at > size:
            return False
        if slot_bytes % ALIGNMENT or slot_bytes > (size - data_at) // WEIGHTS_SLOTS:
            return False
        self._keep(table_bytes, tensors, data_at, slot_bytes)
        return True

    @property
    def table(self) -> bytes:
        return bytes(memoryview(self.mapping)[PAGE:PAGE + self._table_bytes])

    @property
    def tensors(self) -> int:
        """How many rows the table is said to have."""
        return self._tensors

    @property
    def segment_id(self) -> int:
        return self._header.segment_id

    @property
    def slot_bytes(self) -> int:
        return self._slot_bytes

    def slot_at(self, uint32_t slot):
        """Place of a slot in the segment, bytes."""
        return self._data_at + slot * self._slot_bytes

    @property
    def latest(self):
        """(version, slot) of the newest complete version; None before the first, or for impossible words."""
        cdef uint64_t word = load_seq64(&self._header.latest), before  # SYNC(weights-commit)
        while WEIGHTS_SLOTS <= word < (END + 1) * WEIGHTS_SLOTS:
            # SYNC(weights-slot)
            if load_acquire64(&self._header.slot_version[word % WEIGHTS_SLOTS]) == word // WEIGHTS_SLOTS:
                return word // WEIGHTS_SLOTS - 1, word % WEIGHTS_SLOTS
            before, word = word, load_seq64(&self._header.latest)  # SYNC(weights-commit)
            if word == before:
                return None
        return None

    def holds(self, uint32_t slot, int64_t version):
        """Whether the slot holds that version, whole."""
        # SYNC(weights-slot)
        return slot < WEIGHTS_SLOTS and load_acquire64(&self._header.slot_version[slot]) == version + 1

    cdef shm_u64* _stamps(self, uint32_t slot) except NULL:
        if slot >= WEIGHTS_SLOTS:
            raise ValueError(f"a weights segment has no slot {slot}")
        return self._words + (1 + 2 * slot) * self._tensors

    def stamps(self, uint32_t slot):
        """uint64[tensors]: version + 1 that last changed a tensor, 0 where it is torn."""
        found = np.empty(self._tensors, np.uint64)
        # SYNC(weights-stamps)
        load_acquire_words(cnp.PyArray_DATA(<cnp.ndarray>found), self._stamps(slot), self._tensors)
        return found

    def begin(self, uint32_t slot):
        """Marks the slot as being filled: no byte of it may change before."""
        store_seq64(&self._header.slot_version[slot], 0)  # SYNC(weights-slot)
        fault_hit(b"weights.filling")

    def touch(self, uint32_t slot, uint32_t tensor):
        """Marks a tensor of the slot as torn, until `commit`, and as finite."""
        self._require(tensor)
        store_release64(self._stamps(slot) + tensor, 0)  # SYNC(weights-stamps)
        store_release64(self._stamps(slot) + self._tensors + tensor, 0)  # SYNC(weights-finite)

    def mark_not_finite(self, uint32_t slot, uint32_t tensor):
        """Marks a tensor of the slot: some value that was written since `touch` is NaN or infinite."""
        self._require(tensor)
        store_release64(self._stamps(slot) + self._tensors + tensor, 1)  # SYNC(weights-finite)

    def not_finite(self, uint32_t slot):
        """uint64[tensors]: 0 where all values of a tensor are finite."""
        found = np.empty(self._tensors, np.uint64)
        cdef shm_u64* words = self._stamps(slot) + self._tensors
        load_acquire_words(cnp.PyArray_DATA(<cnp.ndarray>found), words, self._tensors)  # SYNC(weights-finite)
        return found

    cdef int _require(self, uint32_t tensor) except -1:
        if tensor >= self._tensors:
            raise ValueError(f"a weights segment of {self._tensors} tensors has no tensor {tensor}")
        return 0

    def commit(self, uint32_t slot, int64_t version, stamps not None):
        """Publishes the filled slot with its uint64[tensors] stamps; call `ring` once it can be held."""
        cdef cnp.ndarray changed = np.ascontiguousarray(stamps, np.uint64)
        cdef shm_u64* words = self._stamps(slot)
        if changed.size != self._tensors:
            raise ValueError(f"a weights segment of {self._tensors} tensors has as many stamps")
        fault_hit(b"weights.filled")
        if self._tensors:
            store_release_words(words, cnp.PyArray_DATA(changed), self._tensors)  # SYNC(weights-stamps)
        fault_hit(b"weights.stamped")
        store_release64(&self._header.slot_version[slot], version + 1)  # SYNC(weights-slot)
        fault_hit(b"weights.slot_whole")
        # SYNC(weights-commit)
        store_seq64(&self._header.latest, <uint64_t>(version + 1) * WEIGHTS_SLOTS + slot)
        fault_hit(b"weights.committed")

    def ring(self):
        """Wakes readers that wait for a version."""
        ring_bell(&self._header.bell)

    def next_filling(self, uint32_t slot, bint with_parts):
        """Begins a filling of the slot, with no byte written; returns its word, for tickets of parts.

        Under the exclusive parts' lock. No earlier ticket fits it.
        """
        cdef uint64_t word = load_seq64(&self._header.filling), i  # SYNC(weights-filling)
        for i in range(self._tensors):
            store_release64(self._words + i, 0)  # SYNC(weights-written)
        word = ((word // 2 // WEIGHTS_SLOTS + 1) * WEIGHTS_SLOTS + slot) * 2 + with_parts
        store_seq64(&self._header.filling, word)  # SYNC(weights-filling)
        fault_hit(b"weights.numbered")
        return word

    def end_filling(self):
        """From now on no part is let in."""
        cdef uint64_t word = load_seq64(&self._header.filling)  # SYNC(weights-filling)
        store_seq64(&self._header.filling, word // 2 * 2)  # SYNC(weights-filling)
        fault_hit(b"weights.parts_refused")

    def lets_in(self, uint64_t word):
        """Whether this filling is under way and takes parts. Under the shared parts' lock."""
        return word % 2 == 1 and load_seq64(&self._header.filling) == word  # SYNC(weights-filling)

    def add_written(self, uint32_t tensor, uint64_t size):
        """Counts bytes of a tensor that have been written in this filling."""
        self._require(tensor)
        add_seq64(self._words + tensor, size)  # SYNC(weights-written)

    @property
    def written(self):
        """uint64[tensors]: bytes written in this filling."""
        found = np.empty(self._tensors, np.uint64)
        # SYNC(weights-written)
        load_acquire_words(cnp.PyArray_DATA(<cnp.ndarray>found), self._words, self._tensors)
        return found

    @property
    def bell(self) -> int:
        """To be read before `latest`, then waited on."""
        return load_seq32(&self._header.bell)  # SYNC(bell)

    def wait_bell(self, uint32_t seen, int64_t timeout_ns):
        """Sleeps until the bell is not `seen`, a signal, or the timeout; returns whether it did not ring."""
        if not self.mapping.alive():
            raise BufferError("the segment was mapped before fork: attach again in this process")
        with nogil:
            futex_wait(&self._header.bell, seen, timeout_ns)
        return load_seq32(&self._header.bell) == seen  # SYNC(bell)
