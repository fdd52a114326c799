"""The GRPO learner: batches in, weights out; the type of a step's metrics, and the base of its errors."""

from typing import Any

Metrics = dict[str, Any]  # name -> number or text


class Refusal(Exception):
    """The learner cannot start or go on; the message says why and what to do."""


class Untrainable(Refusal, ValueError):
    """A batch cannot be trained; the message names what is wrong, and the option that would change it."""
