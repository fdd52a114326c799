"""The shared words of a weights segment: which slot holds the newest complete version. Knows no tensors and no locks."""

from libc.stdint cimport int64_t, uint32_t, uint64_t

from shmbridge._ext.atomics cimport load_acquire64, load_seq64, store_release64, store_seq64
from shmbridge._ext.faults cimport fault_hit
from shmbridge._ext.layout cimport ALIGNMENT, LAYOUT_VERSION, PAGE, WEIGHTS_MAGIC, WEIGHTS_SLOTS, weights_header
from shmbridge._ext.mapping cimport Mapping

slots = WEIGHTS_SLOTS
header_bytes = PAGE


cdef class Versions:
    """Header of a mapped weights segment. Setters are for the holder of the writer's lock; nothing blocks."""

    cdef readonly Mapping mapping
    cdef weights_header* _header
    cdef uint64_t _table_bytes, _data_at, _slot_bytes  # our own copies: what is computed with was checked

    def __cinit__(self, Mapping mapping not None):
        if mapping.size < sizeof(weights_header):
            raise ValueError("weights segment too small")
        self.mapping = mapping
        self._header = <weights_header*>mapping.base

    def format(self, uint32_t pid, bytes table not None, uint64_t slot_bytes):
        """Makes an empty segment a weights segment; magic last."""
        data_at = (PAGE + len(table) + PAGE - 1) // PAGE * PAGE
        self._header.layout_version, self._header.writer_pid = LAYOUT_VERSION, pid
        self._header.table_bytes, self._header.data_at, self._header.slot_bytes = len(table), data_at, slot_bytes
        self._table_bytes, self._data_at, self._slot_bytes = len(table), data_at, slot_bytes
        memoryview(self.mapping)[PAGE:PAGE + len(table)] = table
        fault_hit(b"weights.before_magic")
        store_release64(&self._header.magic, WEIGHTS_MAGIC)  # SYNC(weights-ready)

    @property
    def ready(self) -> bool:
        """Whether the segment is whole, of this build's layout, and what its header says of it can be; to be asked before all else."""
        cdef uint64_t size = self.mapping.size, table_bytes, data_at, slot_bytes
        if load_acquire64(&self._header.magic) != WEIGHTS_MAGIC or self._header.layout_version != LAYOUT_VERSION:  # SYNC(weights-ready)
            return False
        table_bytes, data_at, slot_bytes = self._header.table_bytes, self._header.data_at, self._header.slot_bytes
        if table_bytes > size - PAGE or data_at != (PAGE + table_bytes + PAGE - 1) // PAGE * PAGE or data_at > size:
            return False
        if slot_bytes % ALIGNMENT or slot_bytes > (size - data_at) // WEIGHTS_SLOTS:
            return False
        self._table_bytes, self._data_at, self._slot_bytes = table_bytes, data_at, slot_bytes
        return True

    @property
    def table(self) -> bytes:
        return bytes(memoryview(self.mapping)[PAGE:PAGE + self._table_bytes])

    def slot_at(self, uint32_t slot):
        """Place of a slot in the segment, bytes."""
        return self._data_at + slot * self._slot_bytes

    @property
    def latest(self):
        """(version, slot) of the newest complete version; None before the first, or if no slot holds what the word says."""
        cdef uint64_t word = load_seq64(&self._header.latest), before  # SYNC(weights-commit)
        while word >= WEIGHTS_SLOTS:
            if load_acquire64(&self._header.slot_version[word % WEIGHTS_SLOTS]) == word // WEIGHTS_SLOTS:  # SYNC(weights-slot)
                return word // WEIGHTS_SLOTS - 1, word % WEIGHTS_SLOTS
            before, word = word, load_seq64(&self._header.latest)  # SYNC(weights-commit)
            if word == before:
                return None
        return None

    def holds(self, uint32_t slot, int64_t version):
        """Whether the slot holds that version, whole."""
        return slot < WEIGHTS_SLOTS and load_acquire64(&self._header.slot_version[slot]) == version + 1  # SYNC(weights-slot)

    def begin(self, uint32_t slot):
        """Marks the slot as being filled."""
        store_seq64(&self._header.slot_version[slot], 0)  # SYNC(weights-slot)
        fault_hit(b"weights.filling")

    def commit(self, uint32_t slot, int64_t version):
        """Publishes the filled slot."""
        fault_hit(b"weights.filled")
        store_release64(&self._header.slot_version[slot], version + 1)  # SYNC(weights-slot)
        store_seq64(&self._header.latest, <uint64_t>(version + 1) * WEIGHTS_SLOTS + slot)  # SYNC(weights-commit)
        fault_hit(b"weights.committed")
