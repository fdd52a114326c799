"""What a learner has consumed: totals, the last sequence of each producer, and the records that may come
again.

A checkpoint that holds it tells a resumed learner which redelivered records are in its weights already. Knows
metadata of records and `Progress`; nothing of torch. Called by the GRPO learner.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from shmbridge.consumers.dataset_parts.lane_records import may_come_again
from shmbridge.consumers.learner.checkpoint.checkpoint import Progress
from shmbridge.segments.segment import mount_id

MOST_PRODUCERS = 1024  # whose last sequence is known; those that were heard of longest ago go first


class Consumed:
    """Counts what each step takes.

    Its size is that of the records held, of what the loaded checkpoint held, and of `MOST_PRODUCERS` names,
    however many steps it makes. What a checkpoint of it holds is bounded by what lanes hold, however many
    resumes there are. One thread, but for `contains`.

    Args:
        before: the progress of the checkpoint that the run goes on from.
    """

    def __init__(self, before: Progress) -> None:
        self._in_checkpoint = {producer: frozenset(numbers) for producer, numbers in before.held.items()}
        self._mounts = dict(before.mounts)
        self._last = dict(before.last_sequences)
        self._held: dict[str, set[int]] = {}
        self._groups, self._trajectories, self._tokens = before.groups, before.trajectories, before.tokens
        self._begun_s = time.monotonic() - before.wall_s

    def contains(self, meta: Any) -> bool:
        """Whether the checkpoint's weights have been trained with this record, which its learner had not
        released.

        Only a redelivered record can be one; another with that number comes from a producer that has begun to
        count again.
        """
        return bool(meta.redelivered) and meta.sequence in self._in_checkpoint.get(meta.producer_id, ())

    def took(self, metas: Iterable[Any], *, groups: int, trajectories: int, tokens: int) -> None:
        """Notes a batch: the metadata of its records, any number of times each, and how much it was."""
        for meta in metas:
            producer, sequence = meta.producer_id, meta.sequence
            self._held.setdefault(producer, set()).add(sequence)
            self._last[producer] = max(self._last.pop(producer, -1), sequence)
        for producer in list(self._last)[: max(0, len(self._last) - MOST_PRODUCERS)]:
            del self._last[producer]
        self._groups += groups
        self._trajectories += trajectories
        self._tokens += tokens

    def released(self) -> None:
        """Notes that nothing of what was taken so far is held any more: none of it can come again."""
        self._held.clear()

    def progress(self, step: int, policy_version: int) -> Progress:
        """Returns what a checkpoint of this moment says. Looks at lanes; never blocks.

        It goes on holding what the loaded checkpoint held, until the record's lane shows it as released, or
        is gone. Such a record may not have come yet. One that has come is released after `contains`, or
        later, while a rank of an earlier learner lives.
        """
        earlier, here = may_come_again(self._in_checkpoint, self._mounts), mount_id()
        mounts = {each: self._mounts[each] for each in earlier if each in self._mounts}
        producers = dict.fromkeys([*earlier, *self._held])
        return Progress(
            step=step,
            policy_version=policy_version,
            groups=self._groups,
            trajectories=self._trajectories,
            tokens=self._tokens,
            wall_s=round(time.monotonic() - self._begun_s, 3),
            last_sequences=dict(self._last),
            held={each: sorted(earlier.get(each, set()) | self._held.get(each, set())) for each in producers},
            mounts=mounts | (dict.fromkeys(self._held, here) if here else {}),
        )
