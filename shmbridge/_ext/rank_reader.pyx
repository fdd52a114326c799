"""A learner rank's leases: records that the hub's manifests name, read in place without the hub lock.

For one thread at a time, except that a Lease may end on any thread.
"""

cimport cython
from libc.stdint cimport uint32_t, uint64_t

from shmbridge._ext.geometry cimport complaint
from shmbridge._ext.lane_reader cimport LaneReader, Lease, lane_found, lane_look
from shmbridge._ext.mapping cimport Mapping

from shmbridge._ext.header import LaneCorrupt


@cython.no_gc_clear
cdef class RankReader(LaneReader):
    """A learner rank's reader of one lane; writes nothing, so that leases end in this process only."""

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
