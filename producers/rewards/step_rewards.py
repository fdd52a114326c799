"""The stage that splits rows into steps, has them scored, and adds `step_rewards` and `step_ends`."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.producers.rewards.concurrency import in_thread
from shmbridge.producers.rewards.errors import RewardsFailed
from shmbridge.producers.rewards.group_rows import new_group, token_rows, trained_spans
from shmbridge.producers.rewards.scorer import StepScorer
from shmbridge.producers.rewards.step_row import StepRow
from shmbridge.producers.rewards.steps import StepSplitter
from shmbridge.producers.rollout import TokenText


class StepRewards:
    """A stage, `group = await stage(group)`: a reward for each step, in the columns of the learner.

    Any number of tasks may await it at the same time.

    Args:
        scorer: what scores.
        splitter: where steps end.
        tokenizer: the policy's, for scorers that read text; see `TokenText`.
    """

    def __init__(self, scorer: StepScorer, splitter: StepSplitter, *, tokenizer: Any = None) -> None:
        self._scorer, self._splitter = scorer, splitter
        self._text = None if tokenizer is None else TokenText(tokenizer)

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group with `step_rewards` (float32 per step) and `step_ends` (int32, exclusive).

        Never blocks the event loop; may be cancelled. Rows without trained tokens have no steps.

        Args:
            group: a mapping from column to rows, as `Producer.put` takes it, with `tokens` and one of
                `loss_mask`, `masks` and `prompt_length`. It is not changed; leave it so until this ends.

        Raises:
            RewardsFailed: the group has step rewards already, or lacks what is needed; the scorer failed, or
                gave something other than a finite number per step.
        """
        new = new_group(group)
        for name in ("step_rewards", "step_ends"):
            if new.get(name) is not None:
                raise RewardsFailed(
                    f"the group has {name} already", hint="leave the column out, or do not score it again"
                )
        rows = await in_thread(self._rows, new, "the splitter")
        scores = _checked(await self._scored(rows), rows)
        return {**new, "step_rewards": scores, "step_ends": [list(row.ends) for row in rows]}

    def _rows(self, group: Mapping[str, Any]) -> list[StepRow]:
        tokens = token_rows(group)
        messages = group.get("messages")
        said = messages if isinstance(messages, (list, tuple)) and len(messages) == len(tokens) else None
        return [
            StepRow.of(row, spans, self._splitter(row, spans), said and said[at], self._text)
            for at, (row, spans) in enumerate(zip(tokens, trained_spans(group, tokens), strict=True))
        ]

    async def _scored(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        try:
            return await self._scorer.score_steps(rows)
        except ShmBridgeError:
            raise
        except (Exception, asyncio.CancelledError) as error:
            if isinstance(error, asyncio.CancelledError) and _is_cancelled():
                raise
            raise RewardsFailed(f"{type(self._scorer).__name__} failed: {error!r}") from error


def _is_cancelled() -> bool:
    """Whether the running task is cancelled, and not only something that it awaited."""
    task = asyncio.current_task()
    return task is None or task.cancelling() > 0


def _checked(scores: Sequence[Sequence[float]], rows: Sequence[StepRow]) -> list[list[float]]:
    if len(scores) != len(rows):
        raise RewardsFailed(f"the scorer scored {len(scores)} rows of {len(rows)}")
    checked = []
    for at, (row, found) in enumerate(zip(rows, scores, strict=True)):
        try:
            values = [float(each) for each in found]
        except (TypeError, ValueError) as wrong:
            raise RewardsFailed(f"the scorer gave row {at} something other than numbers: {wrong}") from wrong
        if len(values) != len(row.ends):
            raise RewardsFailed(f"the scorer gave row {at} {len(values)} values for {len(row.ends)} steps")
        if not all(map(math.isfinite, values)):
            raise RewardsFailed(f"the scorer gave row {at} a value that is not finite: {values!r:.100}")
        checked.append(values)
    return checked
