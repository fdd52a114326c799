"""A producer whose groups get their rewards on the way into the lane."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any, Self

from shmbridge import Producer
from shmbridge.errors import Closed
from shmbridge.producers.rewards.stages import Stage, Stages

log = logging.getLogger(__name__)


class RewardedProducer:
    """A `shmbridge.Producer` with stages before `put`, `put_many`, `put_async`; all else is the producer's.

    `claim` is the producer's, too: what is written in place passes no stage. Threads as for the producer.

    Args:
        producer: where groups go; closed by `close`, or the `with` block.
        stages: what happens to a group before, the first first.
    """

    def __init__(self, producer: Producer, *stages: Stage) -> None:
        self.producer, self._stages = producer, Stages(*stages)
        self._tasks: set[asyncio.Task[int | None]] = set()
        self._not_put = 0

    def put(self, group: Mapping[str, Any], **options: Any) -> int | None:
        """`Producer.put` of what the stages make of a group; `timeout_s` is for the lane alone.

        Blocks while the stages work, and as `Producer.put`. The group is not changed.

        Raises:
            RewardsFailed, or what else a stage raises: nothing was committed, counted in `not_put_total`.
            BadArgument: a stage waits, and this thread runs an event loop.
        """
        try:
            new = self._stages.now(group)
        except BaseException:
            self._not_put += 1
            raise
        return self.producer.put(new, **options)

    def put_many(self, groups: Iterable[Mapping[str, Any]], **options: Any) -> list[int | None]:
        """Calls `put` for each of the groups, in order. Records committed before an error stay committed."""
        return [self.put(group, **options) for group in groups]

    async def put_async(self, group: Mapping[str, Any], **options: Any) -> int | None:
        """`put` that never blocks the event loop. Groups go in the order in which their rewards are there.

        A group that was handed over is committed or counted, also if the awaiting task is cancelled: do not
        change it until then.
        """
        task = asyncio.get_running_loop().create_task(self._rewarded(group, options))
        self._tasks.add(task)
        task.add_done_callback(self._done)
        return await asyncio.shield(task)

    async def _rewarded(self, group: Mapping[str, Any], options: dict[str, Any]) -> int | None:
        try:
            new = await self._stages(group)
        except BaseException:
            self._not_put += 1
            raise
        try:
            return await self.producer.put_async(new, **options)
        except Closed:
            self._not_put += 1
            raise

    def _done(self, task: asyncio.Task[int | None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.debug("a group was not put: %s", error)  # its caller has the error, unless it was cancelled

    def stats(self) -> dict[str, float]:
        """The producer's counters, and `not_put_total`: groups that never came as far as those.

        A stage failed, the event loop ended first, or the producer was closed meanwhile.
        """
        return {**self.producer.stats(), "not_put_total": self._not_put}

    def __getattr__(self, name: str) -> Any:
        if name == "producer":  # not there yet, as in a copy that is being made
            raise AttributeError(name)
        return getattr(self.producer, name)

    def __enter__(self) -> Self:
        self.producer.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self.producer.__exit__(*raised)

    def __repr__(self) -> str:
        return f"<RewardedProducer of {self.producer!r}>"
