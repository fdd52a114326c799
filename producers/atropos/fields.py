"""Converts an Atropos group for a lane: which keys become columns, which go into `extra`, where step rewards
end.

Used by `shmbridge.producers.atropos.lane`;
docs/reference/atropos-fields.md is the table.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

WIRE = frozenset(
    {
        "tokens",
        "masks",
        "scores",
        "advantages",
        "ref_logprobs",
        "inference_logprobs",
        "messages",
        "generation_params",
        "overrides",
        "group_overrides",
        "images",
        "env_id",
        "distill_token_ids",
        "distill_logprobs",
    }
)

# A group's key, of an environment of ours: the names of its other keys that are our columns, as they are.
OWN_COLUMNS = "shmbridge_columns"

_LARGEST = 3.4e38  # of float32, about


@dataclass(frozen=True)
class Carried:
    """A group for `Producer.put(foreign=True)`, and the parts that could not be carried though it is
    delivered.
    """

    group: dict[str, Any]
    left_out: tuple[str, ...] = ()


def carried(
    group: Mapping[str, Any],
    step_rewards: bool = False,
    token_versions: Any = None,
    columns: Mapping[str, Any] | None = None,
) -> Carried:
    """Sorts the keys of a group; never raises, never changes it.

    Upstream drops every key but its fourteen. Here they go into `extra` under their own names, also where a
    column of ours is called the same: an environment may give `temperature` or `rewards` another meaning. A
    key that has no JSON is left out, as upstream would. With `step_rewards`, the columns step_rewards and
    step_ends are filled where the group has them. `token_versions`, in a form that a lane takes, is a column;
    if the group itself has them, they are in `extra`, too, and come back with its other keys. `columns` are
    those that rewards made; step rewards among them replace the group's own. What `OWN_COLUMNS` of the group
    names is a column, and in `extra`, too.
    """
    if OWN_COLUMNS in group:
        own = {name: group[name] for name in group[OWN_COLUMNS] if name in group}
        columns = {**own, **(columns or {})}
        group = {key: value for key, value in group.items() if key != OWN_COLUMNS}
    made = {**(columns or {}), **({} if token_versions is None else {"token_versions": token_versions})}
    step_rewards = step_rewards and "step_rewards" not in made
    if WIRE.issuperset(group) and not step_rewards:
        return Carried({**group, **made})
    wire = {key: value for key, value in group.items() if key in WIRE}
    steps = _steps(group) if step_rewards else {}
    others = {key: value for key, value in group.items() if key not in WIRE and key not in steps}
    extra = {key: value for key, value in others.items() if isinstance(key, str) and _has_json(value)}
    left_out = [str(key) for key in others if key not in extra and key not in made]
    if step_rewards and "step_ends" not in steps and ("step_rewards" in steps or _speaks_of_steps(group)):
        left_out.append("step_ends" if "step_rewards" in steps else "step_rewards")
    return Carried({**wire, **steps, **made, **({"extra": extra} if extra else {})}, tuple(left_out))


def _has_json(value: Any) -> bool:
    """Whether upstream's client could write it, and a strict reader read it."""
    if isinstance(value, Mapping):
        return all(key is None or isinstance(key, (str, int)) for key in value) and all(
            map(_has_json, (*value, *value.values()))
        )
    if isinstance(value, (list, tuple)):
        return all(map(_has_json, value))
    if isinstance(value, str):
        return value.isascii() or value.encode(errors="replace").decode() == value
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


# --- rewards of steps -------------------------------------------------------------------------------------


def _steps(group: Mapping[str, Any]) -> dict[str, Any]:
    """The columns of step rewards that can be made of a group, each valid by itself; none if there are none,
    or they are no numbers.
    """
    tokens = group.get("tokens")
    rows = len(tokens) if isinstance(tokens, (list, tuple)) else -1
    if "step_rewards" in group:
        rewards, ends = group["step_rewards"], group.get("step_ends")
    else:
        rewards = _rewards_of_messages(group.get("messages"))
        ends = _ends_of_turns(group.get("masks"), rewards)
    if rewards is None or not _is_table(rewards, rows, float) or not any(rewards):
        return {}
    fits = (
        ends is not None
        and _is_table(ends, rows, int)
        and [len(row) for row in ends] == [len(row) for row in rewards]
    )
    return {"step_rewards": rewards, "step_ends": ends} if fits else {"step_rewards": rewards}


def _speaks_of_steps(group: Mapping[str, Any]) -> bool:
    rewards = _rewards_of_messages(group.get("messages"))
    return bool(group.get("step_rewards")) or (rewards is not None and any(rewards))


def _rewards_of_messages(messages: Any) -> list[list[Any]] | None:
    """`reward` of every message that has one, in order; a list per row, or None."""
    if not isinstance(messages, (list, tuple)) or not all(isinstance(row, (list, tuple)) for row in messages):
        return None
    return [
        [m["reward"] for m in row if isinstance(m, Mapping) and m.get("reward") is not None]
        for row in messages
    ]


def _ends_of_turns(masks: Any, rewards: list[list[Any]] | None) -> list[list[int]] | None:
    """The index after each trained span of a row, where there are as many spans as rewards: then the n-th
    reward is that of the n-th.
    """
    if rewards is None or not _is_table(masks, len(rewards), object):
        return None
    ends = [
        [
            at + 1
            for at, mask in enumerate(row)
            if mask != -100 and (at + 1 == len(row) or row[at + 1] == -100)
        ]
        for row in masks
    ]
    return [row if turns else [] for row, turns in zip(ends, rewards, strict=True)]


def _is_table(value: Any, rows: int, kind: type) -> bool:
    """A list per row: of anything, of indices of tokens, or of numbers that float32 holds."""
    if (
        not isinstance(value, (list, tuple))
        or len(value) != rows
        or not all(isinstance(row, (list, tuple)) for row in value)
    ):
        return False
    if kind is object:
        return True
    numbers = [each for row in value for each in row]
    if any(isinstance(each, bool) or not isinstance(each, (int, kind)) for each in numbers):
        return False
    return (
        all(0 <= each < 1 << 31 for each in numbers)
        if kind is int
        else all(abs(each) <= _LARGEST for each in numbers)
    )
