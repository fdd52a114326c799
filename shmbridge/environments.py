"""The environments a hub has admitted, and the numbers they steer themselves by.

An environment throttles itself: ten times a second it asks how much is queued, and starts or stops rollouts.
The arithmetic is that of the Atropos API server, on groups in lanes instead of a list in memory. One thing
differs: a dead environment takes its weight and its share of the batch with it.

Knows nothing of sockets, nor of the bytes of messages. Called by the control server's thread only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from shmbridge.config import Run
from shmbridge.messages import Ack, Manifest, NextShare, NoMoreShares, Refused, Register, Registered, SharesDone, Status, WaitForRun

# An environment never counts for less than this, whatever its weight (as upstream).
MIN_ENV_WEIGHT = 0.01

# Each hub of a bridge numbers new environments from a block of its own: those of an earlier hub come back
# with the number they have, and must find it free.
ENV_IDS_PER_HUB = 1000


class HubView(Protocol):
    """What the control plane sees of the hub.

    Everything here is called from the control server's thread while the consumer works on its own. So each
    must be thread-safe, never block, never raise, and cost no more than reading a few shared words: every
    environment asks ten times a second.
    """

    @property
    def hub_epoch(self) -> int:
        """Which hub of this bridge this is: 1 for the first, rising."""

    @property
    def run(self) -> Run | None:
        """What is being trained, or None before anybody has said so."""

    @property
    def current_step(self) -> int:
        """`run.starting_step` plus the batches handed out since."""

    @property
    def policy_version(self) -> int:
        """The newest published policy version, -1 before the first."""

    @property
    def paused(self) -> bool:
        """Environments are asked to begin no new groups."""

    @property
    def draining(self) -> bool:
        """As `paused`, for good: the run ends when the lanes are empty."""

    def announce_run(self, run: Run) -> None:
        """Take over what a learner that is not the hub trains."""

    def publish_policy_version(self, version: int) -> None:
        """Take over the version that such a learner has published."""

    def pause(self) -> None:
        """Set `paused`."""

    def resume(self) -> None:
        """Clear `paused`."""

    def drain(self) -> None:
        """Set `draining`."""

    def queue_groups(self, producer_id: str | None = None) -> int:
        """Groups committed and not yet taken into a batch, of one producer (unknown: 0) or of all."""

    def producer_live(self, producer_id: str) -> bool:
        """A lane of this producer is attached and its process holds it; False for an unknown one."""

    def next_share(self, request: NextShare) -> Manifest | NoMoreShares | Refused | None:
        """A learner rank's next share; None while there is none."""

    def shares_done(self, request: SharesDone) -> Ack | Refused:
        """A learner rank is done with shares."""


@dataclass
class Environment:
    """One admitted environment, as it described itself."""

    env_id: int
    desired_name: str
    wandb_name: str
    producer_id: str
    max_token_length: int
    group_size: int
    weight: float
    min_batch_allocation: float | None
    seen_live: bool = False

    @property
    def share(self) -> float:
        """The part of every batch that is guaranteed to it."""
        return self.min_batch_allocation or 0.0


class Environments:
    """The table. For one thread."""

    def __init__(self, hub: HubView) -> None:
        self._hub = hub
        self._table: dict[int, Environment] = {}

    def __len__(self) -> int:
        return len(self._table)

    def __contains__(self, env_id: int) -> bool:
        return env_id in self._table

    def admit(self, wish: Register) -> Registered | WaitForRun:
        """Give an environment its number and its name; the same ones if it had some. Never blocks."""
        run = self._hub.run
        if run is None:
            return WaitForRun(hub_epoch=self._hub.hub_epoch)
        self._bury_the_dead()
        env_id = self._number_for(wish)
        name = wish.wandb_name or self._known_name(env_id) or self._free_name(wish.desired_name)
        self._table[env_id] = Environment(
            env_id=env_id,
            desired_name=wish.desired_name,
            wandb_name=name,
            producer_id=wish.producer_id,
            max_token_length=wish.max_token_length,
            group_size=wish.group_size,
            weight=wish.weight,
            min_batch_allocation=wish.min_batch_allocation,
        )
        return Registered(
            env_id=env_id,
            wandb_name=name,
            run=run,
            current_step=self._hub.current_step,
            hub_epoch=self._hub.hub_epoch,
            policy_version=self._hub.policy_version,
        )

    def forget(self, env_id: int) -> None:
        """Free what an environment took; unknown numbers are ignored. Never blocks."""
        self._table.pop(env_id, None)

    def status(self, env_id: int) -> Status:
        """Return what one environment steers by. Never blocks. Raises KeyError for an unknown number."""
        me = self._table[env_id]
        self._bury_the_dead(but=me)
        groups = {env.env_id: self._hub.queue_groups(env.producer_id) for env in self._table.values()}
        # Of producers that never registered; their group size is not known here, taken to be the asker's.
        strangers = max(0, self._hub.queue_groups() - sum(groups.values())) * me.group_size
        largest = max([1, *(env.group_size for env in self._table.values() if groups[env.env_id])])
        if strangers:
            largest = max(largest, me.group_size)
        others = self._open_to_me(me, groups, strangers, largest)
        sequences = groups[env_id] * me.group_size + others
        return Status(
            current_step=self._hub.current_step,
            queue_groups=sequences // me.group_size,
            self_queue_groups=groups[env_id],
            unallocated_fraction=1.0 - min(1.0, sum(env.share for env in self._table.values())),
            max_group_size=largest,
            env_weight=self._weight(me),
            policy_version=self._hub.policy_version,
            hub_epoch=self._hub.hub_epoch,
            paused=self._hub.paused,
            draining=self._hub.draining,
        )

    # --- admission ----------------------------------------------------------------------------------------

    def _number_for(self, wish: Register) -> int:
        if wish.env_id is not None:
            holder = self._table.get(wish.env_id)
            if holder is None or holder.producer_id == wish.producer_id:
                return wish.env_id
        if wish.producer_id:
            for env in self._table.values():
                if env.producer_id == wish.producer_id:
                    return env.env_id
        number = max(0, self._hub.hub_epoch - 1) * ENV_IDS_PER_HUB
        while number in self._table:
            number += 1
        return number

    def _known_name(self, env_id: int) -> str:
        known = self._table.get(env_id)
        return known.wandb_name if known else ""

    def _free_name(self, desired: str) -> str:
        """With the lowest free index: an environment started again finds its checkpoints under its name."""
        taken = {env.wandb_name for env in self._table.values()}
        index = 0
        while f"{desired}_{index}" in taken:
            index += 1
        return f"{desired}_{index}"

    def _bury_the_dead(self, but: Environment | None = None) -> None:
        for env in list(self._table.values()):
            live = self._hub.producer_live(env.producer_id)
            if env.seen_live and not live and env is not but:
                del self._table[env.env_id]
            env.seen_live = env.seen_live or live

    # --- steering -----------------------------------------------------------------------------------------

    def _open_to_me(self, me: Environment, groups: dict[int, int], strangers: int, largest: int) -> int:
        """Sequences of others that compete with mine: beyond what is theirs by right, packed as a batch."""
        if largest == 1:
            return 0  # as upstream: without groups to pack, only one's own queue counts
        batch_size = run.batch_size if (run := self._hub.run) else 0
        open_to_me = math.ceil(strangers / largest) * largest
        for other in self._table.values():
            if other is not me:
                packed = math.ceil(groups[other.env_id] * other.group_size / largest) * largest
                open_to_me += max(0, packed - int(batch_size * other.share))
        return open_to_me

    def _weight(self, me: Environment) -> float:
        total = sum(env.max_token_length * max(0.0, env.weight) for env in self._table.values())
        mine = me.max_token_length * me.weight / total if total > 0 else 0.0
        return max(MIN_ENV_WEIGHT, mine)
