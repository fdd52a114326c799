"""The lanes of a hub in turn: one record of each, then the next of each. Knows readers; which lanes there are, and why, is lanes.py's.

Taking is for the hub's thread. The death watch's thread adds and removes lanes meanwhile: between two records at most, since the GIL is held.
"""

from libc.stdint cimport uint32_t

from shmbridge._ext.atomics cimport load_seq32
from shmbridge._ext.layout cimport control_header
from shmbridge._ext.mapping cimport Mapping
from shmbridge._ext.ring cimport LaneReader

from shmbridge._ext.header import LaneCorrupt


cdef class Turns:
    """Takes records of type `cls` from many lanes, fairly. Never blocks.

    A lane whose words cannot be true is told to `on_corrupt(reader, why)` at once, and left out from then on.
    """

    cdef type _cls
    cdef Mapping _control
    cdef control_header* _words
    cdef object _on_corrupt
    cdef list _readers
    cdef Py_ssize_t _place           # whose turn it is
    cdef public uint32_t arrivals    # of the bridge, before its lanes were listed

    def __init__(self, type cls not None, Mapping control not None, on_corrupt, uint32_t arrivals):
        self._cls, self._control, self._on_corrupt, self.arrivals = cls, control, on_corrupt, arrivals
        self._words, self._readers = <control_header*>control.base, []

    def add(self, LaneReader reader not None):
        """A lane to take from."""
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
    def overtaken(self) -> bool:
        """Whether lanes have arrived since `arrivals` was noted."""
        return self.is_open() and load_seq32(&self._words.arrivals) != self.arrivals  # SYNC(bell)

    cdef bint is_open(self):
        return self._control is not None and self._control.alive()

    cdef bint may_take(self, bint anyway):
        return self.is_open() and (anyway or load_seq32(&self._words.arrivals) == self.arrivals)  # SYNC(bell)

    cdef object next(self):
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
                return record
            empty += 1
        return None

    def take(self, bint anyway=False):
        """The next record. None if there is none, if this is closed or belongs to the process before fork, or, unless `anyway`, if lanes have arrived."""
        return self.next() if self.may_take(anyway) else None

    def poll(self, Py_ssize_t most, bint anyway=False):
        """A list of up to `most` records, by the same rules. Once there are some, no want of memory for more loses them."""
        cdef list records = []
        if self.may_take(anyway):
            while len(records) < most:
                try:
                    record = self.next()
                except MemoryError:
                    if not records:
                        raise
                    break
                if record is None:
                    break
                records.append(record)
        return records
