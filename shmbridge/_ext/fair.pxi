"""Policy "fair": oldest first in an environment, token-fair over environments by weight, minimum shares.

The order over environments is weighted deficit round robin, in tokens: M. Shreedhar and G. Varghese, "Efficient
Fair Queueing Using Deficit Round Robin", SIGCOMM 1995: every visit adds a quantum to a queue's deficit counter, and
the queue is served while the counter lasts.
"""

cdef enum:
    BEHIND_A_HEAD = 32  # groups of a flow tried for the rest of a batch
    MOST_FLOWS = 256    # kept while empty, for their weights

MIN_WEIGHT = 0.01       # an environment's least weight, as upstream


cdef class Flow:
    """The groups of one producer, and the tokens it may spend."""

    cdef str producer_id
    cdef object queue                # a deque, oldest first
    cdef double weight, deficit
    cdef bint visited
    cdef Py_ssize_t head_tokens      # of its oldest group, at least 1; 0: not known
    cdef Py_ssize_t groups, rows     # queued here or returned
    cdef Py_ssize_t missed           # batches in a row that lacked its guaranteed share
    cdef Py_ssize_t passed           # batches without it, although it had the turn: its oldest group did not fit

    def __init__(self, str producer_id):
        self.producer_id, self.queue, self.weight = producer_id, deque(), 1.0

    cdef Py_ssize_t tokens_of_head(self) except -1:
        if self.head_tokens == 0:
            self.head_tokens = max(<Py_ssize_t>(<Group>self.queue[0]).tokens, 1)
        return self.head_tokens

    cdef Group pop(self, Py_ssize_t place=0):
        """Removes and returns a group, by default the oldest."""
        if place:
            group = self.queue[place]
            del self.queue[place]
            return group
        self.head_tokens = self.passed = 0
        return self.queue.popleft()

    cdef replace(self, groups):
        self.queue, self.head_tokens, self.passed = groups, 0, 0


cdef class RoundRobin:
    """The flows that have groups, in the order of their turns.

    A turn costs O(1) while weights are comparable, and never more than a few passes over the flows: rounds that
    would serve no flow are added at once. With a single flow, deficits are not computed.
    """

    cdef object _waiting             # a deque of flows
    cdef list _aside
    cdef Py_ssize_t _quantum         # added to the heaviest flow per visit: the largest group seen, in tokens
    cdef double heaviest
    cdef Py_ssize_t visits           # so far

    def __init__(self):
        self._waiting, self._aside, self._quantum, self.heaviest = deque(), [], 1, 1.0

    cdef list flows(self):
        return [*self._aside, *self._waiting]

    cdef Flow only(self):
        """The flow, if there is just one."""
        return self._waiting[0] if len(self._waiting) == 1 and not self._aside else None

    cdef Flow overdue(self):
        """The flow passed over most often, if more than once. Looks at every flow."""
        cdef Flow flow, most = None
        for flow in self._waiting:
            if flow.passed > 1 and (most is None or flow.passed > most.passed):
                most = flow
        return most

    cdef join(self, Flow flow, Group group):
        """Queues the first group of an empty flow: it starts with deficit 0, behind the others."""
        flow.deficit, flow.visited = 0.0, False
        self._waiting.append(flow)
        flow.queue.append(group)

    cdef double earned(self, Flow flow):
        self.visits += 1
        return self._quantum * flow.weight / self.heaviest

    cdef Flow turn(self):
        """The flow that has the turn, of those not set aside; it may spend its oldest group. None: no flow."""
        cdef Flow flow
        cdef double rounds
        if len(self._waiting) <= 1:
            return self._waiting[0] if self._waiting else None
        while True:
            for _ in range(len(self._waiting)):
                flow = self._waiting[0]
                self._quantum = max(self._quantum, flow.tokens_of_head())
                if not flow.visited:
                    flow.visited = True
                    flow.deficit += self.earned(flow)
                if flow.deficit >= flow.tokens_of_head():
                    return flow
                flow.visited = False
                self._waiting.rotate(-1)
            rounds = NEVER
            for flow in self._waiting:
                rounds = fmin(rounds, ceil((flow.tokens_of_head() - flow.deficit) / self.earned(flow)))
            for flow in self._waiting:
                flow.deficit += fmax(rounds - 1, 0) * self.earned(flow)

    cdef Group serve(self, Flow flow, Py_ssize_t place=0):
        """Takes a group of a flow and charges its tokens; before the flow's turn this leaves it in debt."""
        if self.only() is None:
            flow.deficit -= (<Group>flow.queue[place]).tokens if place else flow.tokens_of_head()
        cdef Group group = flow.pop(place)
        if not flow.queue:
            (self._aside if flow in self._aside else self._waiting).remove(flow)
        return group

    cdef list serve_turns(self, Py_ssize_t count):
        """Takes `count` groups, each at its flow's turn; there must be that many."""
        cdef list served = []
        cdef Flow flow
        while len(served) < count:
            flow = self.turn()
            if flow is None:
                break
            if len(self._waiting) == 1:
                for _ in range(min(count - len(served), len(flow.queue))):
                    served.append(flow.pop())
            while flow.queue and len(served) < count and flow.deficit >= flow.tokens_of_head():
                flow.deficit -= flow.tokens_of_head()
                served.append(flow.pop())
            if not flow.queue:
                self._waiting.popleft()
        return served

    cdef list drain(self):
        """Removes and returns all groups of all flows, and zeroes the flows' counts."""
        cdef list groups = []
        cdef Flow flow
        for flow in self._waiting:
            groups += flow.queue
            flow.replace(deque())
            flow.groups = flow.rows = 0
        self._waiting.clear()
        return groups

    cdef Flow set_aside(self):
        """Passes over the flow that has the turn, until `restore`: it then has the next turn."""
        self._aside.append(self._waiting.popleft())
        return self._aside[-1]

    cdef restore(self):
        """Ends a batch: flows passed over come first in the next; debts beyond one visit are forgiven."""
        cdef Flow flow
        self._waiting.extendleft(reversed(self._aside))
        self._aside.clear()
        for flow in self._waiting:
            flow.deficit = fmax(flow.deficit, -self.earned(flow))

    cdef keep(self, Flow flow, groups):
        """Replaces a flow's groups by these, a part of them."""
        flow.replace(groups)
        if not groups and flow in self._waiting:
            self._waiting.remove(flow)


cdef class FairBatch:
    """A batch being formed; `left` is the room left, below 0 if its only group is too large."""

    cdef list groups
    cdef Py_ssize_t left
    cdef bint _by_rows
    cdef dict _by_producer

    def __init__(self, Py_ssize_t size, bint by_rows):
        self.groups, self.left, self._by_rows, self._by_producer = [], size, by_rows, {}

    cdef Py_ssize_t size_of(self, Group group):
        return group.rows if self._by_rows else 1

    cdef bint has_room_for(self, Group group):
        """Whether the group fits; the first of a batch always does."""
        return not self.groups or self.left >= self.size_of(group)

    cdef append(self, Group group):
        self.groups.append(group)
        self.left -= self.size_of(group)
        count(self._by_producer, group.producer_id, self.size_of(group))

    cdef Py_ssize_t of(self, Flow flow) except -1:
        """How much is chosen of one flow, in the batch's unit."""
        return self._by_producer.get(flow.producer_id, 0)


def number_of(Group group not None):
    return group.number


cdef class FairScheduler:
    """Policy "fair": a queue per producer. A producer that requested no share has weight 1.

    Args:
        allocation_wait_s: seconds a batch is delayed for a living environment that is promised a part of it.
    """

    cdef double _allocation_wait_s, _formable_since_s
    cdef readonly double waits_until_s  # time.monotonic() until which a batch waits for certain groups
    cdef readonly object formed
    cdef object _applied             # the shares that are applied
    cdef list _allocated             # (flow, its part of every batch)
    cdef dict _flows                 # by producer id
    cdef RoundRobin _round_robin
    cdef object _returned            # groups that come before all others
    cdef Py_ssize_t _count, _rows, _next, _missed, _short, _over

    def __init__(self, double allocation_wait_s):
        self._allocation_wait_s, self._applied = allocation_wait_s, None
        self._allocated, self._flows, self._round_robin, self._returned = [], {}, RoundRobin(), deque()
        self._formable_since_s = self.waits_until_s = NEVER

    def __len__(self):
        return self._count

    def __iter__(self):
        return iter(self.everything())

    cdef list everything(self):
        cdef list groups = list(self._returned)
        cdef Flow flow
        for flow in self._round_robin.flows():
            groups += flow.queue
        return groups

    def queued(self, producer_id):
        """Groups of one producer."""
        cdef Flow flow = self._flows.get(producer_id)
        return 0 if flow is None else flow.groups

    def stats(self):
        return {
            "allocations_missed_total": self._missed,
            "batches_short_total": self._short,
            "batches_over_total": self._over,
        }

    @property
    def visits(self):
        """How often a flow's turn was looked at: what a batch costs beyond its groups."""
        return self._round_robin.visits

    @property
    def flows(self) -> int:
        """Producers that are known now."""
        return len(self._flows)

    # -- coming in

    def add(self, Group group not None):
        """Queues a whole group behind the others; O(1)."""
        cdef Flow flow = self.flow_of(group.producer_id)
        group.number = self._next
        self._next += 1
        if flow.queue:
            flow.queue.append(group)
        else:
            self._round_robin.join(flow, group)
        self.book(flow, group, 1)

    def put_back(self, list groups not None):
        """Queues groups of a batch before all others, in their order; O(1) per group."""
        cdef Group group
        self._returned.extendleft(reversed(groups))
        for group in groups:
            self.book(self.flow_of(group.producer_id), group, 1)

    cdef book(self, Flow flow, Group group, Py_ssize_t by):
        flow.groups += by
        flow.rows += by * group.rows
        self._count += by
        self._rows += by * group.rows

    cdef Flow flow_of(self, str producer_id):
        cdef Flow flow = self._flows.get(producer_id)
        if flow is None:
            if len(self._flows) >= MOST_FLOWS:
                known = self._applied or {}
                self._flows = {
                    name: each for name, each in self._flows.items() if (<Flow>each).groups or name in known}
            flow = self._flows[producer_id] = Flow(producer_id)
            self._round_robin.heaviest = fmax(self._round_robin.heaviest, 1.0)
        return flow

    def remove(self, list groups not None):
        """Takes these groups out of the queue."""
        cdef set gone = {id(group) for group in groups}
        cdef Flow flow
        cdef Group group
        self._returned = deque([group for group in self._returned if id(group) not in gone])
        for flow in self._round_robin.flows():
            self._round_robin.keep(flow, deque([each for each in flow.queue if id(each) not in gone]))
        for group in groups:
            self.book(self.flow_of(group.producer_id), group, -1)

    # -- choosing

    def take(self, Py_ssize_t size, bint by_rows, double now_s, *, bint last, live=()):
        """The groups of the next batch; None while there is none.

        O(1) per group chosen, and O(environments) per batch.
        """
        cdef bint enough = (self._rows if by_rows else self._count) >= size or (last and by_rows and self._count > 0)
        cdef list needs
        cdef Flow only
        cdef FairBatch chosen
        needs = [(flow, int(part * size)) for flow, part in self._allocated if int(part * size)]
        if not enough or (needs and not last and self.waits(needs, by_rows, now_s, live)):
            if not enough:
                self._formable_since_s = self.waits_until_s = NEVER
            return None
        self._formable_since_s = self.waits_until_s = NEVER
        if not by_rows and size == self._count and not needs:
            return self.all_there_is()
        if not (needs or by_rows or self._returned):
            only = self._round_robin.only()
            return self.counted_out(self._round_robin.serve_turns(size), only)
        chosen = FairBatch(size, by_rows)
        self.choose(chosen, needs)
        self.note_what_is_amiss(chosen, needs, live)
        return self.counted_out(chosen.groups, None)

    cdef list all_there_is(self):
        cdef list groups = [*self._returned, *self._round_robin.drain()]
        cdef Group group
        cdef Flow flow
        for group in self._returned:
            flow = self._flows[group.producer_id]
            flow.groups = flow.rows = 0
        self._returned.clear()
        self._count = self._rows = 0
        groups.sort(key=number_of)
        return groups

    cdef list counted_out(self, list groups, Flow only):
        """Books chosen groups out, and returns them oldest first; `only`: all are of that flow."""
        cdef Group group
        for group in groups:
            self.book(only if only is not None else self._flows[group.producer_id], group, -1)
        if only is None:
            groups.sort(key=number_of)
        return groups

    cdef choose(self, FairBatch chosen, list needs):
        cdef RoundRobin round_robin = self._round_robin
        cdef Flow flow
        cdef list aside = []
        while self._returned and chosen.has_room_for(self._returned[0]):
            chosen.append(self._returned.popleft())
        flow = round_robin.overdue()
        if flow is not None and chosen.has_room_for(flow.queue[0]):
            chosen.append(round_robin.serve(flow))  # next to guaranteed shares it may never fit
        for flow, need in sorted(needs, key=missed_most):
            while flow.queue and chosen.of(flow) < need and chosen.left and chosen.has_room_for(flow.queue[0]):
                chosen.append(round_robin.serve(flow))
        while chosen.left or (needs and not aside):
            flow = round_robin.turn()
            if flow is None:
                break
            if chosen.left and chosen.has_room_for(flow.queue[0]):
                chosen.append(round_robin.serve(flow))
            else:
                flow.passed += chosen.of(flow) == 0
                aside.append(round_robin.set_aside())
        for flow in aside:
            self.look_behind_the_head(chosen, flow)
        round_robin.restore()

    cdef look_behind_the_head(self, FairBatch chosen, Flow flow):
        cdef Py_ssize_t place = 1
        while chosen.left and place < min(<Py_ssize_t>len(flow.queue), BEHIND_A_HEAD):
            if chosen.has_room_for(flow.queue[place]):
                chosen.append(self._round_robin.serve(flow, place))
            else:
                place += 1

    cdef note_what_is_amiss(self, FairBatch chosen, list needs, live):
        cdef Flow flow
        cdef bint short_of
        self._short += chosen.left > 0
        self._over += chosen.left < 0
        for flow, need in needs:
            short_of = chosen.of(flow) < need
            flow.missed = flow.missed + 1 if short_of else 0
            self._missed += short_of and flow.producer_id in live

    # -- guaranteed shares

    def apply(self, shares not None):
        """Takes over what environments request now, by producer id."""
        cdef Flow flow
        cdef double total = 0.0
        if shares is self._applied:
            return
        self._applied, self._round_robin.heaviest = shares, 0.0
        for producer_id, share in shares.items():
            self.flow_of(producer_id).weight = fmax(share.weight, MIN_WEIGHT)
            total += share.min_allocation or 0.0
        for flow in self._flows.values():
            self._round_robin.heaviest = fmax(self._round_robin.heaviest, flow.weight)
        self._round_robin.heaviest = self._round_robin.heaviest or 1.0
        self._allocated = [
            (self._flows[producer_id], share.min_allocation / fmax(1.0, total))
            for producer_id, share in shares.items() if share.min_allocation]

    cdef bint waits(self, list needs, bint by_rows, double now_s, live) except -1:
        """Whether the batch waits for the guaranteed share of a living producer."""
        cdef Flow flow
        cdef bint lacks = False
        for flow, need in needs:
            lacks = lacks or ((flow.rows if by_rows else flow.groups) < need and flow.producer_id in live)
        if not lacks:
            return False
        self._formable_since_s = fmin(self._formable_since_s, now_s)
        self.waits_until_s = self._formable_since_s + self._allocation_wait_s
        return now_s < self.waits_until_s


def missed_most(need):
    return -(<Flow>need[0]).missed
