"""Advantages of rows and tokens, from scores and from rewards of steps and tokens; pure numpy."""

from shmbridge.consumers.advantages.from_scores import (
    clip_to_range,
    group_advantages,
    group_normalised,
    leave_one_out,
    override_rows,
    override_tokens,
    silence_rows,
    spread_to_tokens,
)

__all__ = [
    "clip_to_range",
    "group_advantages",
    "group_normalised",
    "leave_one_out",
    "override_rows",
    "override_tokens",
    "silence_rows",
    "spread_to_tokens",
]
