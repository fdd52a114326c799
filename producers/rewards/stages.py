"""Several stages as one: what happens to a group before it is put."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Protocol

from shmbridge.errors import BadArgument
from shmbridge.producers.rewards.group_rows import new_group


class Stage(Protocol):
    """Makes a new group of a group. Tasks may await it at the same time; it never blocks the event loop."""

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new mapping from column to rows; the given one is not changed."""
        ...


class Stages:
    """Stages one behind the other: `group = await Stages(first, second)(group)`.

    Args:
        stages: `StepRewards`, `RewardBridge`, or any other `Stage`.
    """

    def __init__(self, *stages: Stage) -> None:
        for each in stages:
            if not callable(each):
                raise BadArgument(
                    f"a {type(each).__name__} is no stage", hint="StepRewards(...) or RewardBridge(...)"
                )
        self._stages = stages

    async def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a new group. Never blocks the event loop; may be cancelled. Raises what a stage raises."""
        new = new_group(group)
        for stage in self._stages:
            new = await stage(new)
        return new

    def now(self, group: Mapping[str, Any]) -> dict[str, Any]:
        """`await stages(group)` for code without an event loop. Blocks until the stages are done.

        Raises:
            BadArgument: a stage waits for something, and this thread runs an event loop, which would stop.
        """
        whole = [getattr(stage, "now", None) for stage in self._stages]
        if all(whole):
            new = new_group(group)
            for each in whole:
                new = each(new) if each else new
            return new
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            return asyncio.run(self(group))
        raise BadArgument(
            "rewards that are waited for would stop this thread's event loop", hint="await put_async(...)"
        )
