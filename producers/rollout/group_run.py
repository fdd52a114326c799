"""Plays many tasks at once, a group of each, and puts the groups into a lane: `GroupRun`.

`rollout.py` plays its own episodes with it; producers of other environments play theirs.
"""

from __future__ import annotations

import asyncio
import logging
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, Literal, Self, TypedDict, TypeVar

from shmbridge import Producer, ShmBridgeError
from shmbridge.errors import BridgeDraining
from shmbridge.producers.rollout.episode import Played, known_versions
from shmbridge.producers.rollout.position import Position
from shmbridge.producers.rollout.sampling import Message
from shmbridge.producers.rollout.survivors import Limits, Losses, TooOld, is_cancelled, survivors

log = logging.getLogger(__name__)

T = TypeVar("T")
P = TypeVar("P", bound=Played)
Group = Mapping[str, Any]
Stage = Callable[[Group], Awaitable[Group]]

_LOOK_S = 0.25  # between two looks at the policy version and at the time
_DEFAULT = Limits()


class NothingCame(ShmBridgeError, TimeoutError):
    """No group was finished for as long as the run was to wait."""

    code = "SB520"


@dataclass(frozen=True)
class Task(Generic[T]):
    """One prompt to be answered a group's number of times.

    Attributes:
        messages: the beginning of each episode.
        data: whatever the episode's code needs, such as the right answer.
        instance_id: name of the prompt; None: its number in the run.
    """

    messages: Sequence[Message]
    data: T
    instance_id: str | None = None


class RunOptions(TypedDict, total=False):
    """What every run of groups may be told; see `Rollout`."""

    env_name: str
    group_size: int
    concurrency: int
    limits: Limits
    stop_after_failures: int
    stop_after_idle_s: float | None
    max_staleness: int | None
    resume: str | Path | None
    tickets: bool
    stages: Sequence[Stage]
    lane_bytes: int | str
    on_full: Literal["block", "raise", "drop"]


class GroupRun(ABC, Generic[P]):
    """Plays each task a group's number of times, many at once, and puts the groups into one lane.

    What is played, and how columns are made of it, is the subclass's. For one event loop; an async context
    manager, which closes the lane. Only the constructor blocks, to reserve the lane's memory; its arguments
    are those of `Rollout`.
    """

    def __init__(
        self,
        bridge: str,
        *,
        env_name: str = "",
        group_size: int = 8,
        concurrency: int = 8,
        limits: Limits = _DEFAULT,
        stop_after_failures: int = 8,
        stop_after_idle_s: float | None = None,
        max_staleness: int | None = None,
        resume: str | Path | None = None,
        tickets: bool = False,
        stages: Sequence[Stage] = (),
        lane_bytes: int | str = "64M",
        on_full: Literal["block", "raise", "drop"] = "block",
    ) -> None:
        if group_size < 1 or concurrency < 1:
            raise ValueError(f"group_size={group_size} and concurrency={concurrency} must be at least 1")
        self._group_size, self._concurrency = group_size, concurrency
        self._limits, self._tickets, self._max_staleness = limits, tickets, max_staleness
        self._idle_s, self._last_group = stop_after_idle_s, 0.0
        self._stages = tuple(stages)
        self._playing: dict[asyncio.Future[Exception], tuple[int, list[P]]] = {}  # with its version
        self._newest = -1  # version that was looked at
        self._putting = asyncio.Lock()
        self._position = Position(resume)
        try:
            self.producer = Producer(bridge, env_name=env_name, lane_bytes=lane_bytes, on_full=on_full)
        except BaseException:
            self._position.close()
            raise
        self._position.begin(self.producer)
        self.losses = Losses(stop_after_failures, self.producer.count_lost)
        self.groups_put = 0  # and committed
        log.info("%s: %s", env_name or bridge, limits)
        if self._position.tasks_over:
            log.info("goes on behind %d tasks that are over: %s", self._position.tasks_over, resume)

    @abstractmethod
    def _begin(self, task: Task[Any], instance_id: str, repetition_id: int) -> P:
        """Makes what is played."""

    @abstractmethod
    def _columns(self, episodes: Sequence[P]) -> Group:
        """Makes the group's columns, as `Producer.put` takes them."""

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Leaves the bridge, with what is committed in the lane, and closes the connections."""
        self.producer.close()
        self._position.settle(int(self.producer.stats()["records_total"]))
        self._position.close()

    async def run(
        self,
        tasks: Iterable[Task[T]] | AsyncIterable[Task[T]],
        play: Callable[[P, T], Awaitable[None]],
        max_groups: int | None = None,
    ) -> int:
        """Plays each task `group_size` times and puts its group; returns how many groups were put.

        Ends with the tasks, or when the bridge drains. An episode that fails costs its row, is counted in
        `losses` and logged; the others are put as a smaller group.

        Args:
            tasks: may be endless: the next is taken when a group is finished.
            play: samples, observes and rewards one episode, and sets `episode.score`.
            max_groups: tasks to play at most, those before a restart included.

        Raises:
            TooManyFailures: see `stop_after_failures`. NothingCame: see `stop_after_idle_s`.
        """
        before, more = self.groups_put, True
        self._last_group = asyncio.get_running_loop().time()
        making: set[asyncio.Task[None]] = set()
        upcoming: asyncio.Task[tuple[int, Task[T]] | None] | None = None
        source = _numbered(tasks, max_groups, self._position)
        try:
            while more or making:
                if more and upcoming is None and len(making) < self._concurrency:
                    upcoming = asyncio.create_task(_next(source))
                waits: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
                await asyncio.wait(waits, timeout=_LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if upcoming is not None and upcoming.done():
                    numbered, upcoming = upcoming.result(), None
                    if numbered is None:
                        more = False
                    else:
                        making.add(asyncio.create_task(self._make(*numbered, play)))
                for each in [each for each in making if each.done()]:
                    making.remove(each)
                    each.result()
                self._look()
        except BridgeDraining:
            log.info("the bridge drains: %d groups were put", self.groups_put - before)
        finally:
            left: set[asyncio.Task[Any]] = {*making, *(() if upcoming is None else (upcoming,))}
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)
        return self.groups_put - before

    def _look(self) -> None:
        """Ends groups that are too old, after a new version. Raises NothingCame."""
        version = self.producer.policy_version
        if self._max_staleness is not None and version > self._newest:
            self._newest = version
            for outdated, (began, begun) in self._playing.items():
                behind = version - _oldest(begun, began)
                if behind > self._max_staleness and not outdated.done():
                    why = f"a group is {behind} versions behind, more than {self._max_staleness}"
                    outdated.set_result(TooOld(why))
        now = asyncio.get_running_loop().time()
        if self._putting.locked() or (self._tickets and not self._playing):  # the consumer's turn
            self._last_group = now
        elif self._idle_s is not None and now - self._last_group > self._idle_s:
            raise NothingCame(
                f"no group was finished for {now - self._last_group:.0f} s; {len(self._playing)} are played",
                hint="see what was lost in the log, and the inference server's log",
            )

    @property
    def failed(self) -> Counter[str]:
        """Groups that were not put, by the kind of their error."""
        return self.losses.groups

    def stats(self) -> dict[str, float]:
        """Returns counters, flat: groups put, episodes and groups lost by reason. Never blocks."""
        return {"groups_put_total": float(self.groups_put), **self.losses.stats()}

    def summary(self) -> str:
        """Returns a line on what was put and what was lost, and why."""
        return f"{self.groups_put} groups were put; lost: {self.losses}"

    async def group(self, task: Task[T], play: Callable[[P, T], Awaitable[None]], number: int = 0) -> list[P]:
        """Returns the episodes of one task that came to a good end, all played at once; nothing is put.

        Raises EpisodesLost: see `limits`.
        """
        instance = str(number) if task.instance_id is None else task.instance_id
        begun: list[P] = []

        def begin(repetition: int) -> P:
            begun.append(self._begin(task, instance, repetition))
            return begun[-1]

        outdated: asyncio.Future[Exception] = asyncio.get_running_loop().create_future()
        self._playing[outdated] = self.producer.policy_version, begun
        try:
            return await survivors(
                begin,
                lambda episode: play(episode, task.data),
                self._group_size,
                self._limits,
                self.losses,
                outdated,
            )
        finally:
            del self._playing[outdated]
            self.losses.asked_again += sum(episode.asked_again for episode in begun)

    async def _make(self, number: int, task: Task[T], play: Callable[[P, T], Awaitable[None]]) -> None:
        """One group, from its ticket to its lane."""
        began = asyncio.get_running_loop().time()
        try:
            with await self.producer.begin_group_async() if self._tickets else nullcontext():
                began = asyncio.get_running_loop().time()
                await self._make_now(number, task, play)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.group(error, began)

    async def _make_now(self, number: int, task: Task[T], play: Callable[[P, T], Awaitable[None]]) -> None:
        began, episodes = self.producer.policy_version, list[P]()
        try:
            episodes = await self.group(task, play, number)
            versions = known_versions(episodes, began, self.producer.policy_version)
            group = await self._staged(episodes)
            async with self._putting:
                records = int(self.producer.stats()["records_total"])
                self._position.committing(number, records)
                sequence = await self.producer.put_async(group, policy_version=versions)
                self._position.over(number)
        except BridgeDraining:
            raise
        except Exception as error:
            self.losses.episode(error, len(episodes))
            self._position.over(number)
            raise
        self._last_group = asyncio.get_running_loop().time()
        self.losses.put()
        self.groups_put += sequence is not None

    async def _staged(self, episodes: Sequence[P]) -> Group:
        group = self._columns(episodes)
        for stage in self._stages:
            try:
                group = await stage(group)
            except asyncio.CancelledError as error:
                if is_cancelled():
                    raise
                raise RuntimeError(f"a stage ended with {error!r}") from error
        return group


def _oldest(begun: Sequence[Played], began: int) -> int:
    """The oldest version that samples one of the episodes, as far as it is known; else that of the start."""
    first = (each.versions[each.prompt_length] if each.turn_ends else -1 for each in begun)
    return min((began if version < 0 else version for version in first), default=began)


async def _next(source: AsyncIterator[T]) -> T | None:
    return await anext(source, None)


async def _numbered(
    tasks: Iterable[T] | AsyncIterable[T], most: int | None, over: Position
) -> AsyncIterator[tuple[int, T]]:
    """The first `most` of the tasks, with their numbers, without those that are over."""
    number = 0
    if isinstance(tasks, AsyncIterable):
        async for task in tasks:
            if number == most:
                return
            if number not in over:
                yield number, task
            number += 1
    else:
        for task in islice(tasks, most):
            if number not in over:
                yield number, task
            number += 1
