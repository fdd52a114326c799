"""A group, and its assembly from the fragments that its one producer put. Reads only the records' metadata.
"""


@cython.final
@cython.no_gc
cdef class InFlight:
    """How many groups are in batches whose step is not over."""

    cdef Py_ssize_t groups


@cython.no_gc_clear  # so that its end still counts
cdef class Group:
    """The records of one group, complete when their rows add up to its size. Holds their leases.

    Attributes:
        records: its records.
        rows: rows of these; `size` of the whole group.
        number: the order in which groups became complete; set by the scheduler.
        wrong: how its fragments contradict each other; such a group is never complete.
    """

    cdef public list records
    cdef readonly Py_ssize_t rows, size
    cdef readonly double began_s
    cdef public Py_ssize_t number
    cdef public str wrong
    cdef bint queued
    cdef InFlight _in_flight

    def __init__(self, Py_ssize_t size, double began_s):
        self.records, self.size, self.began_s, self.wrong = [], size, began_s, ""

    def __dealloc__(self):
        self.leave_flight()

    cdef void enter_flight(self, InFlight flight) noexcept:
        self.leave_flight()
        self._in_flight = flight
        flight.groups += 1

    cdef void leave_flight(self) noexcept:
        if self._in_flight is not None:
            self._in_flight.groups -= 1
            self._in_flight = None

    def append(self, record):
        """Takes over a record and its lease."""
        self.records.append(record)
        self.rows += record.rows

    def discard(self, reason):
        """Releases its records unread and counts them as discarded, for a Discard."""
        for record in self.records:
            record._discard(reason)

    def abandon(self):
        """Ends all leases without release, whatever views live: the next consumer gets the group again."""
        for record in self.records:
            record._abandon()

    def __repr__(self):
        of = f" {self.group_id} of {self.producer_id}" if self.records else ""
        state = f"; {self.wrong}" if self.wrong else ""
        tokens = self.tokens if self.records else 0
        return f"<Group{of}: {self.rows}/{self.size} rows, {tokens} tokens, {len(self.records)} records{state}>"

    @property
    def complete(self):
        """Whether all rows are here."""
        return self.rows >= self.size and not self.wrong

    cdef first(self):
        """Its first record, from which its identity is read: not from its meta, which is built on demand."""
        if not self.records:
            raise IndexError("a group without records has no identity")
        return self.records[0]

    @property
    def producer_id(self):
        """Id of the producer that put it; one group comes from one producer."""
        return self.first()._lane_reader.about.producer_id

    @property
    def group_id(self):
        """Its id among its producer's groups."""
        return self.first()._group_id

    @property
    def env_id(self):
        """The number under which its environment has registered; None if it has none."""
        env_id = self.first()._env_id
        return None if env_id < 0 else env_id

    @property
    def split(self):
        """ "train" or "eval"."""
        return self.first()._split  # looking at its meta would count as reading

    @property
    def tokens(self):
        """Tokens of all rows."""
        tokens = 0
        for record in self.records:
            tokens += record.token_count
        return tokens

    @property
    def oldest_version(self):
        """The oldest policy version under which any of its records began; -1 if none was stamped."""
        return self.oldest()

    cdef int64_t oldest(self) except? -2:
        cdef int64_t oldest = LATEST
        for record in self.records:
            oldest = min(oldest, <int64_t>record._min_policy_version)
        return oldest


cdef class GroupAssembler:
    """Holds groups in part until they are complete or late. For one thread at a time.

    Args:
        timeout_s: seconds until a group is late.

    Attributes:
        contradictory: groups found to be wrong since it was last cleared, for a log.
    """

    cdef readonly double timeout_s
    cdef dict _partial               # (producer, group id) -> group
    cdef public list contradictory

    def __init__(self, double timeout_s):
        self.timeout_s, self._partial, self.contradictory = timeout_s, {}, []

    def __len__(self):
        return len(self._partial)

    def __iter__(self):
        return iter(list(self._partial.values()))

    def add(self, record, double now_s):
        """Takes over a record; returns its group once that is complete. `now_s` is time.monotonic()."""
        cdef Change change = Change()
        return self.join(record, now_s)

    cdef Group join(self, record, double now_s):
        cdef Py_ssize_t size = record._group_size
        cdef Group group
        if record.rows >= size:
            group = Group(size, now_s)
            group.append(record)
            return group
        lane = record._lane_reader.about
        key = (lane.origin_producer_id or lane.producer_id, record._group_id)
        group = self._partial.get(key)
        if group is None:
            group = self._partial[key] = Group(size, now_s)
        if not group.wrong:
            group.wrong = contradiction(group, record)
            if group.wrong:
                self.contradictory.append(group)
        group.append(record)
        if not group.complete:
            return None
        del self._partial[key]
        return group

    def late(self, double now_s, busy):
        """Removes and returns contradictory groups, and old ones unless their producer is in `busy`."""
        return self.without([
            key for key, group in self._partial.items()
            if (<Group>group).wrong or (now_s - (<Group>group).began_s > self.timeout_s and key[0] not in busy)])

    def orphans(self, producer_ids):
        """Removes and returns the groups in part of producers that will put nothing more."""
        return self.without([key for key in self._partial if key[0] in producer_ids])

    cdef list without(self, list keys):
        return [self._partial.pop(key) for key in keys]


cdef str contradiction(Group group, record):
    """Why the record cannot be a fragment of the group that it names; "" if it can."""
    if record._group_size != group.size:
        return f"one fragment says group_size={group.size}, another {record._group_size}"
    if group.records and record._split != group.split:
        return f"one fragment says split={group.split!r}, another {record._split!r}"
    rows = group.rows + record.rows
    return f"its fragments have {rows} rows, and group_size={group.size}" if rows > group.size else ""
