"""Makes the columns of one group from its episodes: `group_of`. Used by `rollout.py` and `skyrl_gym`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from shmbridge import ShmBridgeError
from shmbridge.producers.rollout.episode import Episode, Played
from shmbridge.schema import FINISH_REASONS


class EpisodeUnfinished(ShmBridgeError, ValueError):
    """An episode cannot be a row: it has no answer, or no score."""

    code = "SB510"


def require_finished(episode: Played) -> None:
    """Raises EpisodeUnfinished if an episode cannot be a row. Never blocks."""
    name = f"episode {episode.repetition_id} of task {episode.instance_id!r}"
    if not episode.turn_ends:
        raise EpisodeUnfinished(f"{name} has no answer", hint="sample at least once, or leave it out")
    if episode.score is None or not math.isfinite(episode.score):
        raise EpisodeUnfinished(f"{name} has the score {episode.score}", hint="set episode.score")


def group_of(episodes: Sequence[Episode], env_metrics: dict[str, Any] | None = None) -> dict[str, Any]:
    """Returns the columns of a group, a row for each episode, as `Producer.put` takes them. Never blocks.

    Log-probabilities are a column only if every row has them. Optional columns are left out where no row has
    a value. `env_metrics`, any JSON, arrives at the consumer in `record.json("extra")` and in
    `to_scored_data()`.

    Raises:
        EpisodeUnfinished: an episode without an answer or without a finite score.
    """
    for episode in episodes:
        require_finished(episode)
    group: dict[str, Any] = {
        "tokens": [episode.tokens for episode in episodes],
        "loss_mask": [episode.mask for episode in episodes],
        "prompt_length": [episode.prompt_length for episode in episodes],
        "score": [episode.score for episode in episodes],
        "token_versions": [episode.versions for episode in episodes],
        "temperature": [episode.sampling.temperature for episode in episodes],
        "finish_reason": [FINISH_REASONS.index(episode.finish_reason) for episode in episodes],
        "turn_ends": [episode.turn_ends for episode in episodes],
        "messages": [list(episode.messages) for episode in episodes],
        "instance_id": [episode.instance_id for episode in episodes],
        "repetition_id": [episode.repetition_id for episode in episodes],
    }
    if all(episode.logprobs is not None for episode in episodes):
        group["inference_logprobs"] = [episode.logprobs for episode in episodes]
    if any(episode.step_rewards for episode in episodes):
        group["step_rewards"] = [episode.step_rewards for episode in episodes]
        group["step_ends"] = [episode.step_ends for episode in episodes]
    if any(episode.trace_spans for episode in episodes):
        group["trace_spans"] = [episode.trace_spans for episode in episodes]
    if any(episode.components for episode in episodes):
        group["reward_components"] = [episode.components for episode in episodes]
    if extra := _extra(episodes, env_metrics):
        group["extra"] = extra
    return group


def _extra(episodes: Sequence[Episode], env_metrics: dict[str, Any] | None) -> dict[str, Any]:
    extra: dict[str, Any] = {}
    if env_metrics:
        extra["env_metrics"] = env_metrics
    if not all(episode.exact for episode in episodes):
        extra["retokenised"] = [row for row, episode in enumerate(episodes) if not episode.exact]
    if any(episode.extra for episode in episodes):
        extra["rows"] = [episode.extra for episode in episodes]
    return extra
