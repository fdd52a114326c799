"""The Atropos server's own arithmetic: its queue, its buffers, its batches, its numbers, on items that are only sizes and owners.

Knows nothing of lanes, HTTP or records. What is odd here is odd there: this is what `--compat strict` promises. For one thread.
"""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shmbridge.config import Run
from shmbridge.environments import MIN_ENV_WEIGHT

T = TypeVar("T")


@dataclass(slots=True, eq=False)
class Item(Generic[T]):
    """A group in the queue: so many sequences of one environment."""

    size: int
    env_id: int | None
    group: T


@dataclass(slots=True)
class EnvRow:
    """An environment as it registered; `group_size` grows to the largest group that was seen of it."""

    desired_name: str
    real_name: str
    max_token_length: int
    weight: float
    group_size: int
    min_batch_allocation: float | None
    connected: bool = True


class NoSuchThing(Exception):
    """The original fails here with status 500."""


@dataclass(slots=True)
class Upstream(Generic[T]):
    """The state of one Atropos server."""

    registered: bool = False  # its queue exists: the first /register or the first post makes it, /reset_data ends it
    run: Run | None = None
    num_steps: int = -1
    step: int | None = None
    started: bool | None = None  # None: nobody has ever registered
    envs: list[EnvRow] = field(default_factory=list)
    queue: list[Item[T]] = field(default_factory=list)
    buffers: dict[int, list[Item[T]]] = field(default_factory=lambda: defaultdict(list))
    ready: list[list[Item[T]]] = field(default_factory=list)
    latest: Item[T] | None = None
    batch_size: int = -1

    # -- the trainer --------------------------------------------------------------------------------------------------------------

    def register(self, run: Run) -> bool:
        """Whether this is the registration that holds from now on."""
        if self.registered:
            return False
        self.registered, self.started, self.run = True, False, run
        self.step, self.batch_size, self.num_steps = run.starting_step, run.batch_size, run.num_steps
        self.queue, self.ready, self.envs, self.buffers = [], [], [], defaultdict(list)
        return True

    def next_batch(self) -> tuple[list[Item[T]] | None, int]:
        """The batch to hand out, or None; and how many were formed. All that can be formed are, and the newest goes first."""
        self.started = True
        formed = 0
        if not self.ready:
            if not self.registered:
                raise NoSuchThing
            while (batch := self._form()) is not None:
                self.ready.append(batch)
                formed += 1
            self.step = (self.step or 0) + formed
        return (self.ready.pop() if self.ready else None), formed

    def _form(self) -> list[Item[T]] | None:
        chosen = self._with_shares() if self._shares() else self._in_order()
        if chosen is None:
            return None
        taken = set(map(id, chosen))
        self.queue = [item for item in self.queue if id(item) not in taken]
        return chosen

    def _shares(self) -> dict[int, float]:
        return {
            number: env.min_batch_allocation
            for number, env in enumerate(self.envs)
            if env.connected and env.min_batch_allocation is not None
        }

    def _in_order(self) -> list[Item[T]] | None:
        """Groups in the order of the packs they complete: as many of one size as make the largest size."""
        if not self.queue or sum(item.size for item in self.queue) < self.batch_size:
            return None
        packs = _Packs[T](max(item.size for item in self.queue))
        packed = [item for each in self.queue for item in packs.add(each.size, each)]
        chosen: list[Item[T]] = []
        sequences = 0
        for item in packed:
            chosen.append(item)
            sequences += item.size
            if sequences >= self.batch_size:
                break
        return chosen if sequences == self.batch_size and chosen else None

    def _with_shares(self) -> list[Item[T]] | None:
        """First what is guaranteed to each environment, then whatever comes next; only groups that complete a pack of their owner."""
        if not self.queue:
            return None
        largest = max(item.size for item in self.queue)
        packs: dict[int, _Packs[T]] = {}
        packed: dict[int, list[Item[T]]] = {}
        for item in self.queue:
            if item.env_id is not None:
                pack = packs.setdefault(item.env_id, _Packs(largest))
                packed.setdefault(item.env_id, []).extend(pack.add(item.size, item))
        guaranteed: dict[int, int] = {}
        for number, share in self._shares().items():
            if (least := int(self.batch_size * share)) > 0:
                if not packed.get(number):
                    return None
                guaranteed[number] = least
        if (total := sum(guaranteed.values())) > self.batch_size:
            scale = self.batch_size / total
            for number, least in guaranteed.items():
                guaranteed[number] = max(min(item.size for item in packed[number]), int(least * scale))
        chosen: list[Item[T]] = []
        sequences = 0
        for number, least in guaranteed.items():
            mine = 0
            for item in packed[number]:
                if mine >= least:
                    break
                if sequences + item.size <= self.batch_size:
                    chosen.append(item)
                    mine += item.size
                    sequences += item.size
        if sequences < self.batch_size:
            taken, packable = set(map(id, chosen)), {id(item) for items in packed.values() for item in items}
            for item in self.queue:
                if id(item) in packable and id(item) not in taken and sequences + item.size <= self.batch_size:
                    chosen.append(item)
                    sequences += item.size
                    if sequences == self.batch_size:
                        break
        return chosen if sequences == self.batch_size else None

    def status(self) -> dict[str, int]:
        """The answer to /status."""
        if self.step is None or not self.registered:
            return {"current_step": 0, "queue_size": 0}
        return {"current_step": self.step, "queue_size": len(self.queue)}

    def reset(self) -> bool:
        """Forgets the registration, the queue and the environments, not what was posted last; whether there was anything to forget."""
        if not self.registered:
            return False
        self.registered, self.started, self.step = False, False, 0
        self.batch_size = self.num_steps = -1
        self.queue, self.ready, self.envs, self.buffers = [], [], [], defaultdict(list)
        return True

    # -- the environments ---------------------------------------------------------------------------------------------------------

    def add_env(self, desired_name: str, max_token_length: int, weight: float, group_size: int, share: float | None) -> int:
        """The number of a new environment."""
        index = sum(env.desired_name == desired_name for env in self.envs)
        self.envs.append(EnvRow(desired_name, f"{desired_name}_{index}", max_token_length, weight, group_size, share))
        return len(self.envs) - 1

    def post(self, item: Item[T]) -> int | None:
        """Queues a group; or buffers it until others of its environment make up the size, then: how many sequences are buffered."""
        number = item.env_id
        if number is None or number >= len(self.envs) or item.size == self.envs[number].group_size:
            self.queue.append(item)
            self.latest = item
            return None
        buffer = self.buffers[number]
        buffer.append(item)
        chosen = _summing_to([each.size for each in buffer], self.envs[number].group_size)
        for place in chosen:
            self.queue.append(buffer[place])
            self.latest = buffer[place]
        self.buffers[number] = [each for place, each in enumerate(buffer) if place not in chosen]
        return sum(each.size for each in self.buffers[number])

    def env_status(self, number: int) -> dict[str, Any]:
        """The answer to /status-env. Raises what the original fails with."""
        me = self.envs[number]
        connected = [env for env in self.envs if env.connected]
        total = sum(env.max_token_length * max(0.0, env.weight) for env in connected)
        weight = max(MIN_ENV_WEIGHT, me.max_token_length * me.weight / total)
        shares = self._shares()
        largest = max([1, *(item.size for item in self.queue)])
        sequences: dict[int | None, int] = defaultdict(int)
        for item in self.queue:
            sequences[item.env_id] += item.size
            if item.env_id == number:
                me.group_size = max(me.group_size, item.size)
        mine = sequences.pop(number, 0)
        others = 0
        if largest > 1:
            for other, count in sequences.items():
                least = int(self.batch_size * shares[other]) if other in shares else 0
                others += max(0, math.ceil(count / largest) * largest - least)
        return {
            "current_step": self.step,
            "queue_size": (mine + others) // me.group_size,
            "unallocated_fraction": 1.0 - min(sum(shares.values(), 0.0), 1.0),
            "self_queue_size": mine // me.group_size,
            "max_group_size": largest,
            "env_weight": weight,
        }


class _Packs(Generic[T]):
    """Groups by size, until as many are there as make up the largest size."""

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._open: dict[int, list[Item[T]]] = defaultdict(list)

    def add(self, size: int, item: Item[T]) -> list[Item[T]]:
        """The pack that this one completes, or nothing yet."""
        pack = self._open[size]
        pack.append(item)
        if len(pack) * size != self._largest:
            return []
        self._open[size] = []
        return pack


def _summing_to(sizes: list[int], target: int) -> list[int]:
    """Places whose sizes add up to the target, the first that fit if that does; nothing if no choice does."""
    chosen: list[int] = []
    total = 0
    for place, size in enumerate(sizes):
        if total + size <= target:
            chosen.append(place)
            total += size
            if total == target:
                return chosen
    reachable = [{0}]  # sums that the first n places can make
    for size in sizes:
        reachable.append(reachable[-1] | {each + size for each in reachable[-1] if each + size <= target})
    if target not in reachable[-1]:
        return []
    chosen = []
    for place in range(len(sizes) - 1, -1, -1):
        if target - sizes[place] in reachable[place]:
            chosen.append(place)
            target -= sizes[place]
    return sorted(chosen)
