"""Collects one trajectory of an Atropos environment, or one group of siblings: `collect`, and its `Score`."""

from __future__ import annotations

import contextvars
import math
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from shmbridge.producers.gem.action import Spoken
from shmbridge.producers.gem.errors import EnvFailed
from shmbridge.producers.gem.own_rows import rows_of

Group = dict[str, Any]
RewardBridge = Callable[[Group], Awaitable[Mapping[str, Any]]]
RewardOf = Callable[[Sequence[Group]], float]

_OF_THE_GROUP = ("group_overrides", "generation_params")  # not one value per row

# The ScoredDataGroups that the environment has made in this episode, in its order.
_made: contextvars.ContextVar[list[Group]] = contextvars.ContextVar("shmbridge_gem_groups")


@dataclass(frozen=True)
class Rules:
    """What an episode is worth beside the environment's own score.

    Attributes:
        reward_of: of its groups; None: they have one row for each sibling.
        bridge: gives groups other scores.
        left_out: of an answer that the environment leaves out of its group; None: it is an error.
    """

    reward_of: RewardOf | None = None
    bridge: RewardBridge | None = None
    left_out: float | None = None


@dataclass(frozen=True)
class Score:
    """What an episode gave.

    Attributes:
        groups: the environment's own, one with the sibling's row as a rule; none of an answer left out.
        reward: what the episode is worth.
        raw: the environment's score, where a reward bridge changed it.
        filtered: the environment dropped its group after it was scored.
        siblings: scores of all rows of the group, in its order, as the environment gave them.
    """

    groups: list[Group]
    reward: float
    raw: float
    filtered: bool = False
    siblings: tuple[float, ...] = ()


async def collect(
    env: Any, item: Any, rules: Rules, said: Callable[[], Sequence[Spoken]]
) -> list[Score | EnvFailed]:
    """Returns the score of each sibling. Awaits the environment's completions.

    The environment's own `postprocess_histories` is applied, and its backlog grows, as with Atropos' workers.
    A group that the environment scores and then drops, as when all scores are equal, is taken as it was.

    Args:
        env: the environment.
        item: what it plays.
        rules: see there.
        said: returns what each sibling has said, once the environment has ended.

    Raises:
        EnvFailed: it gave no trajectory, or none with one finite score.
        Exception: whatever the environment raises.
    """
    made: list[Group] = []
    _made.set(made)
    groups, filtered = await _groups(env, item), False
    siblings = said()
    if not groups:
        groups = [each for each in made if each.get("scores") and len(each["scores"]) == len(each["tokens"])]
        groups, filtered = groups[-1:], True
    if not groups:
        if rules.left_out is None:
            raise EnvFailed(
                "the environment gave no trajectory, and scored none in a ScoredDataGroup",
                hint="it may have rejected it: see its log; left_out=NUMBER is then what an answer is worth",
            )
        return [Score([], rules.left_out, rules.left_out, True) for _ in siblings]
    changed = groups if rules.bridge is None else [{**group, **await rules.bridge(group)} for group in groups]
    if len(siblings) == 1:
        raw = _finite((rules.reward_of or the_score)(groups))
        reward = _finite((rules.reward_of or the_score)(changed))
        return [Score(changed, reward, raw, filtered, (raw,))]
    if len(groups) > 1:
        raise EnvFailed(
            f"the environment gave {len(groups)} groups for {len(siblings)} siblings",
            hint="group_size=1 plays it",
        )
    worth = list(zip(groups[0]["scores"], changed[0]["scores"], strict=True))
    rows = rows_of(groups[0], siblings, env.tokenizer, worth)
    return [_of_a_sibling(groups[0], changed[0], row, filtered, rules.left_out) for row in rows]


def the_score(groups: Sequence[Group]) -> float:
    """Returns the score of an episode that is one group of one row. Raises EnvFailed for any other."""
    rows = [float(score) for group in groups for score in group["scores"]]
    if len(rows) != 1:
        raise EnvFailed(
            f"the environment gave {len(rows)} rows in {len(groups)} groups for one episode",
            hint="reward_of=function of the groups says what the episode is worth",
        )
    return rows[0]


def watch(kind: type[Any]) -> None:
    """Has the ScoredDataGroups that a class makes noted, so that what it scores and then drops is known.

    In the modules of the class and its bases, `ScoredDataGroup` is then a name that makes the same dicts.
    """
    from atroposlib.envs.base import BaseEnv, ScoredDataGroup

    for each in kind.__mro__:
        if each in BaseEnv.__mro__:
            continue
        module = sys.modules[each.__module__]
        for name, value in list(vars(module).items()):
            if value is ScoredDataGroup or ScoredDataGroup in getattr(value, "__orig_bases__", ()):
                setattr(module, name, _Noted)


class _Noted(dict[str, Any]):
    """Makes plain dicts, as a TypedDict does, and notes each."""

    def __new__(cls, *args: Any, **kwargs: Any) -> Any:
        group: Group = dict(*args, **kwargs)
        made = _made.get(None)
        if made is not None:
            made.append(group)
        return group


async def _groups(env: Any, item: Any) -> list[Group]:
    if collects_alone(type(env)):
        row, backlog = await env.collect_trajectory(item)
        result: Any = None if row is None else _group_of(row)
    else:
        result, backlog = await env.collect_trajectories(item)
    env.backlog.extend(backlog)
    if result:
        result = await env.postprocess_histories(result)
    return [each for each in (result if isinstance(result, list) else [result]) if each]


def collects_alone(kind: type[Any]) -> bool:
    """Returns whether a class plays each trajectory by itself: siblings then have nothing in common."""
    from atroposlib.envs.base import BaseEnv

    return kind.collect_trajectories is BaseEnv.collect_trajectories


def _group_of(row: Any) -> Group:
    if not isinstance(row, Mapping):
        raise EnvFailed(f"collect_trajectory returned a {type(row).__name__}, not a ScoredDataItem")
    return {name: value if name in _OF_THE_GROUP or value is None else [value] for name, value in row.items()}


def _of_a_sibling(
    group: Group, changed: Group, row: int | EnvFailed | None, filtered: bool, left_out: float | None
) -> Score | EnvFailed:
    siblings = tuple(float(each) for each in group["scores"])
    if isinstance(row, EnvFailed):
        return row
    if row is None:
        if left_out is None:
            return EnvFailed(
                f"the environment left this answer out of its group, which has {len(siblings)} rows",
                hint="left_out=NUMBER is what such an answer is worth",
            )
        return Score([], left_out, left_out, True, siblings)
    try:
        raw, reward = _finite(siblings[row]), _finite(float(changed["scores"][row]))
    except EnvFailed as wrong:
        return wrong
    rows = len(siblings)
    own = {
        name: [value[row]]
        if name not in _OF_THE_GROUP and isinstance(value, (list, tuple)) and len(value) == rows
        else value
        for name, value in changed.items()
    }
    return Score([own], reward, raw, filtered, siblings)


def _finite(score: float) -> float:
    if not math.isfinite(score):
        raise EnvFailed(f"the score is {score}")
    return float(score)
