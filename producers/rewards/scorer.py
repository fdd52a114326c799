"""What scores steps: `StepScorer` from an event loop, `StepJudge` in a thread."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from shmbridge.producers.rewards.step_row import StepRow


class StepScorer(Protocol):
    """Scores steps without blocking the event loop; any number of tasks may await it at the same time."""

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns, for each row, a finite number per step, in the scorer's unit. Raises what went wrong."""
        ...


class StepJudge(Protocol):
    """Scores steps in the calling thread, which it blocks; one call at a time. See `BatchedScorer`."""

    def score_now(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns, for each row, a finite number per step, in the judge's unit. Raises what went wrong."""
        ...
