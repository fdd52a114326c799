"""The Atropos API server's queue: the same groups in the same batches in the same order, without its scans of the
whole queue. An item is only a number of sequences and an environment.
"""


@cython.final
cdef class Entry:
    """An item in the queue; lower numbers come first."""

    cdef Py_ssize_t number, size
    cdef object item, env_id         # env_id: None of an unregistered producer


cdef Entry entry_of(Py_ssize_t number, item, Py_ssize_t size, env_id):
    cdef Entry entry = Entry.__new__(Entry)
    entry.number, entry.item, entry.size, entry.env_id = number, item, size, env_id
    return entry


def place_of(Entry entry not None):
    return entry.number


cdef Py_ssize_t sequences_of(entries) except -1:
    cdef Py_ssize_t sequences = 0
    cdef Entry entry
    for entry in entries:
        sequences += entry.size
    return sequences


cdef class SizedQueue:
    """Queue, buffers and formed batches of one training run. For one thread at a time.

    Groups of one size stand in a line; if an environment has a minimum allocation, there is a line for each
    environment, too. A batch takes from the front of lines only, so that forming one costs its own groups and the
    number of lines, whatever the length of the queue.

    Args:
        batch_size: sequences in a batch.
        step: batches formed before.

    Attributes:
        buffered: groups that wait for others to fill their environment's group size.
    """

    cdef public Py_ssize_t step
    cdef Py_ssize_t _batch_size
    cdef dict _envs                  # env_id -> EnvWeight
    cdef set _connected
    cdef dict _lines                 # (environment, None: all; group size) -> deque of entries
    cdef bint _line_per_env, _changed
    cdef dict _sizes                 # groups queued, by size
    cdef dict _by_env                # env_id -> groups queued, by size
    cdef dict _buffers               # env_id -> SizeBuffer
    cdef list _formed                # batches of entries, the next one last
    cdef Py_ssize_t _queued, _next, _first
    cdef readonly Py_ssize_t buffered

    def __init__(self, Py_ssize_t batch_size, Py_ssize_t step=0):
        self.step, self._batch_size, self._envs, self._connected, self._lines = step, batch_size, {}, set(), {}
        self._sizes, self._by_env, self._buffers, self._formed, self._changed = {}, {}, {}, [], True

    # -- environments

    @property
    def batch_size(self):
        """Sequences in a batch."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, Py_ssize_t sequences):
        self._changed |= sequences != self._batch_size
        self._batch_size = sequences

    def register(self, env):
        """Connects an environment, or changes its request: an EnvWeight.

        Raises ValueError for a group size below 1.
        """
        if env.group_size < 1:
            raise ValueError(f"environment {env.env_id} has groups of {env.group_size}: at least 1")
        self._envs[env.env_id] = env
        self._connected.add(env.env_id)
        self.draw_lines()

    def disconnect(self, env_id):
        """Stops counting its weight and its allocation; its queued groups stay. KeyError if it is unknown."""
        self._envs[env_id]
        self._connected.discard(env_id)
        self.draw_lines()

    def replace(self, env):
        """Replaces what a registered environment requested; it stays as it is, connected or not."""
        self._envs[env.env_id] = env

    @property
    def envs(self):
        """The requests of all environments, by env_id: a copy."""
        return dict(self._envs)

    @property
    def connected(self):
        """The requests of the connected environments, in the order of their registration."""
        return [env for env in self._envs.values() if env.env_id in self._connected]

    cdef draw_lines(self):
        cdef bint per_env = False
        for env in self.connected:
            per_env = per_env or env.min_allocation is not None
        self._changed = True
        if per_env != self._line_per_env:
            entries = self.in_order()
            self._line_per_env, self._lines = per_env, {}
            for entry in entries:
                self.line_of(entry).append(entry)

    # -- coming in

    def add(self, item, Py_ssize_t size, env_id):
        """Queues an item of `size` sequences, or buffers it until others fill its environment's group size; O(1)
        unless buffered.

        Returns (the items that entered the queue by it, the sequences that its environment's buffer holds now;
        None: not buffered).
        """
        cdef SizeBuffer buffer
        env = self._envs.get(env_id)
        if env is None or size == env.group_size:
            self.enqueue(item, size, env_id)
            return [item], None
        buffer = self._buffers.get(env_id)
        if buffer is None:
            buffer = self._buffers[env_id] = SizeBuffer()
        whole = buffer.add(item, size, env.group_size)
        self.buffered += 1 - len(whole)
        for part, part_size in whole:
            self.enqueue(part, part_size, env_id)
        return [part for part, _ in whole], buffer.sequences

    def put_back(self, list batch not None):
        """Returns (item, size, environment) of batches, one after the other: whole batches come next, and count no
        further step.

        Groups of an incomplete batch go before all others.
        """
        cdef list whole = [[]], each
        for item, size, env_id in batch:
            if sequences_of(whole[-1]) == self._batch_size:
                whole.append([])
            (<list>whole[-1]).append(entry_of(0, item, size, env_id))
        if all([sequences_of(each) == self._batch_size for each in whole]):
            self._formed += whole[::-1]
        else:
            self.stand_first([entry for each in whole for entry in each])

    cdef stand_first(self, list entries):
        cdef Entry entry
        for entry in reversed(entries):
            self._first -= 1
            entry.number = self._first
            self.line_of(entry).appendleft(entry)
            self.book(entry, 1)

    cdef enqueue(self, item, Py_ssize_t size, env_id):
        cdef Entry entry = entry_of(self._next, item, size, env_id)
        self._next += 1
        self.line_of(entry).append(entry)
        self.book(entry, 1)

    cdef object line_of(self, Entry entry):
        key = (entry.env_id if self._line_per_env else None, entry.size)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
        return line

    cdef book(self, Entry entry, Py_ssize_t by):
        self._changed = True
        self._queued += by
        count(self._sizes, entry.size, by)
        count(self._by_env.setdefault(entry.env_id, {}), entry.size, by)

    # -- batches

    def next_batch(self):
        """Returns the newest formed batch; if there is none, forms all it can first, and `step` rises by their
        number.

        None if there is none.
        """
        self.form()
        return [(<Entry>entry).item for entry in self._formed.pop()] if self._formed else None

    def form(self):
        """Forms all batches it can, unless one still waits; returns the items that left the queue."""
        cdef list left = [], batch
        if not self._formed and self._changed:
            while True:
                batch = self.one_batch()
                if batch is None:
                    break
                self.step += 1
                self._formed.append(batch)
                left += [(<Entry>entry).item for entry in batch]
            self._changed = False
        return left

    cdef list one_batch(self):
        cdef Entry entry
        cdef list batch
        cdef Py_ssize_t largest
        self._lines = {key: line for key, line in self._lines.items() if line}
        largest = max(self._sizes, default=0)
        if largest == 0 or self._batch_size < 1:
            return None
        batch = self.allocated(largest) if self._line_per_env else self.in_packs(largest)
        if sequences_of(batch) != self._batch_size:
            for entry in reversed(batch):
                self.line_of(entry).appendleft(entry)
            return None
        for entry in batch:
            self.book(entry, -1)
        return batch

    cdef list in_packs(self, Py_ssize_t largest):
        """As grab_exact_from_heterogeneous_queue: packs of equal groups, as large as the largest group; the pack
        completed first goes first.
        """
        cdef Packs packs = Packs(self._lines, largest)
        cdef list batch = []
        cdef Py_ssize_t left = self._batch_size
        while left > 0:
            line = packs.first()
            if line is None:
                break
            for _ in range(packs.groups(line)):
                batch.append(self._lines[line].popleft())
                left -= line[1]
                if left <= 0:
                    break
            else:
                packs.taken()
        return batch

    cdef list allocated(self, Py_ssize_t largest):
        """As grab_batch_with_minimum_allocations: to each its minimum, then the first groups that fit.

        Empty if an environment has nothing for its minimum.
        """
        cdef Packs packs
        cdef list batch = []
        cdef Py_ssize_t left = self._batch_size, got
        # groups in a pack
        packing = {key: largest // key[1] for key in self._lines if key[1] and not largest % key[1]}
        packable = {
            key: len(self._lines[key]) // groups * groups
            for key, groups in packing.items() if len(self._lines[key]) >= groups}
        minima = self.minima(packable)
        if minima is None:
            return []
        for env_id, minimum in minima.items():
            packs = Packs({key: self._lines[key] for key in packable if key[0] == env_id}, largest)
            got = 0
            while got < minimum:
                line = packs.first()
                if line is None:
                    break
                if line[1] > left:
                    packs.forget()  # nor will the rest of its line fit
                    continue
                for _ in range(packs.groups(line)):
                    if line[1] > left or got >= minimum:
                        break
                    batch.append(self._lines[line].popleft())
                    packable[line] -= 1
                    left -= line[1]
                    got += line[1]
                else:
                    packs.taken()
        self.fill(batch, left, packable)
        return batch

    cdef dict minima(self, dict packable):
        """The sequences that each environment must have; None if one of them has none queued."""
        cdef dict minima = {}, smallest = {}
        cdef Py_ssize_t total = 0
        for env in self.connected:
            minimum = int(self._batch_size * env.min_allocation) if env.min_allocation is not None else 0
            if minimum > 0:
                minima[env.env_id] = minimum
                total += minimum
        for env_id in minima:
            smallest[env_id] = min([size for of, size in packable if of == env_id], default=0)
            if not smallest[env_id]:
                return None
        if total > self._batch_size:
            scale = self._batch_size / <double>total
            for env_id in minima:
                minima[env_id] = max(smallest[env_id], int(minima[env_id] * scale))
        return minima

    cdef fill(self, list batch, Py_ssize_t left, dict packable):
        cdef list heads = []  # (number, line, groups to take from it)
        for key, groups in packable.items():
            if groups and key[0] is not None:  # unregistered producers: never in a batch, as upstream
                heads.append(((<Entry>self._lines[key][0]).number, key, groups))
        heapify(heads)
        while left and heads:
            _, key, groups = heads[0]
            if key[1] > left or not groups:
                heappop(heads)
                continue
            batch.append(self._lines[key].popleft())
            left -= key[1]
            if groups > 1:
                heapreplace(heads, ((<Entry>self._lines[key][0]).number, key, groups - 1))
            else:
                heappop(heads)

    # -- state

    @property
    def queue_size(self):
        """Groups queued; buffered and formed ones do not count, as upstream."""
        return self._queued

    def __iter__(self):
        """Over all items: formed, queued, buffered."""
        cdef list items = [(<Entry>entry).item for batch in self._formed for entry in batch]
        items += self.queued()
        for buffer in self._buffers.values():
            items += (<SizeBuffer>buffer).items
        return iter(items)

    def queued(self):
        """The queued items, in order: a list."""
        return [(<Entry>entry).item for entry in self.in_order()]

    def by_env(self):
        """The queue of each environment: (groups, sequences, largest group); None: of unregistered producers.

        O(environments), whatever the length of the queue.
        """
        cdef Change change = Change()  # any thread asks
        cdef dict found = {}
        for env_id, sizes in self._by_env.items():
            if sizes:
                groups = sequences = 0
                for size, many in sizes.items():
                    groups += many
                    sequences += size * many
                found[env_id] = groups, sequences, max(sizes)
        return found

    def remove(self, list items not None):
        """Removes these items, wherever they are. A formed batch that loses an item is undone."""
        cdef set gone = {id(item) for item in items}
        cdef list undone = [], kept = []
        cdef Entry entry
        cdef SizeBuffer buffer
        for batch in self._formed:
            lost = any([id((<Entry>each).item) in gone for each in batch])
            (undone if lost else kept).append(batch)
        self._formed = kept
        self.step -= len(undone)
        for batch in reversed(undone):
            self.stand_first(batch)
        for entry in self.in_order():
            if id(entry.item) in gone:
                self.book(entry, -1)
        self._lines = {
            key: deque([each for each in line if id((<Entry>each).item) not in gone])
            for key, line in self._lines.items()}
        self.buffered = 0
        for buffer in self._buffers.values():
            buffer.keep([each for each in buffer._items if id(each[0]) not in gone])
            self.buffered += len(buffer._items)

    cdef list in_order(self):
        return sorted([entry for line in self._lines.values() for entry in line], key=place_of)


cdef class Packs:
    """Packs from the fronts of lines: equal groups, together as large as the largest group; the pack completed first
    goes first.
    """

    cdef dict _lines
    cdef Py_ssize_t _largest
    cdef list _whole                 # (number of the pack's last group, line)

    def __init__(self, dict lines, Py_ssize_t largest):
        self._lines, self._largest, self._whole = lines, largest, []
        for key in lines:
            if key[1] and not largest % key[1]:
                self.offer(key)

    cdef Py_ssize_t groups(self, key) except -1:
        """Groups in a pack of that line."""
        return self._largest // key[1]

    cdef offer(self, key):
        line, groups = self._lines[key], self.groups(key)
        if len(line) >= groups:
            heappush(self._whole, ((<Entry>line[groups - 1]).number, key))

    cdef object first(self):
        """The line whose pack comes first; None: there is none."""
        return self._whole[0][1] if self._whole else None

    cdef taken(self):
        """The first pack was taken out of its line."""
        self.offer(heappop(self._whole)[1])

    cdef forget(self):
        """Drops the first line: nothing more is taken from it."""
        heappop(self._whole)


cdef class SizeBuffer:
    """Groups of an unusual size, kept until some of them add up to the group size that their environment registered.

    Finds the very groups that upstream's find_groups_summing_to_target finds, without checking all of them for each
    new one. Upstream takes the groups that fit in order of arrival; if those do not add up, it solves the subset sum
    and walks back from its end. Both grow by one group at a time: a running sum, and a set of reachable sums kept as
    the bits of one integer.
    """

    cdef list _items                 # (item, size)
    cdef readonly Py_ssize_t sequences
    cdef Py_ssize_t _target, _looked_at, _sum  # _sum: of the items that fit in order of arrival
    cdef list _fits, _reach          # _reach: bit j of entry i: the first i items can add up to j

    def __init__(self):
        self._items = []
        self.begin_again(0)

    def __len__(self):
        return len(self._items)

    @property
    def items(self):
        """The buffered items, in order of arrival: a copy."""
        return [item for item, _ in self._items]

    def add(self, item, Py_ssize_t size, Py_ssize_t target):
        """Keeps an item; removes and returns the items that now add up to `target`, in order of arrival, with their
        sizes.
        """
        if target != self._target:
            self.begin_again(target)
        self._items.append((item, size))
        self.sequences += size
        places = self.first_fit() or self.any_fit()
        if not places:
            return []
        found = [self._items[place] for place in places]
        self.sequences -= target
        for place in reversed(places):
            del self._items[place]
        self.begin_again(target)
        return found

    def keep(self, list items not None):
        """Replaces the buffered items: (item, size)."""
        self._items, self.sequences = items, 0
        for _, size in items:
            self.sequences += size
        self.begin_again(self._target)

    cdef begin_again(self, Py_ssize_t target):
        self._target, self._looked_at, self._sum, self._fits, self._reach = target, 0, 0, [], [1]

    cdef list first_fit(self):
        cdef Py_ssize_t place, size
        for place in range(self._looked_at, len(self._items)):
            size = self._items[place][1]
            self._looked_at += 1
            if self._sum + size <= self._target:
                self._fits.append(place)
                self._sum += size
                if self._sum == self._target:
                    return self._fits
            self._reach.append(self._reach[-1] | self.moved(size))
        return []

    cdef object moved(self, Py_ssize_t size):
        """The sums reachable by also taking one item of `size`, none of them beyond the target."""
        if size > self._target:
            return 0
        moved = self._reach[-1] << size
        return moved & ((2 << <object>self._target) - 1) if moved.bit_length() > self._target + 1 else moved

    cdef list any_fit(self):
        cdef Py_ssize_t left = self._target, place, size
        cdef list places = []
        if not self._reach[-1] >> left & 1:
            return []
        for place in range(len(self._items) - 1, -1, -1):
            size = self._items[place][1]
            if left >= size and self._reach[place] >> (left - size) & 1:
                places.append(place)
                left -= size
        return places[::-1]


cdef class AtroposScheduler:
    """Policy "atropos": upstream's queue, filled from lanes. A size counts rows: the run's batch size."""

    cdef readonly double waits_until_s
    cdef dict _applied               # env_id -> EnvWeight
    cdef object _seen                # the shares that are applied
    cdef SizedQueue _queue
    cdef dict _by_producer           # groups neither in a formed batch nor buffered

    def __init__(self):
        self.waits_until_s, self._applied, self._queue, self._by_producer = NEVER, {}, SizedQueue(0), {}

    def __len__(self):
        return self._queue._queued

    def __iter__(self):
        return iter(self._queue)

    @property
    def formed(self):
        """Batches formed: the steps of a run under this policy."""
        return self._queue.step

    def queued(self, producer_id):
        """Groups of one producer."""
        return self._by_producer.get(producer_id, 0)

    def by_env(self):
        """As SizedQueue.by_env."""
        return self._queue.by_env()

    def stats(self):
        return {"groups_buffered": self._queue.buffered}

    def add(self, Group group not None):
        """Queues a whole group behind the others."""
        for queued in self._queue.add(group, group.rows, group.env_id)[0]:
            count(self._by_producer, (<Group>queued).producer_id, 1)

    def put_back(self, list groups not None):
        """A whole batch comes next; groups of a partial batch go before all others."""
        cdef Py_ssize_t known = self._queue._queued
        cdef Group group
        self._queue.put_back([(group, group.rows, group.env_id) for group in groups])
        if self._queue._queued > known:
            for group in groups:
                count(self._by_producer, group.producer_id, 1)

    def take(self, Py_ssize_t size, bint by_rows, double now_s, *, bint last, live=()):
        """The groups of the next batch; None while there is none. Upstream has no shorter last batch."""
        cdef Group group
        self._queue.batch_size = size
        for group in self._queue.form():
            count(self._by_producer, group.producer_id, -1)
        return self._queue.next_batch()

    def apply(self, shares not None):
        """Registers what environments request now, by producer id."""
        if shares is self._seen:
            return
        asked = {share.env_id: share for share in shares.values()}
        for env_id, share in asked.items():
            if self._applied.get(env_id) is not share:  # comparing them would run Python code
                self._queue.register(share)
        for env_id in self._applied.keys() - asked.keys():
            self._queue.disconnect(env_id)
        self._seen, self._applied = shares, asked

    def remove(self, list groups not None):
        """Takes these groups out of the queue."""
        cdef Group group
        self._queue.remove(groups)
        self._by_producer = {}
        for group in self._queue.queued():
            count(self._by_producer, group.producer_id, 1)
