"""Scores steps with a Python function."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from shmbridge.producers.rewards.concurrency import Limit, in_thread
from shmbridge.producers.rewards.step_row import StepRow


class FunctionScorer:
    """A `StepScorer` that calls a function for each row.

    Args:
        function: takes a `StepRow`, returns a finite number per step. An ordinary function is called in
            threads, so that the event loop goes on: several rows at a time. A coroutine function is awaited.
        most_at_once: rows under way at the same time, for each event loop.
    """

    def __init__(
        self,
        function: Callable[[StepRow], Sequence[float]] | Callable[[StepRow], Awaitable[Sequence[float]]],
        *,
        most_at_once: int = 16,
    ) -> None:
        self._function, self._limit = function, Limit(most_at_once)

    async def score_steps(self, rows: Sequence[StepRow]) -> Sequence[Sequence[float]]:
        """Returns what the function says. Never blocks the event loop; may be cancelled.

        Raises:
            Whatever the function raises, for the first row that it raises for.
        """
        return await self._limit.all(self._one, rows)

    async def _one(self, row: StepRow) -> Sequence[float]:
        if inspect.iscoroutinefunction(self._function):
            made: Any = self._function(row)
        else:
            made = await in_thread(self._function, row, "the function")
        found: Sequence[float] = await made if inspect.isawaitable(made) else made
        return found
