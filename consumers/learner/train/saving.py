"""Saves each finished step of a learner at most once, with the record of what was consumed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from safetensors import SafetensorError

import shmbridge
from shmbridge.consumers.learner import checkpoint
from shmbridge.consumers.learner.checkpoint import Consumed, Progress, rng_state
from shmbridge.consumers.learner.model.sharding import is_sharded
from shmbridge.consumers.learner.train.grpo_update import Learner
from shmbridge.consumers.learner.types import Metrics, Refusal


class CannotSave(Refusal):
    """A checkpoint could not be written; the message says which and why."""


class Saver:
    """Saves each finished step at most once, and keeps the newest; `progress` is of a resumed checkpoint."""

    def __init__(
        self, folder: Path, learner: Learner, tokenizer: Any, keep: int, progress: Progress | None = None
    ) -> None:
        self.consumed = Consumed(progress or Progress(step=0, policy_version=-1))
        self._folder = folder
        self._learner = learner
        self._tokenizer = tokenizer
        self._keep = keep
        self._saved_step = self._taken_step = learner.step

    @property
    def consistent(self) -> bool:
        """Whether a step ended with all its batches recorded: only then may it be saved."""
        return self._learner.consistent and self._taken_step == self._learner.step

    @property
    def saved(self) -> bool:
        """Whether a checkpoint holds all that was trained; also if no step was."""
        return self._learner.step == self._saved_step

    def took(self, batches: Iterable[shmbridge.Batch], measured: Metrics) -> None:
        """Records this rank's batches of a step, with its metrics over all ranks. Blocks for the others."""
        metas: list[Any] = [meta for batch in batches for meta in batch.meta]
        if self._learner.world.size > 1:
            said = self._learner.world.all_gather(
                sorted({(meta.producer_id, meta.sequence) for meta in metas})
            )
            metas = [
                SimpleNamespace(producer_id=who, sequence=number) for each in said for who, number in each
            ]
        numbers = {name: int(measured[name]) for name in ("groups", "trajectories", "tokens")}
        self.consumed.took(metas, **numbers)
        self._taken_step = self._learner.step

    def save(self, policy_version: int) -> None:
        """Writes a checkpoint of a finished step that has none. Every rank calls it, rank 0 writes.

        Blocks until it is on disk.

        Raises:
            CannotSave: writing failed; raised on all ranks.
        """
        learner = self._learner
        if learner.step == self._saved_step or not self.consistent:
            return
        failure = ""
        try:
            self._write(policy_version)
        except (OSError, SafetensorError) as error:
            failure = str(error)
        if failure := learner.world.broadcast(failure):  # no rank may release batches that are not on disk
            raise CannotSave(
                f"no checkpoint of step {learner.step} in {self._folder}: {failure} -> make room there, "
                "then --resume"
            )
        self._saved_step = learner.step

    def rescue(self, policy_version: int) -> str:
        """Saves the last finished step after an error, without other ranks. Blocks; never raises.

        Returns a short text for the user: which step can be resumed.
        """
        learner = self._learner
        newest = (
            f"step {self._saved_step} is the newest checkpoint"
            if self._saved_step
            else "there is no checkpoint"
        )
        if learner.step == self._saved_step:
            return f"{newest}, and no step was finished since"
        if not self.consistent:
            return f"the update broke off, so nothing of it is saved: {newest}"
        if is_sharded(learner.model):
            return f"a sharded model is saved by all ranks together: {newest}"
        if not learner.world.is_main:
            return f"rank 0 saves step {learner.step}"
        try:
            self._write(policy_version)
        except Exception as error:  # the original error must be reported, whatever fails here
            return f"step {learner.step} could not be saved ({type(error).__name__}: {error}): {newest}"
        self._saved_step = learner.step
        return f"step {learner.step} is saved"

    def _write(self, policy_version: int) -> None:
        learner = self._learner
        checkpoint.save(
            self._folder,
            self.consumed.progress(learner.step, policy_version),
            learner.model,
            self._tokenizer,
            learner.optimizer,
            keep=self._keep,
            write=learner.world.is_main,
            rng=rng_state(),
        )
