"""The environments a hub has admitted, and the numbers they steer themselves by.

An environment throttles itself: ten times a second it asks how much is queued, and starts or stops rollouts.
The arithmetic is that of the Atropos API server, on groups in lanes instead of a list in memory. One thing
differs: a dead environment takes its weight and its share of the batch with it.

Used by the control server's thread only.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

from shmbridge.atropos.env_status import EnvWeight, Queued, steer
from shmbridge.config import Run
from shmbridge.control.messages import (
    Ack,
    BeginGroup,
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
