"""Parses conditions on a metric, such as reward_mean>=0.95, and goals, such as loss:min."""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable
from dataclasses import dataclass

_COMPARISONS: dict[str, Callable[[float, float], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    ">": operator.gt,
    "<": operator.lt,
}
_CONDITION = re.compile(r"\s*([^\s<>=]+)\s*(>=|<=|>|<)\s*(\S+)\s*")
_GOAL = re.compile(r"\s*([^\s:]+)\s*:\s*(max|min)\s*")


@dataclass(frozen=True)
class Condition:
    """A metric compared with a number."""

    metric: str
    comparison: str
    bound: float

    def holds(self, value: float) -> bool:
        """Returns whether a value of the metric meets the condition."""
        return _COMPARISONS[self.comparison](value, self.bound)

    def __str__(self) -> str:
        return f"{self.metric}{self.comparison}{self.bound:g}"


@dataclass(frozen=True)
class Goal:
    """A metric to maximise or minimise."""

    metric: str
    largest: bool


def parse_condition(text: str) -> Condition:
    """Parses a condition such as reward_mean>=0.95. Raises ValueError."""
    if (found := _CONDITION.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not such as reward_mean>=0.95")
    try:
        bound = float(found[3])
    except ValueError:
        bound = math.nan
    if not math.isfinite(bound):
        raise ValueError(f"{text!r}: {found[3]} is no finite number")
    return Condition(found[1], found[2], bound)


def parse_goal(text: str) -> Goal:
    """Parses a goal such as reward_mean:max. Raises ValueError."""
    if (found := _GOAL.fullmatch(text)) is None:
        raise ValueError(f"{text!r} is not such as reward_mean:max or loss:min")
    return Goal(found[1], found[2] == "max")
