"""The records that a learner has consumed, so that a resumed one knows which its weights already contain."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from shmbridge.consumers.feed import HeldRecords
from shmbridge.consumers.learner.checkpoint.checkpoint import Progress

MOST_PRODUCERS = 1024  # limit of known last sequences; the least recently seen producers are dropped first


class Consumed:
    """Counts the records that each step takes.

    Its size is bounded by the held records, those the loaded checkpoint held, and `MOST_PRODUCERS` names, for
    any number of steps. Its saved form is bounded by the records that lanes hold, for any number of resumes.
    One thread, except `contains`.

    Args:
        before: the progress of the checkpoint that the run resumes from, or of a new run, with its run's id.
    """

    def __init__(self, before: Progress) -> None:
        self._in_checkpoint = HeldRecords(before.held, before.mounts)
        self._last = dict(before.last_sequences)
        self._held: set[tuple[str, int]] = set()
        self._groups, self._trajectories, self._tokens = before.groups, before.trajectories, before.tokens
        self._run_id = before.run_id
        self._begun_s = time.monotonic() - before.wall_s

    def contains(self, meta: Any) -> bool:
        """Returns whether the checkpoint's weights contain this record, which was not released."""
        return self._in_checkpoint.contains(meta)

    def took(self, metas: Iterable[Any], *, groups: int, trajectories: int, tokens: int) -> None:
        """Records a batch: the metadata of its records (repetitions allowed), and its size."""
        for meta in metas:
            producer, sequence = meta.producer_id, meta.sequence
            self._held.add((producer, sequence))
            self._last[producer] = max(self._last.pop(producer, -1), sequence)
        for producer in list(self._last)[: max(0, len(self._last) - MOST_PRODUCERS)]:
            del self._last[producer]
        self._groups += groups
        self._trajectories += trajectories
        self._tokens += tokens

    def released(self) -> None:
        """Records that all batches taken so far are released, so none can be redelivered."""
        self._held.clear()

    def progress(self, step: int, policy_version: int) -> Progress:
        """Returns the progress to save now. Reads lanes; never blocks.

        It keeps each record that the loaded checkpoint held until the record's lane shows it as released, or
        is gone. Such a record may not have been redelivered yet. After redelivery it is released after
        `contains`, or later if a rank of an earlier learner is alive.
        """
        held = self._in_checkpoint.that_may_come_again()
        held |= HeldRecords.of(self._held)
        return Progress(
            step=step,
            policy_version=policy_version,
            groups=self._groups,
            trajectories=self._trajectories,
            tokens=self._tokens,
            wall_s=round(time.monotonic() - self._begun_s, 3),
            last_sequences=dict(self._last),
            run_id=self._run_id,
            **held.state(),
        )
