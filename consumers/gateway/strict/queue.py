"""`--compat strict`: the consumer side as the Atropos server has it, over lanes instead of a list in memory.

Committed groups are taken at once, in commit order, and kept in the server's own queue until a batch with
them is read. For one thread: the hub's.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from shmbridge import Consumer, Run
from shmbridge.consumers.gateway.batches import Batch, NotRegistered, Taker, open_hub
from shmbridge.consumers.gateway.environments import SavedEnv, StateFile
from shmbridge.consumers.gateway.limits import GatewayOptions
from shmbridge.control.environments import AtroposQueue, EnvWeight
from shmbridge.errors import Discard
from shmbridge.hub import OutsideQueue
from shmbridge.record import Group, GroupAssembler, lane_name

log = logging.getLogger(__name__)

_FRAGMENTS_WAIT_S = 600.0
_FIRST_ATTACHED = 1 << 30  # environments that post are numbered from 0 on, one after the other


class StrictTaker(Taker):
    """A Taker with the original's queue. It is the hub from the beginning."""

    extras = False

    def __init__(self, options: GatewayOptions, state: StateFile) -> None:
        super().__init__(options, state, lambda: False)
        self.upstream: Upstream[Group] = Upstream()
        self._fragments = GroupAssembler(_FRAGMENTS_WAIT_S)
        self._outcomes: dict[tuple[str, int], int | None] = {}
        self._own: set[str] = set()  # lanes whose posts ask for their outcome
        self._waiting: Counter[str] = Counter()
        self._shown_last: Group | None = None
        self.counts |= {"left_out_total{train}": 0, "left_out_total{eval}": 0}

    # -- who trains

    def restore(self) -> None:
        """Becomes the hub, with what an earlier gateway knew. Raises ConsumerTaken."""
        saved, upstream = self._state.saved, self.upstream
        if saved.run is not None:
            self.run, self._inherited = replace(saved.run, starting_step=saved.step), True
            upstream.register(saved.run)
            upstream.queue.step, upstream.started = saved.step, saved.started
            for env in saved.envs:
                upstream.restore_env(env)
        self._become_hub()
        self.take_all()

    def _open(self, run: Run | None, resume: Any) -> Consumer:
        outside = OutsideQueue(self._waiting, _FIRST_ATTACHED)
        return open_hub(self._options, run, resume=resume, outside=outside)

    def register(self, run: Run) -> None:
        """As the original, the first run stays; but an earlier gateway's run gives way to another.

        Groups that came over lanes before, which the original cannot know, stay queued.
        """
        self.take_all()
        upstream, groups, latest = self.upstream, list(self.upstream.queue), self.upstream.latest
        if self._inherited and self._state.saved.run != run:
            upstream.registered = False
        if not upstream.register(run):
            self._inherited = False
            return
        for group in groups:
            upstream.post(group, group.rows, group.env_id)
        upstream.latest = latest
        self.run, self._inherited = run, False
        self._become_hub().announce_run(run)
        self._state.update(run=run, step=run.starting_step, started=False, envs=[])

    def said_run(self) -> Run | None:
        """Returns the run for /info and /wandb_info; after a reset only the row length remains."""
        upstream = self.upstream
        if upstream.run is None:
            return None
        size = upstream.queue.batch_size
        names: dict[str, Any] = {} if size != -1 else {"wandb_group": None, "wandb_project": None}
        return replace(upstream.run, batch_size=size, **names)

    def step(self) -> int:
        """Returns the original's step, less the batches that were counted and not handed out."""
        return self.upstream.queue.step - self.upstream.formed

    # -- batches

    def _form(self) -> list[Group] | None:
        self.take_all()
        groups, formed = self.upstream.next_batch()
        for _ in range(formed):
            self._become_hub().queue.count_batch()
        if not self._state.saved.started:
            self._state.update(started=True)
        self._waiting.subtract(group.producer_id for group in groups or ())
        return groups

    def _put_back(self, groups: list[Group]) -> None:
        self.upstream.put_back([(group, group.rows, group.env_id) for group in groups])
        self._waiting.update(group.producer_id for group in groups)
        self._become_hub().queue.count_batch(-1)

    def next_batch(self, gzip: bool, gone: Callable[[], bool] = lambda: False) -> Batch | None:
        """See Taker. Raises NoSuchThing where the original fails."""
        if self.upstream.started is None:
            raise NotRegistered
        # as upstream: a registration after a reset and a post announces nothing
        self.run = self.run or Run()
        return super().next_batch(gzip, gone)

    def take_all(self) -> None:
        """Queues what the lanes have, in the order in which it was committed."""
        consumer = self._become_hub()
        records = []
        while some := consumer.poll(1024):
            records += some
        records.sort(key=lambda record: record.meta.t_publish_ns)
        for record in records:
            group = self._fragments.add(record, time.monotonic())
            if group is not None and self._options.split not in (None, group.split):
                self._release([group])
                self.counts[f"left_out_total{{{group.split}}}"] += 1
            elif group is not None:
                meta = group.records[0].meta
                self._waiting[meta.producer_id] += 1
                outcome = self.upstream.post(group, group.rows, meta.env_id)
                if lane_name(record) in self._own:
                    self._outcomes[meta.producer_id, meta.sequence] = outcome
        for group in consumer.queue.take_incomplete(self._fragments) if len(self._fragments) else ():
            log.warning(
                "group %s of %s has %d of %d rows: discarded",
                group.group_id,
                group.producer_id,
                group.rows,
                group.size,
            )
            group.discard(Discard.PARTIAL)

    def own(self, lane: str) -> None:
        """Makes `posted` report the outcomes of this lane's groups. Any thread."""
        self._own.add(lane)

    def posted(self, places: list[tuple[str, int]]) -> list[int | None]:
        """Returns, per (producer, sequence), None if it is queued, else how many sequences are buffered."""
        self.upstream.registered = True  # a post makes the queue, there too
        self.take_all()
        return [self._outcomes.pop(place, None) for place in places]

    def latest(self) -> dict[str, Any] | None:
        """Returns the group that was queued last, also after its release and after a reset."""
        group = self.upstream.latest
        if group is not None and group is not self._shown_last:
            self._latest, self._shown_last = self._shown(group), group
        return self._latest

    def _release(self, groups: list[Group]) -> None:
        if any(group is self.upstream.latest for group in groups):
            self.latest()
        super()._release(groups)

    # -- environments

    def register_env(self, wish: dict[str, Any]) -> dict[str, Any]:
        """Returns the response to /register-env."""
        upstream = self.upstream
        if not upstream.started:
            return {"status": "wait for trainer to start"}
        number = upstream.add_env(
            wish["desired_name"],
            wish["max_token_length"],
            wish["weight"],
            wish["group_size"],
            wish["min_batch_allocation"],
        )
        self._state.update(envs=[*upstream.envs])
        run = upstream.run or Run()
        return {
            "status": "success",
            "env_id": number,
            "wandb_name": upstream.envs[number].wandb_name,
            "checkpoint_dir": run.checkpoint_dir,
            "starting_step": upstream.queue.step,
            "checkpoint_interval": run.save_checkpoint_interval,
            "num_steps": upstream.num_steps,
        }

    def disconnect_env(self, number: int) -> dict[str, Any]:
        """Returns the response to /disconnect-env."""
        if self.upstream.started is None:
            return {"status": "failure", "error": "'State' object has no attribute 'envs'"}
        try:
            self.upstream.disconnect(number)
        except IndexError as unknown:
            return {"status": "failure", "error": str(unknown)}
        self._state.update(envs=[*self.upstream.envs])
        return {"status": "success"}

    def env_status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env. Raises where the original fails."""
        self.take_all()
        return self.upstream.env_status(number)

    def status(self) -> dict[str, int]:
        """Returns the response to /status."""
        self.take_all()
        return self.upstream.status()

    # -- the end

    def reset(self) -> int:
        """As Taker's; does nothing before a registration or a post, as the original."""
        self.take_all()
        if not self.upstream.registered:
            return 0
        latest = self.latest()
        discarded = super().reset()
        self._latest = latest
        self._outcomes.clear()
        self._become_hub()
        self._fragments = GroupAssembler(_FRAGMENTS_WAIT_S)
        return discarded

    def _held(self) -> list[Group]:
        upstream = self.upstream
        groups = [*upstream.queue, *self._fragments]
        upstream.reset()
        self._waiting.clear()
        return groups

    def close(self) -> None:
        """See Taker."""
        for group in self._held():
            group.abandon()
        super().close()


T = TypeVar("T")


class NoSuchThing(Exception):
    """The original fails here with status 500."""


@dataclass(slots=True)
class Upstream(Generic[T]):
    """One server."""

    # the queue exists: made by the first /register or post, removed by /reset_data
    registered: bool = False
    run: Run | None = None
    num_steps: int = -1
    started: bool | None = None  # None: no trainer has ever registered
    envs: list[SavedEnv] = field(default_factory=list)
    queue: AtroposQueue[T] = field(default_factory=lambda: AtroposQueue(-1))
    formed: int = 0  # batches formed and counted as steps, but not handed out
    latest: T | None = None

    # -- the trainer

    def register(self, run: Run) -> bool:
        """Returns whether this registration takes effect."""
        if self.registered:
            return False
        self.registered, self.started, self.run, self.num_steps = True, False, run, run.num_steps
        self.queue, self.envs, self.formed = AtroposQueue(run.batch_size, run.starting_step), [], 0
        return True

    def next_batch(self) -> tuple[list[T] | None, int]:
        """Forms all possible batches; returns the newest, or None, and how many were formed."""
        self.started = True
        if not self.registered and not self.formed:
            raise NoSuchThing
        before = self.queue.step
        batch = self.queue.next_batch()
        formed = self.queue.step - before
        self.formed += formed - (batch is not None)
        return batch, formed

    def put_back(self, batch: list[tuple[T, int, int | None]]) -> None:
        """Puts the remaining groups of an undone batch, with sizes and environments, before all others."""
        self.queue.put_back(batch)
        self.queue.step -= 1

    def status(self) -> dict[str, int]:
        """Returns the response to /status."""
        if self.started is None or not self.registered:
            return {"current_step": 0, "queue_size": 0}
        return {"current_step": self.queue.step, "queue_size": self.queue.queue_size}

    def reset(self) -> None:
        """Clears the registration, the queue and the environments, but not the last post."""
        if self.registered:
            self.registered, self.started, self.num_steps = False, False, -1
            self.queue, self.envs, self.formed = AtroposQueue(-1), [], 0

    # -- the environments

    def add_env(
        self, desired_name: str, max_token_length: int, weight: float, group_size: int, share: float | None
    ) -> int:
        """Returns the number of a new environment. Raises ValueError for a group size below 1."""
        number = len(self.envs)
        name = f"{desired_name}_{sum(env.desired_name == desired_name for env in self.envs)}"
        self.restore_env(SavedEnv(number, name, desired_name, max_token_length, group_size, weight, share))
        return number

    def restore_env(self, env: SavedEnv) -> None:
        """Restores the next environment of an earlier gateway. Raises ValueError as `add_env`."""
        self.queue.register(
            EnvWeight(
                env.env_id,
                env.wandb_name,
                env.weight,
                env.min_batch_allocation,
                env.group_size,
                env.max_token_length,
            )
        )
        self.envs.append(env)
        if not env.connected:
            self.queue.disconnect(env.env_id)

    def disconnect(self, number: int) -> None:
        """Removes an environment's weight and share. Raises IndexError."""
        self.envs[number] = replace(self.envs[number], connected=False)
        self.queue.disconnect(number % len(self.envs))

    def post(self, item: T, size: int, env_id: int | None) -> int | None:
        """Queues a group, or buffers it up to its environment's group size; returns what is buffered."""
        queued, buffered = self.queue.add(item, size, env_id)
        if queued:
            self.latest = queued[-1]
        return buffered

    def env_status(self, number: int) -> dict[str, Any]:
        """Returns the response to /status-env. Raises IndexError and NoWeight where the original fails."""
        self.envs[number]  # a negative number counts from the end, too
        return self.queue.status_env(number % len(self.envs))
