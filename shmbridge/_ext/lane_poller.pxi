"""The lanes of a hub in turn: one record of each, then the next of each. lanes.py says which lanes.

Taking is for the hub's thread. The death watch's thread adds and removes lanes between two records at most,
since the GIL is held.
"""

cdef extern from "latency.h" nogil:
    void latency_count(control_header* control, int64_t took_ns)

cdef enum:
    SAMPLE = 8  # of so many records taken one by one, without a wait between them, one costs a look at the clock


cdef class LanePoller:
    """Takes records of type `cls` from many lanes, fairly. Never blocks.

    Calls `on_corrupt(reader, why)` at once for a lane whose words cannot be true, and takes no more from it.
    Calls `on_lost(call, looked_at)`, which may raise, for the first lease that ended without release, before
    it takes the next record.
    """

    cdef type _cls
    cdef Mapping _control
    cdef control_header* _words
    cdef object _on_corrupt
    cdef readonly Drops drops        # of all lanes
    cdef object _on_lost
    cdef list _readers
    cdef Py_ssize_t _place           # whose turn it is
    cdef uint32_t _without_wait      # records taken one by one since a look found none
    cdef public uint32_t arrivals    # of the bridge, before its lanes were listed
    cdef public bint ending          # nothing is taken any more: close() is owed

    def __init__(self, type cls not None, Mapping control not None, on_corrupt, uint32_t arrivals,
                 on_lost=None):
        self.drops, self._on_lost = Drops(), on_lost
        self._cls, self._control, self._on_corrupt, self.arrivals = cls, control, on_corrupt, arrivals
        self._words, self._readers = <control_header*>control.base, []

    def add(self, LaneReader reader not None):
        """A lane to take from."""
        reader.drops = self.drops
        self._readers.append(reader)

    def remove(self, LaneReader reader not None):
        """Nothing more is taken from a lane. Idempotent."""
        cdef Py_ssize_t place
        for place in range(len(self._readers)):
            if self._readers[place] is reader:
                del self._readers[place]
                self._place -= place < self._place
                return

    def readers(self):
        """A list of the lanes that are taken from now."""
        return list(self._readers)

    def close(self):
        """Lets go of everything: nothing is there to take any more."""
        self._readers.clear()
        self._control = None

    @property
    def closed(self) -> bool:
        return self._control is None

    @property
    def has_new_lanes(self) -> bool:
        """Whether lanes have arrived since `arrivals` was noted."""
        return self.is_open() and load_seq32(&self._words.arrivals) != self.arrivals  # SYNC(bell)

    cdef bint is_open(self):
        return self._control is not None and self._control.alive()

    cdef bint may_take(self, bint anyway):
        return (not self.ending and self.is_open() and
                (anyway or load_seq32(&self._words.arrivals) == self.arrivals))  # SYNC(bell)

    def say_lost(self):
        """Reports the first lost leases to `on_lost`."""
        for call, looked_at in self.drops.take_unsaid():
            if self._on_lost is not None:
                self._on_lost(call, looked_at)

    cdef object next(self, uint8_t by):
        cdef Py_ssize_t empty = 0
        cdef LaneReader reader
        while empty < len(self._readers):
            if self._place >= len(self._readers):
                self._place = 0
            reader = <LaneReader>self._readers[self._place]
            self._place += 1
            try:
                record = reader.next_lease(self._cls)
            except LaneCorrupt as wrong:
                self._on_corrupt(reader, str(wrong))  # what keeps the reason must not keep frames
                self.remove(reader)
                continue
            if record is not None:
                (<Lease>record)._handed_out_by = by
                return record
            empty += 1
        return None

    cdef void count_latency(self, object record, int64_t now):
        """Counts how long a record waited until it was first handed out."""
        if self.is_open() and (<Lease>record).is_new:  # a handler in `on_corrupt` may have closed it
            latency_count(self._words, now - (<Lease>record)._t_publish_ns)

    def take(self, bint anyway=False, uint8_t by=0):
        """The next record, for the Call `by`.

        None if there is none, if this is closed or belongs to the process before fork, or, unless `anyway`,
        if lanes have arrived.
        """
        if self.drops.unsaid:
            self.say_lost()
        record = self.next(by) if self.may_take(anyway) else None
        if record is None:
            self._without_wait = 0
            return None
        if self._without_wait % SAMPLE == 0:
            self.count_latency(record, monotonic_ns())
        self._without_wait += 1
        return record

    def poll(self, Py_ssize_t most, bint anyway=False, uint8_t by=1):
        """A list of up to `most` records, by the same rules.

        Once there are some, no want of memory for more loses them.
        """
        cdef list records = []
        cdef int64_t now
        if self.drops.unsaid:
            self.say_lost()
        if self.may_take(anyway):
            while len(records) < most:
                try:
                    record = self.next(by)
                except MemoryError:
                    if not records:
                        raise
                    break
                if record is None:
                    break
                records.append(record)
        if records:
            now = monotonic_ns()
            for record in records:
                self.count_latency(record, now)
        return records
