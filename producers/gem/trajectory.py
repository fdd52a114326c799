"""Collects one trajectory of an Atropos environment as its worker would: `collect`, and its `Score`."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.gem.errors import EnvFailed

Group = dict[str, Any]
RewardBridge = Callable[[Group], Awaitable[Mapping[str, Any]]]
RewardOf = Callable[[Sequence[Group]], float]

_OF_THE_GROUP = ("group_overrides", "generation_params")  # not one value per row


@dataclass(frozen=True)
class Score:
    """What an episode gave.

    Attributes:
        groups: the environment's own, usually one with one row.
        reward: what the episode is worth.
        raw: the environment's score, where a reward bridge changed it.
    """

    groups: list[Group]
    reward: float
    raw: float


async def collect(env: Any, item: Any, reward_of: RewardOf | None, bridge: RewardBridge | None) -> Score:
    """Returns the score of a trajectory. Awaits the environment's completions.

    The environment's own `postprocess_histories` is applied, and its backlog grows, as with Atropos' workers.

    Raises:
        EnvFailed: it gave no trajectory, or none with one finite score.
        Exception: whatever the environment raises.
    """
    groups = await _groups(env, item)
    score = reward_of or the_score
    raw = _finite(score(groups))
    if bridge is None:
        return Score(groups, raw, raw)
    changed = [{**group, **await bridge(group)} for group in groups]
    return Score(changed, _finite(score(changed)), raw)


def the_score(groups: Sequence[Group]) -> float:
    """Returns the score of an episode that is one group of one row. Raises EnvFailed for any other."""
    rows = [float(score) for group in groups for score in group["scores"]]
    if len(rows) != 1:
        raise EnvFailed(
            f"the environment gave {len(rows)} rows in {len(groups)} groups for one episode",
            hint="reward_of=function of the groups says what the episode is worth",
        )
    return rows[0]


async def _groups(env: Any, item: Any) -> list[Group]:
    from atroposlib.envs.base import BaseEnv

    if type(env).collect_trajectories is BaseEnv.collect_trajectories:
        row, backlog = await env.collect_trajectory(item)
        result: Any = None if row is None else _group_of(row)
    else:
        result, backlog = await env.collect_trajectories(item)
    env.backlog.extend(backlog)
    if result:
        result = await env.postprocess_histories(result)
    groups = [each for each in (result if isinstance(result, list) else [result]) if each]
    if not groups:
        raise EnvFailed("the environment gave no trajectory", hint="it may have rejected it: see its log")
    return groups


def _group_of(row: Any) -> Group:
    if not isinstance(row, Mapping):
        raise EnvFailed(f"collect_trajectory returned a {type(row).__name__}, not a ScoredDataItem")
    return {name: value if name in _OF_THE_GROUP or value is None else [value] for name, value in row.items()}


def _finite(score: float) -> float:
    if not math.isfinite(score):
        raise EnvFailed(f"the score is {score}")
    return float(score)
