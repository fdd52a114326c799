"""What environments return, checked before an episode believes it: `step_in`, `conversation_in`, `plain`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.rollout import Message


@dataclass(frozen=True)
class Step:
    """What an environment says to one answer.

    Attributes:
        observations: messages that follow the answer.
        reward: of this step.
        done: the episode has ended.
        answer: what the environment took of the answer (its postprocessed_action); None: all of it.
    """

    observations: list[Message]
    reward: float
    done: bool
    answer: str | None


def step_in(output: Any) -> Step:
    """Returns the step in what `step` returned. Raises ValueError if that is no step."""
    if not isinstance(output, Mapping) or not {"observations", "reward", "done"} <= set(output):
        raise ValueError(f"step returned {_short(output)}, not observations, reward and done")
    try:
        reward = float(output["reward"])
    except (TypeError, ValueError):
        raise ValueError(f"the reward {_short(output['reward'])} is no number") from None
    if not math.isfinite(reward):
        raise ValueError(f"the reward is {reward}")
    answer = output.get("postprocessed_action")
    if answer is not None and not isinstance(answer, str):
        raise ValueError(f"the postprocessed_action {_short(answer)} is no text")
    return Step(_messages(output["observations"] or []), reward, bool(output["done"]), answer)


def conversation_in(output: Any) -> list[Message]:
    """Returns the conversation in what `init` returned. Raises ValueError if there is none."""
    if not isinstance(output, (tuple, list)) or len(output) != 2:
        raise ValueError(f"init returned {_short(output)}, not a conversation and a dict")
    conversation = _messages(output[0])
    if not conversation:
        raise ValueError("init returned an empty conversation")
    return conversation


def plain(value: Any) -> Any:
    """Returns a value as JSON has it: numbers of numpy as Python's, what has no JSON as text."""
    if isinstance(value, Mapping):
        return {str(key): plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(each) for each in value]
    if hasattr(value, "tolist"):  # numpy's and torch's, scalars too
        return plain(value.tolist())
    if (
        value is None
        or isinstance(value, (bool, int, str))
        or (isinstance(value, float) and math.isfinite(value))
    ):
        return value
    return str(value)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, (list, tuple)) or not all(
        isinstance(each, Mapping) and isinstance(each.get("role"), str) and "content" in each
        for each in value
    ):
        raise ValueError(f"{_short(value)} is no list of messages")
    return [dict(each) for each in value]


def _short(value: Any) -> str:
    return repr(value)[:120]
