"""One row of a bridge as SkyRL's generator output has it: lists of Python numbers over the response.

The lists are made at the last moment: SkyRL's interface has no arrays. Letters: L tokens of a row, R of its
response.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shmbridge.consumers.trajectories import Trajectory

# Columns that a row's `env_metrics` carries as they are, in arrays over the whole row.
CARRIED = (
    "step_rewards", "step_ends", "trace_spans", "turn_ends", "token_versions", "token_rewards",
    "reward_components", "raw_score", "messages", "extra",
)  # fmt: skip
# Columns that have a place of their own in what SkyRL gets.
READ = frozenset(
    (
        "tokens", "prompt_length", "loss_mask", "masks", "score", "advantages", "advantages_mask",
        "inference_logprobs", "finish_reason", "instance_id", "repetition_id", "row_index", "is_last",
        *CARRIED,
    )
)  # fmt: skip
UNKNOWN_END = "unknown"  # why a row ended, if nobody said


@dataclass(frozen=True, slots=True)
class Row:
    """One entry of each list in a GeneratorOutput."""

    prompt: list[int]  # at least one token
    response: list[int]  # (R,) at least one token
    rewards: list[float]  # (R,) advantages, 0 where nothing is trained
    loss_mask: list[int]  # (R,) 1 = trained
    logprobs: list[float] | None  # (R,) nats, 0 where nothing is trained; None: not all recorded
    stop_reason: str
    metrics: dict[str, Any]


def row_of(trajectory: Trajectory) -> Row:
    """Returns a row of a bridge as SkyRL takes it: copies of its numbers, views in `metrics`. Never blocks.

    SkyRL needs a token before the response and one in it. So the response of a row of a prompt only is its
    last token, untrained, and a row's first token is in its prompt.
    """
    size = len(trajectory.tokens)
    if size < 2:
        return masked_row(trajectory)
    begin = max(1, min(trajectory.prompt_length, size - 1))
    tokens = trajectory.tokens
    return Row(
        prompt=tokens[:begin].tolist(),
        response=tokens[begin:].tolist(),
        rewards=trajectory.advantages[begin:].tolist(),
        loss_mask=trajectory.trained[begin:].astype("int64").tolist(),
        logprobs=None if trajectory.logprobs is None else trajectory.logprobs[begin:].tolist(),
        stop_reason=trajectory.finish_reason or UNKNOWN_END,
        metrics=_metrics(trajectory),
    )


def masked_row(like: Trajectory) -> Row:
    """Returns two tokens of which nothing is trained, for a place that no row of the group fills.

    `like` may have no tokens.
    """
    first = int(like.tokens[0]) if len(like.tokens) else 0
    metrics = _identity(like) | {"masked": True}
    return Row([first], [first], [0.0], [0], [0.0], "abort", metrics)


def _metrics(trajectory: Trajectory) -> dict[str, Any]:
    carried = {name: trajectory.value(name) for name in CARRIED}
    return {
        **_identity(trajectory),
        "score": trajectory.score,
        "own_advantages": trajectory.own_advantages,
        **{name: value for name, value in carried.items() if value is not None},
    }


def _identity(trajectory: Trajectory) -> dict[str, Any]:
    meta, names = trajectory.meta, ("min_policy_version", "max_policy_version", "redelivered")
    return trajectory.origin | {name: getattr(meta, name) for name in names}
