"""Gives each repetition of a prompt its rows of a group: in order, short groups padded, long ones refused or
trimmed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from shmbridge.consumers.trajectories import Trajectory

LongGroups = Literal["refuse", "trim"]


class GroupDoesNotFit(ValueError):
    """A group's rows do not fit SkyRL's `n_samples_per_prompt`; nothing was taken, the group comes again."""


@dataclass(frozen=True, slots=True)
class Place:
    """What goes into one row of a prompt: a row of the group or nothing; whether an episode ends there."""

    trajectory: Trajectory | None
    repetition: int
    is_last: bool = True


def places(
    group: list[Trajectory], repetitions: int, *, step_wise: bool = False, long_groups: LongGroups = "refuse"
) -> list[Place]:
    """Returns what each row of one prompt is, repetition by repetition. Never blocks.

    Rows are ordered by column `repetition_id`, and within one episode by `row_index`; without these columns
    they stay in the order of the group. With `step_wise`, an episode may have several rows.

    Args:
        group: the rows of one group, also none.
        repetitions: SkyRL's `generator.n_samples_per_prompt`.
        step_wise: SkyRL's `generator.step_wise_trajectories`.
        long_groups: "trim" leaves out the episodes after the first `repetitions`.

    Raises:
        GroupDoesNotFit: more episodes than `repetitions`, and they are not to be trimmed; or an episode of
            several rows without `step_wise`.
    """
    episodes = _episodes(group)
    several = next((rows for rows in episodes if len(rows) > 1), None)
    if several is not None and not step_wise:
        meta = group[0].meta
        raise GroupDoesNotFit(
            f"group {meta.group_id} of environment {meta.env_name!r} has an episode of {len(several)} rows "
            "-> generator.step_wise_trajectories=true"
        )
    if len(episodes) > repetitions and long_groups == "refuse":
        meta = group[0].meta
        raise GroupDoesNotFit(
            f"group {meta.group_id} of environment {meta.env_name!r} has {len(episodes)} trajectories, "
            f"n_samples_per_prompt is {repetitions} -> generator.n_samples_per_prompt={len(episodes)}, or "
            "bridge.long_groups=trim"
        )
    found = [
        Place(row, number, row is rows[-1])
        for number, rows in enumerate(episodes[:repetitions])
        for row in rows
    ]
    return found + [Place(None, number) for number in range(len(episodes), repetitions)]


def rows_left_out(group: list[Trajectory], arranged: list[Place]) -> int:
    """Returns the rows of the group that have no place. Never blocks."""
    return len(group) - sum(place.trajectory is not None for place in arranged)


def _episodes(group: list[Trajectory]) -> list[list[Trajectory]]:
    """Returns the rows by episode: by `repetition_id` where all have one, else split after `is_last`."""
    numbers = [row.value("repetition_id") for row in group]
    if any(number is None for number in numbers):
        return _split(group)
    by_number: dict[int, list[Trajectory]] = {}
    for number, row in zip(numbers, group, strict=True):
        by_number.setdefault(int(number), []).append(row)
    return [sorted(by_number[number], key=_index) for number in sorted(by_number)]


def _split(group: list[Trajectory]) -> list[list[Trajectory]]:
    episodes: list[list[Trajectory]] = [[]]
    for row in group:
        episodes[-1].append(row)
        ends = row.value("is_last")
        if ends is None or ends:
            episodes.append([])
    return [rows for rows in episodes if rows]


def _index(row: Trajectory) -> int:
    return 0 if (there := row.value("row_index")) is None else int(there)
