"""Early stopping: a metric is good enough, or has not improved for a number of steps."""

from __future__ import annotations

import math
from collections.abc import Callable

from shmbridge.consumers.learner.config.options import Condition, Goal
from shmbridge.consumers.learner.types import Metrics


class EarlyStop:
    """Reads every step's metrics and decides when the run may end.

    A step where the metric is absent or unknown is skipped.

    Args:
        condition: must hold in `patience` consecutive steps; None: no condition.
        patience: the number of steps.
        goal: the metric that must improve within `stall` steps; None: no goal.
        stall: the number of steps.
        say: prints a line for the user: warns of a metric name that the first step does not have.
    """

    def __init__(
        self,
        condition: Condition | None,
        patience: int = 1,
        goal: Goal | None = None,
        stall: int = 1,
        *,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        self._condition, self._patience = condition, patience
        self._goal, self._stall = goal, stall
        self._held = 0
        self._best: float | None = None
        self._since_best = 0
        self._say = say
        self._unseen = {each.metric for each in (condition, goal) if each is not None}

    def reason(self, metrics: Metrics) -> str | None:
        """Returns why to stop after a step with these metrics; None to continue."""
        for name in sorted(self._unseen - metrics.keys()):
            self._say(
                f"no metric {name} in the first step: until there is one, it does not end this run early"
            )
        self._unseen = set()
        return self._good_enough(metrics) or self._no_better(metrics)

    def _good_enough(self, metrics: Metrics) -> str | None:
        condition = self._condition
        if condition is None or (value := _known(metrics, condition.metric)) is None:
            return None
        self._held = self._held + 1 if condition.holds(value) else 0
        if self._held < self._patience:
            return None
        return f"{condition} in {self._patience} steps one after the other, {value:g} in the last"

    def _no_better(self, metrics: Metrics) -> str | None:
        goal = self._goal
        if goal is None or (value := _known(metrics, goal.metric)) is None:
            return None
        if self._best is None or (value > self._best if goal.largest else value < self._best):
            self._best, self._since_best = value, 0
            return None
        self._since_best += 1
        if self._since_best < self._stall:
            return None
        return f"{goal.metric} has not become better than {self._best:g} in {self._stall} steps"


def _known(metrics: Metrics, name: str) -> float | None:
    value = metrics.get(name)
    return None if value is None or not math.isfinite(value) else float(value)
