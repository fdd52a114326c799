"""The state of one Atropos server: who has registered, and what it answers then.

`--compat strict` promises it, odd as some of it is.

The queue's arithmetic is shmbridge.atropos.queue's; this stands around it. Knows nothing of lanes, HTTP or
records. For one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from shmbridge.atropos.env_status import EnvWeight
from shmbridge.atropos.queue import AtroposQueue
from shmbridge.config import Run

T = TypeVar("T")


@dataclass(slots=True)
class EnvRow:
    """An environment as it registered."""

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
    """One server."""

    # its queue exists: the first /register or the first post makes it, /reset_data ends it
    registered: bool = False
    run: Run | None = None
    num_steps: int = -1
    started: bool | None = None  # None: nobody has ever registered
    envs: list[EnvRow] = field(default_factory=list)
    queue: AtroposQueue[T] = field(default_factory=lambda: AtroposQueue(-1))
    formed: int = 0  # batches that are formed, and counted as steps, and not handed out
    latest: T | None = None

    # -- the trainer
    # --------------------------------------------------------------------------------------------------------

    def register(self, run: Run) -> bool:
        """Whether this is the registration that holds from now on."""
        if self.registered:
            return False
        self.registered, self.started, self.run, self.num_steps = True, False, run, run.num_steps
        self.queue, self.envs, self.formed = AtroposQueue(run.batch_size, run.starting_step), [], 0
        return True

    def next_batch(self) -> tuple[list[T] | None, int]:
        """The batch to hand out, or None; and how many were formed.

        All that can be formed are, and the newest goes first.
        """
        self.started = True
        if not self.registered and not self.formed:
            raise NoSuchThing
        before = self.queue.step
        batch = self.queue.next_batch()
        formed = self.queue.step - before
        self.formed += formed - (batch is not None)
        return batch, formed

    def put_back(self, batch: list[tuple[T, int, int | None]]) -> None:
        """What is left, with sizes and environments, of a batch that was handed out and is undone: it stands
        before all others.
        """
        self.queue.put_back(batch)
        self.queue.step -= 1

    def status(self) -> dict[str, int]:
        """The answer to /status."""
        if self.started is None or not self.registered:
            return {"current_step": 0, "queue_size": 0}
        return {"current_step": self.queue.step, "queue_size": self.queue.queue_size}

    def reset(self) -> bool:
        """Forgets the registration, the queue and the environments, not what was posted last; whether there
        was anything to forget.
        """
        if not self.registered:
            return False
        self.registered, self.started, self.num_steps = False, False, -1
        self.queue, self.envs, self.formed = AtroposQueue(-1), [], 0
        return True

    # -- the environments
    # --------------------------------------------------------------------------------------------------------

    def add_env(
        self, desired_name: str, max_token_length: int, weight: float, group_size: int, share: float | None
    ) -> int:
        """The number of a new environment. Raises ValueError for a group size below 1."""
        index = sum(env.desired_name == desired_name for env in self.envs)
        self.restore_env(
            EnvRow(desired_name, f"{desired_name}_{index}", max_token_length, weight, group_size, share)
        )
        return len(self.envs) - 1

    def restore_env(self, row: EnvRow) -> None:
        """The next environment, as an earlier gateway knew it."""
        number = len(self.envs)
        self.queue.register(
            EnvWeight(
                number,
                row.real_name,
                row.weight,
                row.min_batch_allocation,
                row.group_size,
                row.max_token_length,
            )
        )
        self.envs.append(row)
        if not row.connected:
            self.queue.disconnect(number)

    def disconnect(self, number: int) -> None:
        """Its weight and its share count no more. Raises IndexError."""
        self.envs[number].connected = False
        self.queue.disconnect(number % len(self.envs))

    def post(self, item: T, size: int, env_id: int | None) -> int | None:
        """Queues a group; or buffers it until others of its environment make up the size, then: how many
        sequences are buffered.
        """
        added = self.queue.add(item, size, env_id)
        if added.queued:
            self.latest = added.queued[-1]
        return added.buffered

    def env_status(self, number: int) -> dict[str, Any]:
        """The answer to /status-env. Raises IndexError, and NoWeight, where the original fails."""
        self.envs[number]  # counted from the end, too, if it is negative
        return self.queue.status_env(number % len(self.envs))
