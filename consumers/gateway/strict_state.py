"""The state of one Atropos server, for `--compat strict`: registrations and the responses that follow from
them. It reproduces the original's quirks. `shmbridge.control.environments` does the queue's arithmetic. For
one thread.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from msgspec.structs import replace

from shmbridge.config import Run
from shmbridge.consumers.gateway.saved_state import SavedEnv
from shmbridge.control.environments import AtroposQueue, EnvWeight

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
    # --------------------------------------------------------------------------------------------------------

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
    # --------------------------------------------------------------------------------------------------------

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
