"""The groups of a hub between its lanes and a batch, in one object that no interrupt leaves half changed.

Each method of `GroupQueues` is one change. It calls compiled code only: Python runs signal handlers, and lets
other threads run, between two bytecodes, so they come before a change or after it. A garbage collection, whose
finalizers are Python code, waits for its end. So there is no lock and nothing to repair: at every bytecode a group
is in one place. What a method returns is the caller's; if an interrupt loses it there, its leases end, and the
records come again.

Pieces: group.pxi (a group, and its assembly from fragments), fair.pxi and atropos_queue.pxi (policies).
"""

from collections import deque
from heapq import heapify, heappop, heappush, heapreplace

cimport cython
from libc.math cimport ceil, fmax, fmin
from libc.stdint cimport int64_t

cdef extern from "Python.h":
    int PyGC_Disable()
    int PyGC_Enable()

cdef double NEVER = float("inf")
NO_VERSION = 1 << 62                 # later than all
cdef int64_t LATEST = 1 << 62


@cython.final
@cython.no_gc
cdef class Change:
    """While it lives no collection runs: nothing in Python then interrupts compiled code."""

    cdef int _collects

    def __cinit__(self):
        self._collects = PyGC_Disable()

    def __dealloc__(self):
        if self._collects:
            PyGC_Enable()


include "group.pxi"
include "fair.pxi"
include "atropos_queue.pxi"


cdef class OldestScheduler:
    """Policy "oldest": the group that began under the oldest policy version goes first, from any producer.

    A heap by version, then by arrival. Unstamped groups count as the oldest. Its purpose:
    docs/explanation/staleness.md.
    """

    cdef list _heap                  # (version, number, group)
    cdef Py_ssize_t _next
    cdef dict _by_producer           # groups
    cdef readonly double waits_until_s
    cdef readonly object formed

    def __init__(self):
        self._heap, self._by_producer, self.waits_until_s = [], {}, NEVER

    def __len__(self):
        return len(self._heap)

    def __iter__(self):
        return iter([entry[2] for entry in self._heap])

    def queued(self, producer_id):
        """Groups of one producer."""
        return self._by_producer.get(producer_id, 0)

    def stats(self):
        return {}

    def add(self, Group group not None):
        """Queues a whole group behind the others; O(log n)."""
        group.number = self._next
        self._next += 1
        self.push(group)

    def put_back(self, list groups not None):
        """Queues groups of a batch again: ahead of all others of their version, since they came first."""
        cdef Group group
        for group in groups:
            self.push(group)

    cdef push(self, Group group):
        heappush(self._heap, (group.oldest(), group.number, group))
        count(self._by_producer, group.producer_id, 1)

    def apply(self, shares):
        """Shares change nothing here."""

    def take(self, Py_ssize_t size, bint by_rows, double now_s, *, bint last, live=()):
        """The groups of the next batch; None while there is none.

        For a size in rows, whole groups in order until the next does not fit; the first always does.
        """
        cdef list chosen = []
        cdef Py_ssize_t left = size, takes
        cdef Group group
        if not (by_rows and last and self._heap) and self.size(by_rows) < size:
            return None
        while self._heap and left > 0:
            group = <Group>self._heap[0][2]
            takes = group.rows if by_rows else 1
            if chosen and takes > left:
                break
            chosen.append(heappop(self._heap)[2])
            count(self._by_producer, group.producer_id, -1)
            left -= takes
        return chosen

    cdef Py_ssize_t size(self, bint by_rows):
        cdef Py_ssize_t rows = 0
        if not by_rows:
            return len(self._heap)
        for entry in self._heap:
            rows += (<Group>entry[2]).rows
        return rows

    def remove(self, list groups not None):
        """Takes these groups out of the queue."""
        cdef set gone = {id(group) for group in groups}
        cdef Group group
        self._heap = [entry for entry in self._heap if id(entry[2]) not in gone]
        heapify(self._heap)
        for group in groups:
            count(self._by_producer, group.producer_id, -1)


cdef class GroupQueues:
    """Groups in part, whole ones, and those in batches whose step is not over. Any thread; never blocks.

    Args:
        scheduler: the policy, an empty FairScheduler, OldestScheduler or AtroposScheduler.
        timeout_s: a group in part is late after so many seconds.

    Attributes:
        moving: records are on their way from the lanes to `add`; `moves`: how often some were.
        put_backs: how often something was put back.
        looks: groups in the scheduler that `cut` has looked at.
    """

    cdef readonly object scheduler
    cdef readonly GroupAssembler partial
    cdef list _whole                 # not admitted to the scheduler yet
    cdef InFlight _in_flight
    cdef list _in_step
    cdef object _split               # the one of all groups in the scheduler; None: any
    cdef int64_t _oldest             # no group in the scheduler is stamped with an older version
    cdef public bint moving
    cdef public Py_ssize_t moves
    cdef readonly bint closed
    cdef readonly Py_ssize_t put_backs, looks

    def __init__(self, scheduler not None, double timeout_s):
        self.scheduler, self.partial = scheduler, GroupAssembler(timeout_s)
        self._whole, self._in_flight, self._in_step, self._oldest = [], InFlight(), [], LATEST

    # -- coming in

    def add(self, list records not None, double now_s):
        """Takes records over, with their leases, into groups; False, and takes none, once closed."""
        cdef Change change = Change()
        cdef Group group
        if self.closed:
            return False
        for record in records:
            group = self.partial.join(record, now_s)
            if group is not None:
                group.queued = True
                self._whole.append(group)
        return True

    @property
    def whole(self):
        """The whole groups that are not admitted yet: a copy."""
        return list(self._whole)

    def admit(self, Group group, split, int64_t current, most_stale, shares):
        """Moves one whole group, or with None all, to the scheduler.

        Returns (groups of another split than `split`, stale groups): those are out of the queues.
        """
        cdef Change change = Change()
        cdef list left_out = [], stale = []
        cdef list groups = list(self._whole) if group is None else [each for each in self._whole if each is group]
        cdef Group each
        self.scheduler.apply(shares)
        for each in groups:
            if split is not None and each.split != split:
                left_out.append(each)
            elif most_stale is not None and is_stale(each.oldest(), current, most_stale):
                stale.append(each)
            else:
                self._oldest = oldest_of(each, self._oldest)
                self.scheduler.add(each)
                continue
            each.queued = False
        if group is None:
            self._whole.clear()
        elif groups:
            self._whole.remove(group)
        return left_out, stale

    def reject(self, Group group not None):
        """Takes a whole group out that is not admitted yet; returns whether it was there."""
        cdef Change change = Change()
        if group not in self._whole:
            return False
        self._whole.remove(group)
        group.queued = False
        return True

    def put_back(self, list groups not None):
        """Queues unread groups of a batch before all others, in their order; False, and takes none, once closed.

        A group that is queued already stays where it is.
        """
        cdef Change change = Change()
        cdef list back = []
        cdef Group group
        if self.closed:
            return False
        for group in groups:
            group.first()  # raises before anything has changed
        self.put_backs += 1
        for group in groups:
            group.leave_flight()
            if not group.queued:
                group.queued = True
                back.append(group)
                self._oldest = oldest_of(group, self._oldest)
                if group.split != self._split:
                    self._split = None
        self.scheduler.put_back(back)
        return True

    # -- going out

    cdef tuple cut(self, split, int64_t current, most_stale):
        """Takes out of the scheduler what a batch of this split and staleness must not get.

        Returns (groups of another split, stale groups). Looks at every group only if some may be unfit.
        """
        cdef list left_out = [], stale = []
        cdef bint splits = split is not None and split != self._split
        cdef Group group
        self._split = split
        if not (splits or (most_stale is not None and is_stale(self._oldest, current, most_stale))):
            return left_out, stale
        self._oldest = LATEST
        for group in self.scheduler:
            self.looks += 1
            if splits and group.split != split:
                left_out.append(group)
            elif most_stale is not None and is_stale(group.oldest(), current, most_stale):
                stale.append(group)
            else:
                self._oldest = oldest_of(group, self._oldest)
                continue
            group.queued = False
        if left_out or stale:
            self.scheduler.remove(left_out + stale)
        return left_out, stale

    def take(self, Py_ssize_t size, bint by_rows, double now_s, *, bint last, shares, live, bint counted,
             split=None, int64_t current=-1, most_stale=None):
        """Takes out what the next batch must not get, and then its groups.

        Returns (its groups, None while there is none; those of another split; stale ones).

        Args:
            size: of the batch in groups, or `by_rows` in rows.
            now_s: time.monotonic().
            last: no more groups can come.
            shares: what environments requested, by producer id; live: ids of living producers.
            counted: against the off-policy limit, until `finish`, `put_back`, or the end of their step.
            split: of all groups; None: any.
            current, most_stale: the version in training, and how far behind it a group may be; None: any.
        """
        cdef Change change = Change()
        cdef list chosen
        cdef Group group
        left_out, stale = self.cut(split, current, most_stale)
        self.scheduler.apply(shares)
        chosen = self.scheduler.take(size, by_rows, now_s, last=last, live=live)
        if not chosen:
            return None, left_out, stale
        for group in chosen:
            group.queued = False
            if counted:
                group.enter_flight(self._in_flight)
        return chosen, left_out, stale

    def late(self, double now_s, busy, left):
        """Takes groups out that will never be whole, and returns them: (too late or contradictory, left behind).

        Args:
            busy: producers with records to take: their groups may still grow.
            left: producers that will put nothing more; None if records may be on their way.
        """
        cdef Change change = Change()
        return self.partial.late(now_s, busy), self.partial.orphans(left) if left is not None else []

    def close(self):
        """Takes all groups out, for ever, and returns them."""
        cdef Change change = Change()
        cdef list complete = list(self.scheduler), before = self._in_step
        cdef list groups = [*self._whole, *complete, *self.partial]
        self.closed = True
        self.over(before)
        self._in_step = []
        self._whole.clear()
        self.scheduler.remove(complete)
        self.partial = GroupAssembler(0.0)
        return groups

    # -- steps

    def begin_step(self, list groups not None):
        """Starts the step of these groups, and ends the step before."""
        cdef Change change = Change()
        cdef list before = self._in_step
        self.over(before)
        self._in_step = [] if self.closed else list(groups)

    def end_step(self):
        """Ends the step: its groups are in the policy now."""
        cdef Change change = Change()
        cdef list before = self._in_step
        self.over(before)
        self._in_step = []

    def finish(self, list groups not None):
        """Ends the step of these groups only."""
        cdef Change change = Change()
        self.over(groups)

    def begin_again(self):
        """Ends every step: no batch is being formed, so what an exception still holds is in none."""
        self._in_flight, self._in_step = InFlight(), []

    cdef over(self, list groups):
        cdef Group group
        for group in groups:
            group.leave_flight()

    # -- counts

    @property
    def committed(self):
        """Groups that are in no batch, and those in batches whose step is not over."""
        return self.queued(None) + self._in_flight.groups

    @property
    def in_flight(self):
        """Groups in batches whose step is not over."""
        return self._in_flight.groups

    @property
    def complete(self):
        """The groups in the scheduler: a copy."""
        return list(self.scheduler)

    def queued(self, producer_id):
        """Groups in the scheduler of one producer, or, for None, all groups that are in no batch."""
        if producer_id is not None:
            return self.scheduler.queued(producer_id)
        return len(self.scheduler) + len(self._whole) + len(self.partial)


cdef bint is_stale(int64_t stamped, int64_t current, int64_t most):
    return stamped >= 0 and current >= 0 and stamped != LATEST and current - stamped > most


cdef int64_t oldest_of(Group group, int64_t known):
    cdef int64_t version = group.oldest()
    return version if 0 <= version < known else known


cdef count(dict counts, key, Py_ssize_t by):
    """Adds to a count; one of 0 is not kept."""
    cdef Py_ssize_t now = counts.get(key, 0) + by
    if now:
        counts[key] = now
    else:
        counts.pop(key, None)
