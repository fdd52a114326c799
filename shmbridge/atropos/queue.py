"""The Atropos API server's queue: the same groups in the same batches in the same order, without its scans of
the whole queue.

Pure: an item is only a number of sequences and an environment. Used by the consumer's policy "atropos"
(batching/atropos.py) and by programs that speak the server's protocol. Not thread-safe.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from heapq import heapify, heappop, heappush, heapreplace
from typing import Any, Generic, NamedTuple, TypeVar

from shmbridge.atropos.env_status import EnvWeight, Queued, steer, total_weight
from shmbridge.atropos.size_buffer import SizeBuffer
from shmbridge.errors import NoWeight, UnknownEnvironment

T = TypeVar("T")
_Line = tuple[int | None, int]  # environment (None: all) and group size


class Entry(NamedTuple, Generic[T]):
    """An item in the queue; lower numbers come first."""

    number: int
    item: T
    size: int
    env_id: int | None


class Added(NamedTuple, Generic[T]):
    """The result of adding an item: the items that entered the queue by it, and the sequences its
    environment's buffer holds now (None: not buffered).
    """

    queued: list[T]
    buffered: int | None


class AtroposQueue(Generic[T]):
    """Queue, buffers and formed batches of one training run.

    Groups of one size stand in a line; if an environment has a minimum allocation, there is a line for each
    environment, too. A batch takes from the front of lines only, so that forming one costs its own
    groups and the number of lines, whatever the length of the queue.
    """

    def __init__(self, batch_size: int, step: int = 0) -> None:
        self.step = step
        self._batch_size = batch_size
        self._envs: dict[int, EnvWeight] = {}
        self._connected: set[int] = set()
        self._lines: dict[_Line, deque[Entry[T]]] = {}
        self._line_per_env = False
        self._sizes: Counter[int] = Counter()  # groups queued, by size
        self._by_env: dict[int | None, Counter[int]] = {}
        self._buffers: dict[int, SizeBuffer[T]] = {}
        self._formed: list[list[Entry[T]]] = []
        self._queued = 0
        self.buffered = 0  # groups that wait for others to fill their environment's group size
        self._next, self._first = 0, 0
        self._changed = True

    # -- environments
    # --------------------------------------------------------------------------------------------------------

    @property
    def batch_size(self) -> int:
        """Sequences in a batch."""
        return self._batch_size

    @batch_size.setter
    def batch_size(self, sequences: int) -> None:
        self._changed |= sequences != self._batch_size
        self._batch_size = sequences

    def register(self, env: EnvWeight) -> None:
        """Connects an environment, or changes its request.

        Raises ValueError for a group size below 1.
        """
        if env.group_size < 1:
            raise ValueError(f"environment {env.env_id} has groups of {env.group_size}: at least 1")
        self._envs[env.env_id] = env
        self._connected.add(env.env_id)
        self._draw_lines()

    def disconnect(self, env_id: int) -> None:
        """Stops counting its weight and its allocation; its queued groups stay.

        Raises UnknownEnvironment.
        """
        self._known(env_id)
        self._connected.discard(env_id)
        self._draw_lines()

    def _known(self, env_id: int) -> EnvWeight:
        env = self._envs.get(env_id)
        if env is None:
            raise UnknownEnvironment(
                f"no environment {env_id} among {len(self._envs)}", hint="register it first"
            )
        return env

    def _in_force(self) -> list[EnvWeight]:
        return [env for env in self._envs.values() if env.env_id in self._connected]

    def _draw_lines(self) -> None:
        self._changed = True
        per_env = any(env.min_allocation is not None for env in self._in_force())
        if per_env != self._line_per_env:
            entries = self._in_order()
            self._line_per_env, self._lines = per_env, {}
            for entry in entries:
                self._line_of(entry).append(entry)

    # -- coming in
    # --------------------------------------------------------------------------------------------------------

    def add(self, item: T, size: int, env_id: int | None) -> Added[T]:
        """Queues an item of `size` sequences, or buffers it until others fill its environment's group size;
        O(1) unless buffered.
        """
        env = self._envs.get(env_id) if env_id is not None else None
        if env is None or size == env.group_size:
            self._enqueue(item, size, env_id)
            return Added([item], None)
        buffer = self._buffers.setdefault(env.env_id, SizeBuffer())
        whole = buffer.add(item, size, env.group_size)
        self.buffered += 1 - len(whole)
        for part, part_size in whole:
            self._enqueue(part, part_size, env_id)
        return Added([part for part, _ in whole], buffer.sequences)

    def put_back(self, batch: Sequence[tuple[T, int, int | None]]) -> None:
        """Returns (item, size, environment) of batches, one after the other: whole batches come next, and
        count no further step.

        Groups of an incomplete batch go before all others.
        """
        whole: list[list[Entry[T]]] = [[]]
        for each in batch:
            if sum(entry.size for entry in whole[-1]) == self._batch_size:
                whole.append([])
            whole[-1].append(Entry(0, *each))
        if all(sum(entry.size for entry in each) == self._batch_size for each in whole):
            self._formed += reversed(whole)
        else:
            self._stand_first([entry for each in whole for entry in each])

    def _stand_first(self, entries: list[Entry[T]]) -> None:
        for entry in reversed(entries):
            self._first -= 1
            first = entry._replace(number=self._first)
            self._line_of(first).appendleft(first)
            self._count(first, 1)

    def _enqueue(self, item: T, size: int, env_id: int | None) -> None:
        entry = Entry(self._next, item, size, env_id)
        self._next += 1
        self._line_of(entry).append(entry)
        self._count(entry, 1)

    def _line_of(self, entry: Entry[T]) -> deque[Entry[T]]:
        key = (entry.env_id if self._line_per_env else None, entry.size)
        line = self._lines.get(key)
        if line is None:
            line = self._lines[key] = deque()
        return line

    def _count(self, entry: Entry[T], by: int) -> None:
        self._changed = True
        self._queued += by
        for counter in (self._sizes, self._by_env.setdefault(entry.env_id, Counter())):
            counter[entry.size] += by
            if not counter[entry.size]:
                del counter[entry.size]

    # -- batches
    # --------------------------------------------------------------------------------------------------------

    def next_batch(self) -> list[T] | None:
        """Returns the newest formed batch; if there is none, forms all it can first, and `step` rises by
        their number.

        None if there is none.
        """
        self.form()
        return [entry.item for entry in self._formed.pop()] if self._formed else None

    def form(self) -> list[T]:
        """Forms all batches it can, unless one still waits; returns the items that left the queue."""
        left: list[T] = []
        if not self._formed and self._changed:
            while (batch := self._form()) is not None:
                self.step += 1  # first: no batch is handed out uncounted
                self._formed.append(batch)
                left += [entry.item for entry in batch]
            self._changed = False
        return left

    def _form(self) -> list[Entry[T]] | None:
        self._lines = {key: line for key, line in self._lines.items() if line}
        largest = max(self._sizes, default=0)
        if largest == 0 or self._batch_size < 1:
            return None
        batch = self._allocated(largest) if self._line_per_env else self._in_packs(largest)
        if sum(entry.size for entry in batch) != self._batch_size:
            for entry in reversed(batch):
                self._line_of(entry).appendleft(entry)
            return None
        for entry in batch:
            self._count(entry, -1)
        return batch

    def _in_packs(self, largest: int) -> list[Entry[T]]:
        """As grab_exact_from_heterogeneous_queue: packs of equal groups, as large as the largest group; the
        pack completed first goes first.
        """
        packs = _Packs(self._lines, largest)
        batch: list[Entry[T]] = []
        left = self._batch_size
        while left > 0 and (line := packs.first()) is not None:
            for _ in range(packs.groups(line)):
                batch.append(self._lines[line].popleft())
                left -= line[1]
                if left <= 0:
                    break
            else:
                packs.taken()
        return batch

    def _allocated(self, largest: int) -> list[Entry[T]]:
        """As grab_batch_with_minimum_allocations: to each its minimum, then the first groups that fit.

        Empty if an environment has nothing for its minimum.
        """
        # groups in a pack
        packing = {key: largest // key[1] for key in self._lines if key[1] and not largest % key[1]}
        packable = {
            key: len(self._lines[key]) // groups * groups
            for key, groups in packing.items()
            if len(self._lines[key]) >= groups
        }
        minima = self._minima(packable)
        if minima is None:
            return []
        batch: list[Entry[T]] = []
        left = self._batch_size
        for env_id, minimum in minima.items():
            packs = _Packs({key: self._lines[key] for key in packable if key[0] == env_id}, largest)
            got = 0
            while got < minimum and (line := packs.first()) is not None:
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
        self._fill(batch, left, packable)
        return batch

    def _minima(self, packable: dict[_Line, int]) -> dict[int, int] | None:
        """Returns the sequences that each environment must have; None if one of them has none queued."""
        minima: dict[int, int] = {}
        for env in self._in_force():
            minimum = int(self._batch_size * env.min_allocation) if env.min_allocation is not None else 0
            if minimum > 0:
                minima[env.env_id] = minimum
        smallest = {
            env_id: min((size for of, size in packable if of == env_id), default=0) for env_id in minima
        }
        if not all(smallest.values()):
            return None
        total = sum(minima.values())
        if total > self._batch_size:
            scale = self._batch_size / total
            minima = {
                env_id: max(smallest[env_id], int(minimum * scale)) for env_id, minimum in minima.items()
            }
        return minima

    def _fill(self, batch: list[Entry[T]], left: int, packable: dict[_Line, int]) -> None:
        heads: list[tuple[int, Any, int]] = []  # number, line, groups to take from it
        for key, count in packable.items():
            if count and key[0] is not None:  # unregistered producers: never in a batch, as upstream
                heads.append((self._lines[key][0].number, key, count))
        heapify(heads)
        while left and heads:
            _, key, count = heads[0]
            if key[1] > left or not count:
                heappop(heads)
                continue
            batch.append(self._lines[key].popleft())
            left -= key[1]
            if count > 1:
                heapreplace(heads, (self._lines[key][0].number, key, count - 1))
            else:
                heappop(heads)

    # -- state
    # --------------------------------------------------------------------------------------------------------

    @property
    def queue_size(self) -> int:
        """Groups queued; buffered and formed ones do not count, as upstream."""
        return self._queued

    def __iter__(self) -> Iterator[T]:
        """Iterates over all items: formed, queued, buffered."""
        yield from (entry.item for batch in self._formed for entry in batch)
        yield from self.queued()
        yield from (item for buffer in self._buffers.values() for item in buffer.items)

    def queued(self) -> Iterator[T]:
        """Returns the queued items, in order."""
        return (entry.item for entry in self._in_order())

    def recount(self) -> None:
        """Recomputes its counts from the items it holds, after an exception ended a call half-way."""
        self._sizes, self._by_env, self._queued, self._changed = Counter(), {}, 0, True
        for entry in self._in_order():
            self._count(entry, 1)
        for buffer in self._buffers.values():
            buffer.keep(buffer.sized())
        self.buffered = sum(map(len, self._buffers.values()))

    def by_env(self) -> dict[int | None, Queued]:
        """Returns the queue of each environment; O(environments), whatever the length of the queue."""
        return {
            env_id: Queued(sizes.total(), sum(size * count for size, count in sizes.items()), max(sizes))
            for env_id, sizes in self._by_env.items()
            if sizes
        }

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Returns the answer of upstream's /status-env, and has its effect: the environment's group size
        grows to its largest group in the queue.

        Raises:
            UnknownEnvironment: it is not registered.
            NoWeight: no connected environment has a weight above 0.
        """
        me, connected = self._known(env_id), self._in_force()
        if total_weight(connected) == 0:
            raise NoWeight(
                f"environment {env_id} asks for its part of a weight of 0; {len(connected)} are connected",
                hint="give one a weight above 0",
            )
        told = steer(me, connected, self.by_env(), self._batch_size)
        self._envs[env_id] = replace(me, group_size=told.group_size)
        return {
            "current_step": self.step,
            "queue_size": told.queue_size,
            "unallocated_fraction": told.unallocated_fraction,
            "self_queue_size": told.self_queue_size,
            "max_group_size": told.max_group_size,
            "env_weight": told.env_weight,
        }

    def remove(self, unfit: Callable[[T], bool]) -> list[T]:
        """Removes and returns the unfit items, wherever they are.

        A formed batch that loses an item is undone. Checks every item.
        """
        fit = [not any(unfit(entry.item) for entry in batch) for batch in self._formed]
        undone = [batch for batch, whole in zip(self._formed, fit, strict=True) if not whole]
        self._formed = [batch for batch, whole in zip(self._formed, fit, strict=True) if whole]
        self.step -= len(undone)
        for batch in reversed(undone):
            self._stand_first(batch)
        removed = [entry for entry in self._in_order() if unfit(entry.item)]
        gone = {entry.number for entry in removed}
        for entry in removed:
            self._count(entry, -1)
        if gone:
            self._lines = {
                key: deque(entry for entry in line if entry.number not in gone)
                for key, line in self._lines.items()
            }
        items = [entry.item for entry in removed]
        for buffer in self._buffers.values():
            items += [item for item, _ in buffer.sized() if unfit(item)]
            buffer.keep([(item, size) for item, size in buffer.sized() if not unfit(item)])
        self.buffered = sum(map(len, self._buffers.values()))
        return items

    def _in_order(self) -> list[Entry[T]]:
        return sorted(
            (entry for line in self._lines.values() for entry in line), key=lambda entry: entry.number
        )


class _Packs(Generic[T]):
    """Packs from the fronts of lines: equal groups, together as large as the largest group; the pack
    completed first goes first.
    """

    def __init__(self, lines: dict[_Line, deque[Entry[T]]], largest: int) -> None:
        self._lines, self._largest = lines, largest
        self._whole: list[tuple[int, Any]] = []
        for key in lines:
            if key[1] and not largest % key[1]:
                self._offer(key)

    def groups(self, key: _Line) -> int:
        """Returns the groups in a pack of that line."""
        return self._largest // key[1]

    def _offer(self, key: _Line) -> None:
        line, groups = self._lines[key], self.groups(key)
        if len(line) >= groups:
            heappush(self._whole, (line[groups - 1].number, key))

    def first(self) -> _Line | None:
        """Returns the line whose pack comes first."""
        return self._whole[0][1] if self._whole else None

    def taken(self) -> None:
        """Notes that the first pack was taken out of its line."""
        self._offer(heappop(self._whole)[1])

    def forget(self) -> None:
        """Drops the first line: nothing more is taken from it."""
        heappop(self._whole)
