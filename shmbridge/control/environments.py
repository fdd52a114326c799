"""The environments a hub has admitted, and the numbers they steer themselves by.

An environment throttles itself: ten times a second it asks how much is queued, and starts or stops rollouts.
The arithmetic is that of the Atropos API server (`steer`, AtroposQueue), on groups in lanes instead of a list
in memory. One thing differs: a dead environment takes its weight and its share of the batch with it.

Environments and Evaluations are used by the control server's thread only.
"""

from __future__ import annotations

import math
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Generic, Protocol, TypeVar

from shmbridge._ext import groups
from shmbridge.config import Run
from shmbridge.control.messages import (
    BAD_VALUE,
    LONGEST_NAME,
    MOST_METRICS,
    Ack,
    BeginGroup,
    Evaluated,
    Full,
    Manifest,
    MayBegin,
    NextShare,
    NoMoreShares,
    Refused,
    Register,
    Registered,
    SharesDone,
    Status,
    WaitForRun,
)
from shmbridge.errors import NoWeight, UnknownEnvironment

MIN_ENV_WEIGHT = 0.01  # an environment's least weight, as upstream


@dataclass(frozen=True, slots=True)
class EnvWeight:
    """An environment's request: its weight, its guaranteed part of every batch, the rows of its groups."""

    env_id: int
    name: str
    weight: float
    min_allocation: float | None
    group_size: int
    max_token_length: int = 1


@dataclass(frozen=True, slots=True)
class Queued:
    """The queue of one environment: groups, sequences in them, the largest group."""

    groups: int = 0
    sequences: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class Steering:
    """The answer to one environment.

    Sizes in groups of `group_size`, the largest size ever seen of that environment.
    """

    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    max_group_size: int
    env_weight: float
    group_size: int


def steer(
    me: EnvWeight, connected: Collection[EnvWeight], queue: Mapping[int | None, Queued], batch_size: int
) -> Steering:
    """Returns the answer to `me` about `queue`, by env_id (None: unregistered producers); O(environments),
    for any queue.
    """
    mine = queue.get(me.env_id, Queued())
    largest = max([1, *(each.largest for each in queue.values())])
    group_size = max(me.group_size, mine.largest)
    return Steering(
        queue_size=(mine.sequences + _open_to(me, connected, queue, batch_size, largest)) // group_size,
        self_queue_size=mine.sequences // group_size,
        unallocated_fraction=1.0 - min(sum(env.min_allocation or 0.0 for env in connected), 1.0),
        max_group_size=largest,
        env_weight=_weight(me, connected),
        group_size=group_size,
    )


def total_weight(connected: Collection[EnvWeight]) -> float:
    """Returns the weight of all, as upstream computes it: times the longest sequence."""
    return sum(env.max_token_length * max(0.0, env.weight) for env in connected)


def _open_to(
    me: EnvWeight,
    connected: Collection[EnvWeight],
    queue: Mapping[int | None, Queued],
    batch_size: int,
    largest: int,
) -> int:
    """Returns the sequences of others that compete with mine: beyond their guaranteed part, packed as a
    batch.
    """
    if largest == 1:
        return 0  # as upstream: without groups to pack, only one's own queue counts
    open_to_me = 0
    by_right: dict[int | None, int] = {
        env.env_id: int(batch_size * env.min_allocation)
        for env in connected
        if env.min_allocation is not None
    }
    for env_id, each in queue.items():
        if env_id != me.env_id and each.groups:
            open_to_me += max(0, math.ceil(each.sequences / largest) * largest - by_right.get(env_id, 0))
    return open_to_me


def _weight(me: EnvWeight, connected: Collection[EnvWeight]) -> float:
    total = total_weight(connected)
    return max(MIN_ENV_WEIGHT, me.max_token_length * me.weight / total if total > 0 else 0.0)


T = TypeVar("T")


class AtroposQueue(groups.SizedQueue, Generic[T]):
    """Queue, buffers and formed batches of one training run; an item is of any type."""

    def __iter__(self) -> Iterator[T]:
        """Iterates over all items: formed, queued, buffered."""
        return super().__iter__()

    def disconnect(self, env_id: int) -> None:
        """Stops counting its weight and its allocation; its queued groups stay.

        Raises UnknownEnvironment.
        """
        self._known(env_id)
        super().disconnect(env_id)

    def _known(self, env_id: int) -> EnvWeight:
        env = self.envs.get(env_id)
        if env is None:
            raise UnknownEnvironment(
                f"no environment {env_id} among {len(self.envs)}", hint="register it first"
            )
        return env  # type: ignore[no-any-return]

    def status_env(self, env_id: int) -> dict[str, Any]:
        """Returns the answer of upstream's /status-env, and has its effect: the environment's group size
        grows to its largest group in the queue.

        Raises:
            UnknownEnvironment: it is not registered.
            NoWeight: no connected environment has a weight above 0.
        """
        me, connected = self._known(env_id), self.connected
        if total_weight(connected) == 0:
            raise NoWeight(
                f"environment {env_id} asks for its part of a weight of 0; {len(connected)} are connected",
                hint="give one a weight above 0",
            )
        told = steer(me, connected, as_queued(self.by_env()), self.batch_size)
        self.replace(replace(me, group_size=told.group_size))
        return {
            "current_step": self.step,
            "queue_size": told.queue_size,
            "unallocated_fraction": told.unallocated_fraction,
            "self_queue_size": told.self_queue_size,
            "max_group_size": told.max_group_size,
            "env_weight": told.env_weight,
        }


def as_queued(by_env: dict[int | None, tuple[int, int, int]]) -> dict[int | None, Queued]:
    """Returns the queue of each environment, of what the compiled queue counts."""
    return {env_id: Queued(*counts) for env_id, counts in by_env.items()}


MOST_KEPT = 256
_MOST_PRODUCERS = 4096  # of which the last evaluation is known


class Evaluations:
    """The evaluations that nobody has taken yet, the newest `MOST_KEPT` at most. Any thread; never blocks.

    Args:
        lock: one that the close of a consumer knows of, so that a signal handler within `take` may close it.
    """

    def __init__(self, lock: threading.RLock) -> None:
        self._lock = lock
        self._kept: deque[Evaluated] = deque()
        self._last: OrderedDict[str, int] = OrderedDict()  # producer id -> number of its newest
        self._noted = self._lost = 0

    def note(self, evaluation: Evaluated) -> None:
        """Keeps one; does nothing for one that came before. The oldest one makes room."""
        producer_id = evaluation.producer_id
        with self._lock:
            if self._last.get(producer_id, -1) >= evaluation.number:
                return
            self._last[producer_id] = evaluation.number
            self._last.move_to_end(producer_id)
            if len(self._last) > _MOST_PRODUCERS:
                self._last.popitem(last=False)
            self._noted += 1
            self._kept.append(evaluation)
            if len(self._kept) > MOST_KEPT:
                self._kept.popleft()
                self._lost += 1

    def take(self) -> list[Evaluated]:
        """Returns those that came since the last call, in order."""
        with self._lock:
            taken, self._kept = list(self._kept), deque()
            return taken

    def stats(self) -> dict[str, float]:
        """Returns the counters, flat."""
        return {"evaluations_total": self._noted, "evaluations_lost_total": self._lost}


def fault_of(evaluation: Evaluated) -> Refused | None:
    """Returns the refusal of an evaluation that is too large, or has a number that is none."""
    names = [evaluation.env_name, evaluation.producer_id, *evaluation.metrics]
    if len(evaluation.metrics) > MOST_METRICS:
        fault = f"{len(evaluation.metrics)} metrics, at most {MOST_METRICS} are kept"
    elif long := [name for name in names if len(name) > LONGEST_NAME]:
        fault = f"a name of {len(long[0])} characters, at most {LONGEST_NAME} are kept"
    elif odd := [name for name, value in evaluation.metrics.items() if not math.isfinite(value)]:
        fault = f"{odd[0]!r} is {evaluation.metrics[odd[0]]}"
    else:
        return None
    return Refused(
        BAD_VALUE,
        f"cannot keep an evaluation of {evaluation.env_name[:40]!r}: {fault}",
        "report fewer metrics",
    )


# Each hub of a bridge numbers new environments from its own block: environments of an earlier hub return with
# their numbers, which must be free.
ENV_IDS_PER_HUB = 1000
# Seconds. An environment without a living lane is known by its requests alone; it asks ten times a second,
# and registers again when the hub does not know it.
SILENCE_S = 120.0
MOST_WITHOUT_LANE = 1000


class HubView(Protocol):
    """The hub as the control plane sees it.

    The control server's thread calls this while the consumer works in another thread. So each member must be
    thread-safe, never block, never raise, and cost no more than reading a few shared words: every environment
    asks ten times a second.
    """

    @property
    def hub_epoch(self) -> int:
        """The number of this hub among the hubs of the bridge: 1 for the first, rising."""

    @property
    def run(self) -> Run | None:
        """The announced training run; None before any."""

    @property
    def current_step(self) -> int:
        """`run.starting_step` plus the batches handed out since."""

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""

    @property
    def paused(self) -> bool:
        """Whether environments are asked to begin no new groups."""

    @property
    def draining(self) -> bool:
        """As `paused`, for good: the run ends when the lanes are empty."""

    def refused_lanes(self) -> dict[str, str]:
        """Returns the lanes that the hub will not read, by name, and why."""

    def announce_run(self, run: Run) -> None:
        """Announces the run of a learner that is not the hub."""

    def publish_policy_version(self, version: int) -> None:
        """Publishes the version of such a learner."""

    def pause(self) -> None:
        """Sets `paused`."""

    def resume(self) -> None:
        """Clears `paused`."""

    def drain(self) -> None:
        """Sets `draining`."""

    def queue_groups(self) -> int:
        """Returns the groups committed and not yet taken into a batch, of all producers."""

    def look_at_producers(self, producer_ids: Collection[str]) -> dict[str, tuple[bool, int]]:
        """Returns, per producer id, whether its process holds an attached lane, and its part of
        queue_groups.

        Unknown: False, 0.
        """

    def next_share(self, request: NextShare) -> Manifest | NoMoreShares | Refused | None:
        """Returns a learner rank's next share; None while there is none."""

    def shares_done(self, request: SharesDone) -> Ack | Refused:
        """Notes that a learner rank is done with shares."""

    def begin_group(self, request: BeginGroup) -> MayBegin | Full | Refused | None:
        """Returns whether a producer may begin one more group; None: not yet."""


class QueueView(Protocol):
    """A queue that knows its content by environment; for any thread. A hub without one counts groups only."""

    def by_env(self) -> Mapping[int | None, Queued]:
        """Returns the queued groups by the number of their registered environment."""

    def queued(self, producer_id: str) -> int:
        """Returns the queued groups of one producer."""

    def __len__(self) -> int:
        """Returns the number of queued groups."""


@dataclass
class Environment:
    """One admitted environment; `asks` is its request, for forming batches and for steering the others."""

    producer_id: str
    asks: EnvWeight
    heard_s: float  # by time.monotonic()
    seen_live: bool = False


class Environments:
    """The table of admitted environments.

    For one thread; `shares`, by producer id, is replaced and never changed, so that any thread may read it.

    Numbers below `first_env_id` belong to another table: an environment that brings such a number gets a new
    one.
    """

    def __init__(self, hub: HubView, queue: QueueView | None = None, first_env_id: int = 0) -> None:
        self._hub, self._queue, self._first = hub, queue, first_env_id
        self._table: dict[int, Environment] = {}
        self.shares: Mapping[str, EnvWeight] = MappingProxyType({})

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, env_id: int) -> bool:
        return env_id in self._table

    def admit(self, wish: Register) -> Registered | WaitForRun:
        """Gives an environment its number and its name; the earlier ones if it had some. Never blocks."""
        run = self._hub.run
        if run is None:
            return WaitForRun(hub_epoch=self._hub.hub_epoch)
        self._remove_dead(self._look())
        env_id = self._number_for(wish)
        known = self._table.get(env_id)
        name = wish.wandb_name or (known.asks.name if known else "") or self._free_name(wish.desired_name)
        asks = EnvWeight(
            env_id,
            name,
            wish.weight,
            wish.min_batch_allocation,
            wish.group_size,
            max_token_length=wish.max_token_length,
        )
        self._table[env_id] = Environment(wish.producer_id, asks, heard_s=time.monotonic())
        self._publish()
        return Registered(
            env_id=env_id,
            wandb_name=name,
            run=run,
            current_step=self._hub.current_step,
            hub_epoch=self._hub.hub_epoch,
            policy_version=self._hub.policy_version,
        )

    def forget(self, env_id: int) -> None:
        """Frees an environment's number, name, weight and share; ignores unknown numbers. Never blocks."""
        if self._table.pop(env_id, None) is not None:
            self._publish()

    def status(self, env_id: int) -> Status:
        """Returns the numbers one environment steers by. Never blocks. Raises KeyError for an unknown
        number.
        """
        me = self._table[env_id]
        me.heard_s = time.monotonic()
        seen = self._look()
        self._remove_dead(seen, but=me)
        queued = self._queued(me, {producer_id: groups for producer_id, (_, groups) in seen.items()})
        told = steer(
            me.asks,
            [env.asks for env in self._table.values()],
            queued,
            run.batch_size if (run := self._hub.run) else 0,
        )
        if told.group_size != me.asks.group_size:
            me.asks = replace(me.asks, group_size=told.group_size)
            self._publish()
        return Status(
            current_step=self._hub.current_step,
            queue_groups=told.queue_size,
            self_queue_groups=told.self_queue_size,
            unallocated_fraction=told.unallocated_fraction,
            max_group_size=told.max_group_size,
            env_weight=told.env_weight,
            policy_version=self._hub.policy_version,
            hub_epoch=self._hub.hub_epoch,
            paused=self._hub.paused,
            draining=self._hub.draining,
        )

    # --- admission ----------------------------------------------------------------------------------------

    def _number_for(self, wish: Register) -> int:
        if wish.env_id is not None and wish.env_id >= self._first:
            holder = self._table.get(wish.env_id)
            if holder is None or holder.producer_id == wish.producer_id:
                return wish.env_id
        if wish.producer_id:
            for env_id, env in self._table.items():
                if env.producer_id == wish.producer_id:
                    return env_id
        number = self._first + max(0, self._hub.hub_epoch - 1) * ENV_IDS_PER_HUB
        while number in self._table:
            number += 1
        return number

    def _free_name(self, desired: str) -> str:
        """Uses the lowest free index: a restarted environment finds its checkpoints under its name."""
        taken = {env.asks.name for env in self._table.values()}
        index = 0
        while f"{desired}_{index}" in taken:
            index += 1
        return f"{desired}_{index}"

    def _look(self) -> dict[str, tuple[bool, int]]:
        """Returns, for every producer here, whether it lives and its groups; once per request, since the hub
        walks all its lanes for it.
        """
        return self._hub.look_at_producers({env.producer_id for env in self._table.values()})

    def _remove_dead(self, seen: Mapping[str, tuple[bool, int]], but: Environment | None = None) -> None:
        known, late, silent = len(self._table), time.monotonic() - SILENCE_S, []
        for env_id, env in list(self._table.items()):
            live, _ = seen[env.producer_id]
            if (env.seen_live or env.heard_s < late) and not live and env is not but:
                del self._table[env_id]
            elif not live and env is not but:
                silent.append((env.heard_s, env_id))
            env.seen_live = env.seen_live or live
        for _, env_id in sorted(silent)[: max(0, len(silent) + 1 - MOST_WITHOUT_LANE)]:
            del self._table[env_id]
        if len(self._table) != known:
            self._publish()

    # --- the queue ----------------------------------------------------------------------------------------

    def _queued(self, me: Environment, waiting: Mapping[str, int]) -> dict[int | None, Queued]:
        """Returns the queue by environment.

        Groups not read yet are assumed to have their environment's registered size.
        """
        seen = self._queue.by_env() if self._queue is not None else {}
        unseen = {
            env_id: self._unseen(env.producer_id, waiting[env.producer_id])
            for env_id, env in self._table.items()
        }
        queued: dict[int | None, Queued] = {
            env_id: _with(seen.get(env_id, Queued()), groups, self._table[env_id].asks.group_size)
            for env_id, groups in unseen.items()
        }
        # Groups of unregistered producers; their group size is unknown here, so the asking environment's is
        # used.
        strangers = max(0, self._unseen(None, self._hub.queue_groups()) - sum(unseen.values()))
        others = {env_id: each for env_id, each in seen.items() if env_id not in self._table}
        queued |= others
        queued[None] = _with(others.get(None, Queued()), strangers, me.asks.group_size)
        return queued

    def _unseen(self, producer_id: str | None, groups: int) -> int:
        """Returns how many of `groups`, of one producer or of all, are not in the queue yet."""
        if self._queue is not None:
            groups -= len(self._queue) if producer_id is None else self._queue.queued(producer_id)
        return max(0, groups)

    def _publish(self) -> None:
        """Replaces `shares`, never changes it: another thread reads it."""
        self.shares = MappingProxyType(
            {env.producer_id: env.asks for env in self._table.values() if env.producer_id}
        )


def _with(seen: Queued, groups: int, group_size: int) -> Queued:
    """Returns the queue with that many groups more."""
    if not groups:
        return seen
    return Queued(seen.groups + groups, seen.sequences + groups * group_size, max(seen.largest, group_size))
