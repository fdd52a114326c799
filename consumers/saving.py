"""When a learner's state goes to the disk: each finished step at most once.

Knows the learner and the run's folder; what a checkpoint holds is `checkpoint.py`'s. Called by the GRPO learner
(`grpo.py`).
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shmbridge.consumers import checkpoint
from shmbridge.consumers.checkpoint import Progress
from shmbridge.consumers.grpo_update import Learner


class Saver:
    """Saves each finished step at most once.

    Args:
        folder: where the checkpoints of this run lie.
        learner: whose state is saved.
        tokenizer: saved beside the model; None for none.
        keep: newest checkpoints to leave.
    """

    def __init__(self, folder: Path, learner: Learner, tokenizer: Any, keep: int) -> None:
        self._folder = folder
        self._learner = learner
        self._tokenizer = tokenizer
        self._keep = keep
        self._saved_step = learner.step

    def save(self, policy_version: int) -> None:
        """Write a checkpoint unless this step has one; every rank calls it, rank 0 writes. Blocks for the disk."""
        learner = self._learner
        if learner.step == self._saved_step:
            return
        progress = Progress(step=learner.step, policy_version=policy_version)
        checkpoint.save(
            self._folder,
            progress,
            learner.model,
            self._tokenizer,
            learner.optimizer,
            keep=self._keep,
            write=learner.world.is_main,
        )
        self._saved_step = learner.step
