"""The numbers environments steer by: the arithmetic of the Atropos API server's /status-env, over any queue.

Pure. Used by the control plane for its environments, and by queue.py.
"""

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

MIN_ENV_WEIGHT = 0.01  # an environment's least weight, as upstream


@dataclass(frozen=True, slots=True)
class EnvWeight:
    """An environment's request: its weight, its guaranteed part of every batch, the rows of its groups."""

    env_id: int
    name: str
    weight: float
    min_allocation: float | None
    group_size: int
    max_token_length: int = 1


@dataclass(frozen=True, slots=True)
class Queued:
    """The queue of one environment: groups, sequences in them, the largest group."""

    groups: int = 0
    sequences: int = 0
    largest: int = 0


@dataclass(frozen=True, slots=True)
class Steering:
    """The answer to one environment.

    Sizes in groups of `group_size`, the largest size ever seen of that environment.
    """

    queue_size: int
    self_queue_size: int
    unallocated_fraction: float
    max_group_size: int
    env_weight: float
    group_size: int


def steer(
    me: EnvWeight, connected: Collection[EnvWeight], queue: Mapping[int | None, Queued], batch_size: int
) -> Steering:
    """Returns the answer to `me` about `queue`, by env_id (None: unregistered producers); O(environments),
    for any queue.
    """
    mine = queue.get(me.env_id, Queued())
    largest = max([1, *(each.largest for each in queue.values())])
    group_size = max(me.group_size, mine.largest)
    return Steering(
        queue_size=(mine.sequences + _open_to(me, connected, queue, batch_size, largest)) // group_size,
        self_queue_size=mine.sequences // group_size,
        unallocated_fraction=1.0 - min(sum(env.min_allocation or 0.0 for env in connected), 1.0),
        max_group_size=largest,
        env_weight=_weight(me, connected),
        group_size=group_size,
    )


def total_weight(connected: Collection[EnvWeight]) -> float:
    """Returns the weight of all, as upstream computes it: times the longest sequence."""
    return sum(env.max_token_length * max(0.0, env.weight) for env in connected)


def _open_to(
    me: EnvWeight,
    connected: Collection[EnvWeight],
    queue: Mapping[int | None, Queued],
    batch_size: int,
    largest: int,
) -> int:
    """Returns the sequences of others that compete with mine: beyond their guaranteed part, packed as a
    batch.
    """
    if largest == 1:
        return 0  # as upstream: without groups to pack, only one's own queue counts
    open_to_me = 0
    by_right: dict[int | None, int] = {
        env.env_id: int(batch_size * env.min_allocation)
        for env in connected
        if env.min_allocation is not None
    }
    for env_id, each in queue.items():
        if env_id != me.env_id and each.groups:
            open_to_me += max(0, math.ceil(each.sequences / largest) * largest - by_right.get(env_id, 0))
    return open_to_me


def _weight(me: EnvWeight, connected: Collection[EnvWeight]) -> float:
    total = total_weight(connected)
    return max(MIN_ENV_WEIGHT, me.max_token_length * me.weight / total if total > 0 else 0.0)
