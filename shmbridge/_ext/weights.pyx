"""A weights segment: its shared words, which are its newest complete version and the progress of a filling; the bytes
of tensors that are copied into it; and checksums, of whatever bytes.
"""

from cpython.buffer cimport PyBUF_ANY_CONTIGUOUS, PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
cimport numpy as cnp

import numpy as np

from shmbridge._ext.core cimport (
    ALIGNMENT, LAYOUT_VERSION, PAGE, WEIGHTS_MAGIC, WEIGHTS_SLOTS, WEIGHTS_WORDS, add_seq64, fault_hit,
    futex_wait, lane_copies_done, lane_copy, load_acquire64, load_acquire_words, load_seq32, load_seq64,
    ring_bell, row_check_seed, shm_u64, store_release64, store_release_words, store_seq64, weights_header,
)
from shmbridge._ext.header cimport Mapping

cdef extern from "cache.h" nogil:
    uint64_t cache_bytes(int level, uint64_t otherwise)

cdef extern from "finite.h" nogil:
    int numbers_are_finite(const uint8_t* at, uint64_t count, uint64_t width, uint64_t mask, uint64_t value)

cdef extern from "row_check.h" nogil:
    ctypedef struct checksum_pieces:
        pass
    void checksum_begin(checksum_pieces* all)
    void checksum_add(checksum_pieces* all, const uint8_t* data, uint64_t size)
    uint64_t checksum_end(checksum_pieces* all, uint64_t seed)
    uint64_t checksum_seeded(const uint8_t* data, uint64_t size, uint64_t seed)

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


cdef uint64_t PIECE = 32 << 10  # bytes that are copied, then looked at while the cache has them
cdef uint64_t FAR_OFF = cache_bytes(3, 32 << 20) // 2


cdef int _inside(Mapping mapping, uint64_t at, uint64_t size) except -1:
    if not mapping.alive():
        raise BufferError("the segment was mapped before fork: attach again in this process")
    if at > mapping.size or size > mapping.size - at:
        raise ValueError(f"bytes {at} to {at + size} of a segment of {mapping.size}")
    return 0


cdef tuple _ANY = (0, 0, 0)


def copy_in(Mapping mapping not None, uint64_t at, source not None, uint64_t going_round, tuple number=None,
            uint64_t first=0):
    """Copies the contiguous buffer `source` to byte `at` of the segment; returns whether its numbers are finite.

    Blocks, with the GIL released. Past the cache if this place is written again only after `going_round` bytes,
    and those are more than the cache keeps.

    Args:
        number: (bytes, mask, value) of the type of the numbers, as finite.h has them; None: all are finite.
        first: byte of the source at which the first whole number begins.
    """
    cdef Py_buffer view
    cdef bint is_cold = going_round > FAR_OFF, finite = True
    cdef uint64_t width, mask, value, size, piece, count, done = 0, looked = first
    width, mask, value = _ANY if number is None else number
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        size = view.len
        _inside(mapping, at, size)
        with nogil:
            while done < size:
                piece = size - done if size - done < PIECE else PIECE
                lane_copy(mapping.base + at + done, <uint8_t*>view.buf + done, piece, is_cold)
                done += piece
                if width and finite and done > looked:
                    count = (done - looked) // width
                    finite = numbers_are_finite(<uint8_t*>view.buf + looked, count, width, mask, value)
                    looked += count * width
            lane_copies_done(is_cold)
    finally:
        PyBuffer_Release(&view)
    return finite


def are_finite(source not None, tuple number=None):
    """Returns whether the numbers of a contiguous buffer are finite, as `copy_in`. Blocks, with the GIL
    released.
    """
    cdef Py_buffer view
    cdef bint finite = True
    cdef uint64_t width, mask, value
    width, mask, value = _ANY if number is None else number
    PyObject_GetBuffer(source, &view, PyBUF_SIMPLE)
    try:
        with nogil:
            if width:
                finite = numbers_are_finite(<uint8_t*>view.buf, view.len // width, width, mask, value)
    finally:
        PyBuffer_Release(&view)
    return finite


def check_of(str column not None, values not None):
    """The check of one row's contiguous values, which have the column's dtype; never 0. Never blocks."""
    cdef Py_buffer view
    cdef bytes name = column.encode()
    PyObject_GetBuffer(values, &view, PyBUF_ANY_CONTIGUOUS)
    try:
        return checksum_seeded(<const uint8_t*>view.buf, view.len, row_check_seed(name))
    finally:
        PyBuffer_Release(&view)


def checksum(pieces, uint64_t seed=0):
    """The checksum of bytes that lie in several contiguous pieces, one behind the other; never 0.

    However they are cut, it is the same. Another seed gives another one. Never blocks; lets other threads run.
    """
    cdef checksum_pieces all
    cdef Py_buffer view
    checksum_begin(&all)
    for piece in pieces:
        PyObject_GetBuffer(piece, &view, PyBUF_ANY_CONTIGUOUS)
        try:
            if view.len < 1 << 14:
                checksum_add(&all, <const uint8_t*>view.buf, view.len)
            else:
                with nogil:
                    checksum_add(&all, <const uint8_t*>view.buf, view.len)
        finally:
            PyBuffer_Release(&view)
    return checksum_end(&all, seed)
