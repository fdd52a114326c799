"""A group of episodes in the form of Atropos: `scored_group`, with what that form lacks beside it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shmbridge.producers.atropos.fields import OWN_COLUMNS
from shmbridge.producers.rollout import Episode, group_of
from shmbridge.schema import ATROPOS_NO_LOGPROB

_MASKED = -100  # of `masks`

# What Atropos has no field for: its own rollout server drops them. On a bridge they are columns, rewards of
# steps with --step-rewards, as those of every environment.
_STEPS = ("step_rewards", "step_ends")
_BESIDE = ("trace_spans", "instance_id", "repetition_id", "turn_ends", "finish_reason")


def scored_group(episodes: Sequence[Episode], env_metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns a ScoredDataGroup of finished episodes, with `env_metrics` and rewards of steps. Never blocks.

    Raises:
        EpisodeUnfinished: an episode has no answer, or no score.
    """
    columns = group_of(episodes)
    group: dict[str, Any] = {
        "tokens": columns["tokens"],
        "masks": [
            [token if sampled else _MASKED for token, sampled in zip(each.tokens, each.mask, strict=True)]
            for each in episodes
        ],
        "scores": columns["score"],
        "messages": [[dict(message) for message in row] for row in columns["messages"]],
        "generation_params": {"temperature": episodes[0].sampling.temperature},
        "env_metrics": env_metrics,
        **{name: columns[name] for name in (*_STEPS, *_BESIDE) if name in columns},
        OWN_COLUMNS: list(_BESIDE),
    }
    if "inference_logprobs" in columns:
        group["inference_logprobs"] = [
            [
                logprob if sampled and not math.isnan(logprob) else ATROPOS_NO_LOGPROB
                for logprob, sampled in zip(each.logprobs or (), each.mask, strict=True)
            ]
            for each in episodes
        ]
    return group
